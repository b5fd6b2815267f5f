# SPDX-License-Identifier: Apache-2.0
"""Sum gradients over replicas once per optimizer step, and share the optimizer's work among them.

Each parameter is owned by one rank of the data-parallel group. Gradients are summed to their owner, in one flat
buffer per owner; only the owner keeps a gradient, so only there does the optimizer step and hold state (ZeRO stage 1,
Rajbhandari et al. 2020, section 5.1). Whole parameters are owned, not slices: any torch optimizer works unchanged,
those that look at a whole matrix included. Afterwards owners broadcast the new values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["DataParallel", "assign_owners", "sum_over"]

Count = Callable[[dist.ProcessGroup, Tensor], None]


def assign_owners(sizes: Sequence[int], num_ranks: int, load: Sequence[int] | None = None) -> list[int]:
    """Spread parameters over ranks so that the fullest holds as little as possible (largest first, to the emptiest).

    Args:
        sizes: Elements of each parameter.
        num_ranks: Ranks of the data-parallel group.
        load: Elements that each rank owns already.

    Returns:
        The owner of each parameter, a rank within the group.
    """
    load = list(load) if load is not None else [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owner = min(range(num_ranks), key=lambda r: (load[r], r))
        owners[index] = owner
        load[owner] += sizes[index]
    return owners


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()


def _by_dtype(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[torch.dtype, list[nn.Parameter]] = {}
    for param in params:
        groups.setdefault(param.dtype, []).append(param)
    return list(groups.values())


def _presence(params: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[bool]:
    """Which parameters have a gradient on any rank of the group (experts may be idle on some)."""
    flags = torch.tensor([p.grad is not None for p in params], dtype=torch.int32)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(f) for f in flags]


def sum_over(
    params: Sequence[nn.Parameter], group: dist.ProcessGroup, control: dist.ProcessGroup, count: Count
) -> None:
    """Sum the gradients of parameters that several stages hold (tied weights, small shared modules).

    Args:
        params: The same parameters, in the same order, on every rank of the group.
        group: Their ranks.
        control: The same ranks on a CPU backend.
        count: Told what is sent.
    """
    present = [p for p, used in zip(params, _presence(params, control), strict=True) if used]
    for same in _by_dtype(present):
        flat = _flatten([p.grad if p.grad is not None else torch.zeros_like(p) for p in same])
        count(group, flat)
        dist.all_reduce(flat, group=group)
        for param in same:
            if param.grad is None:
                param.grad = torch.empty_like(param)
        _unflatten_into(flat, [p.grad for p in same if p.grad is not None])


class DataParallel:
    """Gradient reduction and shared optimizer work of one data-parallel group.

    Args:
        params: The trainable parameters of this rank, in an order that all ranks of the group share.
        group: The group.
        control: The same ranks on a CPU backend, for flags.
        owner: The rank of the group that steps each parameter; None: every rank keeps all gradients and state.
        count: Told what is sent.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        owner: Mapping[nn.Parameter, int] | None,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        count: Count,
    ) -> None:
        self._params = list(params)
        self._count = count
        self._group, self._control = group, control
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.shard_optimizer = owner is not None
        self.owner: Mapping[nn.Parameter, int] = owner or {}

    def owns(self, param: nn.Parameter) -> bool:
        """Whether this rank steps the parameter and answers for it (rank 0 does where nothing is sharded)."""
        return self.owner.get(param, 0) == self.rank

    def reduce_gradients(self) -> None:
        """Sum gradients over the group; with a sharded optimizer only owners keep them."""
        if self.size == 1:
            return
        used = _presence(self._params, self._control)
        works: list[tuple[Any, Tensor, list[nn.Parameter], int | None]] = []
        for param, is_used in zip(self._params, used, strict=True):
            if is_used and param.grad is None:
                param.grad = torch.zeros_like(param)
        live = [p for p, is_used in zip(self._params, used, strict=True) if is_used]
        targets: list[int | None] = list(range(self.size)) if self.shard_optimizer else [None]
        for target in targets:
            mine = [p for p in live if target is None or self.owner[p] == target]
            for same in _by_dtype(mine):
                flat = _flatten([p.grad for p in same if p.grad is not None])
                self._count(self._group, flat)
                if target is None:
                    work = dist.all_reduce(flat, group=self._group, async_op=True)
                else:
                    work = dist.reduce(flat, group=self._group, group_dst=target, async_op=True)
                works.append((work, flat, same, target))
        for work, flat, same, target in works:
            work.wait()
            if target is None or target == self.rank:
                _unflatten_into(flat, [p.grad for p in same if p.grad is not None])
            else:
                for param in same:
                    param.grad = None

    def broadcast_parameters(self) -> None:
        """Hand the values that owners stepped to the other ranks."""
        if self.size == 1 or not self.shard_optimizer:
            return
        works: list[tuple[Any, Tensor, list[nn.Parameter], int]] = []
        with torch.no_grad():
            for owner in range(self.size):
                for same in _by_dtype([p for p in self._params if self.owner[p] == owner]):
                    flat = _flatten([p.detach() for p in same])
                    if owner == self.rank:
                        self._count(self._group, flat)
                    work = dist.broadcast(flat, group=self._group, group_src=owner, async_op=True)
                    works.append((work, flat, same, owner))
            for work, flat, same, owner in works:
                work.wait()
                if owner != self.rank:
                    _unflatten_into(flat, [p.data for p in same])
