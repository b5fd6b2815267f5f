# SPDX-License-Identifier: Apache-2.0
"""Read from a module what the planner must know of it."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from holmes_core.plan.layout import ModelFacts
from holmes_core.runtime.chain import Chain

__all__ = ["hugging_face_model", "model_config", "model_facts"]


def hugging_face_model(root: nn.Module) -> tuple[str, nn.Module] | None:
    """Return path and module of the transformers model inside `root`, recognised by its structure; None without one."""
    for path, module in root.named_modules():
        if hasattr(module, "config") and hasattr(module, "get_input_embeddings") and hasattr(module.config, "to_dict"):
            return path, module
    return None


def model_config(root: nn.Module) -> tuple[str, dict[str, Any]] | None:
    """Return path and configuration (JSON values only) of the transformers model inside `root`."""
    found = hugging_face_model(root)
    if found is None:
        return None
    path, module = found
    config = json.loads(module.config.to_json_string(use_diff=False))  # type: ignore[union-attr, operator]
    if not config.get("architectures"):
        config["architectures"] = [type(module).__name__]
    return path, config


def model_facts(root: nn.Module, chain: Chain) -> ModelFacts:
    """Return the facts the planner needs: blocks, heads, vocabulary, ties."""
    found = hugging_face_model(root)
    blocks = len(chain.blocks)
    if found is None:
        return ModelFacts(num_blocks=blocks)
    config: Any = found[1].config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config

    def integer(*names: str) -> int | None:
        values = (getattr(config, name, None) for name in names)
        return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    heads = integer("num_attention_heads", "n_head", "num_heads")
    return ModelFacts(
        num_blocks=blocks,
        num_heads=heads,
        num_kv_heads=integer("num_key_value_heads", "num_kv_heads") or heads,
        vocab_size=integer("vocab_size"),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
    )
