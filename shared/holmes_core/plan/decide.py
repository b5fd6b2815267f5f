# SPDX-License-Identifier: Apache-2.0
"""What a job decides for itself in its first seconds: degrees, order of clusters, blocks per stage, recomputation.

The rule of ``choose_layout`` gives the usual layout. The search replaces it only where it is clearly faster by what was
measured, or where the usual one does not fit the memory: a layout that changes with the noise of a measurement would
change how many samples a step has. What the user has fixed is kept, and refused if it cannot fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

from holmes_core.cluster.probe import ProbeResult
from holmes_core.cluster.topology import Topology
from holmes_core.config import EMBEDDING_SCHEDULES, V_SCHEDULES, ZERO_BUBBLE, HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.batch_split import default_num_microbatches
from holmes_core.plan.cost import Choice, CostModel, Job, Prediction
from holmes_core.plan.cost_network import Place
from holmes_core.plan.decide_memory import too_large
from holmes_core.plan.grid import make_grid, ranks_in_order
from holmes_core.plan.layout import Layout, choose_layout
from holmes_core.plan.means import choose_means
from holmes_core.plan.partition import equal_partition
from holmes_core.plan.probe import hardware_of
from holmes_core.plan.profile import ModelProfile
from holmes_core.plan.search import Candidate, Limits, search, split_blocks
from holmes_core.plan.simulate import predict_by_simulation
from holmes_core.plan.simulate_orders import SIMULATED

__all__ = ["Decision", "Step", "decide"]

#: What another layout, and another split of the blocks, must gain to be taken instead of the usual one.
_CLEARLY_FASTER, _CLEARLY_BETTER = 1.05, 1.03
#: What a setting that is off must promise to be named.
_WORTH_SAYING = 0.02
_USUAL_BATCH = 8  # samples of a replica's batch where nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is known of the steps to come.

    Args:
        profile: The model at the steps' sequence length and precision.
        precision: A key of ``cost.PRECISIONS``.
        batch: Samples of one replica's batch; None: not known.
        memory: Rank -> bytes it may use.
        runtime_bytes: What every rank occupies besides the model.
        trainable: Part of the parameters that is trained.
        recomputes: Whether the model recomputes its blocks already.
        device_type: ``cuda`` or ``cpu``.
    """

    profile: ModelProfile
    precision: str
    batch: int | None
    memory: Mapping[int, int]
    runtime_bytes: int
    trainable: float = 1.0
    recomputes: bool = False
    device_type: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided.

    Args:
        config: The user's configuration with what was decided filled in.
        topology: The clusters in the order that makes the grid place them as decided.
        prediction: Of the layout; None where the model is not known well enough.
        recompute: Whether blocks are to be recomputed.
        notes: Why, one sentence each.
    """

    config: HolmesConfig
    topology: Topology
    prediction: Prediction | None = None
    recompute: bool = False
    notes: tuple[str, ...] = ()


class _PlacedModel(CostModel):
    """Costs of the stages where the grid really puts them."""

    def __init__(self, job: Job, topology: Topology, config: HolmesConfig) -> None:
        super().__init__(job)
        self._topology, self._config = topology, config
        self._known: dict[tuple[int, int, bool], list[Place]] = {}
        self._host_index = {
            host.name: index for cluster in topology.clusters for index, host in enumerate(cluster.hosts)
        }

    def places(self, choice: Choice) -> list[Place]:
        """Return where each pp rank's stage lies."""
        if self._config.rank_order is not None:
            ranks: Sequence[int] = self._config.rank_order
            width = choice.width
            return [self._place(ranks[start : start + width]) for start in range(0, len(ranks), width)]
        v_schedule = choice.schedule in V_SCHEDULES
        return [place for cluster in choice.order for place in self._cut(cluster, choice.width, v_schedule)]

    def _cut(self, cluster: int, width: int, v_schedule: bool) -> list[Place]:
        key = (cluster, width, v_schedule)
        if key not in self._known:
            zero_last = self._config.last_stage_on_rank_zero
            ranks = ranks_in_order(self._topology, cluster, width, v_schedule=v_schedule, zero_last=zero_last)
            self._known[key] = [self._place(ranks[start : start + width]) for start in range(0, len(ranks), width)]
        return self._known[key]

    def _place(self, ranks: Sequence[int]) -> Place:
        counts = Counter(self._host_index[self._topology.host_of(rank).name] for rank in ranks)
        return Place(
            cluster=self._topology.cluster_index(ranks[0]),
            first_host=min(counts),
            last_host=max(counts),
            per_host=max(counts.values()),
        )


