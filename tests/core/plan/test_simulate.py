# SPDX-License-Identifier: Apache-2.0
"""The simulation: by hand, against the closed form, against torch's own action lists."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.config import V_SCHEDULES
from holmes_core.errors import ConfigError, HolmesError
from holmes_core.plan.cost import Choice, CostModel
from holmes_core.plan.cost_schedule import in_flight
from holmes_core.plan.profile_config import profile_of_config
from holmes_core.plan.profile_names import KNOWN_MODELS
from holmes_core.plan.simulate import predict_by_simulation, simulate
from holmes_core.plan.simulate_orders import SIMULATED, Action, check_orders, make_orders, read_orders
from holmes_core.report.timeline import perfetto_events, write_perfetto, write_png
from tests.core.plan.prediction_jobs import choice, cluster, gpt, job, two_clusters


def test_a_pipeline_of_equal_stages_takes_m_plus_p_minus_1_rounds() -> None:
    work = job(cluster("a", 4), batch=8, profile=gpt(1024, 8, 16, 1024, vocab_size=1))
    found = simulate(CostModel(work), choice(work, layers_per_stage=(2, 2, 2, 2)))
    costs = CostModel(work).stage_costs(choice(work, layers_per_stage=(2, 2, 2, 2)))
    one = costs.forward[0] + costs.backward[0]
    assert found.prediction.pipeline_seconds == pytest.approx(11 * one, rel=0.02)  # links inside the host are fast
    assert found.prediction.bubble == pytest.approx(3 / 11, abs=0.02)


@pytest.mark.parametrize("rate", [1.0, 10.0, 25.0, 100.0])
@pytest.mark.parametrize("dp", [2, 4, 8, 16])
def test_closed_form_and_simulation_agree(rate: float, dp: int) -> None:
    """GPipe within 3 %; 1F1B within 15 % (its bursts queue on slow links, which the closed form does not see)."""
    work = two_clusters(ethernet_rate=rate, batch=32 * dp)
    model = CostModel(work)
    for schedule, tolerance in (("gpipe", 0.03), ("1f1b", 0.15)):
        one = choice(work, dp=dp, schedule=schedule)
        exact = simulate(model, one).prediction
        assert model.predict(one).pipeline_seconds == pytest.approx(exact.pipeline_seconds, rel=tolerance)
        assert model.predict(one).memory_bytes == exact.memory_bytes


@pytest.mark.parametrize(("dp", "schedule", "virtual"), [(8, "1f1b", 1), (16, "interleaved_1f1b", 2), (4, "1f1b", 1)])
def test_the_pace_of_the_beginning_is_that_of_the_rest(dp: int, schedule: str, virtual: int) -> None:
    work = two_clusters(batch=96 * dp)
    model, one = CostModel(work), choice(work, dp=dp, schedule=schedule, virtual_stages=virtual)
    whole, short = simulate(model, one).prediction, predict_by_simulation(model, one)
    assert short.step_seconds == pytest.approx(whole.step_seconds, rel=0.01)
    assert short.memory_bytes == whole.memory_bytes


@given(
    dp=st.sampled_from([2, 4, 8, 16]),
    rate=st.sampled_from([0.3, 5.0, 100.0]),
    plan=st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("looped_bfs", 2)]),
    m=st.integers(1, 4),
)
@settings(max_examples=40, deadline=None)
def test_nothing_starts_before_its_input_is_there(dp: int, rate: float, plan: tuple[str, int], m: int) -> None:
    pp = 32 // dp
    if pp * plan[1] > 30:
        return
    work = two_clusters(ethernet_rate=rate, batch=dp * pp * m)
    one = choice(work, dp=dp, schedule=plan[0], virtual_stages=plan[1])
    found = simulate(CostModel(work), one)
    ends = {(e.kind, e.stage, e.micro_batch): e.end for e in found.events}
    busy: dict[int, float] = {}
    for event in found.events:
        assert event.start >= busy.get(event.rank, 0.0) - 1e-12
        busy[event.rank] = event.end
        before = ("F", event.stage - 1) if event.kind == "F" else ("B", event.stage + 1)
        if event.kind in "FB" and 0 <= before[1] < one.num_stages:
            assert event.start >= ends[before[0], before[1], event.micro_batch]
    ports: dict[tuple[str, int], float] = {}
    for sent in found.transfers:
        key = (sent.kind, sent.sender)
        assert sent.start >= ports.get(key, 0.0) - 1e-12
        ports[key] = sent.end
    assert len([e for e in found.events if e.kind in "FB"]) == 2 * one.num_stages * pp * m


TORCH_NAMES = {
    "interleaved_1f1b": "Interleaved1F1B", "looped_bfs": "LoopedBFS", "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip


@pytest.mark.parametrize(("schedule", "stages"), [("interleaved_1f1b", (2, 3)), ("looped_bfs", (2,)),
    ("interleaved_zb", (1, 2, 3)), ("zbv", (2,)), ("dualpipev", (2,))])  # fmt: skip
def test_orders_are_those_of_torch(schedule: str, stages: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every action of every rank, for all sizes up to 6 ranks that torch accepts."""
    for pp in range(1, 7):
        for m in range(1, 20):
            for v in stages:
                if not _torch_accepts(schedule, pp, m):
                    continue
                mine = make_orders(schedule, pp=pp, virtual_stages=v, num_microbatches=m)
                assert mine == _torch_orders(TORCH_NAMES[schedule], pp, v, m, monkeypatch), (pp, v, m)


