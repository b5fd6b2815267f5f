# SPDX-License-Identifier: Apache-2.0
"""Replay a schedule's actions over links with bandwidth, latency and sharing. What comes out is a prediction.

Ranks work through their lists one action after another. A forward pass waits for its activation, a backward pass for
its gradient; what they produce is sent at once, beside compute, and queues behind what is already on its way through
the same port. All replicas do the same at the same time: one of them is simulated, with its share of each port.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

from holmes_core.cluster.value import Value
from holmes_core.errors import HolmesError
from holmes_core.plan.cost import Choice, CostModel, Prediction, StageCosts
from holmes_core.plan.cost_network import INSIDE_RANK, Edge
from holmes_core.plan.cost_values import Job
from holmes_core.plan.one_f_one_b import Action, embedding_lead
from holmes_core.plan.simulate_orders import check_orders, make_orders

__all__ = ["Event", "Simulation", "Transfer", "predict_by_simulation", "simulate"]


class Event(NamedTuple):
    """What a pp rank does from ``start`` to ``end`` (seconds): F, B, I, W of a stage, or reduce, optimizer, gather."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


class Transfer(NamedTuple):
    """An activation (F) or gradient (B): on the port from ``start`` to ``end``, there at ``arrival``."""

    sender: int
    receiver: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float
    arrival: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation(Value):
    """One simulated step.

    Args:
        prediction: Its times, memory and bytes.
        events: What each pp rank does, in order of time.
        transfers: What is sent.
    """

    prediction: Prediction
    events: tuple[Event, ...] = ()
    transfers: tuple[Transfer, ...] = ()


def simulate(model: CostModel, choice: Choice, orders: Sequence[Sequence[Action]] | None = None) -> Simulation:
    """Simulate one step of a choice.

    Args:
        model: The job's costs.
        choice: The layout.
        orders: Each pp rank's actions; None takes the schedule's own.

    Returns:
        The simulated step.

    Raises:
        ConfigError: The orders are not complete.
        HolmesError: The orders wait for each other for ever.
    """
    costs, ends = _costs_of(model, choice)
    m = costs.num_microbatches + choice.tapered
    if orders is None:
        orders = _orders_of(choice, m)
    else:
        check_orders(orders, schedule=choice.schedule, pp=choice.pp, num_stages=choice.num_stages, m=m)
    run = _Run(costs, choice, orders, ends=ends)
    run.run()
    pipeline = max(run.ends)
    tail, gradient = _end_of_step(costs, run.ends, model.job)
    events = sorted([*run.events, *tail], key=lambda event: (event.start, event.rank))
    prediction = model.assemble(choice, costs, pipeline, run.memory(), gradient)
    return Simulation(prediction=prediction, events=tuple(events), transfers=tuple(run.transfers))


def predict_by_simulation(model: CostModel, choice: Choice) -> Prediction:
    """Simulate one step; of a long one, the beginning, and its pace for the rest.

    A schedule settles into a period after a few rounds of pp micro-batches. With more than 8 rounds, 3 and 5 are
    simulated, and what the two between them take is what each two of the rest take.
    """
    costs, small = _costs_of(model, choice)
    m, pp = costs.num_microbatches, choice.pp
    if choice.schedule in ("gpipe", "looped_bfs") or m <= 8 * pp:
        return simulate(model, choice).prediction
    per_round = m // (m // pp)
    runs = []
    for count in (3 * per_round, 5 * per_round):
        orders = _orders_of(choice, count + choice.tapered)
        run = _Run(costs, choice, orders, record=False, ends=small)
        run.run()
        runs.append(run)
    pace = (max(runs[1].ends) - max(runs[0].ends)) / (2 * per_round)
    ends = [end + (m - 5 * per_round) * pace for end in runs[1].ends]
    _, gradient = _end_of_step(costs, ends, model.job)
    return model.assemble(choice, costs, max(ends), runs[1].memory(), gradient)


def _costs_of(model: CostModel, choice: Choice) -> tuple[StageCosts, tuple[StageCosts, ...]]:
    """Return what a choice costs, and its first and last micro-batch where they are smaller."""
    costs = model.stage_costs(choice)
    if not choice.tapered:
        return costs, ()
    first = choice.micro_batch_size // 2
    sizes = (first, choice.micro_batch_size - first)
    ends = tuple(model.stage_costs(replace(choice, micro_batch_size=size)) for size in sizes)
    covering = list(ends[-1].covering)
    if choice.split:  # whole ones and two halves, done together
        covering[-1] = costs.covering[-1]
    return replace(costs, covering=tuple(covering), opening=ends[0].opening), ends