def ordered(topology: Topology, order: Sequence[int]) -> Topology:
    """Return the topology with its clusters in another order."""
    return replace(topology, clusters=tuple(topology.clusters[index] for index in order))


def decide(config: HolmesConfig, topology: Topology, step: Step, probe: ProbeResult | None) -> Decision:
    """Decide what the user has left open. The same input gives the same decision.

    Args:
        config: What the user said.
        topology: Where the ranks run.
        step: The model and the steps to come.
        probe: What was measured; None: all ranks count as equally fast, but for ``cluster_speeds``.

    Returns:
        The decision, with the prediction of its layout.

    Raises:
        ConfigError: The degrees cannot be, or no layout that the user's settings allow fits the memory.
    """
    layout, _ = choose_layout(topology, config, step.profile.facts())
    model = _PlacedModel(_job(config, topology, step, probe), topology, config)
    fixed = _limits(config, topology, step)
    grid = make_grid(
        topology,
        layout,
        rank_order=config.rank_order,
        last_stage_on_rank_zero=config.last_stage_on_rank_zero,
    )
    order = tuple(dict.fromkeys(topology.cluster_index(stage[0][0]) for stage in grid.ranks))
    rule = usual = _usual(model, config, layout, order, probe, fixed)
    if probe is not None and usual.prediction.fits and usual.choice.schedule in SIMULATED:
        choice, prediction = choose_means(model, usual.choice, fixed)
        usual = Candidate(choice=choice, prediction=prediction)
    chosen, notes = usual, []
    open_degrees = None in (config.pp, config.dp, config.tp) and not _described(config)
    if open_degrees and (probe is not None or not _fits(model, usual, step)):
        best = _best(model, fixed)
        if best is not None and not _fits(model, usual, step):
            chosen = best
            notes.append(f"{_degrees(usual.choice)} would not fit the memory of the ranks")
        elif best is not None and _speed(best) > _CLEARLY_FASTER * _speed(usual):
            chosen = best
            gain = _speed(best) / _speed(usual) - 1
            notes.append(f"by what was measured {gain:.0%} more samples per second than {_degrees(usual.choice)}")
    if not _fits(model, chosen, step):
        raise too_large(model, topology, _limits(config, topology, step), chosen)
    recompute = chosen.choice.recompute
    if recompute and not step.recomputes and config.recompute is None:
        notes.append("blocks are recomputed in the backward pass: without it the memory would not do")
    if means := _means(rule.choice, chosen.choice, config):
        faster = f"; together {_speed(usual) / _speed(rule) - 1:.0%} more samples per second" if chosen is usual else ""
        notes.append(f"by what was measured: {', '.join(means)}{faster}")
    if probe is not None and (more := _by_late_parameters(model, chosen)) >= _WORTH_SAYING:
        notes.append(
            f"overlap_param_gather: true would give {more:.0%} more samples per second; it is off because some scripts "
            "would read old values (docs/slow-link.md)"
        )
    return Decision(
        config=_filled(config, chosen, rule, probe),
        topology=ordered(topology, chosen.choice.order) if chosen.choice.order != order else topology,
        prediction=chosen.prediction,
        recompute=recompute,
        notes=tuple(notes),
    )


