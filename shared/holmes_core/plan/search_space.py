# SPDX-License-Identifier: Apache-2.0
"""What the search looks at: every legal way to run a job, within what the user has fixed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from holmes_core.cluster.value import Value
from holmes_core.config import EMBEDDING_SCHEDULES, V_SCHEDULES
from holmes_core.errors import ConfigError
from holmes_core.plan.batch_split import default_num_microbatches
from holmes_core.plan.cost import Choice, Job
from holmes_core.plan.layout import Layout

__all__ = ["Limits", "choices_of", "divisors", "orders_of", "reordered"]

_VIRTUAL = (2, 3, 4)
_LARGEST_MICRO_BATCH = 64
_PERMUTED = 6  # clusters up to which all their orders are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Value):
    """What the user has fixed; None leaves it to the search.

    Args:
        pp: Pipeline ranks.
        dp: Data-parallel degree.
        tp: Tensor-parallel degree.
        schedule: Name of the schedule.
        virtual_stages: Stages per rank.
        micro_batch_size: Samples per micro-batch.
        num_microbatches: Micro-batches per replica's batch; looked at where the data loader decides the batch.
        recompute: Whether blocks are recomputed.
        last: Cluster that holds the last stage, as a position in ``Hardware.clusters``: it comes last in the pipeline,
            and first in V schedules.
        first: Cluster that comes first.
        sharding: ``optimizer`` or ``none``.
        run_ahead: Micro-batches that 1F1B runs ahead at each edge between clusters.
        defer_weights: Whether 1F1B puts off weights' gradients at both ends of a step.
        taper: Whether 1F1B has half a micro-batch at each end of a step.
        recut: False keeps the rule's number of micro-batches where the data loader decides the batch (which may be a
            guess); otherwise others are tried.
        partition: ``auto`` (the slowest stage as fast as possible), ``equal`` or ``paper`` (proportional to speed).
        embedding: Which rank runs the input embedding: ``first``, ``last`` or, as jobs do it, ``auto``.
    """

    pp: int | None = None
    dp: int | None = None
    tp: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    micro_batch_size: int | None = None
    num_microbatches: int | None = None
    recompute: bool | None = None
    last: int | None = None
    first: int | None = None
    sharding: str | None = None
    run_ahead: int | None = None
    defer_weights: bool | None = None
    taper: bool | None = None
    recut: bool | None = None
    partition: str = "auto"
    embedding: str = "auto"


def choices_of(job: Job, limits: Limits, order: tuple[int, ...]) -> Iterator[Choice]:
    """Return every legal choice with the clusters in an order, without blocks."""
    clusters, profile = job.hardware.clusters, job.profile
    widest = math.gcd(*(cluster.ranks for cluster in clusters))
    sizes = math.gcd(*(size for cluster in clusters for size in cluster.hosts))
    heads = math.gcd(sizes, profile.num_heads, profile.num_kv_heads)
    for width in divisors(widest):
        stages = tuple(clusters[c].ranks // width for c in order)
        pp = sum(stages)
        if pp > len(profile.blocks) or limits.pp not in (None, pp):
            continue
        for tp in divisors(math.gcd(heads, width)):
            dp = width // tp
            if limits.tp not in (None, tp) or limits.dp not in (None, dp):
                continue
            plain = Choice(
                tp=tp,
                dp=dp,
                order=order,
                stages=stages,
                embedding_on_last=_embedding_on_last(job, limits, pp),
                sharding=limits.sharding or "optimizer",
                run_ahead=limits.run_ahead or 0,
                defer_weights=bool(limits.defer_weights),
                taper=bool(limits.taper),
            )
            if job.replica_batch:
                yield from _as_a_job_runs_it(job, limits, plain)
                continue
            if job.batch % dp:
                continue
            for x in divisors(job.batch // dp):
                if x > _LARGEST_MICRO_BATCH or limits.micro_batch_size not in (None, x):
                    continue
                m = job.batch // dp // x
                for schedule, v in _schedules(limits, pp, m, len(profile.blocks)):
                    last = plain.embedding_on_last and schedule in EMBEDDING_SCHEDULES
                    found = replace(
                        plain, schedule=schedule, virtual_stages=v, micro_batch_size=x, embedding_on_last=last
                    )
                    yield reordered(found, order, limits)


def _embedding_on_last(job: Job, limits: Limits, pp: int) -> bool:
    """Where a job runs the embedding, if nobody says: see ``HolmesConfig.embedding``."""
    if limits.embedding != "auto" or pp == 1:
        return limits.embedding == "last" and pp > 1
    return job.profile.tied_parameters > 0 and len(job.hardware.clusters) > 1


def _as_a_job_runs_it(job: Job, limits: Limits, plain: Choice) -> Iterator[Choice]:
    """A job takes its schedule from the config and cuts each batch by the rule of ``default_num_microbatches``."""
    layout = Layout(
        tp=plain.tp,
        dp=plain.dp,
        stages_per_cluster=plain.stages,
        virtual_stages=limits.virtual_stages or 1,
        num_microbatches=limits.num_microbatches,
        micro_batch_size=limits.micro_batch_size,
        schedule=limits.schedule or "1f1b",
    )
    if layout.num_stages > len(job.profile.blocks):
        return
    try:
        m = default_num_microbatches(job.replica_batch, layout)
    except ConfigError:  # too few samples for the schedule
        return
    yield replace(
        plain,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batch_size=-(-job.replica_batch // m),
        embedding_on_last=plain.embedding_on_last and layout.schedule in EMBEDDING_SCHEDULES,
    )


def _schedules(limits: Limits, pp: int, m: int, blocks: int) -> Iterator[tuple[str, int]]:
    """The schedules that can run: 1F1B needs as many micro-batches as ranks, interleaving whole rounds of them."""
    if pp == 1:
        found = [("1f1b", 1)]
    else:
        found = [("1f1b", 1)] if m >= pp else []
        found.append(("gpipe", 1))
        if m >= pp and m % (m // pp) == 0:
            found += [("interleaved_1f1b", v) for v in _VIRTUAL if pp * v <= blocks]
            found += [("interleaved_zb", v) for v in (1, *_VIRTUAL) if pp * v <= blocks]
        if 2 * pp <= blocks:
            found += [("zbv", 2)] if m >= pp else []
            found += [("dualpipev", 2)] if m >= 2 * pp else []
    for schedule, v in found:
        if limits.schedule in (None, schedule) and limits.virtual_stages in (None, v):
            yield schedule, v


def orders_of(count: int, last: int | None = None, first: int | None = None) -> list[tuple[int, ...]]:
    """Orders of the clusters along the pipeline; first the one a job takes whose rank 0 is in the first cluster."""
    plain = [(*(c for c in range(count) if c != end), end) for end in range(count)]
    # With many clusters: each of them last (or first) once, the others as they are written.
    plain += [(end, *(c for c in range(count) if c != end)) for end in range(count)]
    known = dict.fromkeys(plain)
    orders = list(known) if count > _PERMUTED else list({**known, **dict.fromkeys(permutations(range(count)))})
    return [order for order in orders if last in (None, order[-1]) and first in (None, order[0])]


def reordered(choice: Choice, order: tuple[int, ...], limits: Limits) -> Choice:
    """Put a choice's clusters into another order; where one must hold the last stage, it begins V schedules."""
    if limits.last is not None and choice.schedule in V_SCHEDULES:
        order = order[::-1]
    if order == choice.order:
        return choice
    stages = dict(zip(choice.order, choice.stages, strict=True))
    return replace(choice, order=order, stages=tuple(stages[c] for c in order))


def divisors(number: int) -> list[int]:
    """Return what divides a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
