# SPDX-License-Identifier: Apache-2.0
"""The tensor-parallel layout of a whole model: its blocks (tp_rules.py), its vocabulary, ties, and what must divide."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from holmes_core.errors import ConfigError
from holmes_core.runtime.shard import TensorShard
from holmes_core.runtime.tp_regions import Region
from holmes_core.runtime.tp_rules import DOWN, FUSED, HEAD_NAMES, KEY, OUTPUT, QUERY, UP, VALUE, read_block

__all__ = ["Analysis", "analyse", "legal_sizes", "vocabulary_shard"]


@dataclass(slots=True, kw_only=True)
class Analysis:
    """What is split and what stays whole."""

    styles: dict[str, str]
    """Module name -> style, from the model's own tensor-parallel plan (empty without one)."""
    config: Any
    """The config of the model that holds the blocks, or None."""
    block_names: dict[int, str]
    """id of each block -> its name."""
    regions: list[Region] = field(default_factory=list)
    embedding: nn.Embedding | None = None
    head: nn.Linear | None = None
    shards: dict[str, TensorShard] = field(default_factory=dict)
    """Every name of every sharded parameter (a tied parameter appears under each)."""
    whole: dict[str, str] = field(default_factory=dict)
    """Module name -> why it stays whole."""

    def read_again(self, block: nn.Module, name: str) -> list[Region]:
        """Return the regions of a copy of a block."""
        return list(read_block(block, name, self.styles, self.config, {}))


def _holders(model: nn.Module, blocks: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules that hold the blocks, outermost first: a root may hold a second model, a teacher, say."""
    name = next((name for name, module in model.named_modules() if blocks and module is blocks[0]), "")
    parts = name.split(".")[:-1]
    paths = [".".join(parts[:depth]) for depth in range(len(parts) + 1)]
    return [(path, model.get_submodule(path)) for path in paths]


def _plan_styles(holders: Sequence[tuple[str, nn.Module]]) -> dict[str, str]:
    """Return module name -> style, as the model's own tensor-parallel plan says (empty without one)."""
    for prefix, holder in holders:
        plan = getattr(holder, "tp_plan", None) or getattr(holder, "_tp_plan", None)
        if not isinstance(plan, dict):
            continue
        styles = {}
        for name, _ in holder.named_modules():
            style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name))
            if isinstance(style, str):
                styles[f"{prefix}.{name}" if prefix else name] = style
        if styles:  # a PEFT wrapper shows the plan of the model inside it, whose names do not fit the wrapper's
            return styles
    return {}


def _vocabulary(
    model: nn.Module, blocks: Sequence[nn.Module], holders: Sequence[tuple[str, nn.Module]]
) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """Return the token embedding and the output head, where they are plain modules."""
    for _, holder in holders:
        getter = getattr(holder, "get_input_embeddings", None)
        if not callable(getter):
            continue
        try:
            embedding = getter()
            head = getattr(holder, "get_output_embeddings", lambda: None)()
        except (NotImplementedError, AttributeError):
            continue
        return (
            embedding if isinstance(embedding, nn.Embedding) else None,
            head if isinstance(head, nn.Linear) else None,
        )
    # Not a transformers model: the embedding is only split where the head that reads the same vocabulary is known,
    # because a model may also multiply by the embedding's weight itself.
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
    embeddings = [module for _, module in outside if isinstance(module, nn.Embedding)]
    for name, module in outside:
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in HEAD_NAMES:
            for embedding in embeddings:
                if embedding.num_embeddings == module.out_features:
                    return embedding, module
    return None, None


def vocabulary_shard(shape: Sequence[int]) -> TensorShard:
    """Return the layout of a weight or bias whose first dimension is the vocabulary."""
    return TensorShard(dim=0, full_shape=tuple(shape), sections=tuple(shape[:1]), padded=True)


def _vocabulary_owners(embedding: nn.Embedding | None, head: nn.Linear | None) -> list[tuple[nn.Module, str]]:
    owners: list[tuple[nn.Module, str]] = []
    if embedding is not None:
        owners.append((embedding, "weight"))
    if head is not None:
        owners.extend((head, name) for name in ("weight", "bias") if getattr(head, name, None) is not None)
    return owners


