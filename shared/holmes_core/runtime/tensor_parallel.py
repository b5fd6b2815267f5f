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
from holmes_core.runtime.shard import SHARD_ATTRIBUTE, TensorShard, get_shard
from holmes_core.runtime.tp_check import BlockCheck, example_arguments
from holmes_core.runtime.tp_collectives import TensorParallelContext
from holmes_core.runtime.tp_modules import (
    ConfigView,
    RegionState,
    install,
    wrap_embedding,
    wrap_head,
    wrap_region,
)
from holmes_core.runtime.tp_rules import Analysis, Region, analyse

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
    checks: tuple[str, ...]
    """For each kind of block: whether it was compared with the whole block now, or will be at its first call."""

    def lines(self) -> list[str]:
        """Return the report as lines for a person."""
        parts = ", ".join(f"{count} x {kind}" for kind, count in self.regions.items()) or "nothing"
        lines = [f"tensor parallelism over {self.size} ranks: {parts}; vocabulary: {', '.join(self.vocabulary) or 'whole'}"]
        lines += [f"  {text}" for text in self.checks]
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
    from holmes_core.runtime.tp_rules import legal_sizes

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
        return TensorParallelReport(size=1, shards={}, regions={}, vocabulary=(), whole={}, checks=())
    analysis = analyse(model, blocks, context.size)
    absent = {id(part) for module in skip or () for part in module.modules()}
    _check_equal_weights(model, context)
    local = [region for region in analysis.regions if id(region.module) not in absent]
    checks = _make_checks(blocks, block_prefix, local, absent, context)
    counts: dict[str, int] = {}
    for region in local:
        _split_region(region, context)
        counts[region.kind] = counts.get(region.kind, 0) + 1
    vocabulary = _split_vocabulary(analysis, absent, context)
    _drop_stale_gradients(model)
    texts = [_check(check, model, local) for check in checks]
    return TensorParallelReport(
        size=context.size,
        shards=analysis.shards,
        regions=counts,
        vocabulary=vocabulary,
        whole=analysis.whole,
        checks=tuple(texts),
    )


# ---------------------------------------------------------------------------------------------------------- weights


def _shard_tensor(owner: nn.Module, name: str, shard: TensorShard, context: TensorParallelContext) -> None:
    """Replace the data of a parameter or buffer by this rank's part, once (a tied parameter has two owners)."""
    tensor = getattr(owner, name)
    if get_shard(tensor) is not None:
        return
    part = shard.take(tensor.detach(), context.rank, context.size)
    if isinstance(tensor, nn.Parameter):
        # Same object: optimizers and ties hold on to it.
        tensor.grad = None
        tensor.data = part
        setattr(tensor, SHARD_ATTRIBUTE, shard)
    else:
        setattr(part, SHARD_ATTRIBUTE, shard)
        owner._buffers[name] = part


def _split_region(region: Region, context: TensorParallelContext) -> None:
    for owner, name, shard in region.shards:
        _shard_tensor(owner, name, shard, context)
    state = RegionState(region.module, context)
    for site in region.sites:
        install(site.module, site.role, state, dim=site.dim, full=site.full)
    for name, value in region.attributes.items():
        setattr(region.module, name, value // context.size)
    if region.config:
        values = {name: value // context.size for name, value in region.config.items()}
        region.module.config = ConfigView(region.module.config, values)  # type: ignore[assignment]
    wrap_region(region.module, region.kind, state, heads=region.heads)


def _split_vocabulary(analysis: Analysis, absent: set[int], context: TensorParallelContext) -> tuple[str, ...]:
    done = []
    embedding, head = analysis.embedding, analysis.head
    if embedding is not None and id(embedding) not in absent:
        words = embedding.weight.shape[0] if get_shard(embedding.weight) is None else None
        assert words is not None
        shape = tuple(embedding.weight.shape)
        done.append("embedding")
        _shard_tensor(embedding, "weight", _by_words(shape), context)
        wrap_embedding(embedding, context, words=words)
    if head is not None and id(head) not in absent:
        known = get_shard(head.weight)
        shape = tuple(head.weight.shape) if known is None else known.full_shape
        done.append("head")
        _shard_tensor(head, "weight", _by_words(shape), context)
        if head.bias is not None:
            _shard_tensor(head, "bias", _by_words(shape[:1]), context)
        wrap_head(head, context, words=shape[0])
    return tuple(done)


def _by_words(shape: tuple[int, ...]) -> TensorShard:
    return TensorShard(dim=0, full_shape=shape, sections=shape[:1], padded=True)


def _drop_stale_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if get_shard(parameter) is not None and parameter.grad is not None:
            parameter.grad = None


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


# ------------------------------------------------------------------------------------------------------- self-check


def _make_checks(
    blocks: Sequence[nn.Module],
    block_prefix: str,
    regions: Sequence[Region],
    absent: set[int],
    context: TensorParallelContext,
) -> list[BlockCheck]:
    """Keep the skeleton of one whole block of each kind."""
    by_module = {id(region.module): region for region in regions}
    seen: set[Any] = set()
    checks = []
    for index, block in enumerate(blocks):
        if id(block) in absent:
            continue
        inside = [by_module[id(m)] for m in block.modules() if id(m) in by_module]
        key = (type(block).__name__, tuple((r.kind, tuple(s[2] for s in r.shards)) for r in inside))
        if not inside or key in seen:
            continue
        seen.add(key)
        checks.append(BlockCheck(name=f"{block_prefix}.{index}", block=block, context=context))
    return checks


def _check(check: BlockCheck, model: nn.Module, regions: Sequence[Region]) -> str:
    shards = {
        name: shard
        for name, parameter in check.block.named_parameters(remove_duplicate=False)
        if (shard := get_shard(parameter)) is not None
    }
    check.after_split(shards)
    inside = {id(module) for module in check.block.modules()}
    heads = next((r.heads for r in regions if r.heads and id(r.module) in inside), 0)
    width = next((_width(r) for r in regions if id(r.module) in inside), 0)
    on_meta = any(tensor.is_meta for tensor in (*check.block.parameters(), *check.block.buffers()))
    if width and not on_meta:
        for args, kwargs in example_arguments(model, check.block, width, heads):
            if check.run(args, kwargs):
                return f"{check.name} ({check.kind}) computes the same as the whole block"
    check.block.forward = _FirstCall(check)  # type: ignore[method-assign, assignment]
    return f"{check.name} ({check.kind}) will be compared with the whole block at its first call"


def _width(region: Region) -> int:
    """Return the number of input features of a region's first sharded weight."""
    owner, name, shard = region.shards[0]
    transposed = type(owner).__name__ == "Conv1D"
    del name
    return shard.full_shape[0] if transposed else shard.full_shape[-1]


class _FirstCall:
    """A block's forward that runs the check with the arguments of its first call, and then steps aside."""

    def __init__(self, check: BlockCheck) -> None:
        self.check: BlockCheck | None = check
        self.block = check.block
        self.inner = check.block.forward

    @property
    def __wrapped__(self) -> Any:
        return self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        check, self.check = self.check, None
        if check is not None:
            self.block.forward = self.inner
            if not check.run(args, kwargs):
                raise HolmesError(
                    seen=f"a whole copy of block {check.name} ({check.kind}) cannot be called like the block itself",
                    where="self-check of tensor parallelism",
                    means="whether the split block computes the same cannot be proved",
                    do="use tensor_parallel: 1 for this model, and report the class",
                ) from check.failure
        return self.inner(*args, **kwargs)