def _job(config: HolmesConfig, topology: Topology, step: Step, probe: ProbeResult | None) -> Job:
    profile = step.profile
    mean = sum(block.forward_flops for block in profile.blocks) / len(profile.blocks)
    hardware = hardware_of(
        topology, probe, block_flops=mean, memory=step.memory, declared=config.cluster_speeds or None
    )
    return Job(
        profile=profile,
        hardware=hardware,
        batch=0,
        replica_batch=step.batch or _USUAL_BATCH,
        precision=step.precision,
        runtime_bytes=step.runtime_bytes,
        trainable=step.trainable,
        device_type=step.device_type,
        overlap=None if config.overlap else 0.0,
        overlap_param_gather=config.overlap_param_gather,
    )


def _limits(config: HolmesConfig, topology: Topology, step: Step) -> Limits:
    zero = topology.cluster_index(0) if config.last_stage_on_rank_zero and config.rank_order is None else None
    v_schedule = config.schedule in V_SCHEDULES
    return Limits(
        pp=config.pp,
        dp=config.dp,
        tp=config.tp,
        schedule=config.schedule,
        virtual_stages=config.stages_per_rank,
        micro_batch_size=config.micro_batch_size,
        num_microbatches=config.num_microbatches,
        recompute=True if step.recomputes else config.recompute,
        sharding=None if config.sharding == "auto" else config.sharding,
        run_ahead=config.run_ahead,
        defer_weights=config.defer_weights,
        taper=config.taper,
        recut=None if step.batch is not None else False,
        last=None if v_schedule else zero,
        first=zero if v_schedule else None,
        partition=config.partition,
        # Stages that begin at named modules have no embedding of their own.
        embedding=config.embedding if config.split_points is None else "first",
    )


def _described(config: HolmesConfig) -> bool:
    """Whether the user has said where the blocks go, or the ranks."""
    return any(value is not None for value in (config.layers_per_stage, config.split_points, config.rank_order))


