# SPDX-License-Identifier: Apache-2.0
"""Sum gradients over replicas once per optimizer step, and share the optimizer's work among them.

Each parameter is owned by one rank of the data-parallel group. Gradients are summed to their owner; only the owner
keeps a gradient, so only there does the optimizer step and hold state (ZeRO stage 1, Rajbhandari et al. 2020, section
5.1). Whole parameters are owned, not slices: any torch optimizer works unchanged, those that look at a whole matrix
included. Afterwards owners hand out the new values (`holmes_core.runtime.hand_out`).

Gradients travel in buckets of neighbouring parameters, in the order in which a backward pass completes them, and each
bucket leaves as soon as the last backward of the step has completed it (as in DistributedDataParallel, Li et al. 2020,
section 3.2.3). All ranks launch the same buckets in the same order, whatever each of them computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.torch_compat import storage_is_shared

__all__ = ["Count", "DataParallel", "assign_owners", "by_dtype", "flatten", "sum_over", "unflatten_into"]

#: Told of each tensor that is handed to a group.
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


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors of one dtype into one of a dimension."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten_into(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy what `flatten` has put together back."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()


def by_dtype(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by dtype."""
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
    for same in by_dtype(present):
        flat = flatten([p.grad if p.grad is not None else torch.zeros_like(p) for p in same])
        count(group, flat)
        dist.all_reduce(flat, group=group)
        for param in same:
            if param.grad is None:
                param.grad = torch.empty_like(param)
        unflatten_into(flat, [p.grad for p in same if p.grad is not None])


def _grown(param: nn.Parameter) -> HolmesError:
    return HolmesError(
        seen=f"a gradient of shape {tuple(param.shape)} grew after its sum over the replicas had begun",
        where="the last backward of an optimizer step",
        means="the parameter is used in several parts of the model that are recomputed each in a backward of its own"
        " (torch.utils.checkpoint with use_reentrant=True)",
        do="use use_reentrant=False, or set overlap: false (gradients are then summed after the backward)",
    )


