# SPDX-License-Identifier: Apache-2.0
"""Process groups of a Plan, created by all ranks in the plan's order.

The default group is gloo and serves start-up, barriers and objects only, so that no GPU communicator ever spans
networks that cannot meet. No other group reuses it. Groups with a planned order keep it (``sort_ranks=False``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from holmes_core.plan.plan import Plan

__all__ = ["ProcessGroups"]


class ProcessGroups:
    """This rank's process groups.

    Args:
        plan: The plan; the same on every rank.
        rank: This rank.
        device: Its device; tensors on it travel over ``nccl`` on a GPU, ``gloo`` otherwise.
        timeout: Longest wait for a peer, in seconds.

    Attributes:
        world: All ranks, on the CPU.
        tp, dp: Tensor- and data-parallel group of this rank, on its device.
        dp_control: The data-parallel group on the CPU.
        pipeline: All stages of this (dp, tp) place, on the CPU.
        replica: All ranks of this replica, on the CPU.
    """

    def __init__(self, plan: Plan, *, rank: int, device: torch.device, timeout: float) -> None:
        self._plan, self._rank, self._device = plan, rank, device
        self._timeout = timedelta(seconds=timeout)
        self._edges: dict[tuple[int, int, str], dist.ProcessGroup] = {}
        self._shared: dict[tuple[int, ...], tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]] = {}
        self._made: list[dist.ProcessGroup] = []
        world = dist.group.WORLD
        assert world is not None
        self.world: dist.ProcessGroup = world
        found: dict[str, dist.ProcessGroup] = {}
        for group in plan.groups:
            on_device = group.axis in ("tp", "dp", "edge")
            if group.axis in ("world", "embedding"):  # embedding and other shared groups: made on demand
                continue
            made = self._new(group.ranks, on_device=on_device)
            control = made if group.axis != "dp" or not self._gpu else self._new(group.ranks, on_device=False)
            if rank not in group.ranks:
                continue
            if group.axis == "edge":
                self._edges[(group.ranks[0], group.ranks[1], group.direction)] = made
            else:
                found[group.axis] = made
                if group.axis == "dp":
                    found["dp_control"] = control
        self.dp_size = plan.layout.dp
        self.tp = found["tp"]
        self.dp, self.dp_control = found["dp"], found["dp_control"]
        self.pipeline, self.replica = found["pp"], found["replica"]

    @property
    def _gpu(self) -> bool:
        return self._device.type == "cuda"

    def _new(self, ranks: Sequence[int], *, on_device: bool) -> dist.ProcessGroup:
        backend = "nccl" if on_device and self._gpu else "gloo"
        # Sorting would put ranks of a planned order in another place than the grid says, without an error.
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, timeout=self._timeout, sort_ranks=False)
        if self._rank in ranks:
            self._made.append(group)
            if backend == "nccl":  # create the communicator now, in one order on all ranks, not at first use
                dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    def edge(self, sender: int, receiver: int, direction: str) -> dist.ProcessGroup:
        """Return the group of one pipeline edge in one direction (``"fwd"`` or ``"bwd"``)."""
        return self._edges[(sender, receiver, direction)]

    def shared(self, pipeline_ranks: Sequence[int]) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Return groups of the given pipeline ranks at this (dp, tp) place: on the device, and on the CPU.

        Made at the first request, which all ranks of the job must make in the same order; (None, None) on ranks
        that are not among them.
        """
        key = tuple(pipeline_ranks)
        if key not in self._shared:
            grid = self._plan.grid
            mine: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
            for dp in range(grid.dp):
                for tp in range(grid.tp):
                    ranks = [grid.rank_at(pp=pp, dp=dp, tp=tp) for pp in key]
                    group = self._new(ranks, on_device=True)
                    control = self._new(ranks, on_device=False) if self._gpu else group
                    if self._rank in ranks:
                        mine = (group, control)
            self._shared[key] = mine
        return self._shared[key]

    def close(self) -> None:
        """Destroy every group made here (not the default group)."""
        for group in reversed(self._made):
            dist.destroy_process_group(group)
        self._made.clear()
