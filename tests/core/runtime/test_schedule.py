# SPDX-License-Identifier: Apache-2.0
"""The order in which stages compute: torch's own, and right for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import _add_send_recv

from holmes_core.plan.one_f_one_b import Action, defer_weights, embedding_on_last, one_f_one_b, one_per_rank
from holmes_core.runtime.schedule import gpipe_order, receive_early, torch_actions
from tests.core.runtime import pipeline_models as models
from tests.models.pipeline import Workers, actions, assert_same


class _FakeStage:
    """What torch's single-stage schedules ask of a stage; it records."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self.has_backward = True
        self.trace: list[tuple[int, str, int]] = []

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.trace.append((self.stage_index, "F", index))
        return torch.zeros(())

    def backward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> None:
        self.trace.append((self.stage_index, "B", index))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: []


def _executed(cls: Any, stage: int, num_stages: int, microbatches: int) -> list[tuple[int, str, int]]:
    fake = _FakeStage(stage, num_stages)
    schedule = cls(fake, microbatches, loss_fn=lambda output, target: output)
    schedule._initialize_stage = lambda *args, **kwargs: None
    schedule._maybe_compute_loss = lambda *args, **kwargs: None
    schedule._maybe_get_loss = lambda *args, **kwargs: None
    schedule._update_losses = lambda *args, **kwargs: None
    schedule._step_microbatches([()] * microbatches, [{}] * microbatches, [None] * microbatches, None)
    return fake.trace


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 2, 5])
def test_1f1b_is_torchs(num_stages: int, extra: int) -> None:
    n = num_stages + extra
    order = torch_actions(one_f_one_b(num_stages, n))
    for stage in range(num_stages):
        assert actions(order[stage]) == _executed(Schedule1F1B, stage, num_stages, n)


def test_1f1b_that_runs_ahead_of_slow_edges() -> None:
    n, ahead = 8, [4, 2, 0]
    order = one_f_one_b(3, n, ahead)
    for stage in range(3):
        kinds = "".join(kind for _, kind, _ in order[stage])
        assert kinds.index("B") == min(n, 3 - stage + ahead[stage])
        for kind in "FB":
            assert [i for _, k, i in order[stage] if k == kind] == list(range(n))
    assert one_f_one_b(3, n, [0, 0, 0]) == one_f_one_b(3, n)


def _end(orders: list[list[Action]], cost: dict[str, int]) -> int:
    """Seconds that an order takes on links without delay."""
    todo = {rank: list(acts) for rank, acts in enumerate(orders)}
    clock, done, last = dict.fromkeys(todo, 0), {}, len(todo) - 1
    while any(todo.values()):
        progress = False
        for rank, acts in todo.items():
            while acts:
                stage, kind, i = acts[0]
                needs = [(stage - 1, "F", i)] if kind == "F" and stage else []
                needs += [(stage + 1, "B", i)] if kind in "BI" and stage < last else []
                if any(need not in done for need in needs):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + cost[kind]
                done[stage, "F" if kind == "F" else "B" if kind in "BI" else "W", i] = clock[rank]
                acts.pop(0)
                progress = True
        assert progress, "the order waits for itself"
    return max(clock.values())


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_deferred_weights_shorten_the_step_as_in_the_paper(pp: int) -> None:
    """Idle time (pp-1)(F+B+W) becomes (pp-1)(F+B-W), of which F = B = W = 1 leaves a third (Qi et al., table 2)."""
    n, cost = 4 * pp, {"F": 1, "B": 2, "I": 1, "W": 1}
    plain = one_f_one_b(pp, n, [pp - 1 - rank for rank in range(pp)])
    split = defer_weights(plain, n)
    assert split == one_per_rank(pp, n, split=True)
    assert _end(plain, cost) == 3 * n + 3 * (pp - 1)
    assert _end(split, cost) == 3 * n + (pp - 1)
    assert sum(kind == "I" for acts in split for _, kind, _ in acts) == pp * (pp - 1)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("n", [4, 5, 12])
@pytest.mark.parametrize("slow", [0, 2])
def test_embedding_on_the_last_rank(pp: int, n: int, slow: int) -> None:
    ahead = [slow] * (pp - 1) + [0]
    order = embedding_on_last(pp, n, ahead)
    plain = one_f_one_b(pp, n, ahead)
    for rank in range(pp):
        blocks = [(stage - 1, kind, i) for stage, kind, i in order[rank] if stage]
        assert blocks == plain[rank]
    last = order[pp - 1]
    for kind in "FB":
        assert [i for stage, what, i in last if (stage, what) == (0, kind)] == list(range(n))
    # The first blocks have so many micro-batches in flight before their first backward; no fewer are embedded by then.
    first_backward = last.index((pp, "B", 0))
    in_flight = [kind for _, kind, _ in order[0]].index("B")
    assert sum(stage == 0 for stage, *_ in last[:first_backward]) >= in_flight


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_gpipe_is_torchs(num_stages: int, n: int) -> None:
    order = gpipe_order({s: [s] for s in range(num_stages)}, n)
    for stage in range(num_stages):
        assert actions(order[stage]) == _executed(ScheduleGPipe, stage, num_stages, n)


def _lower(order: dict[int, Any], rank_of: dict[int, int]) -> dict[int, list[Any]]:
    copied = {rank: list(acts) for rank, acts in order.items()}
    return _add_send_recv(copied, stage_to_rank=rank_of.__getitem__, num_stages=len(rank_of))


