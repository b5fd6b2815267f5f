# SPDX-License-Identifier: Apache-2.0
"""Plan: who does what. Everything the runtime needs to build process groups and stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from holmes_core.cluster.topology import Topology
from holmes_core.cluster.value import Value
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, did_you_mean
from holmes_core.plan.cost import Prediction
from holmes_core.plan.grid import Grid, check_grid, make_grid
from holmes_core.plan.layout import Layout, ModelFacts, choose_layout
from holmes_core.plan.partition import (
    check_layers_per_stage,
    equal_partition,
    paper_partition,
    self_adapting_partition,
)
from holmes_core.plan.transport import Transport, choose_transport

__all__ = ["AXES", "Axis", "Group", "Plan", "make_plan"]

Axis = Literal["world", "tp", "dp", "pp", "replica", "edge", "embedding"]
AXES: tuple[Axis, ...] = ("world", "tp", "dp", "pp", "replica", "edge", "embedding")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Value):
    """The ranks of one process group and how they talk.

    Args:
        name: Unique in the plan, the same on every rank.
        axis: ``tp``, ``dp``, ``pp`` (a whole pipeline), ``replica`` (all pp and tp ranks of one dp index),
            ``edge`` (one pipeline edge in one direction), ``embedding`` (first and last stage), ``world``.
        ranks: Members in their planned order (not always ascending). An edge is (sender, receiver).
        direction: ``fwd`` (activations) or ``bwd`` (gradients) for edges, else empty.
        transport: How the members talk.
        reason: What the group is for.
    """

    name: str
    axis: Axis
    ranks: tuple[int, ...]
    direction: Literal["", "fwd", "bwd"] = ""
    transport: Transport
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Value):
    """Topology, Layout, Grid and Groups of one job, with the reasons.

    Args:
        topology: Where the ranks run.
        layout: Degrees and schedule.
        grid: Rank placement.
        groups: Every process group, in the order in which all ranks create them.
        layers_per_stage: Blocks per stage in pipeline order; empty where split_points decide.
        split_points: The user's split points, else empty.
        reasons: Why the plan is as it is, one sentence each.
        model: The model's facts.
        prediction: Step time, memory per pipeline rank, bytes per link; None where nobody has predicted.
        recompute: Whether blocks are recomputed in the backward pass.
    """

    topology: Topology
    layout: Layout
    grid: Grid
    groups: tuple[Group, ...]
    layers_per_stage: tuple[int, ...]
    split_points: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    model: ModelFacts | None = None
    prediction: Prediction | None = None
    recompute: bool = False
    _index: dict[tuple[str, int], tuple[Group, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the plan as a whole, so that one read from a file is as sound as one made here.

        Raises:
            ConfigError: Grid, layout and topology contradict each other, or an invariant is broken.
        """
        check_grid(self.topology, self.grid)
        degrees = (self.layout.pp, self.layout.dp, self.layout.tp)
        if degrees != (self.grid.pp, self.grid.dp, self.grid.tp):
            raise ConfigError(seen=f"layout {degrees} and grid differ", where="Plan", do="make the plan again")
        stages = len(self.layers_per_stage) or len(self.split_points) + 1
        if stages != self.layout.num_stages:
            seen = f"{stages} stages described, the layout has {self.layout.num_stages}"
            raise ConfigError(seen=seen, where="Plan.layers_per_stage", do="make the plan again")
        index: dict[tuple[str, int], list[Group]] = {}
        for group in self.groups:
            for rank in group.ranks:
                index.setdefault((group.axis, rank), []).append(group)
        object.__setattr__(self, "_index", {key: tuple(found) for key, found in index.items()})

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.layout.num_stages

    def groups_of(self, rank: int, axis: Axis | None = None) -> tuple[Group, ...]:
        """Return a rank's groups (of one axis, or all), in creation order."""
        if axis is not None:
            return self._index.get((axis, rank), ())
        return tuple(group for group in self.groups if rank in group.ranks)

    def group(self, axis: Axis, rank: int) -> Group:
        """Return a rank's one group of an axis (for edges use ``edge``, for embedding ``embedding_group``).

        Raises:
            ConfigError: The rank has none, or several.
        """
        found = self._index.get((axis, rank), ())
        if len(found) != 1:
            seen = f"rank {rank} is in {len(found)} groups of axis {axis!r}"
            raise ConfigError(
                seen=seen, where="Plan.group", do="use groups_of(rank, axis), edge(...) or embedding_group"
            )
        return found[0]

    def edge(self, sender: int, receiver: int, direction: Literal["fwd", "bwd"]) -> Group | None:
        """Return the group over which sender passes activations (fwd) or gradients (bwd) on; None if there is none."""
        for group in self._index.get(("edge", sender), ()):
            if group.ranks == (sender, receiver) and group.direction == direction:
                return group
        return None

    def embedding_group(self, rank: int) -> Group | None:
        """Return the group of first and last stage a rank is in; None if it is in none."""
        found = self._index.get(("embedding", rank), ())
        return found[0] if found else None

    def forwards_ahead(self) -> list[int]:
        """Per pp rank, the forwards 1F1B runs ahead: ``run_ahead`` for each later edge between clusters."""
        ranks = [self.grid.rank_at(pp=pp, dp=0, tp=0) for pp in range(self.layout.pp)]
        slow = [a != b for a, b in pairwise(self.topology.cluster_index(rank) for rank in ranks)]
        return [self.layout.run_ahead * sum(slow[pp:]) for pp in range(self.layout.pp)]

    def pp_rank_of(self, stage: int) -> int:
        """Return the pp rank that runs a stage."""
        return self.layout.pp_rank_of(stage)

    def rank_of(self, *, stage: int, dp: int, tp: int) -> int:
        """Return the global rank that runs a stage for a replica and tp part."""
        return self.grid.rank_at(pp=self.pp_rank_of(stage), dp=dp, tp=tp)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages a rank runs, ascending."""
        return self.layout.stages_of(self.grid.coordinates(rank).pp)

    def stage_blocks(self, stage: int) -> range:
        """Return the indices of the blocks of a stage.

        Raises:
            ConfigError: The model is split by split_points, so blocks are not counted.
        """
        if not self.layers_per_stage:
            raise ConfigError(
                seen="the model is split by split_points", where="Plan.stage_blocks", do="use Plan.split_points"
            )
        first = sum(self.layers_per_stage[:stage])
        return range(first, first + self.layers_per_stage[stage])

    def holds_last_stage(self, rank: int) -> bool:
        """Tell whether a rank runs the last stage (head and loss)."""
        return self.grid.coordinates(rank).pp == self.pp_rank_of(self.num_stages - 1)

    def holds_first_stage(self, rank: int) -> bool:
        """Tell whether a rank runs the first stage (embedding)."""
        return self.grid.coordinates(rank).pp == self.pp_rank_of(0)


def make_plan(config: HolmesConfig, topology: Topology, model: ModelFacts, *, device_type: str = "cpu") -> Plan:
    """Make the plan of a job. The same input gives the same plan on every rank.

    Args:
        config: What the user said.
        topology: What is there.
        model: The model's facts.
        device_type: ``cuda`` plans NCCL groups, everything else gloo groups.

    Returns:
        The plan.

    Raises:
        ConfigError: No such plan exists; the message says what does.
    """
    layout, reasons = choose_layout(topology, config, model)
    lines = list(reasons)
    grid = make_grid(
        topology, layout, rank_order=config.rank_order, last_stage_on_rank_zero=config.last_stage_on_rank_zero
    )
    layers: tuple[int, ...] = ()
    if config.split_points is not None:
        lines.append(f"split at {', '.join(config.split_points)} (split_points)")
        if len(config.split_points) + 1 != layout.num_stages:
            raise ConfigError(
                seen=f"{len(config.split_points)} split points give {len(config.split_points) + 1} stages",
                where="HolmesConfig.split_points",
                means=f"the pipeline has {layout.num_stages} stages",
                do=f"give {layout.num_stages - 1} split points, or change pp or virtual_stages",
            )
    elif config.layers_per_stage is not None:
        layers = check_layers_per_stage(
            config.layers_per_stage, num_blocks=model.num_blocks, num_stages=layout.block_stages
        )
        lines.append("blocks per stage as given (layers_per_stage)")
    else:
        layers, reason = _split(config, topology, layout, grid, model)
        lines.append(reason)
    if layout.embedding_on_last:
        layers = (0, *layers)
        lines.append(
            "the embedding runs beside the head, on the last pipeline rank"
            + (" (embedding: last)" if config.embedding == "last" else "; the gradient of their weight stays there")
        )
    lines.extend(f"{cluster.name}: {cluster.reason}" for cluster in topology.clusters if cluster.reason)
    lines.extend(_placement_reasons(config, topology, layout, grid))
    return Plan(
        topology=topology,
        layout=layout,
        grid=grid,
        groups=_make_groups(topology, layout, grid, device_type),
        layers_per_stage=layers,
        split_points=config.split_points or (),
        reasons=tuple(lines),
        model=model,
        recompute=bool(config.recompute),
    )


def _split(
    config: HolmesConfig, topology: Topology, layout: Layout, grid: Grid, model: ModelFacts
) -> tuple[tuple[int, ...], str]:
    """Split the blocks by the rule and the speeds that the user gave; return the reason, too."""
    names = [cluster.name for cluster in topology.clusters]
    speeds = config.cluster_speeds
    wrong = [name for name in speeds if name not in names] or [name for name in names if speeds and name not in speeds]
    if wrong or (config.partition == "paper" and not speeds):
        hint = did_you_mean(wrong[0], names) if wrong else ""
        raise ConfigError(
            seen=f"partition {config.partition}, speeds of: {', '.join(speeds) or 'no cluster'}{hint}",
            where="HolmesConfig.cluster_speeds",
            means=f"the clusters are {', '.join(names)}",
            do=f"give each a speed: cluster_speeds: {{{', '.join(f'{name}: 1.0' for name in names)}}}",
        )
    if config.partition == "equal" or len(set(speeds.values())) < 2:
        layers = equal_partition(model.num_blocks, layout.block_stages)
        return layers, f"{model.num_blocks} blocks split as evenly as they can be"
    owners = [
        topology.cluster_of(grid.rank_at(pp=layout.pp_rank_of(stage), dp=0, tp=0)).name
        for stage in range(layout.num_stages - layout.block_stages, layout.num_stages)
    ]
    per_stage = [speeds[name] for name in owners]
    shown = ", ".join(f"{name} {speeds[name]:g}" for name in names)
    if config.partition == "paper":
        return paper_partition(model.num_blocks, per_stage), f"blocks in proportion to speed ({shown})"
    layers = self_adapting_partition([1.0] * model.num_blocks, per_stage)
    return layers, f"blocks split so that the slowest stage is as fast as it can be ({shown})"


def _placement_reasons(config: HolmesConfig, topology: Topology, layout: Layout, grid: Grid) -> list[str]:
    lines: list[str] = []
    last = layout.pp_rank_of(layout.num_stages - 1)
    if config.rank_order is not None:
        lines.append("ranks placed as given (rank_order)")
    elif layout.pp > 1 and grid.coordinates(0).pp == last:
        lines.append("rank 0 runs the last stage, so loss, logs and progress bar are where the host expects them")
    clusters = [
        topology.cluster_of(grid.rank_at(pp=layout.pp_rank_of(s), dp=0, tp=0)) for s in range(layout.num_stages)
    ]
    slow = [
        f"{stage} -> {stage + 1} ({clusters[stage].name} -> {clusters[stage + 1].name})"
        for stage in range(layout.num_stages - 1)
        if clusters[stage] != clusters[stage + 1]
    ]
    if slow:
        shown = ", ".join(slow[:4]) + (", ..." if len(slow) > 4 else "")
        lines.append(f"{len(slow)} of {layout.num_stages - 1} stage boundaries cross clusters: {shown}")
    lines.append("checked: no tp group leaves a host, no dp group leaves a cluster")
    return lines


def _make_groups(topology: Topology, layout: Layout, grid: Grid, device_type: str) -> tuple[Group, ...]:
    """Return every group, axis by axis in the order of AXES, each rank exactly once per tp, dp, pp and replica."""
    groups: list[Group] = []

    def add(
        axis: Axis, name: str, ranks: tuple[int, ...], reason: str, direction: Literal["", "fwd", "bwd"] = ""
    ) -> None:
        # These carry metadata, scalars and barriers, never bulk: gloo, so that no NCCL communicator spans fabrics.
        control = axis in ("world", "pp", "replica")
        transport = choose_transport(topology, ranks, "cpu" if control else device_type)
        groups.append(Group(name=name, axis=axis, ranks=ranks, direction=direction, transport=transport, reason=reason))

    add("world", "world", tuple(range(grid.world_size)), "barriers and objects of the whole job")
    for index, ranks in enumerate(grid.tp_groups()):
        p, d = divmod(index, grid.dp)
        add("tp", f"tp_pp{p}_dp{d}", ranks, "shares each layer")
    for index, ranks in enumerate(grid.dp_groups()):
        p, t = divmod(index, grid.tp)
        add("dp", f"dp_pp{p}_tp{t}", ranks, "sums gradients, gathers parameters")
    for index, ranks in enumerate(grid.pp_groups()):
        d, t = divmod(index, grid.tp)
        add("pp", f"pp_dp{d}_tp{t}", ranks, "pipeline metadata: shapes, losses, logs")
    for d, ranks in enumerate(grid.replicas()):
        add("replica", f"replica_dp{d}", ranks, "one model replica: norms and flags of the whole model")
    first, last = layout.pp_rank_of(0), layout.pp_rank_of(layout.num_stages - 1)
    lanes = [(d, t) for d in range(grid.dp) for t in range(grid.tp)]
    seen: set[tuple[int, int]] = set()
    for stage in range(layout.num_stages - 1):
        a, b = layout.pp_rank_of(stage), layout.pp_rank_of(stage + 1)
        if a == b or (a, b) in seen:
            continue
        seen.add((a, b))
        for d, t in lanes:
            here, there = grid.rank_at(pp=a, dp=d, tp=t), grid.rank_at(pp=b, dp=d, tp=t)
            lane = f"dp{d}_tp{t}"
            add("edge", f"edge_fwd_pp{a}_pp{b}_{lane}", (here, there), "activations to the next stage", "fwd")
            add("edge", f"edge_bwd_pp{b}_pp{a}_{lane}", (there, here), "gradients to the stage before", "bwd")
    if first != last:
        for d, t in lanes:
            ends = (grid.rank_at(pp=first, dp=d, tp=t), grid.rank_at(pp=last, dp=d, tp=t))
            add("embedding", f"embedding_dp{d}_tp{t}", ends, "weights that first and last stage share")
    return tuple(groups)
