# SPDX-License-Identifier: Apache-2.0
"""Choose, by prediction, among the means that hide what a layout still waits for; none of them changes a number.

Where the embedding runs, how far 1F1B runs ahead of slow edges, whether weights' gradients are put off, whether
replicas share the optimizer, how many micro-batches there are and whether those at the ends are smaller. Each is looked
at with the others as they are, until none gains: they depend on each other little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from holmes_core.config import EMBEDDING_SCHEDULES
from holmes_core.plan.cost import Choice, CostModel, Prediction
from holmes_core.plan.search_space import Limits
from holmes_core.plan.simulate import predict_by_simulation

__all__ = ["choose_means"]

_AHEAD = (0, 1, 2)
_GAIN = 1.01  # what each of them must gain: a mean that gains nothing is one more thing to explain
_SAME = 1.003  # difference below which the plainer one is taken
_FEWEST_ROUNDS, _MOST_ROUNDS = 1, 8  # micro-batches per pipeline rank that are tried
_ROUNDS = 3
_ACTIONS = 100_000  # most actions simulated for one layout


def choose_means(model: CostModel, choice: Choice, limits: Limits) -> tuple[Choice, Prediction]:
    """Return the choice with the means that make it fastest, and its prediction; it fits the memory if `choice` does.

    Args:
        model: The job's costs.
        choice: The layout, with its blocks; in a schedule that can be simulated.
        limits: What the user has fixed.
    """
    best, prediction = choice, predict_by_simulation(model, choice)
    actions = 0
    for _ in range(_ROUNDS):
        before = best
        for group in _groups(model, best, limits):
            tried: list[tuple[Choice, Prediction]] = []
            for changes in group:
                one = replace(best, **changes)  # type: ignore[arg-type]
                m = model.job.samples(one.dp) // one.micro_batch_size
                actions += 2 * min(m, 8 * one.pp) * one.num_stages
                if actions > _ACTIONS:
                    return best, prediction
                found = predict_by_simulation(model, one)
                if found.fits or not prediction.fits:
                    tried.append((one, found))
            fastest = max((found.tokens_per_second for _, found in tried), default=0.0)
            if fastest > _GAIN * prediction.tokens_per_second:
                best, prediction = next(pair for pair in tried if pair[1].tokens_per_second > fastest / _SAME)
        if best == before:
            break
    return best, prediction


def _groups(model: CostModel, choice: Choice, limits: Limits) -> Iterator[list[dict[str, object]]]:
    """Changes of a choice, those of one means together (those of the schedule share memory); the plainest first."""
    pipeline, tied = choice.pp > 1, model.job.profile.tied_parameters > 0
    if pipeline and tied and limits.embedding == "auto" and choice.schedule in EMBEDDING_SCHEDULES:
        yield [{"embedding_on_last": not choice.embedding_on_last}]
    if pipeline and choice.schedule == "1f1b":
        slow = len(choice.order) > 1
        aheads = (limits.run_ahead,) if limits.run_ahead is not None else _AHEAD if slow else (choice.run_ahead,)
        put_off = (limits.defer_weights,) if limits.defer_weights is not None else (False, True)
        # Of a block that is recomputed, each weight would compute it once more.
        pairs = [(ahead, defer) for ahead in aheads for defer in put_off if not (defer and choice.recompute)]
        yield [{"run_ahead": ahead, "defer_weights": defer} for ahead, defer in pairs]
    if pipeline and choice.schedule == "1f1b" and limits.taper is None and limits.recut is not False:
        yield [{"taper": not choice.taper}]
    if choice.dp > 1 and limits.sharding is None:
        yield [{"sharding": "none" if choice.sharding == "optimizer" else "optimizer"}]
    # Where the data loader does not decide the batch, the search itself tries all sizes.
    open_cut = model.job.replica_batch and limits.micro_batch_size is None and limits.num_microbatches is None
    if pipeline and open_cut and limits.recut is not False and choice.schedule == "1f1b":
        batch = model.job.samples(choice.dp)
        sizes = [size for size in range(batch, 0, -1) if batch % size == 0]
        sizes = [size for size in sizes if _FEWEST_ROUNDS <= batch / size / choice.pp <= _MOST_ROUNDS]
        yield [{"micro_batch_size": size} for size in sizes]
