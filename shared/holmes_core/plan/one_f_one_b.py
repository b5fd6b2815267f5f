# SPDX-License-Identifier: Apache-2.0
"""The order in which pipeline ranks work under 1F1B and what this project does to it, without torch.

The runtime runs these lists, and the simulation predicts them: they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Action", "defer_weights", "embedding_lead", "embedding_on_last", "one_f_one_b", "one_per_rank"]


class Action(NamedTuple):
    """One thing a rank does for one micro-batch: a stage's forward (F) or backward (B; or in halves, I and W)."""

    stage: int
    kind: str
    micro_batch: int


def one_f_one_b(num_stages: int, num_microbatches: int, ahead: Sequence[int] = ()) -> list[list[Action]]:
    """The order that torch's `Schedule1F1B` executes: warm-up, then one backward per forward, then the rest.

    Args:
        num_stages: Stages, one per rank.
        num_microbatches: Micro-batches of the batch.
        ahead: Per stage, how many more forwards come before its first backward. A gradient returns over a slow edge
            only after a round trip; a stage that has run ahead by as many micro-batches as fit into it does not wait.
            Falls along the pipeline (no stage runs further ahead than the one before). Costs their activations.

    Returns:
        Action lists, by stage.
    """
    orders = []
    for stage in range(num_stages):
        warmup = min(num_microbatches, num_stages - stage + (ahead[stage] if ahead else 0))
        order = [Action(stage, "F", i) for i in range(warmup)]
        for i in range(num_microbatches):
            order.append(Action(stage, "B", i))
            if warmup + i < num_microbatches:
                order.append(Action(stage, "F", warmup + i))
        orders.append(order)
    return orders


def one_per_rank(
    pp: int, num_microbatches: int, ahead: Sequence[int] = (), *, split: bool = False, tapered: bool = False
) -> list[list[Action]]:
    """1F1B with one stage per rank; with `split` its weights' parts are deferred (`defer_weights`)."""
    if not split:
        return one_f_one_b(pp, num_microbatches, ahead)
    further = [pp - 1 - rank + (ahead[rank] if ahead else 0) for rank in range(pp)]
    return defer_weights(one_f_one_b(pp, num_microbatches, further), num_microbatches, tapered=tapered)


def defer_weights(
    orders: Sequence[Sequence[Action]], num_microbatches: int, *, tapered: bool = False
) -> list[list[Action]]:
    """Do the weights' part of some backward passes of 1F1B later, so that other ranks start and end earlier.

    The idea of ZB-H1 (Qi et al. 2023, section 2.1), which splits every backward into the gradient of the input, for
    which the stage before waits, and that of the weights, for which nobody does. Only the splits that move something
    are made: of each stage but the first, as many of the first micro-batches as stages lie before it, and as many of
    the last as lie behind it, and one. It then sends its first and its last gradients earlier, and fills the time in
    which it would wait at the end with the weights' part. Each stage runs one forward further ahead per stage behind.

    Args:
        orders: 1F1B, one stage per rank.
        num_microbatches: Micro-batches of the batch.
        tapered: Whether the first and the last are half as large: one more of the last is then split.

    Returns:
        The new order. With all times equal and enough micro-batches, (pp - 1) x (F + B - W) of each step is idle.
    """
    found = []
    for rank, actions in enumerate(orders):
        last_forward = max(place for place, action in enumerate(actions) if action.kind == "F")
        later: list[Action] = []
        done: list[Action] = []
        for place, action in enumerate(actions):
            stage, kind, i = action
            if kind == "B" and rank and (i < rank or i >= num_microbatches - (len(orders) - rank) - tapered):
                done.append(Action(stage, "I", i))
                later.append(Action(stage, "W", i))
            else:
                done.append(action)
            if place > last_forward and later and place < len(actions) - 1 and rank < len(orders) - 1:
                done.append(later.pop(0))
        found.append(done + later)
    return found


def embedding_lead(pp: int, ahead: Sequence[int] = (), *, split: bool = False) -> int:
    """Micro-batches by which an embedding on the last rank works ahead: as many as the first blocks have in flight."""
    return pp + (ahead[0] if ahead else 0) + (pp - 1 if split else 0) + 1


def embedding_on_last(
    pp: int, num_microbatches: int, ahead: Sequence[int] = (), *, split: bool = False, tapered: bool = False
) -> list[list[Action]]:
    """1F1B whose stage 0 is the embedding alone, on the last rank; blocks are stages 1 to `pp`, one per rank.

    The embedding works ahead by as many micro-batches as the first blocks may have in flight, so that they never wait
    for it, and takes its gradients when they have had as long to return; it is little work at any time. With two ranks
    and a smaller last micro-batch, its gradient has returned before all deferred weights' parts are done: the last of
    them comes after it, and the embedding's gradients can travel to other replicas meanwhile.

    Args:
        pp: Pipeline ranks.
        num_microbatches: Micro-batches of the batch.
        ahead: As for `one_f_one_b`, by pipeline rank.
        split: Whether to `defer_weights` of the blocks.
        tapered: See there.

    Returns:
        Action lists, by pipeline rank.
    """
    blocks = one_per_rank(pp, num_microbatches, ahead, split=split, tapered=tapered)
    orders = [[Action(rank + 1, kind, i) for _, kind, i in actions] for rank, actions in enumerate(blocks)]
    lead = embedding_lead(pp, ahead, split=split)
    merged = [Action(0, "F", i) for i in range(min(lead, num_microbatches))]
    for action in orders[-1]:
        merged.append(action)
        _, kind, i = action
        if kind == "F" and i + lead < num_microbatches:
            merged.append(Action(0, "F", i + lead))
        elif kind in "BI" and i >= lead:
            merged.append(Action(0, "B", i - lead))
    ending = [Action(0, "B", i) for i in range(max(0, num_microbatches - lead), num_microbatches)]
    place = len(merged) - (split and tapered and pp == 2)  # over more ranks it returns later than that
    return [*orders[:-1], [*merged[:place], *ending, *merged[place:]]]
