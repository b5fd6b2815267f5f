# SPDX-License-Identifier: Apache-2.0
"""The search against exhaustive search on small jobs; what it refuses; that it is quick."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import HealthCheck, given, settings

from holmes_core.config import V_SCHEDULES
from holmes_core.errors import ConfigError
from holmes_core.plan.cost import Choice, CostModel, Job
from holmes_core.plan.search import Limits, SearchResult, candidates, search, why_slower
from holmes_core.plan.search_space import orders_of
from holmes_core.plan.simulate import simulate
from tests.core.plan.prediction_jobs import cluster, gpt, job, small_jobs, two_clusters


def _exhaustive(work: Job, schedules: tuple[str, ...]) -> dict[tuple[object, ...], float]:
    """The best closed-form pace of every layout, over every split of the blocks there is; slow and simple."""
    model, clusters = CostModel(work), work.hardware.clusters
    blocks = len(work.profile.blocks)
    best: dict[tuple[object, ...], float] = {}
    for tp in range(1, 5):
        for dp in range(1, 13):
            width = tp * dp
            legal = all(c.ranks % width == 0 and all(size % tp == 0 for size in c.hosts) for c in clusters)
            if not legal or work.batch % dp or work.profile.num_heads % tp:
                continue
            for order in permutations(range(len(clusters))):
                stages = tuple(clusters[c].ranks // width for c in order)
                pp = sum(stages)
                for x in (x for x in range(1, work.batch // dp + 1) if work.batch // dp % x == 0):
                    for schedule in schedules:
                        m = work.batch // dp // x
                        if pp > 1 and schedule != "gpipe" and m < pp:
                            continue
                        if schedule == "interleaved_zb" and m % (m // pp):
                            continue
                        if pp == 1 and schedule != "1f1b":
                            continue
                        for cut in combinations(range(1, blocks), pp - 1):
                            ends = (0, *cut, blocks)
                            layers = tuple(b - a for a, b in pairwise(ends))
                            one = Choice(tp=tp, dp=dp, order=order, stages=stages, schedule=schedule,
                                micro_batch_size=x, layers_per_stage=layers)  # fmt: skip
                            prediction = model.predict(one)
                            if prediction.fits:
                                key = (tp, dp, order, x, schedule)
                                best[key] = min(best.get(key, 1e30), _slowest(model, one))
    return best


def _slowest(model: CostModel, one: Choice) -> float:
    costs = model.stage_costs(one)
    return max(f + b for f, b in zip(costs.forward, costs.backward, strict=True))


@given(work=small_jobs())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_layout_is_examined_and_split_at_its_optimum(work: Job) -> None:
    """Exactly the legal layouts, each with the split whose slowest stage is as fast as any split's that fits."""
    schedules = ("1f1b", "gpipe", "interleaved_zb")
    exhaustive = _exhaustive(work, schedules)
    model = CostModel(work)
    orders = list(permutations(range(len(work.hardware.clusters))))
    found: dict[tuple[object, ...], float] = {}
    for schedule in schedules:
        for one in candidates(model, Limits(schedule=schedule, virtual_stages=1, recompute=False), orders):
            c = one.choice
            if one.prediction.fits:
                found[c.tp, c.dp, c.order, c.micro_batch_size, c.schedule] = _slowest(model, c)
    assert found.keys() == exhaustive.keys()
    for key, slowest in exhaustive.items():
        assert found[key] == pytest.approx(slowest, rel=1e-9), key


@given(work=small_jobs())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_fastest_simulated_layout_is_found(work: Job) -> None:
    """Within 2 % of the fastest of all layouts, each of them simulated."""
    model = CostModel(work)
    orders = list(permutations(range(len(work.hardware.clusters))))
    everything = [one for one in candidates(model, Limits(), orders) if one.prediction.fits]
    if not everything:
        with pytest.raises(ConfigError):
            search(work)
        return
    fastest = min(simulate(model, one.choice).prediction.step_seconds for one in everything)
    assert search(work).best.prediction.step_seconds <= fastest * 1.02


def test_runners_up_differ_and_say_why_they_lost() -> None:
    result = search(two_clusters(batch=512))
    kinds = {(c.choice.pp, c.choice.tp, c.choice.schedule, c.choice.virtual_stages) for c in result.runners_up}
    assert len(kinds) == len(result.runners_up) == 5
    assert all(why_slower(result.best, other) for other in result.runners_up)
    times = [one.prediction.step_seconds for one in (result.best, *result.runners_up)]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= times[1] * 1.001
    assert SearchResult.from_json(result.to_json()) == result


