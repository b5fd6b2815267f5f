# SPDX-License-Identifier: Apache-2.0
"""In which order each pipeline rank works: the action lists of the schedules, without torch.

``F`` forward, ``B`` whole backward, ``I`` backward for the input only, ``W`` the weights' part of it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from holmes_core.errors import ConfigError
from holmes_core.plan.cost_schedule import rank_of_stage

__all__ = ["SIMULATED", "Action", "make_orders", "read_orders"]

#: Schedules whose action lists are made here.
SIMULATED = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs")


class Action(NamedTuple):
    """One thing a rank does: a stage's forward (F) or backward (B, or I and W) of one micro-batch."""

    stage: int
    kind: str
    micro_batch: int


def make_orders(schedule: str, *, pp: int, virtual_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return each pp rank's actions.

    Args:
        schedule: ``1f1b``, ``gpipe``, ``interleaved_1f1b`` or ``looped_bfs``.
        pp: Ranks along the pipeline.
        virtual_stages: Stages per rank.
        num_microbatches: Micro-batches per step.

    Returns:
        Action lists, by pp rank.

    Raises:
        ConfigError: Other schedules are simulated from lists that torch writes (``read_orders``).
    """
    if schedule in ("gpipe", "looped_bfs"):
        return [_all_forward_first(rank, pp, virtual_stages, num_microbatches) for rank in range(pp)]
    if schedule == "1f1b":
        return [_one_f_one_b(rank, pp, num_microbatches) for rank in range(pp)]
    if schedule == "interleaved_1f1b":
        return [_interleaved(rank, pp, virtual_stages, num_microbatches) for rank in range(pp)]
    raise ConfigError(
        seen=f"schedule {schedule!r}",
        where="holmes simulate",
        means="its action lists come from torch, and planning works without torch",
        do="simulate 1f1b, gpipe, interleaved_1f1b or looped_bfs, or give torch's list: --actions schedule.csv",
    )


def _one_f_one_b(rank: int, pp: int, m: int) -> list[Action]:
    warmup = min(m, pp - rank)
    order = [Action(rank, "F", i) for i in range(warmup)]
    for i in range(m):
        order.append(Action(rank, "B", i))
        if warmup + i < m:
            order.append(Action(rank, "F", warmup + i))
    return order


def _all_forward_first(rank: int, pp: int, v: int, m: int) -> list[Action]:
    stages = range(rank, pp * v, pp)
    forward = [Action(stage, "F", i) for stage in stages for i in range(m)]
    # LoopedBFS goes back through its micro-batches; GPipe forward again.
    back = [Action(s, "B", i) for s in reversed(stages) for i in (range(m) if v == 1 else reversed(range(m)))]
    return forward + back


def _interleaved(rank: int, pp: int, v: int, m: int) -> list[Action]:
    """Micro-batches go in rounds of about pp; a rank takes a round through each of its stages in turn.

    Narayanan et al. 2021, section 2.2; rounds as in torch, so that m need not be a multiple of pp.
    """
    per_round = max(1, m // max(1, m // pp))
    total = m * v

    def action(kind: str, index: int) -> Action:
        turn = (index // per_round) % v
        local = turn if kind == "F" else v - 1 - turn
        return Action(local * pp + rank, kind, index // (per_round * v) * per_round + index % per_round)

    warmup = min(total, (v - 1) * per_round + 2 * (pp - 1 - rank))
    order = [action("F", index) for index in range(warmup)]
    for index in range(total - warmup):
        order += [action("F", warmup + index), action("B", index)]
    return order + [action("B", index) for index in range(total - warmup, total)]


_TOKEN = re.compile(r"(\d+)(F|B|I|W)(\d+)$")
_OTHER = re.compile(r"\d*(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d*$")


def read_orders(text: str, *, where: str = "actions") -> list[list[Action]]:
    """Read action lists in the form that torch's schedules write: one row per rank, ``0F0,0F1,1B0``.

    Communication in the rows is left out: the simulation works out when it happens.

    Raises:
        ConfigError: A word is none of torch's actions.
    """
    orders: list[list[Action]] = []
    for row in text.splitlines():
        order: list[Action] = []
        for word in re.split(r"[,;()]", row.replace("OVERLAP_F_B", "")):
            token = word.strip().strip('"')
            if not token or token == "None" or _OTHER.match(token):
                continue
            found = _TOKEN.match(token)
            if found is None:
                do = "write one row per pipeline rank, with words like 0F3 (stage 0, forward, micro-batch 3)"
                raise ConfigError(seen=f"{token!r}", where=where, do=do)
            order.append(Action(int(found[1]), found[2], int(found[3])))
        orders.append(order)
    return orders


def check_orders(orders: Sequence[Sequence[Action]], *, schedule: str, pp: int, num_stages: int, m: int) -> None:
    """Check that every stage does every micro-batch's forward and backward pass once, on its rank.

    Raises:
        ConfigError: Something is missing, doubled or on another rank.
    """
    where = "action lists"
    if len(orders) != pp:
        raise ConfigError(seen=f"{len(orders)} rows for pp {pp}", where=where, do="give one row per pipeline rank")
    seen: dict[Action, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            if action in seen or rank_of_stage(schedule, action.stage, pp) != rank:
                raise ConfigError(seen=f"{action} on rank {rank}", where=where, do="do each action once, on its rank")
            seen[action] = rank
    for stage in range(num_stages):
        for i in range(m):
            backward = Action(stage, "B", i) in seen or {Action(stage, k, i) for k in "IW"} <= set(seen)
            if Action(stage, "F", i) not in seen or not backward:
                do = f"list forward and backward of {m} micro-batches for each of {num_stages} stages"
                raise ConfigError(seen=f"stage {stage}, micro-batch {i} is not complete", where=where, do=do)
    if len(seen) > 3 * num_stages * m:
        raise ConfigError(seen="more micro-batches than the step has", where=where, do=f"list {m} micro-batches")
