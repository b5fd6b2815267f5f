# SPDX-License-Identifier: Apache-2.0
"""The collectives of tensor parallelism as autograd functions, and the random streams of sharded regions.

Each function is a pair of a forward and a backward collective; the names say what the *forward* does to a tensor and
where its gradient comes from. Plain (non-functional) collectives on an explicit group, so gloo and NCCL both work.
Source: Megatron-LM, core/tensor_parallel/mappings.py (the f and g operators of arXiv:1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.runtime.shard import TensorShard

__all__ = [
    "RandomFork",
    "TensorParallelContext",
    "copy_to_region",
    "gather_partial",
    "gather_replicated",
    "gather_sections",
    "reduce_from_region",
    "split_to_region",
]


class TensorParallelContext:
    """A tensor-parallel group as its members see it. Copies of a model share it (a process group cannot be copied)."""

    __slots__ = ("group", "rank", "size")

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Read rank and size once: both are asked for in every layer."""
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallelContext:
        """Return the same object."""
        return self

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor of the same shape, in rank order."""
        tensor = tensor.contiguous()
        shards = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(shards, tensor, group=self.group)
        return shards

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, as a new tensor."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total


def _narrow(tensor: Tensor, dim: int, context: TensorParallelContext) -> Tensor:
    length = tensor.shape[dim] // context.size
    return tensor.narrow(dim, context.rank * length, length).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: TensorParallelContext) -> Tensor:
        ctx.context = context
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.context.all_reduce(grads[0]), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, context: TensorParallelContext) -> Tensor:
        return context.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, context: TensorParallelContext) -> Tensor:
        ctx.dim, ctx.context = dim, context
        return torch.cat(context.all_gather(tensor), dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _narrow(grads[0], ctx.dim, ctx.context), None, None


class _GatherPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, context: TensorParallelContext) -> Tensor:
        ctx.dim, ctx.context = dim, context
        return torch.cat(context.all_gather(tensor), dim=dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _narrow(ctx.context.all_reduce(grads[0]), ctx.dim, ctx.context), None, None


class _GatherSections(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sections: tuple[int, ...], context: TensorParallelContext) -> Tensor:
        ctx.context = context
        full_shape = (*tensor.shape[:-1], sum(sections))
        ctx.shard = TensorShard(dim=tensor.dim() - 1, full_shape=full_shape, sections=sections)
        return ctx.shard.merge(context.all_gather(tensor))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.shard.take(grads[0], ctx.context.rank, ctx.context.size), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, context: TensorParallelContext) -> Tensor:
        ctx.dim, ctx.context = dim, context
        return _narrow(tensor, dim, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat(ctx.context.all_gather(grads[0]), dim=ctx.dim), None, None


def copy_to_region(tensor: Tensor, context: TensorParallelContext) -> Tensor:
    """Enter a sharded region: the same tensor; its gradient is summed over the ranks."""
    result: Tensor = _Copy.apply(tensor, context)  # type: ignore[no-untyped-call]
    return result


def reduce_from_region(tensor: Tensor, context: TensorParallelContext) -> Tensor:
    """Leave a sharded region: partial results are summed; the gradient passes as it is."""
    result: Tensor = _Reduce.apply(tensor, context)  # type: ignore[no-untyped-call]
    return result


def gather_replicated(tensor: Tensor, dim: int, context: TensorParallelContext) -> Tensor:
    """Join the ranks' parts where all ranks go on to compute the same: the gradient is cut, not summed."""
    result: Tensor = _GatherReplicated.apply(tensor, dim % tensor.dim(), context)  # type: ignore[no-untyped-call]
    return result


def gather_partial(tensor: Tensor, dim: int, context: TensorParallelContext) -> Tensor:
    """Join the ranks' parts where each rank uses the whole for its own part: gradients are summed, then cut."""
    result: Tensor = _GatherPartial.apply(tensor, dim % tensor.dim(), context)  # type: ignore[no-untyped-call]
    return result


def gather_sections(tensor: Tensor, sections: tuple[int, ...], context: TensorParallelContext) -> Tensor:
    """Join the last dimension like ``gather_replicated``, where it has sections (q, k, v) split one by one."""
    result: Tensor = _GatherSections.apply(tensor, sections, context)  # type: ignore[no-untyped-call]
    return result


def split_to_region(tensor: Tensor, dim: int, context: TensorParallelContext) -> Tensor:
    """Keep one's own part of a replicated tensor: the gradient is joined."""
    result: Tensor = _Split.apply(tensor, dim % tensor.dim(), context)  # type: ignore[no-untyped-call]
    return result


_MIX = 0x9E3779B97F4A7C15  # odd, so that neighbouring ranks get unrelated streams


class RandomFork:
    """Switches a device's random stream to one that differs between the ranks, and back.

    Dropout inside a sharded region must differ between ranks (they hold different heads), outside it must not. The
    forked stream starts from the current state, which is equal on all ranks, mixed with the rank: a repeated run, and
    the recomputation of activation checkpointing, fork into the same stream. After ``leave`` the outer stream goes on
    as if no region had been there, apart from the one draw that seeded it.
    """

    __slots__ = ("_context", "_generator", "_saved")

    def __init__(self, context: TensorParallelContext) -> None:
        """Start outside."""
        self._context = context
        self._generator: torch.Generator | None = None
        self._saved: Tensor | None = None

    @property
    def entered(self) -> bool:
        """Whether the stream is switched now."""
        return self._generator is not None

    def enter(self, device: torch.device) -> None:
        """Switch, unless switched already."""
        if self._generator is not None:
            return
        generator, seed = _generator_and_seed(device)
        self._saved = generator.get_state()
        self._generator = generator
        generator.manual_seed((seed + (self._context.rank + 1) * _MIX) % 2**63)

    def leave(self) -> None:
        """Switch back; nothing happens outside."""
        if self._generator is not None and self._saved is not None:
            self._generator.set_state(self._saved)
        self._generator = self._saved = None


def _generator_and_seed(device: torch.device) -> tuple[torch.Generator, int]:
    """Return the default generator of a device and a seed drawn from it (the same on every rank)."""
    if device.type == "cuda":
        generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
        # Philox keeps seed and offset on the host: reading them costs no synchronisation, drawing a number would.
        offset = generator.get_offset()
        seed = (generator.initial_seed() * 6364136223846793005 + offset * 1442695040888963407 + 1) % 2**63
        generator.set_offset(offset + 4)  # the next region must not fork into the same stream
        return generator, seed
    generator = torch.default_generator
    return generator, int(torch.randint(0, 2**62, (), generator=generator, dtype=torch.int64).item())
