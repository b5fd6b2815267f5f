# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: split the weights of every block over the ranks of one host, in place.

Sharded parameters are ordinary local tensors, not DTensors: mixed lists of the two break foreach and fused optimizers
and gradient clipping, DTensor's dispatch dominates small steps, and zero-bubble schedules read gradients directly. The
collectives are autograd functions around the layers (Megatron-LM, arXiv:1909.08053): two all-reduces per block and
direction. Parameter *objects* stay, so an optimizer that was built before goes on working.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.shard import TensorShard, get_shard
from holmes_core.runtime.tp_analysis import Analysis, analyse, legal_sizes
from holmes_core.runtime.tp_check import BlockCheck, example_arguments
from holmes_core.runtime.tp_collectives import TensorParallelContext
from holmes_core.runtime.tp_regions import Region
from holmes_core.runtime.tp_split import split_embedding, split_head, split_region

__all__ = [
    "TensorParallelReport",
    "TensorShard",
    "apply_tensor_parallel",
    "get_shard",
    "legal_tensor_parallel_sizes",
    "plan_tensor_parallel",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelReport:
    """What ``apply_tensor_parallel`` did."""

    size: int
    """Number of tensor-parallel ranks."""
    shards: dict[str, TensorShard]
    """Layout by parameter name, of the whole model (parameters of other pipeline stages included)."""
    regions: dict[str, int]
    """How many attention modules, MLPs and expert groups were split on this rank, by kind."""
    vocabulary: tuple[str, ...]
    """Which of embedding and head were split on this rank."""
    whole: dict[str, str]
    """Module name -> why it stays whole on every rank (exact, but each rank computes all of it)."""
    gathered: tuple[str, ...]
    """Modules of which only the weights are split: their code insists on the full width, so each computes all of it."""
    checks: tuple[str, ...]
    """For each kind of block: whether it was compared with the whole block now, or will be at its first call."""

    def lines(self) -> list[str]:
        """Return the report as lines for a person."""
        parts = ", ".join(f"{count} x {kind}" for kind, count in self.regions.items()) or "nothing"
        vocabulary = ", ".join(self.vocabulary) or "whole"
        lines = [f"tensor parallelism over {self.size} ranks: {parts}; vocabulary: {vocabulary}"]
        lines += [f"  {text}" for text in self.checks]
        lines += [f"  weights split, computed whole on every rank: {name}" for name in self.gathered]
        lines += [f"  whole on every rank: {name} ({why})" for name, why in self.whole.items()]
        return lines


def plan_tensor_parallel(model: nn.Module, blocks: Sequence[nn.Module], tp_size: int) -> dict[str, TensorShard]:
    """Say which parameters will be split and how; nothing is changed.

    Needs names and shapes only, so the whole model may be on the meta device. A loader then fills each rank with
    ``shard.take(full, rank, size)`` or reads ``shard.ranges(rank, size)`` from a file.

    Args:
        model: The user's root module.
        blocks: Its main block list.
        tp_size: Number of tensor-parallel ranks.

    Returns:
        Layout by parameter name. A tied parameter appears under each of its names; replicated ones do not appear.

    Raises:
        ConfigError: The model cannot be split over that many ranks (the legal numbers are in the message), or at all.
    """
    if tp_size == 1:
        return {}
    done = {
        name: shard
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if (shard := get_shard(parameter)) is not None
    }
    return done or analyse(model, blocks, tp_size).shards


def legal_tensor_parallel_sizes(model: nn.Module, blocks: Sequence[nn.Module], *, limit: int = 64) -> tuple[int, ...]:
    """Return the tensor-parallel sizes up to ``limit`` that this model can be split over."""
    return legal_sizes(analyse(model, blocks, 1).regions, limit)


def apply_tensor_parallel(
    model: nn.Module,
    *,
    blocks: Sequence[nn.Module],
    block_prefix: str,
    group: dist.ProcessGroup,
    skip: Collection[nn.Module] | None = None,
) -> TensorParallelReport:
    """Split a model over a tensor-parallel group, in place. All ranks of the group call it at the same point.

    Module objects, class names, parameter names, parameter objects, ties and ``requires_grad`` stay as they are.
    Parameters on the meta device become meta parameters of the local shape.

    Args:
        model: The user's root module, after the pipeline split.
        blocks: Its main block list (all of them; those of other stages are in ``skip``).
        block_prefix: Name of that list inside the model, for messages.
        group: The tensor-parallel group. The default group is never used.
        skip: Modules of other pipeline stages: they and everything inside them is left alone.

    Raises:
        ConfigError: The model cannot be split over that many ranks, or at all.
        HolmesError: Ranks hold different weights, or a split block computes something else than the whole one.
    """
    context = TensorParallelContext(group)
    if context.size == 1:
        return TensorParallelReport(size=1, shards={}, regions={}, vocabulary=(), whole={}, gathered=(), checks=())
    analysis = analyse(model, blocks, context.size, block_prefix=block_prefix)
    absent = {id(part) for module in skip or () for part in module.modules()}
    local = [region for region in analysis.regions if id(region.module) not in absent]
    _check_equal_weights(model, context)
    gathered, checks = _settle(model, blocks, analysis, local, absent, context)
    counts: dict[str, int] = {}
    for region in local:
        split_region(region, context, gathered=id(region.module) in gathered)
        counts[region.kind] = counts.get(region.kind, 0) + 1
    vocabulary = []
    if analysis.embedding is not None and id(analysis.embedding) not in absent:
        split_embedding(analysis.embedding, context)
        vocabulary.append("embedding")
    if analysis.head is not None and id(analysis.head) not in absent:
        split_head(analysis.head, context)
        vocabulary.append("head")
    for check in checks.values():
        if check is not None:
            check.install()
    return TensorParallelReport(
        size=context.size,
        shards=analysis.shards,
        regions=counts,
        vocabulary=tuple(vocabulary),
        whole=analysis.whole,
        gathered=tuple(region.name for region in local if id(region.module) in gathered),
        checks=tuple(f"{text} {'at its first call' if check else 'now'}" for text, check in checks.items()),
    )


def _check_equal_weights(model: nn.Module, context: TensorParallelContext) -> None:
    """Stop where the ranks start from different weights: parts of different models would be joined, silently."""
    named = [(name, p) for name, p in model.named_parameters() if not p.is_meta]
    if not named:
        return
    sums = torch.stack([p.detach().sum(dtype=torch.float64).to(named[0][1].device) for _, p in named])
    sums = sums.nan_to_num()
    others = context.all_gather(sums)
    for rank, other in enumerate(others):
        wrong = (other != others[0]).nonzero()
        if len(wrong):
            raise HolmesError(
                seen=f"parameter {named[int(wrong[0])][0]} differs between tensor-parallel ranks 0 and {rank}",
                where="start of tensor parallelism",
                means="each rank keeps a part of its own weights, so all must start from the same",
                do="seed all ranks alike before the model is built (seed_everything), or load a checkpoint on each",
            )


def _settle(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    analysis: Analysis,
    regions: Sequence[Region],
    absent: set[int],
    context: TensorParallelContext,
) -> tuple[set[int], dict[str, _FirstCall | None]]:
    """Compare one block of each kind, split, with the whole block, before anything is changed.

    Returns:
        ids of the modules of regions whose inside is computed whole; what was compared (None), or will be.
    """
    by_module = {id(region.module): region for region in regions}
    gathered: set[int] = set()
    checks: dict[str, _FirstCall | None] = {}
    known: dict[Any, frozenset[str]] = {}
    for block in {id(block): block for block in blocks if id(block) not in absent}.values():
        inside = [by_module[id(module)] for module in block.modules() if id(module) in by_module]
        if not inside:
            continue
        key = (type(block).__name__, tuple((region.kind, tuple(s[2] for s in region.shards)) for region in inside))
        if key not in known:
            name = analysis.block_names[id(block)]
            check = BlockCheck(name=name, block=block, context=context, read=analysis.read_again)
            found = _try_now(check, model, block, inside)
            known[key] = found or frozenset()
            checks[f"{name} ({check.kind}) compared with the whole block"] = (
                None if found is not None else _FirstCall(check, block)
            )
        gathered |= {id(region.module) for region in inside if region.kind in known[key]}
    return gathered, checks


def _try_now(check: BlockCheck, model: nn.Module, block: nn.Module, regions: Sequence[Region]) -> frozenset[str] | None:
    """Compare with made-up arguments; None where the block does not take them."""
    if any(tensor.is_meta for tensor in (*block.parameters(), *block.buffers())):
        return None
    heads = max(region.heads for region in regions)
    for args, kwargs in example_arguments(model, block, _input_width(regions[0]), heads):
        if (found := check.settle(args, kwargs)) is not None:
            return found
    return None


def _input_width(region: Region) -> int:
    """Return the number of input features of a region's first sharded weight."""
    owner, _, shard = region.shards[0]
    return shard.full_shape[0] if type(owner).__name__ == "Conv1D" else shard.full_shape[-1]


class _FirstCall:
    """A block's forward that compares with the arguments of its first call, and then steps aside."""

    def __init__(self, check: BlockCheck, block: nn.Module) -> None:
        self.check = check
        self.block = block
        self.inner = block.forward

    def install(self) -> None:
        """Put itself in front of the split block."""
        self.inner = self.block.forward
        self.block.forward = self

    @property
    def __wrapped__(self) -> Any:
        """The forward behind: inspect.signature shows its parameters."""
        return self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compare, then call."""
        self.block.forward = self.inner
        if self.check.settle(args, kwargs, fixed=True) is None:
            raise HolmesError(
                seen=f"a whole copy of block {self.check.name} ({self.check.kind}) cannot be called like the block",
                where="self-check of tensor parallelism",
                means="whether the split block computes the same cannot be proved",
                do="use tensor_parallel: 1 for this model, and report the class",
            ) from self.check.failure
        return self.inner(*args, **kwargs)