def _orders_of(choice: Choice, num_microbatches: int) -> list[list[Action]]:
    return make_orders(
        choice.schedule,
        pp=choice.pp,
        virtual_stages=choice.virtual_stages,
        num_microbatches=num_microbatches,
        ahead=choice.ahead(),
        split=choice.split,
        tapered=choice.tapered,
    )


def _end_of_step(costs: StageCosts, ends: Sequence[float], job: Job) -> tuple[list[Event], float]:
    """What follows the pipeline: gradients of each stage as soon as it is done, then, on all ranks, the optimizer.

    The norm of the whole model's gradient holds all ranks back until the last has summed. Returns the events and the
    seconds from the pipeline's end to the step's, the optimizer's aside.
    """
    events: list[Event] = []
    summed = []
    for rank, end in enumerate(ends):
        reduce = costs.exposed_reduce(rank, job.overlap)
        summed.append(end + reduce)
        if reduce:
            events.append(Event(rank, "reduce", -1, -1, end, end + reduce))
    ready = max(max(summed), max(ends) + costs.tied_seconds)
    done = 0.0
    for rank, seconds in enumerate(costs.optimizer_seconds):
        gather = costs.exposed_gather(rank, job.overlap_param_gather)
        events.append(Event(rank, "optimizer", -1, -1, ready, ready + seconds))
        if gather:
            events.append(Event(rank, "gather", -1, -1, ready + seconds, ready + seconds + gather))
        done = max(done, ready + seconds + gather)
    return events, done - max(ends) - max(costs.optimizer_seconds)


class _Pace:
    """How long a micro-batch takes, and what it occupies."""

    def __init__(self, costs: StageCosts) -> None:
        stages = range(len(costs.forward))
        self.seconds = {
            "F": costs.forward,
            "B": costs.backward,
            "I": tuple(costs.input_seconds(stage) for stage in stages),
            "W": tuple(costs.weight_seconds(stage) for stage in stages),
        }
        self.send_seconds = [costs.send_seconds(edge) for edge in range(len(costs.edges))]
        self.activation_bytes, self.sent = costs.activation_bytes, costs.sent


