# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: torch's own action lists, run by torch's own runtime on our stages.

1F1B and GPipe are run through the same runtime as the others, from lists that equal what `Schedule1F1B` and
`ScheduleGPipe` execute. A batch that has too few micro-batches for a schedule is run by the GPipe order, which has
no such limit and gives the same numbers.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

from holmes_core.plan.one_f_one_b import Action as PlainAction
from holmes_core.plan.one_f_one_b import embedding_on_last, one_per_rank
from holmes_core.runtime.stage import HolmesStage
from holmes_core.runtime.torch_compat import (
    SCHEDULE_LOGGER,
    Action,
    ComputationType,
    PipelineScheduleRuntime,
    get_schedule_class,
)
from holmes_core.runtime.weights import WeightsTogether

__all__ = [
    "SINGLE_STAGE",
    "before_embedding",
    "build_schedule",
    "gpipe_order",
    "receive_early",
    "run_forward",
    "run_schedule",
    "torch_actions",
    "trailing_weights",
]

_TORCH_NAME = {
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
#: Schedules with exactly one stage per rank.
SINGLE_STAGE = frozenset({"1f1b", "gpipe"})

_F, _B = ComputationType.FORWARD, ComputationType.FULL_BACKWARD
_KINDS = {"F": _F, "B": _B, "I": ComputationType.BACKWARD_INPUT, "W": ComputationType.BACKWARD_WEIGHT}
_WORK = frozenset(_KINDS.values())
_SENDS = (ComputationType.SEND_F, ComputationType.SEND_B)
_RECEIVES = (ComputationType.RECV_F, ComputationType.RECV_B)
#: Part of the weights that a stage does before the last backward of an embedding beside it. By then this has got its
#: last gradient; under the rest, an eighth as a bucket is, the embedding's gradients travel.
_BEFORE_EMBEDDING = 7 / 8
_POSTED = 4  # activations that a rank makes room for before it needs them, per edge


def torch_actions(orders: Sequence[Sequence[PlainAction]]) -> dict[int, list[Action]]:
    """Write action lists, by pipeline rank, in torch's words."""
    return {rank: [Action(s, _KINDS[kind], i) for s, kind, i in order] for rank, order in enumerate(orders)}


def gpipe_order(stages_of_rank: Mapping[int, list[int]], num_microbatches: int) -> dict[int, list[Action]]:
    """All forwards, then all backwards, for any assignment of stages to ranks."""
    order: dict[int, list[Action]] = {}
    for rank, stages in stages_of_rank.items():
        forward = [Action(s, _F, i) for s in sorted(stages) for i in range(num_microbatches)]
        backward = [Action(s, _B, i) for s in sorted(stages, reverse=True) for i in range(num_microbatches)]
        order[rank] = forward + backward
    return order


class _OurStages:
    """Mixed into torch's schedule classes: our stages agree on shapes themselves."""

    def _initialize_stages(self, *args: Any, **kwargs: Any) -> None:
        return


class _FromOrder(_OurStages, PipelineScheduleRuntime):
    def __init__(self, stages: list[HolmesStage], n_microbatches: int, order: dict[int, list[Action]]) -> None:
        # The constructor wants a multiple of the ranks, for a mapping that the order given below replaces.
        num_stages, pp = stages[0].num_stages, len(order)
        stages[0].num_stages = -(-num_stages // pp) * pp
        super().__init__(stages, n_microbatches)  # type: ignore[no-untyped-call]
        stages[0].num_stages = self._num_stages = num_stages
        compute: dict[int, list[Action | None]] = {rank: list(actions) for rank, actions in order.items()}
        self.pipeline_order = compute
        self._prepare_schedule_with_comms(compute)


def _fits(name: str, num_stages: int, pp: int, num_microbatches: int) -> bool:
    """Whether torch's schedule takes this number of micro-batches."""
    if name in SINGLE_STAGE:
        return name == "gpipe" or num_microbatches >= pp
    if name == "looped_bfs":
        return True
    if name == "zbv":
        return num_microbatches >= pp
    if name == "dualpipev":
        return num_microbatches >= num_stages
    return num_microbatches % max(1, num_microbatches // pp) == 0


def build_schedule(
    name: str,
    stages: list[HolmesStage],
    num_microbatches: int,
    stages_of_rank: Mapping[int, list[int]],
    ahead: Sequence[int] = (),
    *,
    split: bool = False,
    tapered: bool = False,
) -> Any:
    """Build the schedule object for a number of micro-batches.

    Args:
        name: One of `HolmesConfig.schedule`.
        stages: This rank's stages.
        num_microbatches: Micro-batches of the batch at hand.
        stages_of_rank: Pipeline rank to its stages.
        ahead: See `one_f_one_b`; other schedules have an order of their own.
        split: Whether 1F1B is to `defer_weights`.
        tapered: Whether its first and last micro-batch are smaller.

    Returns:
        An object of torch's schedule runtime; `run_schedule` runs it.
    """
    num_stages, pp = stages[0].num_stages, len(stages_of_rank)
    if name == "gpipe" or not _fits(name, num_stages, pp, num_microbatches):
        return _FromOrder(stages, num_microbatches, gpipe_order(stages_of_rank, num_microbatches))
    if name == "1f1b" and num_stages == pp + 1:
        orders = embedding_on_last(pp, num_microbatches, ahead, split=split, tapered=tapered)
        return _FromOrder(stages, num_microbatches, torch_actions(orders))
    if name == "1f1b":
        orders = one_per_rank(pp, num_microbatches, ahead, split=split, tapered=tapered)
        return _FromOrder(stages, num_microbatches, torch_actions(orders))
    base = get_schedule_class(_TORCH_NAME[name])
    cls = type(base.__name__, (_OurStages, base), {})
    # The loss function only tells torch that there is a backward; the user's step computes the loss.
    return cls(stages, n_microbatches=num_microbatches, loss_fn=None, scale_grads=False)


def receive_early(actions: Sequence[Action], rank_of: Mapping[int, int]) -> list[Action]:
    """Post receives as soon as the receiver knows what will come, not where torch's lowering puts them.

    A transfer begins when both of its ends are there. Torch posts many receives right before their use, when all of a
    slow link's time is still to pass and nothing is left to compute meanwhile.

    Args:
        actions: One rank's computations, sends and receives, as torch lowered them.
        rank_of: Stage to its pipeline rank.

    Returns:
        The same actions. Those that come over one edge keep their order, which is the order in which they are sent.
        None is later than before. The gradient of an output is received from when that output exists; of activations
        at most 4 per edge are waited for at once.
    """
    waiting: dict[tuple[int, ComputationType], deque[tuple[int, Action]]] = defaultdict(deque)
    rest: list[Action] = []
    for action in actions:
        kind = action.computation_type
        if kind in _RECEIVES:
            source = rank_of[action.stage_index + (-1 if kind == ComputationType.RECV_F else 1)]
            waiting[source, kind].append((len(rest), action))
        else:
            rest.append(action)
    order: list[Action] = []
    forwards: set[tuple[int, int | None]] = set()
    posted: Counter[tuple[int, ComputationType]] = Counter()

    def post(now: int) -> None:
        sends = now < len(rest) and rest[now].computation_type in _SENDS  # the others wait for it
        for edge, queue in waiting.items():
            while queue:
                latest, action = queue[0]
                forward = edge[1] == ComputationType.RECV_F
                known = posted[edge] < _POSTED if forward else (action.stage_index, action.microbatch_index) in forwards
                if latest > now and (sends or not known):
                    break
                order.append(action)
                posted[edge] += 1
                queue.popleft()

    for now, action in enumerate(rest):
        post(now)
        order.append(action)
        for part in action.sub_actions or (action,):
            if part.computation_type == _F:
                forwards.add((part.stage_index, part.microbatch_index))
                if part.stage_index:
                    posted[rank_of[part.stage_index - 1], ComputationType.RECV_F] -= 1
    return order


def trailing_weights(actions: Sequence[Action], stage: int, *, embedding: int | None = None) -> WeightsTogether:
    """Return the micro-batches whose weights' parts end a stage's work.

    Done parameter by parameter for all of them, not micro-batch by micro-batch, the first gradients are complete when
    little of that time has passed, and travel to other replicas under the rest of it.

    Args:
        actions: One rank's computations, sends and receives.
        stage: One of its stages.
        embedding: A stage of little work whose backward passes may come in between.
    """
    found: list[int] = []
    pause = 0
    computing = [one for action in actions for one in action.sub_actions or (action,) if one.computation_type in _WORK]
    ending = max((at for at, one in enumerate(computing) if one.stage_index == stage), default=-1)
    for one in reversed(computing[: ending + 1]):
        index = one.microbatch_index
        if found and one.stage_index == embedding and one.computation_type == _B:
            pause = pause or len(found)
            continue
        if one.stage_index != stage or one.computation_type != ComputationType.BACKWARD_WEIGHT or index is None:
            break
        found.append(index)
    if not pause or pause == len(found):
        return WeightsTogether(micro_batches=frozenset(found))
    return WeightsTogether(micro_batches=frozenset(found), pause=found[pause], part=_BEFORE_EMBEDDING)


def before_embedding(pp: int, *, split: bool, tapered: bool) -> float:
    """Return the part of the last rank's weights' parts that comes before the last backward pass of an embedding there.

    Args:
        pp: Pipeline ranks.
        split: Whether weights' parts are put off at all.
        tapered: Whether the last micro-batch is a smaller one.
    """
    if not split:
        return 1.0
    orders = torch_actions(embedding_on_last(pp, 2 * pp, split=True, tapered=tapered))
    return trailing_weights(orders[pp - 1], pp, embedding=0).part


def run_schedule(schedule: Any, *, early: bool) -> None:
    """Run one batch, forward and backward.

    Args:
        schedule: From `build_schedule`.
        early: Whether to `receive_early`; only where the shapes of all activations are known.
    """
    lists, rank = schedule.pipeline_order_with_comms, schedule.rank
    if not hasattr(schedule, "_holmes_lists"):
        schedule._holmes_lists = (lists[rank], receive_early(lists[rank], schedule.stage_index_to_group_rank))
        embedding = next((stage.stage_index for stage in schedule._stages if stage.window.stop == 0), None)
        schedule._holmes_weights = [
            trailing_weights(lists[rank], stage.stage_index, embedding=embedding) for stage in schedule._stages
        ]
    lists[rank] = schedule._holmes_lists[early]
    for stage, together in zip(schedule._stages, schedule._holmes_weights, strict=True):
        stage.weights_together = together
    n = schedule._n_microbatches
    level = SCHEDULE_LOGGER.level
    SCHEDULE_LOGGER.setLevel(logging.CRITICAL)  # on failure torch would print the whole table on every rank
    try:
        schedule._step_microbatches(arg_mbs=[()] * n, kwarg_mbs=[{}] * n, losses=None, return_outputs=False)
    finally:
        SCHEDULE_LOGGER.setLevel(level)


def run_forward(stages: Sequence[HolmesStage], num_microbatches: int) -> None:
    """Run micro-batches forward only, through each of a rank's stages.

    Args:
        stages: This rank's stages.
        num_microbatches: Of the batch.
    """
    local = {stage.stage_index: stage for stage in stages}
    sends: list[Any] = []

    def post(stage: HolmesStage, index: int) -> list[Any]:
        if stage.stage_index - 1 in local or index >= num_microbatches:
            return []
        return [op.op(op.tensor, group=op.group, group_src=op.group_peer) for op in stage.get_fwd_recv_ops(index)]

    for stage in stages:
        early = stage.knows_shapes
        coming = post(stage, 0)
        for index in range(num_microbatches):
            here, coming = coming, post(stage, index + 1) if early else []
            for work in here:
                work.wait()
            output = stage.forward_one_chunk(index)
            if stage.stage_index + 1 in local:
                local[stage.stage_index + 1].set_local_fwd_input(output, index)
            else:
                for op in stage.get_fwd_send_ops(index):
                    sends.append(op.op(op.tensor, group=op.group, group_dst=op.group_peer))
            coming = coming or post(stage, index + 1)
    for work in sends:
        work.wait()