#: A bucket is complete at this size; smaller for small models, so that there are about 8 of them.
BUCKET_BYTES = 25 * 2**20


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    """Parameters whose gradients travel together: for each target rank (None: all) those it gets, of one dtype."""

    parts: dict[int | None, list[nn.Parameter]]
    missing: set[nn.Parameter] = field(default_factory=set)  # not complete yet in this step
    left: bool = False  # whether it has left in this step
    home: Tensor | None = None  # where it is summed in each step, on processors
    works: list[Any] = field(default_factory=list)
    sums: dict[int | None, list[Tensor]] = field(default_factory=dict)  # target: the buffers that add up to its sum

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters."""
        return sum(param.nbytes for part in self.parts.values() for param in part)


def _make_buckets(params: Sequence[nn.Parameter], target: Callable[[nn.Parameter], int | None]) -> list[_Bucket]:
    total = sum(p.numel() * p.element_size() for p in params)
    limit = min(BUCKET_BYTES, max(total // 8, 2**20))
    buckets: list[_Bucket] = []
    size, dtype = limit, None
    for param in reversed(params):  # a backward pass completes the last first
        if size >= limit or param.dtype != dtype:
            buckets.append(_Bucket(parts={}))
            size, dtype = 0, param.dtype
        buckets[-1].parts.setdefault(target(param), []).append(param)
        size += param.numel() * param.element_size()
    return buckets


class DataParallel:
    """Gradient reduction and shared optimizer work of one data-parallel group.

    Args:
        params: The trainable parameters of this rank, in an order that all ranks of the group share.
        owner: The rank of the group that steps each parameter; None: every rank keeps all gradients and state.
        group: The group.
        count: Told what is sent.
        overlap: Whether buckets may leave while the last backward still runs (see `expect`).
        last: Parameters that are complete late, or perhaps not used: their buckets leave after all others,
        last_at: or after this part of them (of their bytes).
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        owner: Mapping[nn.Parameter, int] | None,
        group: dist.ProcessGroup,
        count: Count,
        overlap: bool = True,
        last: Collection[nn.Parameter] = (),
        last_at: float = 1.0,
    ) -> None:
        self._params = list(params)
        self._count = count
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.shard_optimizer = owner is not None
        self.owner: Mapping[nn.Parameter, int] = owner or {}
        self._buckets = self._in_order(set(last), last_at) if self.size > 1 else []
        self._bucket_of = {p: b for b in self._buckets for part in b.parts.values() for p in part}
        self._launched = 0
        self._kept = False
        #: Whether a gradient that had left grew afterwards; only where gradients are kept, so that it can be put right.
        self.grown = False
        #: What has left, where it is kept: parameter, gradient, and the gradient's version when it was copied.
        self.left: list[tuple[nn.Parameter, Tensor | None, int]] = []
        self._expecting: Mapping[nn.Parameter, Collection[int]] | None = None
        self._awaited: dict[nn.Parameter, set[int]] = {}  # stages whose part of a gradient is to come in this step
        self._completing: int | None = None
        self._overlap = overlap
        #: What gradients are multiplied by as they leave.
        self.factor = 1.0
        #: Context of sums that begin while the script's own backward runs.
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext
        told: Iterable[Any] = self._bucket_of if overlap else ()
        self._hooks = [param.register_post_accumulate_grad_hook(self.accumulated) for param in told]

    def _in_order(self, last: Collection[nn.Parameter], last_at: float) -> list[_Bucket]:
        parts = [[p for p in self._params if p not in last], [p for p in self._params if p in last]]
        first, late = [_make_buckets(part, self.owner.get) for part in parts]
        ends = list(itertools.accumulate(bucket.nbytes for bucket in first))
        place = sum(end <= last_at * ends[-1] for end in ends)
        return [*first[:place], *late, *first[place:]]

    def owns(self, param: nn.Parameter) -> bool:
        """Whether this rank steps the parameter and answers for it (rank 0 does where nothing is sharded)."""
        return self.owner.get(param, 0) == self.rank

    def close(self) -> None:
        """Follow no more backwards: the parameters may go on in another model."""
        for hook in self._hooks:
            hook.remove()

    # ---- while the last backward runs ----------------------------------------------------------------------------
    def expect(self, stages_of: Mapping[nn.Parameter, Collection[int]], *, keep: bool) -> None:
        """The backward passes that follow complete the step's gradients: buckets may leave as they fill.

        Args:
            stages_of: The local stages that may compute a part of a parameter's gradient.
            keep: Whether ``param.grad`` stays as it was until `reduce_gradients`, so that all can be taken back
                (`discard`). Otherwise a gradient that has left is None until then: its memory is free for the next.
        """
        self._expecting, self._kept, self.grown = stages_of, keep, False
        self._awaited = {param: set(stages) for param, stages in stages_of.items()}
        self.left = []
        for bucket in self._buckets:
            bucket.missing = {p for part in bucket.parts.values() for p in part}
            bucket.left = False

    def completing(self, stage: int | None) -> None:
        """The backward of a stage's last micro-batch begins, or goes on (None: it has ended)."""
        if self._expecting is None:
            return
        done, self._completing = self._completing, stage
        if done is not None and stage is None:  # gradients nobody told of: unused parameters
            for param, awaited in self._awaited.items():
                if done in awaited:
                    self._told(param, done)
            self._launch_complete()

    def pausing(self) -> None:
        """Another stage's backward comes before the rest of this one."""
        self._completing = None

    def _told(self, param: nn.Parameter, stage: int) -> None:
        self._awaited[param].discard(stage)
        if not self._awaited[param] and param in self._bucket_of:
            self._bucket_of[param].missing.discard(param)

    def accumulated(self, param: nn.Parameter) -> None:
        """A backward pass has added to a parameter's gradient (told by autograd, or by a split backward)."""
        if self._completing is None or self._expecting is None or not self._overlap:
            return
        bucket = self._bucket_of.get(param)  # none where there is one replica
        if bucket is None or self._completing not in self._expecting.get(param, ()):
            return
        if bucket.left:
            if not self._kept:
                raise _grown(param)
            self.grown = True
        self._told(param, self._completing)
        self._launch_complete()

    def complete(self) -> None:
        """All backward passes of the step have ended: what has not left leaves."""
        if self._expecting is None:
            return
        for bucket in self._buckets:
            bucket.missing.clear()
        self._launch_complete()

    def _launch_complete(self) -> None:
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            with self.guard():
                self._launch(self._buckets[self._launched])
            self._launched += 1

    def reduce_gradients(self) -> None:
        """Sum gradients over the group; with a sharded optimizer only owners keep them. Collective."""
        self._kept = False
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)
        self._forget()
        for bucket in self._buckets:
            self._finish(bucket)

    def discard(self) -> None:
        """Throw away what left early: gradients are not what `expect` was told. All ranks of the group do so."""
        for bucket in self._buckets:
            for work in bucket.works:
                work.wait()
            bucket.works.clear()
            bucket.sums.clear()
        self._forget()

    def _forget(self) -> None:
        self._launched, self._expecting, self._completing = 0, None, None
        self.left = []  # their memory is the next step's

    # ---- one bucket ----------------------------------------------------------------------------------------------
    @torch.no_grad()
    def _launch(self, bucket: _Bucket) -> None:
        bucket.left = True
        gloo = dist.get_backend(self._group) == "gloo"
        for target in sorted(bucket.parts, key=lambda t: -1 if t is None else (t - self.rank) % self.size):
            params = bucket.parts[target]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            # Experts may be idle on some ranks; a parameter that is unused on all of them must keep no gradient.
            used = torch.tensor([p.grad is not None for p in params]).to(grads[0], non_blocking=True)
            flat = self._flat(bucket, target, grads, used)
            if self._kept:
                self.left += [(p, p.grad, -1 if p.grad is None else p.grad._version) for p in params]
            else:
                for param in params:
                    param.grad = None
            bucket.sums[target] = [flat]
            if target is None:
                self._count(self._group, flat)
                bucket.works.append(dist.all_reduce(flat, group=self._group, async_op=True))
            elif not gloo:
                self._count(self._group, flat)
                bucket.works.append(dist.reduce(flat, group=self._group, group_dst=target, async_op=True))
            elif target != self.rank:
                self._count(self._group, flat)
                bucket.works.append(dist.isend(flat, group=self._group, group_dst=target))
            else:  # gloo's reduce moves the data twice and takes twice the CPU time (it is a ring for any root)
                buffers = [flat if r == self.rank else torch.empty_like(flat) for r in range(self.size)]
                bucket.sums[target] = buffers
                bucket.works += [
                    dist.irecv(buffer, group=self._group, group_src=r)
                    for r, buffer in enumerate(buffers)
                    if r != self.rank
                ]

    def _flat(self, bucket: _Bucket, target: int | None, grads: Sequence[Tensor], used: Tensor) -> Tensor:
        """Copy gradients together; on processors, where all ranks get the sum, to where they were the last time.

        Memory that is given back and taken again in each step costs a processor more than the copy itself (its pages
        are mapped anew); the allocator of GPUs keeps what it has. A place that somebody still looks at (a gradient that
        the script has put aside, or adds to in place) is left to them.
        """
        flat = bucket.home
        if flat is None or storage_is_shared(flat):
            flat = grads[0].new_empty(sum(grad.numel() for grad in grads) + used.numel())
        if grads[0].device.type != "cpu":
            torch.cat([part.reshape(-1) for part in (*grads, used)], out=flat)
            if self.factor != 1.0:
                flat[: -used.numel()].mul_(self.factor)
            return flat
        if target is None:
            bucket.home = flat
        if self.factor == 1.0:
            return torch.cat([part.reshape(-1) for part in (*grads, used)], out=flat)
        start = 0  # one pass over memory, not two
        for grad in grads:
            torch.mul(grad.reshape(-1), self.factor, out=flat[start : start + grad.numel()])
            start += grad.numel()
        flat[start:] = used
        return flat

    @torch.no_grad()
    def _finish(self, bucket: _Bucket) -> None:
        for work in bucket.works:
            work.wait()
        for target, params in bucket.parts.items():
            if target is not None and target != self.rank:
                for param in params:
                    param.grad = None
                continue
            total, *others = bucket.sums[target]
            for other in others:  # in rank order: the sum does not depend on who owns the parameter
                total.add_(other)
            offset, used = 0, total[-len(params) :].tolist()
            for param, count in zip(params, used, strict=True):
                part = total[offset : offset + param.numel()].view_as(param)
                offset += param.numel()
                param.grad = part if count else None
        bucket.works.clear()
        bucket.sums.clear()