def _end_with_links(lists: dict[int, list[Any]], rank_of: dict[int, int], cost: dict[str, int], link: int) -> int:
    """Seconds that lists with sends and receives take, where a transfer begins when both of its ends are there."""
    todo = {rank: list(acts) for rank, acts in lists.items()}
    clock = dict.fromkeys(todo, 0)
    sent: dict[Any, int] = {}
    posted: dict[Any, int] = {}
    done: dict[Any, int] = {}
    busy: dict[Any, int] = {}
    arrived: dict[Any, int] = {}
    while any(todo.values()):
        progress = False
        for rank, acts in todo.items():
            while acts:
                stage, kind, i = acts[0].stage_index, acts[0].computation_type.value, acts[0].microbatch_index
                if kind.startswith(("SEND", "RECV")):
                    there = stage if kind[:4] == "RECV" else stage + (1 if kind[-1] == "F" else -1)
                    (posted if kind[:4] == "RECV" else sent)[there, kind[-1], i] = clock[rank]
                    message = (there, kind[-1], i)
                    if message in sent and message in posted:
                        edge = (rank_of[there], kind[-1])
                        begin = max(sent[message], posted[message], busy.get(edge, 0))
                        arrived[message] = busy[edge] = begin + link
                else:
                    before = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind, -1)
                    if 0 <= before < len(rank_of):
                        way = "F" if kind == "F" else "B"
                        known = done if rank_of[before] == rank else arrived
                        message = (before if known is done else stage, way, i)
                        if message not in known:
                            break
                        clock[rank] = max(clock[rank], known[message])
                    clock[rank] += cost.get(f"{stage}{kind}", cost[kind])
                    done[stage, "F" if kind == "F" else "B" if kind in "BI" else "W", i] = clock[rank]
                acts.pop(0)
                progress = True
        assert progress, "the lists wait for each other"
    return max(clock.values())


LOWERED = {
    "1f1b": (torch_actions(one_f_one_b(3, 6)), {0: 0, 1: 1, 2: 2}),
    "ahead": (torch_actions(one_f_one_b(2, 8, [1, 0])), {0: 0, 1: 1}),
    "deferred": (torch_actions(embedding_on_last(2, 8, split=True)), {0: 1, 1: 0, 2: 1}),
    "gpipe, two stages per rank": (gpipe_order({0: [0, 2], 1: [1, 3]}, 6), {0: 0, 1: 1, 2: 0, 3: 1}),
}


@pytest.mark.parametrize("name", LOWERED)
def test_receives_are_posted_early(name: str) -> None:
    order, rank_of = LOWERED[name]
    moved = 0
    for acts in _lower(order, rank_of).values():
        early = receive_early(acts, rank_of)
        receives = [a for a in acts if a.computation_type.value.startswith("RECV")]
        assert [a for a in early if a not in receives] == [a for a in acts if a not in receives]
        for way, step in (("RECV_F", -1), ("RECV_B", 1)):
            for peer in set(rank_of.values()):

                def of_edge(a: Any, way: str = way, step: int = step, peer: int = peer) -> bool:
                    return a.computation_type.value == way and rank_of[a.stage_index + step] == peer

                assert [a for a in early if of_edge(a)] == [a for a in acts if of_edge(a)]
        for receive in receives:
            before = [a for a in early[: early.index(receive)] if a not in receives]
            assert len(before) <= len([a for a in acts[: acts.index(receive)] if a not in receives])
            moved += len(before) < len([a for a in acts[: acts.index(receive)] if a not in receives])
            if receive.computation_type.value == "RECV_B":  # the shape of a gradient is that of the output
                assert (receive.stage_index, "F", receive.microbatch_index) in actions(before)
    assert moved


def test_early_receives_hide_more_of_a_slow_link() -> None:
    """Each transfer takes as long as a third of a forward; those at both ends of the step cannot be hidden."""
    order, rank_of = LOWERED["deferred"]
    cost = {"F": 20, "B": 40, "I": 24, "W": 18, "0F": 0, "0B": 0}
    lists = _lower(order, rank_of)
    early = {rank: receive_early(acts, rank_of) for rank, acts in lists.items()}
    assert _end_with_links(early, rank_of, cost, link=6) < _end_with_links(lists, rank_of, cost, link=6)


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


ALL = ["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev"]


@pytest.mark.parametrize("name", ["Checkpointed", "Wrapper", "SharedModule"])
@pytest.mark.parametrize("schedule", ALL)
def test_stages_execute_the_schedule(two: Workers, schedule: str, name: str) -> None:
    config = dict(pp=2, schedule=schedule, num_microbatches=8)
    found = assert_same(two.run(models.run, name, config, "token_loss", 9, (), True))
    for rank in found:
        assert rank["trace"] == rank["order"]
        assert {(stage, i) for stage, kind, i in rank["trace"] if kind == "F"} == {
            (stage, i) for stage, *_ in rank["trace"] for i in range(8)
        }


@pytest.mark.parametrize("schedule", ALL)
def test_fewer_samples_than_the_schedule_wants(two: Workers, schedule: str) -> None:
    for rows in (1, 2, 3):
        config = dict(pp=2, schedule=schedule, num_microbatches=8)
        assert_same(two.run(models.run, "Gpt", config, "token_loss", rows))


@pytest.mark.parametrize("schedule", ALL)
def test_frozen_first_stages(two: Workers, schedule: str) -> None:
    frozen = ("tok", "pos", "scale", "blocks.0", "blocks.1", "blocks.2")
    config = dict(pp=2, schedule=schedule, num_microbatches=4)
    assert_same(two.run(models.run, "Gpt", config, "token_loss", 5, frozen))
