# SPDX-License-Identifier: Apache-2.0
"""Find the fastest layout: every legal one is predicted in closed form, the best of them are simulated.

Legal: tp divides heads, key/value heads and each host; a stage's ranks divide every cluster; dp divides the batch;
every stage has a block; every rank has the memory. Blocks are split so that the slowest stage is as fast as it can be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holmes_core.cluster.value import Value
from holmes_core.config import ZERO_BUBBLE
from holmes_core.errors import ConfigError
from holmes_core.plan.cost import Choice, CostModel, Job, Prediction
from holmes_core.plan.cost_network import Place
from holmes_core.plan.cost_schedule import in_flight
from holmes_core.plan.means import choose_means
from holmes_core.plan.partition import equal_partition, fill_stages, paper_partition, self_adapting_partition
from holmes_core.plan.search_space import Limits, choices_of, divisors, orders_of, reordered
from holmes_core.plan.simulate import predict_by_simulation
from holmes_core.plan.simulate_orders import SIMULATED

__all__ = ["Candidate", "Limits", "SearchResult", "candidates", "search", "split_blocks", "why_slower"]

_ORDERS_IN_FULL = 3000  # predictions up to which every order of the clusters is tried with every layout
_SHORTLIST = 24
_ACTIONS = 100_000  # most actions simulated in one search
_WITH_MEANS = 3  # kinds of layouts that get what hides their waiting (`means`)
_SAME = 1e-3  # relative difference below which fewer stages, and a plainer order of clusters, win


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Value):
    """A choice with its prediction."""

    choice: Choice
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Value):
    """What a search has found.

    Args:
        best: The fastest.
        runners_up: The next ones, fastest first, with other degrees or schedule each.
        examined: Layouts that were predicted.
        too_large: Of them, those that do not fit the memory.
        simulated: Of them, those that were simulated.
        closest: Of those that do not fit, the one that misses by least; None if all fit.
    """

    best: Candidate
    runners_up: tuple[Candidate, ...]
    examined: int
    too_large: int
    simulated: int
    closest: Candidate | None = None


def search(job: Job, limits: Limits | None = None, *, keep: int = 5, model: CostModel | None = None) -> SearchResult:
    """Find the fastest layout of a job.

    Args:
        job: What is to be trained, on what.
        limits: What the user has fixed.
        keep: Most runners-up.
        model: The job's costs, where they are known better than from the job alone.

    Returns:
        The fastest, and the runners-up.

    Raises:
        ConfigError: No layout is legal, or none fits the memory; says which comes closest.
    """
    limits = limits or Limits()
    model = model or CostModel(job)
    orders = orders_of(len(job.hardware.clusters), limits.last, limits.first)
    plain = list(candidates(model, limits, orders[:1]))
    rest = orders[1:]
    fitting = [one for one in plain if one.prediction.fits]
    tried = list(plain)
    if rest:
        if len(plain) * len(orders) <= _ORDERS_IN_FULL:
            more = list(candidates(model, limits, rest))
        else:
            fitting.sort(key=_seconds)
            more = [
                found
                for one in fitting[:_SHORTLIST]
                for order in rest
                if (found := _evaluate(model, limits, reordered(one.choice, order, limits))) is not None
            ]
        tried += more
        fitting += [one for one in more if one.prediction.fits]
    if not fitting:
        raise _nothing(model, limits, tried, orders[0])
    place = {order: index for index, order in enumerate(orders)}
    fitting.sort(key=_seconds)
    ranked = _with_means(model, _simulated(model, fitting, limits.partition), limits)
    near = [one for one in ranked if _seconds(one) <= (1 + _SAME) * _seconds(ranked[0])]
    best = min(near, key=lambda one: (one.choice.num_stages, place.get(one.choice.order, 0), _seconds(one)))
    runners: dict[tuple[object, ...], Candidate] = {}
    for one in ranked:
        if (key := _key(one.choice)) != _key(best.choice):
            runners.setdefault(key, one)
    too_large = [one for one in tried if not one.prediction.fits]
    return SearchResult(
        best=best,
        runners_up=tuple(runners.values())[:keep],
        examined=len(tried),
        too_large=len(too_large),
        simulated=len(ranked),
        closest=min(too_large, key=_excess, default=None),
    )


def candidates(model: CostModel, limits: Limits, orders: Sequence[tuple[int, ...]]) -> Iterator[Candidate]:
    """Predict every legal layout in closed form, whether it fits the memory or not.

    Recomputation is tried only where a layout does not fit without it: it is never faster. Schedules that split
    backward passes never recompute (``HolmesConfig.refuse_recomputing``).
    """
    for order in orders:
        for choice in choices_of(model.job, limits, order):
            plain = None
            split = choice.schedule in ZERO_BUBBLE or choice.split
            if limits.recompute is not True:
                plain = _evaluate(model, limits, choice)
                if plain is not None and (plain.prediction.fits or limits.recompute is False):
                    yield plain
                    continue
            found = None if split else _evaluate(model, limits, replace(choice, recompute=True))
            if found is not None or plain is not None:
                yield found or plain  # type: ignore[misc]


def split_blocks(model: CostModel, choice: Choice, partition: str = "auto") -> tuple[int, ...] | None:
    """Split the blocks over a choice's stages.

    Args:
        model: The job's costs.
        choice: The layout; its ``layers_per_stage`` are not looked at.
        partition: ``auto``, ``equal`` or ``paper``.

    Returns:
        Blocks per stage; None where there are fewer blocks than stages.
    """
    profile, stages = model.job.profile, choice.num_stages
    count = len(profile.blocks)
    if stages > count:
        return None
    if partition == "equal":
        return equal_partition(count, stages)
    seconds, extra = _stage_seconds(model, choice)
    if partition == "paper":
        return paper_partition(count, [1 / value for value in seconds])
    limits = _block_limits(model, choice)
    split = fill_stages(count, seconds, extra, limits)
    # Where memory leaves no split, the fastest one shows by how much it misses.
    return split or fill_stages(count, seconds, extra, [count] * stages)


def _stage_seconds(model: CostModel, choice: Choice) -> tuple[list[float], list[float]]:
    """Seconds per micro-batch that a mean block takes on each stage, and what the stage does besides."""
    places, x, tp = model.places(choice), choice.micro_batch_size, choice.tp
    flops = model.flops[-1] / len(model.job.profile.blocks)
    known: dict[Place, float] = {}
    for place in set(places):
        forward, backward = model.block_seconds(place, tp, x, flops)
        known[place] = forward + backward + (forward if choice.recompute else 0.0)
    owners = [places[rank] for rank in choice.ranks()]
    extra = [0.0] * choice.num_stages
    extra[-1] = sum(model.head_seconds(owners[-1], tp, x))
    return [known[place] for place in owners], extra


def _block_limits(model: CostModel, choice: Choice) -> list[int]:
    """Most blocks of each stage that fit its rank's memory."""
    job, profile, v = model.job, model.job.profile, choice.virtual_stages
    count, tp, x = len(profile.blocks), choice.tp, choice.micro_batch_size
    m = max(1, job.samples(choice.dp) // x)
    empty = model.empty_costs(choice)
    whole = model.whole[-1]
    kept = profile.boundary_bytes * count if choice.recompute else whole + (model.kept[-1] - whole) / tp
    parameters = model.parameters[-1] / count / tp
    sharded = choice.sharding != "none"
    weights = parameters * model.bytes.static(choice.dp, sharded=sharded)
    ended = weights + parameters * model.bytes.ending(choice.dp, sharded=sharded)
    found = [0] * choice.num_stages
    more = choice.kept()
    for rank in range(choice.pp):
        stages = choice.stages_of(rank)
        held = in_flight(
            choice.schedule, rank=rank, pp=choice.pp, virtual_stages=v, num_microbatches=m, further=more[rank]
        )
        room = empty.limit_bytes[rank] - empty.static_bytes[rank]
        # What stages have sent stays, however few blocks they have.
        handed_on = held * sum(empty.activation_bytes[stage] for stage in stages) / v
        each = weights + model.heap * held / v * x * kept / count
        computing = (room - empty.transient_bytes[rank] - handed_on) / v // each
        ending = (room - empty.ending_bytes[rank]) / v // ended
        for stage in stages:
            found[stage] = min(count, max(0, int(min(computing, ending))))
    return found


def why_slower(best: Candidate, other: Candidate) -> str:
    """Say in words what makes one candidate slower than another."""
    a, b = best.prediction, other.prediction
    gaps = {
        "gradients": b.gradient_seconds - a.gradient_seconds,
        "optimizer": b.optimizer_seconds - a.optimizer_seconds,
        "pipeline": b.pipeline_seconds - a.pipeline_seconds,
    }
    worst = max(gaps, key=lambda name: gaps[name])
    if gaps[worst] < 0.01 * a.step_seconds:
        return "about as fast"
    if worst == "gradients":
        return f"gradients take {b.gradient_seconds:.3g} s, not {a.gradient_seconds:.3g} s"
    if worst == "optimizer":
        return f"the optimizer takes {b.optimizer_seconds:.3g} s, not {a.optimizer_seconds:.3g} s"
    if other.choice.recompute and not best.choice.recompute:
        return "has to recompute blocks to fit the memory"
    if b.bubble > a.bubble + 0.01:
        return f"ranks wait {b.bubble:.0%} of the pipeline's time, not {a.bubble:.0%}"
    if other.choice.tp > best.choice.tp:
        return f"tp {other.choice.tp} adds all-reduces to every block"
    return f"its pipeline takes {b.pipeline_seconds:.3g} s, not {a.pipeline_seconds:.3g} s"


def _evaluate(model: CostModel, limits: Limits, choice: Choice) -> Candidate | None:
    layers = split_blocks(model, choice, limits.partition)
    if layers is None:
        return None
    choice = replace(choice, layers_per_stage=layers)
    return Candidate(choice=choice, prediction=model.predict(choice))


def _simulated(model: CostModel, fitting: Sequence[Candidate], partition: str) -> list[Candidate]:
    """Simulate the best and rank them again."""
    # The best of each kind of layout first: closed form and simulation differ more between kinds than within one.
    first: dict[tuple[object, ...], Candidate] = {}
    for one in fitting:
        first.setdefault(_key(one.choice), one)
    leaders = list(first.values())[: _SHORTLIST // 2]
    # And those that would be fast if their gradients took no time: what hides them is chosen later.
    unseen = [one for one in first.values() if one.choice.dp > 1 and one not in leaders]
    leaders += sorted(unseen, key=_computing)[:_WITH_MEANS]
    chosen = {id(one) for one in leaders}
    others = [one for one in fitting[:_SHORTLIST] if id(one) not in chosen]
    done: list[Candidate] = []
    actions = 0
    for one in [*leaders, *others][:_SHORTLIST]:
        m = model.job.samples(one.choice.dp) // one.choice.micro_batch_size
        actions += 2 * min(m, 8 * one.choice.pp) * one.choice.num_stages
        if done and actions > _ACTIONS:
            break
        choice = one.choice if model.job.profile.uniform or partition != "auto" else _resplit(model, one.choice)
        known = choice.schedule in SIMULATED
        done.append(Candidate(choice=choice, prediction=predict_by_simulation(model, choice)) if known else one)
    # Of several stages per rank the closed form knows the memory on average only.
    return sorted([one for one in done if one.prediction.fits] or done, key=_seconds)


def _with_means(model: CostModel, ranked: Sequence[Candidate], limits: Limits) -> list[Candidate]:
    """Give the fastest of each of the best kinds what hides its waiting, and rank them again."""
    first: dict[tuple[object, ...], Candidate] = {}
    for one in ranked:
        if one.choice.schedule in SIMULATED:
            first.setdefault(_key(one.choice), one)
    fastest = list(first.values())[:_WITH_MEANS]
    fastest += [one for one in sorted(first.values(), key=_computing)[:_WITH_MEANS] if one not in fastest]
    better = {id(one): choose_means(model, one.choice, limits) for one in fastest}
    done = [Candidate(choice=better[id(one)][0], prediction=better[id(one)][1]) if id(one) in better else one
            for one in ranked]  # fmt: skip
    return sorted(done, key=_seconds)


def _resplit(model: CostModel, choice: Choice) -> Choice:
    """Split blocks that are not alike exactly; the search itself takes each for the mean of all."""
    seconds, extra = _stage_seconds(model, choice)
    mean = model.flops[-1] / len(model.job.profile.blocks)
    try:
        layers = self_adapting_partition(
            [block.forward_flops / mean for block in model.job.profile.blocks],
            [1 / value for value in seconds],
            extra=extra,
            max_blocks=_block_limits(model, choice),
        )
    except ConfigError:  # the limits are those of a mean block
        return choice
    exact = replace(choice, layers_per_stage=layers)
    return exact if model.predict(exact).fits else choice


def _seconds(one: Candidate) -> float:
    """Seconds per token: the order of step times where all steps are equally large."""
    return 1 / one.prediction.tokens_per_second


def _computing(one: Candidate) -> float:
    """Seconds per token without gradients."""
    p = one.prediction
    return (1 - p.gradient_seconds / p.step_seconds) / p.tokens_per_second


def _excess(one: Candidate) -> float:
    p = one.prediction
    return max(need / have for need, have in zip(p.memory_bytes, p.limit_bytes, strict=True))


def _key(choice: Choice) -> tuple[object, ...]:
    return choice.pp, choice.dp, choice.tp, choice.schedule, choice.virtual_stages


def _fitting(model: CostModel, limits: Limits, order: tuple[int, ...]) -> str:
    """Say which layout fits the memory and keeps most of what was fixed; of those the fastest. Empty: none does."""
    names = ("pp", "dp", "tp", "schedule", "virtual_stages", "micro_batch_size", "recompute", "sharding", "run_ahead",
             "defer_weights", "taper")  # fmt: skip
    fixed = {name: value for name in names if (value := getattr(limits, name)) is not None}
    free = replace(limits, **dict.fromkeys(fixed))  # type: ignore[arg-type]
    found = [one for one in candidates(model, free, [order]) if one.prediction.fits]
    if not fixed or not found:
        return ""

    def changes(one: Candidate) -> int:
        return sum(getattr(one.choice, name) != value for name, value in fixed.items())

    best = min(found, key=lambda one: (changes(one), _seconds(one)))
    most = max(best.prediction.memory_bytes) / 2**30
    return f"let it be {best.choice.describe()}, the nearest that fits ({most:.1f} GiB on the fullest rank); or "


def _nothing(model: CostModel, limits: Limits, tried: Sequence[Candidate], order: tuple[int, ...]) -> ConfigError:
    job = model.job
    given = {key: value for key, value in limits.to_json().items() if value not in (None, "auto")}
    shown = ", ".join(f"{key} {value}" for key, value in given.items()) or "nothing fixed"
    if tried:
        near = min(tried, key=_excess)
        p = near.prediction
        rank = max(range(near.choice.pp), key=lambda r: p.memory_bytes[r] / p.limit_bytes[r])
        need, have = p.memory_bytes[rank] / 2**30, p.limit_bytes[rank] / 2**30
        return ConfigError(
            seen=f"{len(tried)} layouts ({shown}), none fits the memory",
            where="holmes plan",
            means=f"nearest: {near.choice.describe()}: stage {rank} needs {need:.1f} GiB, {have:.1f} GiB can be used",
            do=f"{_fitting(model, limits, order)}use more or larger GPUs, a shorter sequence, or bf16-true",
        )
    sizes = ", ".join(f"{c.name} {c.ranks}" for c in job.hardware.clusters)
    dps = [dp for dp in divisors(math.gcd(*(c.ranks for c in job.hardware.clusters))) if job.batch % dp == 0]
    return ConfigError(
        seen=f"no layout of {job.hardware.ranks} ranks ({sizes}) is legal ({shown}; batch {job.batch})",
        where="holmes plan",
        means=f"dp x tp must divide every cluster, each of up to {len(job.profile.blocks)} stages needs a block, and "
        f"dp must divide the batch (possible here: {', '.join(map(str, dps))})",
        do="fix less, change the batch, or leave hosts out so that the clusters' sizes share a larger divisor",
    )
