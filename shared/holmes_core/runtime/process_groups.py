# SPDX-License-Identifier: Apache-2.0
"""Process groups of a Plan, created by all ranks in the plan's order.

The default group is gloo and serves start-up, barriers and objects only, so that no GPU communicator ever spans
networks that cannot meet. No other group reuses it. Groups with a planned order keep it (``sort_ranks=False``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holmes_core.errors import HolmesError
from holmes_core.plan.plan import Plan
from holmes_core.plan.transport import Transport, choose_transport
from holmes_core.runtime.environment import gloo_interface
from holmes_core.runtime.traffic import Traffic

__all__ = ["CONNECT_TIMEOUT", "ProcessGroups", "nccl_options"]

#: Seconds in which the members of a group must have connected: all ranks stand at the same place, so a network that
#: works needs far less, and one that does not is found before training starts.
CONNECT_TIMEOUT = 25.0


def nccl_options(transport: Transport, make: Callable[[], Any] | None = None) -> Any:
    """Return NCCL's options for one communicator: its network by name.

    Args:
        transport: How the group talks.
        make: Makes empty options; ``ProcessGroupNCCL.Options`` when None.

    Returns:
        Options for ``new_group(pg_options=...)``.

    ``OFI`` is left to NCCL: the plugin calls itself differently from release to release, and the environment makes
    sure that it is there (`holmes_core.plan.environment`).
    """
    options: Any = dist.ProcessGroupNCCL.Options() if make is None else make()
    if transport.net in ("IB", "Socket"):
        options.config.net_name = transport.net
    return options


class ProcessGroups:
    """This rank's process groups.

    Args:
        plan: The plan; the same on every rank.
        rank: This rank.
        device: Its device; tensors on it travel over ``nccl`` on a GPU, ``gloo`` otherwise.
        timeout: Longest wait for a peer, in seconds.
        separate_control: Whether `dp_control` is always a group of its own.
        make_nccl_options: Makes the options of a communicator from its transport.

    Attributes:
        world: All ranks, on the CPU.
        tp, dp: Tensor- and data-parallel group of this rank, on its device.
        dp_control: The data-parallel group on the CPU.
        pipeline: All stages of this (dp, tp) place, on the CPU.
        replica: All ranks of this replica, on the CPU.
        traffic: The bytes this rank has handed to each group.

    Raises:
        HolmesError: A group's members cannot reach each other; names the group, its hosts and their interfaces.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        device: torch.device,
        timeout: float,
        separate_control: bool = False,
        make_nccl_options: Callable[[Transport], Any] = nccl_options,
    ) -> None:
        self._plan, self._rank, self._device = plan, rank, device
        self._timeout = timedelta(seconds=timeout)
        self._connect_timeout = timedelta(seconds=min(timeout, CONNECT_TIMEOUT))
        self._make_nccl_options = make_nccl_options
        self._edges: dict[tuple[int, int, str], dist.ProcessGroup] = {}
        self._shared: dict[tuple[int, ...], tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]] = {}
        self._made: list[dist.ProcessGroup] = []
        self.traffic = Traffic()
        world = dist.group.WORLD
        assert world is not None
        self.world: dist.ProcessGroup = world
        dist.barrier(group=world)  # from here on all ranks stand at the same place: CONNECT_TIMEOUT may be short
        found: dict[str, dist.ProcessGroup] = {}
        for group in plan.groups:
            if group.axis in ("world", "embedding"):  # embedding and other shared groups: made on demand
                continue
            made = self._new(group.ranks, group.transport, group.name)
            control = made
            if group.axis == "dp" and (separate_control or group.transport.backend != "gloo"):
                control = self._new(group.ranks, self._choose(group.ranks, on_device=False), group.name)
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

    def _choose(self, ranks: Sequence[int], *, on_device: bool) -> Transport:
        return choose_transport(self._plan.topology, ranks, self._device.type if on_device else "cpu")

    def _new(self, ranks: Sequence[int], transport: Transport, name: str) -> dist.ProcessGroup:
        host = self._plan.topology.host_of(self._rank).name
        nccl = transport.backend == "nccl"
        try:
            # gloo ignores pg_options; the interface is read from the environment while the group is made.
            with gloo_interface(None if nccl else transport.interface_on(host)):
                # Sorting would put ranks of a planned order in another place than the grid says, without an error.
                group: dist.ProcessGroup = dist.new_group(
                    list(ranks),
                    backend=transport.backend,
                    timeout=self._timeout if nccl else self._connect_timeout,
                    pg_options=self._make_nccl_options(transport) if nccl else None,
                    sort_ranks=False,
                )
            if self._rank in ranks:
                self._made.append(group)
                self.traffic.name(group, name, tuple(ranks))
                if nccl:  # create the communicator now, in one order on all ranks, not at first use
                    dist.all_reduce(torch.zeros(1, device=self._device), group=group)
                else:
                    group._get_backend(torch.device("cpu")).set_timeout(self._timeout)
        except RuntimeError as error:
            raise self._unreachable(ranks, transport, name, error) from error
        return group

    def _unreachable(self, ranks: Sequence[int], transport: Transport, name: str, error: RuntimeError) -> HolmesError:
        hosts = {self._plan.topology.host_of(rank).name: None for rank in ranks}
        over = ", ".join(f"{host}:{transport.interface_on(host) or 'default interface'}" for host in hosts)
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return HolmesError(
            seen=f"the members of group {name} did not connect over {transport.backend} {transport.net}: "
            f"{first_line[:300]}",
            where=f"rank {self._rank} on {self._plan.topology.host_of(self._rank).name}; members: ranks "
            f"{', '.join(map(str, ranks))} on {over}",
            means=f"the group was to use {transport.kind} ({transport.reason}); a link, an address or a firewall on "
            "one of these interfaces keeps the hosts apart",
            do="check these interfaces (`holmes detect` on each host, ping between their addresses); to train "
            "without a bad port take it down, or declare the clusters without it",
        )

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
                    name = f"shared_pp{'_'.join(map(str, key))}_dp{dp}_tp{tp}"
                    transport = self._choose(ranks, on_device=True)
                    group = control = self._new(ranks, transport, name)
                    if transport.backend != "gloo":
                        control = self._new(ranks, self._choose(ranks, on_device=False), name)
                    if self._rank in ranks:
                        mine = (group, control)
            self._shared[key] = mine
        return self._shared[key]

    def close(self) -> None:
        """Destroy every group made here (not the default group)."""
        for group in reversed(self._made):
            dist.destroy_process_group(group)
        self._made.clear()