@pytest.mark.parametrize("schedule", SIMULATED)
def test_kept_activations_are_counted_as_the_orders_keep_them(schedule: str) -> None:
    for pp in range(2, 6):
        for m in range(pp, 17):
            for v in (1,) if schedule in ("1f1b", "gpipe") else (2,) if schedule in V_SCHEDULES else (2, 3):
                if not _torch_accepts(schedule, pp, m):
                    continue
                for rank, order in enumerate(make_orders(schedule, pp=pp, virtual_stages=v, num_microbatches=m)):
                    held, most = 0, 0
                    for action in order:
                        held += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
                        most = max(most, held)
                    counted = in_flight(schedule, rank=rank, pp=pp, virtual_stages=v, num_microbatches=m)
                    assert counted == most, (pp, v, m, rank)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize("defer_weights", [False, True])
def test_what_running_ahead_and_deferred_weights_keep(run_ahead: int, defer_weights: bool) -> None:
    for stages in ((1, 1), (2, 1), (1, 2, 1), (2, 3)):
        one = Choice(tp=1, dp=1, order=tuple(range(len(stages))), stages=stages, run_ahead=run_ahead,
                     defer_weights=defer_weights)  # fmt: skip
        for m in range(one.pp, 24):
            orders = make_orders(
                "1f1b", pp=one.pp, virtual_stages=1, num_microbatches=m, ahead=one.ahead(), split=one.split
            )
            check_orders(orders, schedule="1f1b", pp=one.pp, num_stages=one.pp, m=m)
            for rank, order in enumerate(orders):
                kept = list(accumulate({"F": 1, "B": -1, "W": -1, "I": 0}[action.kind] for action in order))
                counted = in_flight(
                    "1f1b", rank=rank, pp=one.pp, virtual_stages=1, num_microbatches=m, further=one.kept()[rank]
                )
                assert counted == max(kept), (stages, m, rank)


