# SPDX-License-Identifier: Apache-2.0
"""Layout: the degrees of parallelism, checked against clusters, hosts and the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NoReturn

from holmes_core.cluster.topology import Topology
from holmes_core.cluster.value import Value
from holmes_core.config import EMBEDDING_SCHEDULES, V_SCHEDULES, HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.batch_split import check_microbatches, runs

__all__ = ["Layout", "ModelFacts", "choose_layout", "legal_tp", "nearest_layouts", "pin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(Value):
    """What the planner needs to know about the model.

    Args:
        num_blocks: Blocks in the model's main list.
        num_heads: Attention heads.
        num_kv_heads: Key/value heads, where they are fewer.
        vocab_size: Rows of the embedding.
        tied: Whether embedding and head share their weight.
    """

    num_blocks: int
    num_heads: int | None = None
    num_kv_heads: int | None = None
    vocab_size: int | None = None
    tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Value):
    """One tp and one dp for the job, and a number of consecutive stages per cluster.

    Args:
        tp: Tensor-parallel degree.
        dp: Data-parallel degree.
        stages_per_cluster: Pipeline ranks of each cluster, in the order of ``Topology.clusters`` (which is not
            always the order along the pipeline: see Grid). 0 only in proposals that leave a cluster out.
        virtual_stages: Stages per rank.
        num_microbatches: Micro-batches per batch; None leaves it to ``default_num_microbatches``.
        micro_batch_size: Samples per micro-batch, instead.
        schedule: Name in ``config.SCHEDULES``.
        embedding_on_last: Whether stage 0 is the input embedding alone, on the last pipeline rank, beside the head. A
            tied weight then lives on one rank and its gradient crosses no network; embedded micro-batches do instead.
        run_ahead: Micro-batches that 1F1B runs ahead at each edge between clusters.
        defer_weights: Whether 1F1B puts off weights' gradients at both ends of a step.
        taper: Whether 1F1B has half a micro-batch at each end of a step.
        sharding: ``optimizer`` (replicas share its work and states) or ``none``.
    """

    tp: int
    dp: int
    stages_per_cluster: tuple[int, ...]
    virtual_stages: int = 1
    num_microbatches: int | None = None
    micro_batch_size: int | None = None
    schedule: str = "1f1b"
    embedding_on_last: bool = False
    run_ahead: int = 0
    defer_weights: bool = False
    taper: bool = False
    sharding: str = "optimizer"

    def __post_init__(self) -> None:
        """Check that all numbers are positive."""
        if min(self.tp, self.dp, self.virtual_stages, sum(self.stages_per_cluster)) < 1:
            raise ConfigError(seen=f"{self!r}", where="Layout", do="use degrees of 1 or more")

    @property
    def pp(self) -> int:
        """Ranks along the pipeline."""
        return sum(self.stages_per_cluster)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline: ``pp * virtual_stages``, and one for an embedding of its own."""
        return self.block_stages + self.embedding_on_last

    @property
    def block_stages(self) -> int:
        """Stages that hold blocks."""
        return self.pp * self.virtual_stages

    def pp_rank_of(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage: in loops, or down and up again for V schedules.

        Raises:
            ConfigError: There is no such stage.
        """
        if not 0 <= stage < self.num_stages:
            raise ConfigError(seen=f"stage {stage}", where="Layout", do=f"use 0 to {self.num_stages - 1}")
        if self.embedding_on_last:
            return self.pp - 1 if stage == 0 else stage - 1
        if self.schedule in V_SCHEDULES:
            return stage if stage < self.pp else 2 * self.pp - 1 - stage
        return stage % self.pp

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank runs, ascending."""
        return tuple(stage for stage in range(self.num_stages) if self.pp_rank_of(stage) == pp_rank)

    @property
    def width(self) -> int:
        """Ranks per stage, ``dp * tp``."""
        return self.dp * self.tp

    @property
    def world_size(self) -> int:
        """Ranks the layout uses."""
        return self.pp * self.width


def choose_layout(topology: Topology, config: HolmesConfig, model: ModelFacts) -> tuple[Layout, tuple[str, ...]]:
    """Fill in the degrees the user left out and check the result.

    Degrees left out: tp is 1; dp is the whole stage, which is as wide as the clusters allow (the greatest common
    divisor of their rank counts), so that the pipeline is as short as possible; pp is what remains.

    Args:
        topology: Clusters, hosts and ranks.
        config: The user's wishes.
        model: The model's facts.

    Returns:
        The layout, and the reasons for it in words.

    Raises:
        ConfigError: No such layout exists; the message names the nearest ones that do and their cost in idle ranks.
    """
    sizes = [len(cluster.ranks) for cluster in topology.clusters]
    wanted = pp, dp, tp = _fill(topology, config)
    _check_tp(topology, config, model, wanted)
    width, world = dp * tp, topology.world_size
    if pp * width != world:
        seen = f"pp {pp} x dp {dp} x tp {tp} = {pp * width} ranks, the job has {world}"
        _fail(topology, config, model, wanted, seen)
    for cluster, size in zip(topology.clusters, sizes, strict=True):
        if size % width:
            means = f"every stage has the same dp x tp and lies in one cluster: {size} % {width} != 0"
            seen = f"stages of dp {dp} x tp {tp} = {width} ranks do not fill cluster {cluster.name!r} of {size}"
            _fail(topology, config, model, wanted, seen, means)
    layout = Layout(
        tp=tp,
        dp=dp,
        stages_per_cluster=tuple(size // width for size in sizes),
        virtual_stages=config.stages_per_rank,
        num_microbatches=config.num_microbatches,
        micro_batch_size=config.micro_batch_size,
        schedule=config.schedule,
        embedding_on_last=_embedding_on_last(topology, config, model, pp),
        run_ahead=config.run_ahead or 0,
        defer_weights=bool(config.defer_weights),
        taper=bool(config.taper) and config.schedule == "1f1b" and pp > 1,
        sharding="none" if config.sharding == "none" else "optimizer",
    )
    if config.layers_per_stage is None and config.split_points is None and layout.block_stages > model.num_blocks:
        stages = f"{layout.block_stages} stages (pp {pp} x {layout.virtual_stages} per rank)"
        seen = f"{stages} for {model.num_blocks} blocks"
        _fail(topology, config, model, wanted, seen, "at least one stage would hold no block")
    check_microbatches(layout)
    return layout, _reasons(topology, config, model, layout)


def _embedding_on_last(topology: Topology, config: HolmesConfig, model: ModelFacts, pp: int) -> bool:
    """Whether the embedding goes to the last rank: asked for, or tied to a head in another cluster."""
    fits = config.schedule in EMBEDDING_SCHEDULES and config.split_points is None and pp > 1
    if config.embedding == "last" and not fits and pp > 1:
        points = " and split_points" if config.split_points else ""
        raise ConfigError(
            seen=f"embedding: last with schedule {config.schedule}{points}",
            where="HolmesConfig.embedding",
            means="the embedding can be a stage of its own where each rank has one stage and blocks are counted",
            do=f"use schedule {' or '.join(EMBEDDING_SCHEDULES)} without split_points, or leave embedding out",
        )
    if config.embedding != "auto":
        return config.embedding == "last" and fits
    return fits and model.tied and config.rank_order is None and len(topology.clusters) > 1


def pin(config: HolmesConfig, layout: Layout) -> HolmesConfig:
    """Return the configuration with the degrees of a layout that was chosen already, before the model was known."""
    return replace(config, pp=layout.pp, dp=layout.dp, tp=layout.tp)


def legal_tp(topology: Topology, model: ModelFacts) -> tuple[int, ...]:
    """Return every tp that divides the heads, the key/value heads and each host's number of ranks."""
    common = math.gcd(*_host_sizes(topology), model.num_heads or 0, model.num_kv_heads or 0)
    return tuple(tp for tp in range(1, common + 1) if common % tp == 0)


def nearest_layouts(
    topology: Topology, config: HolmesConfig, model: ModelFacts, wanted: tuple[int, int, int], *, limit: int = 3
) -> tuple[Layout, ...]:
    """Return possible layouts near a wanted (pp, dp, tp); one that uses all ranks is among them if there is one.

    Nearest first: fewest degrees changed that the user gave, then fewest idle ranks, then smallest change. A layout
    whose ``world_size`` is below the topology's leaves ranks idle: the job would be started with fewer.
    """
    stages = config.stages_per_rank
    described = _described_stages(config)
    heads = math.gcd(model.num_heads or 0, model.num_kv_heads or 0)
    found: dict[tuple[int, int, int], tuple[tuple[int, int, float], Layout]] = {}
    for tp in range(1, max(_host_sizes(topology)) + 1):
        if heads % tp:
            continue
        groups = [sum(len(host.ranks) // tp for host in cluster.hosts) for cluster in topology.clusters]
        for dp in range(1, max(groups) + 1):
            full = [count // dp for count in groups]
            limits = {described // stages if described else model.num_blocks // stages, wanted[0], len(full)}
            for pp in {sum(full), *limits}:
                fits = pp * stages == described if described else pp * stages <= model.num_blocks
                if not 1 <= pp <= sum(full) or not fits:
                    continue
                layout = Layout(
                    tp=tp,
                    dp=dp,
                    stages_per_cluster=_shorten(full, pp),
                    virtual_stages=stages,
                    num_microbatches=config.num_microbatches,
                    micro_batch_size=config.micro_batch_size,
                    schedule=config.schedule,
                )
                degrees = (pp, dp, tp)
                given = (config.pp, config.dp, config.tp)
                changed = sum(g is not None and g != d for g, d in zip(given, degrees, strict=True))
                distance = sum(abs(math.log2(d / w)) for d, w in zip(degrees, wanted, strict=True))
                if config.num_microbatches is not None and not runs(config.num_microbatches, layout):
                    continue
                found[degrees] = ((changed, topology.world_size - layout.world_size, distance), layout)
    ranked = [layout for _, layout in sorted(found.values(), key=lambda item: (item[0], item[1].pp))]
    complete = [layout for layout in ranked if layout.world_size == topology.world_size]
    chosen = dict.fromkeys([*ranked[:1], *complete[:1], *ranked[1:]])
    return tuple(chosen)[:limit]


def _host_sizes(topology: Topology) -> list[int]:
    return [len(host.ranks) for cluster in topology.clusters for host in cluster.hosts]


def _described_stages(config: HolmesConfig) -> int | None:
    """Return the number of stages that layers_per_stage or split_points imply."""
    if config.layers_per_stage is not None:
        return len(config.layers_per_stage)
    return None if config.split_points is None else len(config.split_points) + 1


def _fill(topology: Topology, config: HolmesConfig) -> tuple[int, int, int]:
    """Return (pp, dp, tp) with the missing degrees filled in; nothing is checked yet."""
    world = topology.world_size
    pp, dp, tp = config.pp, config.dp, config.tp
    described = _described_stages(config)
    if pp is None and described is not None:
        pp = max(1, described // config.stages_per_rank)
    if tp is None:
        tp = world // (pp * dp) if pp and dp and world % (pp * dp) == 0 else 1
    if dp is None:
        width = world // pp if pp else math.gcd(*(len(cluster.ranks) for cluster in topology.clusters))
        dp = max(1, width // tp)
    return pp or max(1, world // (dp * tp)), dp, tp


def _check_tp(topology: Topology, config: HolmesConfig, model: ModelFacts, wanted: tuple[int, int, int]) -> None:
    tp = wanted[2]
    legal = legal_tp(topology, model)
    if tp in legal:
        return
    limits = [f"{name} {n}" for name, n in (("heads", model.num_heads), ("kv_heads", model.num_kv_heads)) if n]
    hosts = sorted(set(_host_sizes(topology)))
    limits.append("ranks per host " + ", ".join(map(str, hosts)))
    if model.num_heads and model.num_heads % tp:
        means = f"each tp rank takes whole heads: {model.num_heads} heads % {tp} != 0"
    elif model.num_kv_heads and model.num_kv_heads % tp:
        means = f"each tp rank takes whole key/value heads: {model.num_kv_heads} kv_heads % {tp} != 0"
    else:
        host = next(h for c in topology.clusters for h in c.hosts if len(h.ranks) % tp)
        means = f"a tp group never leaves a host, and host {host.name} has {len(host.ranks)} ranks"
    seen = f"tp {tp}; legal here: {', '.join(map(str, legal))} (common divisors of {'; '.join(limits)})"
    _fail(topology, config, model, wanted, seen, means)


def _fail(
    topology: Topology,
    config: HolmesConfig,
    model: ModelFacts,
    wanted: tuple[int, int, int],
    seen: str,
    means: str | None = None,
) -> NoReturn:
    options = nearest_layouts(topology, config, model, wanted)
    lines = "\n".join(f"- {_describe(topology, layout)}" for layout in options)
    names = [
        name for name in ("pp", "dp", "tp", "layers_per_stage", "split_points") if getattr(config, name) is not None
    ]
    raise ConfigError(
        seen=seen,
        where="HolmesConfig." + ", ".join(names) if names else "the clusters' sizes and the model",
        means=means,
        do=f"use one of the nearest layouts:\n{lines}" if lines else "use fewer stages: no layout fits this model",
    )


def _describe(topology: Topology, layout: Layout) -> str:
    stages = " + ".join(map(str, layout.stages_per_cluster))
    text = f"pp {layout.pp} x dp {layout.dp} x tp {layout.tp} ({stages} stages per cluster)"
    if len(topology.clusters) == 1:
        text = f"pp {layout.pp} x dp {layout.dp} x tp {layout.tp}"
    idle = topology.world_size - layout.world_size
    if not idle:
        return f"{text}: uses all {topology.world_size} ranks"
    whole = "" if layout.tp == 1 else f" (per host a multiple of {layout.tp})"
    used = ", ".join(
        f"{stages * layout.width} of {len(cluster.ranks)} in {cluster.name}"
        for cluster, stages in zip(topology.clusters, layout.stages_per_cluster, strict=True)
    )
    return f"{text}: {idle} of {topology.world_size} ranks idle; start the job with {used}{whole}"


def _shorten(stages: list[int], pp: int) -> tuple[int, ...]:
    """Take stages away, from the longest cluster first, keeping a stage in as many clusters as possible."""
    left = list(stages)
    while sum(left) > pp:
        longest = max(left)
        index = left.index(longest) if longest > 1 else max(i for i, count in enumerate(left) if count)
        left[index] -= 1
    return tuple(left)


def _reasons(topology: Topology, config: HolmesConfig, model: ModelFacts, layout: Layout) -> tuple[str, ...]:
    sizes = [len(cluster.ranks) for cluster in topology.clusters]
    given = [f"{name} {getattr(config, name)}" for name in ("pp", "dp", "tp") if getattr(config, name) is not None]
    source = f"{', '.join(given)} given" if given else "no degree given"
    lines = [f"pp {layout.pp} x dp {layout.dp} x tp {layout.tp} = {topology.world_size} ranks ({source})"]
    if len(sizes) > 1:
        parts = ", ".join(
            f"{count} in {cluster.name}"
            for count, cluster in zip(layout.stages_per_cluster, topology.clusters, strict=True)
        )
        lines.append(f"stages are {layout.width} ranks wide, so each lies in one cluster: {parts}")
    if config.pp is None and layout.pp > len(sizes) and len(set(sizes)) > 1:
        short = [
            option
            for option in nearest_layouts(topology, config, model, (len(sizes), min(sizes), 1), limit=10**9)
            if option.pp == len(sizes) and min(option.stages_per_cluster) > 0
        ]
        if short:
            best = min(short, key=lambda option: (-option.world_size, option.tp != layout.tp))
            lines.append(f"not chosen, as it leaves ranks idle: {_describe(topology, best)}")
    return tuple(lines)