def _usual(
    model: CostModel,
    config: HolmesConfig,
    layout: Layout,
    order: tuple[int, ...],
    probe: ProbeResult | None,
    fixed: Limits,
) -> Candidate:
    """Predict the usual layout, its blocks split as the user said, or evenly unless another split is clearly better."""
    batch = model.job.replica_batch
    try:
        m = default_num_microbatches(batch, layout)
    except ConfigError:  # it needs larger batches than are assumed; the data loader decides
        m, batch = 1, layout.block_stages
    stages = dict(enumerate(layout.stages_per_cluster))
    choice = Choice(
        tp=layout.tp,
        dp=layout.dp,
        order=order,
        stages=tuple(stages[index] for index in order),
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batch_size=-(-batch // m),
        recompute=bool(fixed.recompute),
        embedding_on_last=layout.embedding_on_last,
        sharding=layout.sharding,
        run_ahead=layout.run_ahead,
        defer_weights=layout.defer_weights,
        taper=layout.taper,
    )
    found = _with_blocks(model, config, choice, probe)
    if found.prediction.fits or fixed.recompute is not None or config.schedule in ZERO_BUBBLE or config.defer_weights:
        return found
    return _with_blocks(model, config, replace(choice, recompute=True), probe)


def _with_blocks(model: CostModel, config: HolmesConfig, choice: Choice, probe: ProbeResult | None) -> Candidate:
    blocks = len(model.job.profile.blocks)
    if config.layers_per_stage is not None:
        return _predict(model, choice, config.layers_per_stage)
    even = _predict(model, choice, equal_partition(blocks, choice.num_stages))
    if config.partition == "equal" or (probe is None and even.prediction.fits and not config.cluster_speeds):
        return even
    layers = split_blocks(model, choice, config.partition)
    if layers is None:
        return even
    split = _predict(model, choice, layers)
    better = _speed(split) > _CLEARLY_BETTER * _speed(even)
    needed = split.prediction.fits and not even.prediction.fits
    return split if better or needed or config.partition == "paper" or config.cluster_speeds else even


def _predict(model: CostModel, choice: Choice, layers: Sequence[int]) -> Candidate:
    choice = replace(choice, layers_per_stage=tuple(layers))
    exact = choice.schedule in SIMULATED
    return Candidate(choice=choice, prediction=predict_by_simulation(model, choice) if exact else model.predict(choice))


def _best(model: CostModel, limits: Limits) -> Candidate | None:
    try:
        return search(model.job, limits, model=model).best
    except ConfigError:  # nothing fits
        return None


def _fits(model: CostModel, one: Candidate, step: Step) -> bool:
    """Whether a layout fits; with one sample per micro-batch where the batch is not known."""
    if one.prediction.fits or step.batch is not None:
        return one.prediction.fits
    return model.predict(replace(one.choice, micro_batch_size=1)).fits


def _speed(one: Candidate) -> float:
    return one.prediction.tokens_per_second


def _by_late_parameters(model: CostModel, one: Candidate) -> float:
    """Return what handing out parameters under the next forward would gain, as a part of the speed without it."""
    if model.job.overlap_param_gather or one.choice.schedule not in SIMULATED:
        return 0.0
    late = copy(model)
    late.job = replace(model.job, overlap_param_gather=True)
    return predict_by_simulation(late, one.choice).tokens_per_second / _speed(one) - 1


def _degrees(choice: Choice) -> str:
    return f"pp {choice.pp} x dp {choice.dp} x tp {choice.tp}"


def _means(rule: Choice, choice: Choice, config: HolmesConfig) -> list[str]:
    """What a choice does that the rules would not, in the words of the settings."""
    found = []
    if choice.run_ahead != rule.run_ahead and choice.pp > 1:
        found.append(f"run_ahead: {choice.run_ahead}")
    if choice.split != rule.split:
        found.append(f"defer_weights: {str(choice.split).lower()}")
    if choice.tapered != rule.tapered:
        found.append(f"taper: {str(choice.tapered).lower()}")
    if choice.sharding != rule.sharding:
        found.append(f"sharding: {choice.sharding}")
    if config.embedding == "auto" and choice.pp == rule.pp and choice.embedding_on_last != rule.embedding_on_last:
        found.append(f"embedding: {'last' if choice.embedding_on_last else 'first'}")
    if choice.pp == rule.pp and choice.dp == rule.dp and choice.micro_batch_size != rule.micro_batch_size:
        found.append(f"micro_batch_size: {choice.micro_batch_size}")
    return found


def _filled(config: HolmesConfig, chosen: Candidate, rule: Candidate, probe: ProbeResult | None) -> HolmesConfig:
    choice = chosen.choice
    changes: dict[str, object] = {"sharding": choice.sharding}
    if choice.pp > 1 and choice.schedule == "1f1b":
        changes.update(run_ahead=choice.run_ahead, defer_weights=choice.defer_weights, taper=choice.taper)
    if choice.pp > 1 and config.embedding == "auto" and choice.schedule in EMBEDDING_SCHEDULES:
        changes.update(embedding="last" if choice.embedding_on_last else "first")
    if _degrees(choice) != _degrees(rule.choice):
        changes.update(pp=choice.pp, dp=choice.dp, tp=choice.tp)
    elif choice.micro_batch_size != rule.choice.micro_batch_size:
        changes.update(micro_batch_size=choice.micro_batch_size)
    even = equal_partition(sum(choice.layers_per_stage), choice.num_stages)
    by_rule = config.partition == "paper" and not config.cluster_speeds and probe is not None
    if not _described(config) and (choice.layers_per_stage != even or by_rule):
        changes.update(layers_per_stage=choice.layers_per_stage)
    return replace(config, **changes)  # type: ignore[arg-type]
