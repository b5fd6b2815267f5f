# SPDX-License-Identifier: Apache-2.0
"""Find a model's configuration without a network: a file, a directory, a known name, or what was downloaded before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from holmes_core.errors import ConfigError, did_you_mean

__all__ = ["KNOWN_MODELS", "find_config"]


def _gpt(hidden: int, layers: int, heads: int, vocab: int = 51200) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": hidden, "n_layer": layers, "n_head": heads, "vocab_size": vocab,
            "n_positions": 2048}  # fmt: skip


def _llama(hidden: int, layers: int, heads: int, kv: int, ffn: int, vocab: int, positions: int) -> dict[str, Any]:
    return {"model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv, "intermediate_size": ffn, "vocab_size": vocab,
            "max_position_embeddings": positions, "tie_word_embeddings": False}  # fmt: skip


# Shapes as the models' papers give them: Narayanan et al. 2021, table 1; Smith et al. 2022; Touvron et al. 2023;
# Dubey et al. 2024; Jiang et al. 2024.
KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt(768, 12, 12, 50257) | {"n_positions": 1024},
    "gpt-3.6b": _gpt(3072, 30, 32),
    "gpt-7.5b": _gpt(4096, 36, 32),
    "gpt-39.1b": _gpt(8192, 48, 64),
    "gpt-175b": _gpt(12288, 96, 96),
    "mt-nlg-530b": _gpt(20480, 105, 128),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(8192, 80, 64, 8, 28672, 32000, 4096),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336, 128256, 131072),
    "llama-3.1-70b": _llama(8192, 80, 64, 8, 28672, 128256, 131072),
    "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, 128256, 131072),
    "mixtral-8x7b": _llama(4096, 32, 32, 8, 14336, 32000, 32768)
    | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
}


def find_config(model: str) -> tuple[str, dict[str, Any]]:
    """Return a model's name and configuration.

    Args:
        model: A config.json, a directory with one, a name in KNOWN_MODELS, or a Hugging Face name whose files were
            downloaded before (they are looked for in the cache; nothing is downloaded).

    Raises:
        ConfigError: It is none of these, or not readable.
    """
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return (path.parent.name if path.name == "config.json" else path.stem) or model, _read(path)
    if (key := model.lower().split("/")[-1]) in KNOWN_MODELS:
        return key, KNOWN_MODELS[key]
    cached = _cached(model)
    if cached is not None:
        return model, _read(cached)
    raise ConfigError(
        seen=f"model {model!r}{did_you_mean(model, KNOWN_MODELS)}",
        where="--model",
        means="it is no file, no directory with a config.json, no known name, and not in the Hugging Face cache "
        f"({_cache()}); known names: {', '.join(KNOWN_MODELS)}",
        do="give the path of the model's config.json",
    )


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))


def _cached(model: str) -> Path | None:
    if not model or model.startswith((".", "/")):
        return None
    found = sorted(_cache().glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json"))
    return found[-1] if found else None


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(seen=f"cannot read: {error}", where=str(path), do="give a config.json") from None
    if not isinstance(data, dict):
        raise ConfigError(seen=f"a {type(data).__name__}", where=str(path), do="give a config.json")
    return data