def analyse(model: nn.Module, blocks: Sequence[nn.Module], tp_size: int, *, block_prefix: str = "blocks") -> Analysis:
    """Decide what is split, from structure alone.

    Args:
        model: The user's root module, whole or split into pipeline stages, on any device.
        blocks: Its main block list.
        tp_size: Number of tensor-parallel ranks.
        block_prefix: Name of the block list, for blocks that are not found by name.

    Raises:
        ConfigError: The heads or widths of the model are not divisible, or no part of it can be split.
    """
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        names.setdefault(id(module), name)
    holders = _holders(model, blocks)
    configs = [holder.config for _, holder in holders if hasattr(holder, "config")]
    result = Analysis(
        styles=_plan_styles(holders),
        config=configs[-1] if configs else None,
        block_names={id(block): names.get(id(block), f"{block_prefix}.{i}") for i, block in enumerate(blocks)},
    )
    for block in {id(block): block for block in blocks}.values():
        name = result.block_names[id(block)]
        result.regions.extend(read_block(block, name, result.styles, result.config, result.whole))
    if not result.regions:
        raise _nothing_found(blocks, result.whole)
    _check_divisible(result.regions, tp_size)
    assigned: dict[tuple[int, str], TensorShard] = {
        (id(owner), name): shard for region in result.regions for owner, name, shard in region.shards
    }
    result.embedding, result.head = _vocabulary(model, blocks, holders)
    if result.embedding is not None and (result.embedding.max_norm is not None or result.embedding.sparse):
        result.whole[names[id(result.embedding)]] = "an embedding with max_norm or sparse gradients"
        result.embedding = None
    for owner, name in _vocabulary_owners(result.embedding, result.head):
        assigned[id(owner), name] = vocabulary_shard(getattr(owner, name).shape)
    _keep_strangely_tied_whole(model, names, result, assigned)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            if (shard := assigned.get((id(module), name))) is not None:
                result.shards[f"{prefix}.{name}" if prefix else name] = shard
    return result


def _keep_strangely_tied_whole(
    model: nn.Module, names: dict[int, str], result: Analysis, assigned: dict[tuple[int, str], TensorShard]
) -> None:
    """Take back the vocabulary's split where a tied parameter is also used by a module that would not know of it."""
    owners: dict[int, list[tuple[int, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((id(module), name))
    for uses in owners.values():
        layouts = {assigned.get(use) for use in uses}
        if len(layouts) == 1:
            continue
        vocabulary = {id(m) for m in (result.embedding, result.head) if m is not None}
        if any(use in assigned and use[0] not in vocabulary for use in uses):
            raise ConfigError(
                seen=f"a parameter is shared by {', '.join(names[module] for module, _ in uses)}",
                where="the model's blocks",
                means="tensor parallelism would have to split it in two different ways",
                do="use tensor_parallel: 1 for this model",
            )
        for part in ("embedding", "head"):
            module = getattr(result, part)
            if module is not None and any(use[0] == id(module) for use in uses):
                result.whole[names[id(module)]] = "its weight is tied to a module that cannot be split alike"
                for name in ("weight", "bias"):
                    assigned.pop((id(module), name), None)
                setattr(result, part, None)


def legal_sizes(regions: Sequence[Region], limit: int = 64) -> tuple[int, ...]:
    """Return the tensor-parallel sizes up to ``limit`` that divide everything that is split."""
    numbers = [number for region in regions for number in region.must_divide.values()]
    return tuple(size for size in range(1, limit + 1) if all(number % size == 0 for number in numbers))


def _check_divisible(regions: Sequence[Region], tp_size: int) -> None:
    for region in regions:
        for what, number in region.must_divide.items():
            if number % tp_size:
                legal = ", ".join(str(size) for size in legal_sizes(regions))
                raise ConfigError(
                    seen=f"{what} = {number} ({what} % tensor_parallel = {number % tp_size})",
                    where=f"tensor_parallel: {tp_size}, module {region.name} ({type(region.module).__name__})",
                    means="each rank must hold equally many, so this model cannot be split over that many ranks",
                    do=f"set tensor_parallel to one of {legal}",
                )


def _nothing_found(blocks: Sequence[nn.Module], whole: dict[str, str]) -> ConfigError:
    kinds = ", ".join(sorted({type(block).__name__ for block in blocks})) or "none"
    reasons = "".join(f"; {name}: {why}" for name, why in list(whole.items())[:3])
    return ConfigError(
        seen=f"no attention and no MLP that could be split in blocks of class {kinds}{reasons}",
        where="tensor parallelism",
        means=(
            "looked for linear layers named "
            f"{', '.join(sorted(QUERY | KEY | VALUE))} or {', '.join(sorted(FUSED))} with {', '.join(sorted(OUTPUT))}; "
            f"and {', '.join(sorted(UP))} with {', '.join(sorted(DOWN))}"
        ),
        do="use tensor_parallel: 1, or name the model's linear layers like these",
    )