class _Run:
    """The state of one simulation. Time only moves forward: events come off one heap.

    Args:
        costs: Of the choice.
        choice: The layout.
        orders: Each pp rank's actions.
        record: Whether to keep events and transfers.
        ends: Costs of the first and the last micro-batch, where they differ.
    """

    def __init__(
        self,
        costs: StageCosts,
        choice: Choice,
        orders: Sequence[Sequence[Action]],
        *,
        record: bool = True,
        ends: Sequence[StageCosts] = (),
    ) -> None:
        self._costs, self._orders = costs, orders
        self._next = [0] * len(orders)
        self._port_free: dict[str, float] = {}
        self._there: set[tuple[str, int, int]] = set()  # (F or B, stage, micro-batch) whose input has arrived
        self._waiting: dict[tuple[str, int, int], int] = {}
        self._heap: list[tuple[float, int, int, Action | None, tuple[str, int, int] | None]] = []
        self._count = 0
        self._rank_of = choice.ranks()
        self._last = choice.num_stages - 1
        self._record = record
        self._lead = embedding_lead(choice.pp, choice.ahead(), split=choice.split)
        self._micro_batches = 1 + max((action.micro_batch for order in orders for action in order), default=-1)
        self._paces = [_Pace(costs)] * self._micro_batches
        for place, end in zip((0, -1), ends, strict=False):
            self._paces[place] = _Pace(end)
        self._held = [0] * len(orders)
        self._peak = [0] * len(orders)
        self.ends = [0.0] * len(orders)
        self.events: list[Event] = []
        self.transfers: list[Transfer] = []

    def run(self) -> None:
        if self._costs.embedded is not None:
            for micro_batch in range(min(self._lead, self._micro_batches)):
                self._embed(micro_batch, 0.0)
        for rank in range(len(self._orders)):
            self._start_next(rank, 0.0)
        while self._heap:
            now, _, rank, action, arrived = heappop(self._heap)
            if action is not None:
                self._finish(rank, action, now)
                self._start_next(rank, now)
            elif arrived is not None:
                self._there.add(arrived)
                if (waiter := self._waiting.pop(arrived, None)) is not None:
                    self._start_next(waiter, now)
        stuck = [rank for rank, order in enumerate(self._orders) if self._next[rank] < len(order)]
        if stuck:
            action = self._orders[stuck[0]][self._next[stuck[0]]]
            raise HolmesError(
                seen=f"rank {stuck[0]} waits for ever at {action}",
                where="action lists",
                means="ranks wait for each other's results in a circle",
                do="correct the order of the actions",
            )

    def memory(self) -> tuple[int, ...]:
        """Peak bytes of each pp rank."""
        return tuple(self._costs.memory_bytes(rank, peak) for rank, peak in enumerate(self._peak))

    def _push(self, time: float, rank: int, action: Action | None, arrived: tuple[str, int, int] | None) -> None:
        self._count += 1  # ties in time go in the order in which they were found
        heappush(self._heap, (time, self._count, rank, action, arrived))

    def _start_next(self, rank: int, now: float) -> None:
        if self._next[rank] == len(self._orders[rank]):
            self.ends[rank] = max(self.ends[rank], now)
            return
        action = self._orders[rank][self._next[rank]]
        stage, kind, micro_batch = action
        if kind != "W":
            key = ("F" if kind == "F" else "B", stage, micro_batch)
            first = stage == 0 and self._costs.embedded is None
            free = first if kind == "F" else stage == self._last
            if not free and key not in self._there:
                self._waiting[key] = rank
                return
        self._next[rank] += 1
        pace = self._paces[micro_batch]
        seconds = pace.seconds[kind][stage]
        if kind == "F":
            self._held[rank] += pace.activation_bytes[stage]
            self._peak[rank] = max(self._peak[rank], self._held[rank])
        if self._record:
            self.events.append(Event(rank, kind, stage, micro_batch, now, now + seconds))
        self._push(now + seconds, rank, action, None)

    def _finish(self, rank: int, action: Action, now: float) -> None:
        stage, kind, micro_batch = action
        if kind in "BW":
            self._held[rank] -= self._paces[micro_batch].activation_bytes[stage]
        if kind == "F" and stage < self._last:
            self._send(stage, stage, stage + 1, "F", micro_batch, now)
        if kind in "BI" and stage > 0:
            self._send(stage - 1, stage, stage - 1, "B", micro_batch, now)
        if self._costs.embedded is not None:
            if kind == "F" and stage == self._last and micro_batch + self._lead < self._micro_batches:
                self._embed(micro_batch + self._lead, now)
            if kind in "BI" and stage == 0:  # the embedding's own gradient: little work, when it is there
                self.ends[-1] = max(self.ends[-1], self._occupy(self._costs.embedded, "B", 0, micro_batch, now))

    def _embed(self, micro_batch: int, now: float) -> None:
        """The last rank sends an embedded micro-batch to the first."""
        assert self._costs.embedded is not None
        arrival = self._occupy(self._costs.embedded, "F", -1, micro_batch, now)
        self._push(arrival, 0, None, ("F", 0, micro_batch))

    def _occupy(self, edge: Edge, kind: str, stage: int, micro_batch: int, now: float) -> float:
        """Send between the last rank and the first; return when it has arrived."""
        last = len(self._orders) - 1
        port = (edge.source if kind == "F" else edge.target) or "embedded"
        start = max(now, self._port_free.get(port, 0.0))
        end = start + self._paces[micro_batch].sent / edge.bandwidth
        self._port_free[port] = end
        if self._record:
            ways = (last, 0) if kind == "F" else (0, last)
            self.transfers.append(Transfer(*ways, kind, stage, micro_batch, start, end, end + edge.latency, edge.label))
        return end + edge.latency

    def _send(self, index: int, stage: int, to: int, kind: str, micro_batch: int, now: float) -> None:
        edge = self._costs.edges[index]
        sender, receiver = self._rank_of[stage], self._rank_of[to]
        if edge is INSIDE_RANK:
            self._there.add((kind, to, micro_batch))
            if (waiter := self._waiting.pop((kind, to, micro_batch), None)) is not None:
                self._start_next(waiter, now)
            return
        port = (edge.source if kind == "F" else edge.target) or f"{sender} {receiver}"
        start = max(now, self._port_free.get(port, 0.0))
        end = start + self._paces[micro_batch].send_seconds[index]
        self._port_free[port] = end
        if self._record:
            self.transfers.append(
                Transfer(sender, receiver, kind, stage, micro_batch, start, end, end + edge.latency, edge.label)
            )
        self._push(end + edge.latency, receiver, None, (kind, to, micro_batch))
