# SPDX-License-Identifier: Apache-2.0
"""How long a pipeline schedule takes and how much it keeps, in closed form. No units: seconds in, seconds out.

1F1B is a cyclic system of constraints (micro-batch i waits for i - k); such a system runs at the pace of its slowest
cycle. Between stages a and e micro-batches go down and come back, and e - a + 1 of them are under way, so the pace is

    max over a <= e of (sum of forward and backward of a..e + 2 x sum of sends between them) / (e - a + 1)

or the time that one link or one stage needs per micro-batch. (All elementary cycles of 1F1B have this form.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from holmes_core.config import V_SCHEDULES

__all__ = [
    "SPLIT_BACKWARD",
    "in_flight",
    "pipeline_seconds",
    "rank_of_stage",
    "stages_by_rank",
]

_ALL_FORWARD_FIRST = ("gpipe", "looped_bfs")
#: What the input's part and the weights' part of a backward pass take, of the whole one: autograd goes through the
#: graph twice. Measured with torch 2.13 on a CPU, blocks of GPT-2 and LLaMA: 0.54 to 0.62 and 0.49 to 0.57.
SPLIT_BACKWARD = (0.57, 0.53)


def rank_of_stage(schedule: str, stage: int, pp: int) -> int:
    """Return the pp rank that runs a stage: in loops, or down and up again for V schedules."""
    return stage if stage < pp else 2 * pp - 1 - stage if schedule in V_SCHEDULES else stage % pp


@lru_cache(maxsize=512)
def stages_by_rank(schedule: str, pp: int, virtual_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pp rank, ascending."""
    found: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(pp * virtual_stages):
        found[rank_of_stage(schedule, stage, pp)].append(stage)
    return tuple(tuple(stages) for stages in found)


def in_flight(
    schedule: str, *, rank: int, pp: int, virtual_stages: int, num_microbatches: int, further: int = 0
) -> int:
    """Return how many (micro-batch, stage) activations a pp rank keeps at most.

    1F1B: min(m, pp - rank). GPipe: all m. Interleaved 1F1B: its warm-up and one (Narayanan et al. 2021, section 2.2).
    With split backward passes activations stay until the weights' part is done.

    Args:
        schedule: Name in ``config.SCHEDULES``.
        rank: Position along the pipeline.
        pp: Ranks along the pipeline.
        virtual_stages: Stages per rank.
        num_microbatches: Micro-batches per step.
        further: Micro-batches whose activations 1F1B is made to keep besides.
    """
    total = num_microbatches * virtual_stages
    if schedule in _ALL_FORWARD_FIRST:
        return total
    if schedule == "1f1b":
        return min(total, pp - rank + further)
    if schedule == "zbv":  # as many as 1F1B's first rank, on every rank, in half-size stages
        return min(total, 2 * pp, num_microbatches + 1 + rank)
    if schedule == "dualpipev":
        return min(total, 2 * pp + 1)
    per_round = max(1, num_microbatches // max(1, num_microbatches // pp))
    warmup = (virtual_stages - 1) * per_round
    if schedule == "interleaved_zb":
        return min(total, warmup + pp)
    return min(total, warmup + 2 * (pp - 1 - rank) + 1)


def pipeline_seconds(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    send: Sequence[float],
    latency: Sequence[float],
    *,
    num_microbatches: int,
    pp: int,
    port: float = 0.0,
    weights: Sequence[float] = (),
    further: Sequence[int] = (),
) -> float:
    """Return the time from the first forward to the last backward pass.

    Args:
        schedule: Name in ``config.SCHEDULES``.
        forward: Seconds per micro-batch of each stage.
        backward: The same.
        send: Seconds an activation (or gradient) occupies the edge from each stage to the next.
        latency: Seconds more until it has arrived.
        num_microbatches: Micro-batches per step.
        pp: Ranks along the pipeline; `rank_of_stage` says which runs a stage.
        port: Seconds per micro-batch that the busiest port sends, where edges share one.
        weights: Seconds of the weights' part of each stage's backward pass, where the schedule splits them.
        further: Micro-batches by which each rank of 1F1B is made to run ahead.
    """
    m = num_microbatches
    hops = [s + t for s, t in zip(send, latency, strict=True)]
    work = [f + b for f, b in zip(forward, backward, strict=True)]
    if pp == 1:
        return m * sum(work)
    if schedule == "1f1b":
        pace = max(_slowest_cycle(work, hops, m, further), max(send), port)
        return sum(work) + 2 * sum(hops) + (m - 1) * pace
    virtual = len(forward) // pp
    if schedule in _ALL_FORWARD_FIRST:
        there = max(*(sum(forward[rank::pp]) for rank in range(pp)), virtual * max(send))
        back = max(*(sum(backward[rank::pp]) for rank in range(pp)), virtual * max(send))
        first = sum(forward[:pp]) + sum(backward[:pp]) if virtual > 1 else sum(work)
        own = (sum(forward[:pp]) + sum(backward[:pp])) / pp if virtual > 1 else 0.0
        return first + 2 * sum(hops[: pp - 1]) + (m - 1) * (there + back) + (virtual - 1) * pp * own
    # Interleaved: each rank works through its stages round by round; filling takes one stage per rank, not `virtual`.
    busiest = max(sum(work[stage] for stage in stages) for stages in stages_by_rank(schedule, pp, virtual))
    # Where backward passes are split, the weights' part fills the time in which the input's would be waited for.
    filled = 2 * sum(weights[:pp])
    fill = (sum(work[:pp]) - filled) * (pp - 1) / pp + 2 * sum(hops[: pp - 1])
    held = in_flight(schedule, rank=0, pp=pp, virtual_stages=virtual, num_microbatches=m) / virtual
    round_trip = sum(work) + 2 * sum(hops)
    return fill + m * max(busiest, port, round_trip / held if m > held else 0.0)


def _slowest_cycle(work: Sequence[float], hops: Sequence[float], longest: int, further: Sequence[int] = ()) -> float:
    """Return the largest mean over runs of stages of their work and twice the hops between them.

    A stage that is made to run further ahead than the next has as many micro-batches more under way between them.
    """
    pace = max(work)
    more = [a - b for a, b in pairwise(further)] if further else [0] * len(hops)
    if not any(hops):
        return pace
    for _ in range(64):  # each round finds the run that exceeds the pace by most, and takes its mean as the pace
        best, total, start, run = 0.0, 0.0, 0, (0, 0)
        for stage, seconds in enumerate(work):
            with_before = total + 2 * hops[stage - 1] - more[stage - 1] * pace if stage else 0.0
            if stage and with_before > 0 and stage - start < longest:
                total = with_before + seconds - pace
            else:
                total, start = seconds - pace, stage
            if total > best + 1e-12 * pace:
                best, run = total, (start, stage)
        if not best:
            return pace
        a, e = run
        pace = (sum(work[a : e + 1]) + 2 * sum(hops[a:e])) / (e - a + 1 + sum(more[a:e]))
    return pace
