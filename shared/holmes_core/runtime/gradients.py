# SPDX-License-Identifier: Apache-2.0
"""One rank's gradients: which to sum with whom, which to count, who steps which parameter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.plan.grid import Coordinates, Grid
from holmes_core.runtime.data_parallel import DataParallel, assign_owners, sum_over
from holmes_core.runtime.hand_out import HandOut
from holmes_core.runtime.process_groups import ProcessGroups
from holmes_core.runtime.shard import get_shard
from holmes_core.runtime.split import ParamEntry

__all__ = ["Gradients"]


class Gradients:
    """Reduction, norm and ownership of gradients.

    Order of a reduction: first over the replicas to each parameter's owner, then, there, over the stages that hold
    the same parameter (tied embeddings, small modules outside the blocks): the owner has the same data-parallel index
    on each of these stages, so both copies are stepped alike and stay equal.

    Args:
        entries: All parameters of the user's module, the same list on every rank.
        params: This rank's real parameters, by name.
        grid: The grid.
        place: This rank's place in it.
        groups: The process groups.
        shard_optimizer: Whether each parameter is stepped by one replica only.
        root: The user's module.
        blocks: Its blocks.
        overlap: Whether gradients may be summed while the step's last backward still runs.
        overlap_param_gather: Whether parameters may be handed out while the next forward runs.
        waiting: Context of waits for parameters.
        last: Parameters whose gradients leave after all others, or after a part of them (see `DataParallel`).
        last_at: Which part.
    """

    def __init__(
        self,
        *,
        entries: Sequence[ParamEntry],
        params: Mapping[str, nn.Parameter],
        grid: Grid,
        place: Coordinates,
        groups: ProcessGroups,
        shard_optimizer: bool,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        overlap: bool = True,
        overlap_param_gather: bool = False,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        last: Collection[nn.Parameter] = (),
        last_at: float = 1.0,
    ) -> None:
        self._place, self._groups = place, groups
        shared = [e for e in entries if len(e.owners) > 1]
        numel = {e.name: e.numel for e in entries}
        shared_owner = dict(
            zip([e.name for e in shared], assign_owners([numel[e.name] for e in shared], grid.dp), strict=True)
        )
        trainable = [e for e in entries if e.local and params[e.name].requires_grad]
        own = [e for e in trainable if len(e.owners) == 1]
        load = [0] * grid.dp
        for entry in trainable:
            if len(entry.owners) > 1:
                load[shared_owner[entry.name]] += numel[entry.name]
        own_owner = dict(
            zip([e.name for e in own], assign_owners([params[e.name].numel() for e in own], grid.dp, load), strict=True)
        )
        self.params = {e.name: params[e.name] for e in trainable}
        owner = {params[e.name]: {**own_owner, **shared_owner}[e.name] for e in trainable}
        self.data_parallel = DataParallel(
            list(self.params.values()),
            owner=owner if shard_optimizer else None,
            group=groups.dp,
            count=groups.traffic.add,
            overlap=overlap,
            last=last,
            last_at=last_at,
        )
        self._hand_out = HandOut(
            list(self.params.values()),
            owner=self.data_parallel.owner,
            group=groups.dp,
            count=groups.traffic.add,
            root=root,
            blocks=blocks,
            late=overlap_param_gather,
            waiting=waiting,
        )
        self._shared: list[tuple[dist.ProcessGroup, dist.ProcessGroup, list[nn.Parameter]]] = []
        self._not_counted: set[nn.Parameter] = set()
        holders = {e.name: tuple(grid.coordinates(rank).pp for rank in e.owners) for e in entries}
        for pps in sorted({holders[e.name] for e in shared}):
            # Every rank of the job takes part in making each group, for all columns of the grid.
            group, control = groups.shared(pps)
            if group is None or control is None:
                continue
            mine = [self.params[e.name] for e in shared if holders[e.name] == pps and e.name in self.params]
            mine = [p for p in mine if not shard_optimizer or owner[p] == place.dp]
            if mine:
                self._shared.append((group, control, mine))
        for name, param in self.params.items():
            replicated = get_shard(param) is None and place.tp != 0
            if replicated or holders[name][0] != place.pp:
                self._not_counted.add(param)

    def steps(self, param: nn.Parameter) -> bool:
        """Whether this rank's optimizer steps the parameter (all of its stages and tensor-parallel ranks do)."""
        return not self.data_parallel.shard_optimizer or self.data_parallel.owns(param)

    def reduce(self) -> None:
        """Sum gradients over replicas, then over stages that share parameters."""
        self._hand_out.end()  # the optimizer follows, which chooses its way by the class of parameters
        self.data_parallel.reduce_gradients()
        for group, control, params in self._shared:
            sum_over(params, group, control, self._groups.traffic.add)

    def norm(self) -> Tensor:
        """2-norm of the whole model's gradient, each parameter once. float32 scalar on the CPU, equal on all ranks."""
        total = torch.zeros((), dtype=torch.float64)
        counted = [
            param.grad.detach()
            for param in self.params.values()
            if param.grad is not None and param not in self._not_counted and self.data_parallel.owns(param)
        ]
        if counted:
            norms = torch._foreach_norm(counted, 2, dtype=torch.float32)
            total = torch.stack(norms).double().square().sum().cpu()
        dist.all_reduce(total, group=self._groups.world)
        return total.sqrt().float()

    def scale(self, factor: float | Tensor) -> None:
        """Multiply every gradient of this rank."""
        grads = [param.grad for param in self.params.values() if param.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def broadcast_parameters(self) -> None:
        """Hand out parameters that this or another replica stepped; who looks at one that is on its way waits."""
        self._hand_out.begin()

    def settle(self) -> None:
        """Wait until no parameter is on its way."""
        self._hand_out.end()

    def give_up(self, seconds: float) -> None:
        """After a failure: wait for parameters that still come in some seconds, and for nothing else."""
        self._hand_out.give_up(seconds)

    def close(self) -> None:
        """Follow the parameters no more: they may go on in another model."""
        self._hand_out.end()
        self.data_parallel.close()