def test_slow_links_make_short_pipelines() -> None:
    fast = search(two_clusters(ethernet_rate=400.0, batch=512)).best.choice
    slow = search(two_clusters(ethernet_rate=1.0, batch=512)).best.choice
    assert slow.pp == 2  # nothing but the one boundary there has to be
    assert fast.pp >= slow.pp


@pytest.mark.parametrize("schedule", ["interleaved_zb", "zbv", "dualpipev"])
def test_zero_bubble_schedules_are_searched(schedule: str) -> None:
    """By themselves among all, and alone where they are asked for; V schedules begin in rank 0's cluster."""
    work = two_clusters(batch=512)
    assert schedule in {one.choice.schedule for one in candidates(CostModel(work), Limits(), [(0, 1)])}
    found = search(work, Limits(schedule=schedule, last=1))
    assert found.best.choice.schedule == schedule
    assert found.best.choice.order == ((1, 0) if schedule in V_SCHEDULES else (0, 1))
    assert found.simulated
    if schedule in V_SCHEDULES:
        assert found.best.choice.rank_of(found.best.choice.num_stages - 1) == 0


def test_optimizers_that_are_not_shared_win_where_summing_is_hidden() -> None:
    """Parameters that nobody has to hand out: a tiny model on slow networks, its gradients summed in the background."""
    slow = cluster("a", 8, 8, kind="ethernet", ethernet_rate=1.0, gpu="A100-80GB")
    hidden, shown = (search(job(slow, batch=64, profile=gpt(256, 8, 8, 128), overlap=o)) for o in (1.0, 0.0))
    assert hidden.best.choice.sharding == "none"
    assert shown.best.choice.sharding == "optimizer"
    fixed = search(job(slow, batch=64, profile=gpt(256, 8, 8, 128), overlap=1.0), Limits(sharding="optimizer"))
    assert fixed.best.choice.sharding == "optimizer"
    assert fixed.best.prediction.step_seconds >= hidden.best.prediction.step_seconds


def test_limits_are_kept() -> None:
    limits = Limits(dp=4, tp=2, schedule="1f1b", micro_batch_size=2, recompute=True, partition="equal")
    found = search(two_clusters(batch=512), limits).best.choice
    assert (found.dp, found.tp, found.pp, found.schedule, found.micro_batch_size) == (4, 2, 4, "1f1b", 2)
    assert found.recompute
    assert sorted(found.layers_per_stage) == [7, 7, 8, 8]


def test_the_papers_rule_can_be_chosen() -> None:
    work = job(cluster("a", 8, speed=197.0), cluster("b", 8, kind="roce", speed=160.0), batch=512)
    found = search(work, Limits(pp=2, partition="paper", schedule="1f1b")).best.choice
    assert dict(zip(found.order, found.layers_per_stage, strict=True)) == {0: 16, 1: 14}


def test_the_self_adapting_split_is_predicted_faster_than_an_equal_one() -> None:
    fast, slow = cluster("a", 8, speed=200.0, ethernet_rate=200.0), cluster("b", 8, speed=100.0, ethernet_rate=200.0)
    work = job(fast, slow, batch=512)
    limits = Limits(pp=2, schedule="1f1b", micro_batch_size=1)
    auto, equal = (search(work, replace(limits, partition=rule)).best.prediction for rule in ("auto", "equal"))
    assert auto.step_seconds < 0.85 * equal.step_seconds


def test_blocks_that_are_not_alike_are_weighed() -> None:
    """A model whose first blocks are dense and heavy: the first stage gets fewer of them."""
    light = gpt(1024, 12, 16, 1024, vocab_size=64)
    heavy = replace(light.blocks[0], forward_flops=4 * light.blocks[0].forward_flops)
    work = job(cluster("a", 4), batch=64, profile=replace(light, blocks=(*[heavy] * 3, *light.blocks[3:])))
    found = search(work, Limits(pp=4, schedule="1f1b")).best.choice
    assert found.layers_per_stage[0] < found.layers_per_stage[-1]
    costs = CostModel(work).stage_costs(found)
    assert max(costs.forward) < 1.35 * sum(costs.forward) / 4


def test_f4_05_and_07_tp_divides_key_value_heads() -> None:
    for heads, kv, sizes, legal in ((16, 2, (8,), {1, 2}), (40, 10, (8,), {1, 2})):
        profile = replace(gpt(), num_heads=heads, num_kv_heads=kv)
        work = job(cluster("a", *sizes), batch=64, profile=profile)
        assert {one.choice.tp for one in candidates(CostModel(work), Limits(), [(0,)])} == legal


