# SPDX-License-Identifier: Apache-2.0
"""Grid: global rank <-> (pp, dp, tp) coordinates. The number a launcher handed out means nothing; the Grid maps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holmes_core.cluster.topology import Topology
from holmes_core.cluster.value import Value
from holmes_core.config import V_SCHEDULES
from holmes_core.errors import ConfigError
from holmes_core.plan.layout import Layout

__all__ = ["Coordinates", "Grid", "check_grid", "make_grid", "ranks_in_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates(Value):
    """A rank's place: position along the pipeline, replica, and tensor-parallel part."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid(Value):
    """Every global rank once, as ``ranks[pp][dp][tp]``."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    _coordinates: tuple[Coordinates, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the grid is rectangular and holds ranks 0..n-1 once each.

        Raises:
            ConfigError: It is not.
        """
        found = {
            rank: Coordinates(pp=p, dp=d, tp=t)
            for p, stage in enumerate(self.ranks)
            for d, group in enumerate(stage)
            for t, rank in enumerate(group)
        }
        size = len(self.ranks) * self.dp * self.tp
        rectangular = all(len(stage) == self.dp and all(len(g) == self.tp for g in stage) for stage in self.ranks)
        if not size or not rectangular or sorted(found) != list(range(size)):
            raise ConfigError(
                seen=f"a grid of {len(found)} different ranks for pp {self.pp} x dp {self.dp} x tp {self.tp}",
                where="Grid.ranks",
                do="place every rank from 0 to world size - 1 once, with equal dp and tp on every stage",
            )
        object.__setattr__(self, "_coordinates", tuple(found[rank] for rank in range(size)))

    @property
    def pp(self) -> int:
        """Ranks along the pipeline."""
        return len(self.ranks)

    @property
    def dp(self) -> int:
        """Replicas."""
        return len(self.ranks[0]) if self.ranks else 0

    @property
    def tp(self) -> int:
        """Ranks that share each layer."""
        return len(self.ranks[0][0]) if self.dp else 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._coordinates)

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a global rank sits."""
        if not 0 <= rank < len(self._coordinates):
            last = len(self._coordinates) - 1
            raise ConfigError(seen=f"rank {rank}", where="Grid", do=f"use a rank from 0 to {last}")
        return self._coordinates[rank]

    def rank_at(self, *, pp: int, dp: int, tp: int) -> int:
        """Return the global rank at a place."""
        return self.ranks[pp][dp][tp]

    def tp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every tp group, stage by stage."""
        return tuple(group for stage in self.ranks for group in stage)

    def dp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every dp group, stage by stage."""
        return tuple(column for stage in self.ranks for column in zip(*stage, strict=True))

    def pp_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every pipeline (dp, then tp), first pp rank first."""
        return tuple(tuple(stage[d][t] for stage in self.ranks) for d in range(self.dp) for t in range(self.tp))

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of every model replica (all pp and tp ranks of one dp index)."""
        return tuple(tuple(rank for stage in self.ranks for rank in stage[d]) for d in range(self.dp))


def make_grid(
    topology: Topology, layout: Layout, *, rank_order: Sequence[int] | None = None, last_stage_on_rank_zero: bool = True
) -> Grid:
    """Place the ranks: tp inside a host, dp inside a cluster, each cluster's stages next to each other.

    With ``last_stage_on_rank_zero`` global rank 0 gets the last stage, dp 0, tp 0: its cluster comes last and its
    stage is the cluster's last. V schedules run the last stage on pp rank 0, so there it comes first.

    Args:
        topology: Where the ranks run.
        layout: The degrees and the stages of each cluster.
        rank_order: Ranks in grid order given by the user; it decides everything.
        last_stage_on_rank_zero: See above; ignored when rank_order is given.

    Returns:
        A grid that keeps both invariants.

    Raises:
        ConfigError: The grid would let a tp group leave a host or a dp group leave a cluster.
    """
    width = layout.dp * layout.tp
    if rank_order is not None:
        if len(rank_order) != topology.world_size:
            raise ConfigError(
                seen=f"rank_order has {len(rank_order)} ranks, the job has {topology.world_size}",
                where="HolmesConfig.rank_order",
                do="list every rank once, or leave rank_order out",
            )
        order = list(rank_order)
    else:
        order = _order(topology, width, v_schedule=layout.schedule in V_SCHEDULES, zero_last=last_stage_on_rank_zero)
    stages = [order[start : start + width] for start in range(0, len(order), width)]
    ranks = tuple(
        tuple(tuple(stage[start : start + layout.tp]) for start in range(0, width, layout.tp)) for stage in stages
    )
    grid = Grid(ranks=ranks)
    check_grid(topology, grid)
    return grid


def _order(topology: Topology, width: int, *, v_schedule: bool, zero_last: bool) -> list[int]:
    """Return the ranks in grid order."""
    zero = topology.cluster_index(0)
    others = [index for index in range(len(topology.clusters)) if index != zero]
    clusters = list(range(len(topology.clusters)))
    if zero_last:
        clusters = [zero, *others] if v_schedule else [*others, zero]
    return [
        rank
        for index in clusters
        for rank in ranks_in_order(topology, index, width, v_schedule=v_schedule, zero_last=zero_last)
    ]


def ranks_in_order(topology: Topology, cluster: int, width: int, *, v_schedule: bool, zero_last: bool) -> list[int]:
    """Return the ranks of a cluster in grid order, for stages of ``width`` ranks."""
    # Rank 0 is the first rank of its host, so its host first makes it the first of its stage.
    hosts = sorted(topology.clusters[cluster].hosts, key=lambda host: zero_last and 0 not in host.ranks)
    ranks = [rank for host in hosts for rank in sorted(host.ranks)]
    if zero_last and cluster == topology.cluster_index(0) and not v_schedule:
        ranks = ranks[width:] + ranks[:width]
    return ranks


def check_grid(topology: Topology, grid: Grid) -> None:
    """Check the two invariants: no tp group leaves a host, no dp group leaves a cluster.

    Raises:
        ConfigError: With the group that breaks one.
    """
    if grid.world_size != topology.world_size:
        raise ConfigError(
            seen=f"a grid of {grid.world_size} ranks for a job of {topology.world_size}",
            where="Grid",
            do="plan again for this job",
        )
    for axis, groups, limit in (("tp", grid.tp_groups(), "host"), ("dp", grid.dp_groups(), "cluster")):
        for group in groups:
            places = [topology.host_of(rank).name if axis == "tp" else topology.cluster_of(rank).name for rank in group]
            if len(set(places)) > 1:
                raise ConfigError(
                    seen=f"{axis} group {list(group)} spans {limit}s {', '.join(dict.fromkeys(places))}",
                    where="Grid",
                    means=f"a {axis} group must stay inside one {limit}: it talks all the time, over the fastest link",
                    do=f"choose degrees (or a rank_order) that keep consecutive {axis} ranks in one {limit}",
                )