def _torch_accepts(schedule: str, pp: int, m: int) -> bool:
    if schedule.startswith("interleaved"):
        return m % max(1, m // pp) == 0
    return m >= {"zbv": pp, "dualpipev": 2 * pp}.get(schedule, 1)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zb", "zbv", "dualpipev"])
@pytest.mark.parametrize(("pp", "rounds"), [(2, 2), (4, 3)])
def test_closed_form_of_many_stages(schedule: str, pp: int, rounds: int) -> None:
    """Within 8 % of the simulation, on links that are no bottleneck."""
    work = job(cluster("a", pp), batch=pp * rounds, profile=gpt(1024, 4 * pp, 16, 1024, vocab_size=4096))
    model, one = CostModel(work), choice(work, schedule=schedule, virtual_stages=2)
    exact = simulate(model, one).prediction
    assert model.predict(one).pipeline_seconds == pytest.approx(exact.pipeline_seconds, rel=0.08)


def _torch_orders(name: str, pp: int, v: int, m: int, monkeypatch: pytest.MonkeyPatch) -> list[list[Action]]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/tmp/unused")
    from torch.distributed.pipelining import schedules

    cls: Any = getattr(schedules, f"Schedule{name}")
    count = {"pp_group_size": pp, "n_local_stages": v, "_num_stages": pp * v, "_n_microbatches": m}
    rounds = max(1, m // pp)
    blank = SimpleNamespace(
        **count, num_stages=pp * v, _stages=[None] * v, number_of_rounds=rounds, microbatches_per_round=m // rounds
    )
    rows: list[str] = []
    for rank in range(pp):
        order = cls._calculate_single_rank_operations(blank, rank)
        rows.append(",".join("" if action is None else repr(action) for action in order))
    return read_orders("\n".join(rows))


def test_action_lists_with_split_backward_passes() -> None:
    """A zero-bubble order in torch's form: weights' gradients fill the holes; faster than 1F1B."""
    work = job(cluster("a", 2), batch=4, profile=gpt(1024, 4, 16, 1024, vocab_size=64))
    model, one = CostModel(work), choice(work, layers_per_stage=(2, 2))
    first = "0F0,0SEND_F0,0F1,,0I0,0F2,0I1,0F3,0W0,0I2,0W1,0I3,0W2,0W3"
    rows = first + "\n1RECV_F0,1F0,1I0,1F1,1I1,1F2,1I2,1F3,1I3,1W0,1W1,1W2,1W3"
    split = simulate(model, one, read_orders(rows)).prediction
    plain = simulate(model, one).prediction
    assert split.pipeline_seconds < plain.pipeline_seconds
    assert max(split.memory_bytes) >= max(plain.memory_bytes)


def test_torchs_zero_bubble_lists_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """V schedules: the last stage is on the first rank, so no rank waits for the head's neighbour at the other end."""
    work = job(cluster("a", 4), batch=12, profile=gpt(1024, 8, 16, 1024, vocab_size=64))
    model = CostModel(work)
    one = choice(work, schedule="zbv", virtual_stages=2, layers_per_stage=(1,) * 8)
    orders = _torch_orders("ZBVZeroBubble", 4, 2, 12, monkeypatch)
    split = simulate(model, one, orders).prediction
    assert simulate(model, one).prediction == split
    plain = simulate(model, choice(work, layers_per_stage=(2,) * 4)).prediction
    assert split.pipeline_seconds < plain.pipeline_seconds
    assert split.bubble < 0.15 < plain.bubble
    assert model.predict(one).pipeline_seconds == pytest.approx(split.pipeline_seconds, rel=0.15)


def test_wrong_action_lists() -> None:
    work = job(cluster("a", 2), batch=2, profile=gpt(256, 4, 4, 256))
    model, one = CostModel(work), choice(work)
    for rows, message in (
        ("0F0\n1F0,1B0", "not complete"),
        ("0F0,0B0,0F0\n1F0", "do each action once"),
        ("0F0", "1 rows for pp 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            simulate(model, one, read_orders(rows))
    with pytest.raises(HolmesError, match="waits for ever"):
        simulate(model, one, read_orders("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))
    with pytest.raises(ConfigError, match="0X0"):
        read_orders("0X0")
    with pytest.raises(ConfigError, match="zigzag"):
        make_orders("zigzag", pp=2, virtual_stages=2, num_microbatches=4)


def test_timeline_files(tmp_path: Path) -> None:
    work = two_clusters(batch=64)
    found = simulate(CostModel(work), choice(work, dp=8))
    write_perfetto(found, str(tmp_path / "t.json"), title="x")
    data = json.loads((tmp_path / "t.json").read_text())
    complete = [event for event in data["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == len(found.events) + len(found.transfers)
    assert len(perfetto_events(found)) == len(data["traceEvents"])
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(
        1e6 * found.prediction.step_seconds, rel=0.01
    )
    write_png(found, str(tmp_path / "t.png"), title="x")
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("hosts", "published"), [(280, 60.1), (350, 50.2), (420, 44.4)])
def test_a_published_run_is_predicted_within_ten_percent(hosts: int, published: float) -> None:
    """MT-NLG 530B on DGX A100 (Smith et al. 2022, section 2.3): seconds per iteration, tp 8 x pp 35, batch 1920.

    Nothing is fitted: the usual efficiency, 8 x 200 Gbit/s as the paper says. Recomputation as its memory needs.
    """
    profile = profile_of_config(KNOWN_MODELS["mt-nlg-530b"], seq=2048)
    work = job(cluster("a", *(8,) * hosts, nics=8), batch=1920, profile=profile)
    one = choice(work, tp=8, dp=hosts // 35, stages=(35,), recompute=True, layers_per_stage=(3,) * 35)
    found = simulate(CostModel(work), one).prediction
    assert found.step_seconds == pytest.approx(published, rel=0.10)
    assert found.fits