def test_f4_15_unequal_clusters_use_every_rank() -> None:
    work = job(cluster("a", 8, 8, 8), cluster("b", *(8,) * 5, kind="roce"), batch=64)
    for one in candidates(CostModel(work), Limits(), [(0, 1)]):
        assert one.choice.width in (1, 2, 4, 8)
        assert one.choice.pp * one.choice.width == 64
    best = search(work).best.choice
    assert sum(edge.kind == "across" for edge in CostModel(work).stage_costs(best).edges) == best.virtual_stages * 2 - 1


@pytest.mark.parametrize("sizes", [(2, 3, 3), (6, 1, 1)])
def test_f4_17_uneven_hosts_leave_tp_1(sizes: tuple[int, ...]) -> None:
    work = job(cluster("a", *sizes), batch=64)
    assert {one.choice.tp for one in candidates(CostModel(work), Limits(), [(0,)])} == {1}


def test_f4_19_a_replicas_batch_comes_from_dp() -> None:
    work = job(cluster("a", 8, 8), batch=64)
    found = {
        one.choice.pp * one.choice.tp: 64 // one.choice.dp
        for one in candidates(CostModel(work), Limits(schedule="1f1b"), [(0,)])
        if one.choice.pp * one.choice.tp in (1, 2, 4)
    }
    assert found == {1: 4, 2: 8, 4: 16}
    eights = candidates(CostModel(work), Limits(micro_batch_size=8), [(0,)])
    assert {one.choice.pp * one.choice.tp for one in eights} >= {2, 4}


def test_f4_21_unequal_hosts_give_equal_stages() -> None:
    """Hosts of 4, 1, 2, 1 GPUs: stages of one width, every rank once."""
    work = job(cluster("a", 4, 1, 2, 1), batch=8)
    for one in candidates(CostModel(work), Limits(), [(0,)]):
        assert one.choice.pp * one.choice.width == 8
        assert one.choice.tp == 1


def test_what_does_not_fit_names_the_nearest() -> None:
    work = job(cluster("a", 2, gpu="T4"), batch=8, profile=gpt(8192, 48, 64))
    with pytest.raises(
        ConfigError, match=r"none fits the memory(?s:.)*nearest: pp \d x dp 1(?s:.)*stage \d needs .* GiB"
    ):
        search(work)


def test_fixed_degrees_that_do_not_fit_name_the_nearest_that_does() -> None:
    """What was fixed and can be kept is kept; the layout that is named does fit."""
    work = job(cluster("a", 8, gpu="A100-40GB"), batch=64, profile=gpt(4096, 36, 32, 2048))
    with pytest.raises(ConfigError, match="the nearest that fits") as caught:
        search(work, Limits(pp=1, tp=1, recompute=False))
    found = re.search(
        r"let it be pp (\d) x dp (\d) x tp (\d), (\w+)(?: x (\d))?, micro-batch (\d+)", caught.value.do or ""
    )
    assert found is not None
    pp, dp, tp, schedule, virtual, x = found.groups()
    assert (pp == "1") + (tp == "1") + ("recompute" not in found.string) == 2, "one setting had to give way"
    limits = Limits(pp=int(pp), dp=int(dp), tp=int(tp), schedule=schedule, virtual_stages=int(virtual or 1),
        micro_batch_size=int(x), recompute="recompute" in found.string)  # fmt: skip
    assert search(work, limits).best.prediction.fits


def test_what_is_not_legal_names_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"no layout of 32 ranks(?s:.)*dp must divide the batch \(possible here: 1\)"):
        search(two_clusters(batch=7), Limits(dp=2))
    with pytest.raises(ConfigError, match="pp 3"):
        search(two_clusters(), Limits(pp=3))


def test_96_ranks_are_quick() -> None:
    clusters = [
        cluster(name, *(8,) * 4, kind=kind) for name, kind in (("a", "infiniband"), ("b", "roce"), ("c", "roce"))
    ]
    start = time.process_time()
    result = search(job(*clusters, batch=768))
    assert result.best.choice.pp >= 3
    assert time.process_time() - start < 5  # under a second on a machine that does nothing else


@pytest.mark.parametrize(("count", "tried"), [(1, 1), (3, 6), (6, 720), (8, 15)])
def test_orders_of_many_clusters(count: int, tried: int) -> None:
    """All of them up to six clusters; beyond, each cluster last and each first."""
    orders = orders_of(count)
    assert len(orders) == len(set(orders)) == tried
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert {order[-1] for order in orders} == set(range(count))
    assert all(order[-1] == 0 for order in orders_of(count, last=0))
    assert all(order[0] == 0 for order in orders_of(count, first=0))
