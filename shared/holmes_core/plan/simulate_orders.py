# SPDX-License-Identifier: Apache-2.0
"""In which order each pipeline rank works: the action lists of the schedules, without torch.

``F`` forward, ``B`` whole backward, ``I`` backward for the input only, ``W`` the weights' part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from holmes_core.errors import ConfigError
from holmes_core.plan.cost_schedule import rank_of_stage
from holmes_core.plan.one_f_one_b import Action, one_per_rank

__all__ = ["SIMULATED", "Action", "make_orders", "read_orders"]

#: Schedules whose action lists are made here.
SIMULATED = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")


def make_orders(
    schedule: str,
    *,
    pp: int,
    virtual_stages: int,
    num_microbatches: int,
    ahead: Sequence[int] = (),
    split: bool = False,
    tapered: bool = False,
) -> list[list[Action]]:
    """Return each pp rank's actions.

    Args:
        schedule: Name in SIMULATED.
        pp: Ranks along the pipeline.
        virtual_stages: Stages per rank.
        num_microbatches: Micro-batches per step.
        ahead: Per pp rank, forwards that 1F1B runs further ahead.
        split: Whether 1F1B puts off weights' parts.
        tapered: Whether its first and last micro-batch are smaller.

    Returns:
        Action lists, by pp rank.

    Raises:
        ConfigError: The schedule has no lists here (``read_orders`` reads any that torch writes).
    """
    if schedule in ("gpipe", "looped_bfs"):
        return [_all_forward_first(rank, pp, virtual_stages, num_microbatches) for rank in range(pp)]
    if schedule == "1f1b":
        return one_per_rank(pp, num_microbatches, ahead, split=split, tapered=tapered)
    if schedule in ("interleaved_1f1b", "interleaved_zb"):
        make = _interleaved if schedule == "interleaved_1f1b" else _interleaved_zero_bubble
        return [make(rank, pp, virtual_stages, num_microbatches) for rank in range(pp)]
    if schedule in ("zbv", "dualpipev"):
        make_v = _zero_bubble_v if schedule == "zbv" else _dual_pipe_v
        return [make_v(rank, pp, num_microbatches) for rank in range(pp)]
    raise ConfigError(
        seen=f"schedule {schedule!r}",
        where="holmes simulate",
        do=f"simulate one of: {', '.join(SIMULATED)}; or give torch's list: --actions schedule.csv",
    )


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
    total, per_round = m * v, _per_round(pp, m)
    forward, back = (_in_rounds(kind, rank, pp, v, m) for kind in "FB")
    warmup = min(total, (v - 1) * per_round + 2 * (pp - 1 - rank))
    order = forward[:warmup]
    for index in range(total - warmup):
        order += [forward[warmup + index], back[index]]
    return order + back[total - warmup :]


def _interleaved_zero_bubble(rank: int, pp: int, v: int, m: int) -> list[Action]:
    """As interleaved 1F1B, with half the warm-up; the weights' part comes ``rank`` backward passes later.

    ZB-H1 (Qi et al. 2023, section 2.1) over several stages per rank, as torch orders it.
    """
    total, per_round = m * v, _per_round(pp, m)
    forward, inputs, weights = (_in_rounds(kind, rank, pp, v, m) for kind in "FIW")
    warmup = min(total, (v - 1) * per_round + pp - 1 - rank)
    order = forward[:warmup]
    for index in range(total):
        order += forward[warmup + index : warmup + index + 1]
        order.append(inputs[index])
        order += weights[index - rank : index - rank + 1] if index >= rank else []
    return order + weights[max(0, total - rank) :]


def _per_round(pp: int, m: int) -> int:
    return max(1, m // max(1, m // pp))


def _in_rounds(kind: str, rank: int, pp: int, v: int, m: int) -> list[Action]:
    """A rank's forward (or backward) passes, round by round through its stages (or back through them)."""
    per_round = _per_round(pp, m)
    found = []
    for index in range(m * v):
        turn = (index // per_round) % v
        local = turn if kind == "F" else v - 1 - turn
        micro_batch = index // (per_round * v) * per_round + index % per_round
        found.append(Action(local * pp + rank, kind, micro_batch))
    return found


def _zero_bubble_v(rank: int, pp: int, m: int) -> list[Action]:
    """ZB-V (Qi et al. 2023, section 6): two stages per rank, down the ranks and up again; backward passes in halves.

    With few micro-batches the rank works as if there were 2 pp - 1, and leaves out what is not there.
    """
    n, down, up = max(m, 2 * pp - 1), rank, 2 * pp - 1 - rank
    words = [(down, "F")] * (2 * (pp - rank) - 1)
    words += [(up, "F"), (down, "F")] * rank
    words += [(up, "F"), (up, "I"), (up, "W")] * (pp - rank)
    for index in range(n - pp):
        words += [(down, "F")] if index < n - 2 * pp + rank + 1 else []
        words += [(down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W")]
    words += [(down, "I"), (up, "I")] * rank
    words += [(down, "I"), (down, "W")] * (pp - rank)
    words += [(up, "W")] * rank + [(down, "W")] * rank
    return [action for action in _numbered(words) if action.micro_batch < m]


def _dual_pipe_v(rank: int, pp: int, m: int) -> list[Action]:
    """DualPipeV (the V form of DeepSeek-V3's DualPipe, section 3.2.1), as torch orders it; m >= 2 pp.

    Forward passes alternate with whole backward passes. At both ends these come in halves, whose weights' parts wait
    (``w``: the oldest that waits, if any).
    """
    down, up = rank, 2 * pp - 1 - rank
    below = pp - rank - 1
    words = [(down, "F")] * (2 * below) + [(down, "F"), (up, "F")] * (rank + 1)
    words += [(up, "I"), (-1, "w"), (up, "F")] * below
    words += [(down, "F"), (up, "B"), (up, "F"), (down, "B")] * (m - 2 * pp + rank + 1)
    words += [(up, "B"), (up, "F"), (down, "B")] * below
    ends = [stage for _ in range(rank + 1) for stage in (up, down)]
    whole = 2 * ((rank + 1) // 2) + (1 - rank % 2)  # of them; from there on in halves
    words += [(stage, "B" if index < whole else "I") for index, stage in enumerate(ends)]
    words += [(-1, "w"), (down, "I")] * below + [(-1, "w")] * (rank + 1)
    return _numbered(words)


def _numbered(words: Iterable[tuple[int, str]]) -> list[Action]:
    """Number the micro-batches of each stage's passes as they come."""
    counts: dict[tuple[int, str], int] = {}
    waiting: list[Action] = []
    order: list[Action] = []
    for stage, kind in words:
        if kind == "w":
            order += [waiting.pop(0)] if waiting else []
            continue
        counter = stage, "I" if kind == "B" else kind  # a whole backward pass counts as its first half
        number = counts[counter] = counts.get(counter, -1) + 1
        order.append(Action(stage, kind, number))
        if kind == "I":
            waiting.append(Action(stage, "W", number))
    return order


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
            backward = Action(stage, "B", i) in seen or all(Action(stage, half, i) in seen for half in "IW")
            if Action(stage, "F", i) not in seen or not backward:
                do = f"list forward and backward of {m} micro-batches for each of {num_stages} stages"
                raise ConfigError(seen=f"stage {stage}, micro-batch {i} is not complete", where=where, do=do)
    if len(seen) > 3 * num_stages * m:
        raise ConfigError(seen="more micro-batches than the step has", where=where, do=f"list {m} micro-batches")
