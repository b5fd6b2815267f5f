# SPDX-License-Identifier: Apache-2.0
"""Degrees: what is filled in, what is refused, and what a refusal proposes. F4-nn: public cases."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_core.cluster.topology import Topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.batch_split import default_num_microbatches
from holmes_core.plan.layout import (
    Layout,
    ModelFacts,
    choose_layout,
    legal_tp,
    nearest_layouts,
)
from tests.core.plan.helpers import topology_of


def degrees(topology: Topology, model: ModelFacts | None = None, **wishes: Any) -> tuple[int, int, int]:
    layout, _ = choose_layout(topology, HolmesConfig(**wishes), model or ModelFacts(num_blocks=64))
    return layout.pp, layout.dp, layout.tp


def refusal(topology: Topology, model: ModelFacts | None = None, **wishes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        degrees(topology, model, **wishes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("clusters", "wishes", "expected"),
    [
        (([8],), {}, (1, 8, 1)),
        (([8],), {"tp": 2}, (1, 4, 2)),
        (([8],), {"pp": 4}, (4, 2, 1)),
        (([8],), {"pp": 2, "dp": 2}, (2, 2, 2)),
        (([8],), {"dp": 2}, (4, 2, 1)),
        (([2], [2]), {}, (2, 2, 1)),
        (([2], [2]), {"dp": 1}, (4, 1, 1)),
        (([4, 4], [4]), {"tp": 4}, (3, 1, 4)),
        (([1], [1], [1]), {}, (3, 1, 1)),
    ],
)
def test_left_out_degrees(clusters: tuple[list[int], ...], wishes: dict[str, int], expected: tuple[int, ...]) -> None:
    assert degrees(topology_of(*clusters), **wishes) == expected


def test_f4_15_unequal_clusters() -> None:
    layout, reasons = choose_layout(topology_of([8] * 3, [8] * 5), HolmesConfig(), ModelFacts(num_blocks=32))
    assert (layout.pp, layout.width, layout.stages_per_cluster) == (8, 8, (3, 5))
    assert any("pp 2 x dp 24 x tp 1" in line and "16 of 64 ranks idle" in line for line in reasons)


def test_f4_15_the_short_pipeline_is_proposed_with_its_cost() -> None:
    text = refusal(topology_of([8] * 3, [8] * 5), pp=2)
    assert "HolmesConfig.pp" in text
    assert "24 % 32 != 0" in text
    assert "pp 2 x dp 24 x tp 1 (1 + 1 stages per cluster): 16 of 64 ranks idle" in text
    assert "pp 8 x dp 8 x tp 1 (3 + 5 stages per cluster): uses all 64 ranks" in text


@pytest.mark.parametrize("hosts", [[2, 3, 3], [6, 1, 1]])
def test_f4_17_uneven_hosts(hosts: list[int]) -> None:
    topology = topology_of(hosts)
    assert degrees(topology) == (1, 8, 1)
    assert [topology.local_rank(rank) for rank in range(8)] == [i for size in hosts for i in range(size)]
    text = refusal(topology, tp=2)
    assert "HolmesConfig.tp" in text
    assert "legal here: 1 " in text
    assert "a tp group never leaves a host" in text
    assert "pp 1 x dp 8 x tp 1: uses all 8 ranks" in text


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_f4_05_few_key_value_heads(tp: int) -> None:
    model = ModelFacts(num_blocks=16, num_heads=16, num_kv_heads=2)
    if tp <= 2:
        assert degrees(topology_of([8]), model, tp=tp)[2] == tp
    else:
        text = refusal(topology_of([8]), model, tp=tp)
        assert f"2 kv_heads % {tp} != 0" in text
        assert "legal here: 1, 2" in text
        assert "tp 4" not in text.partition("do:")[2]


def test_f4_07_legal_tp_is_listed() -> None:
    model = ModelFacts(num_blocks=40, num_heads=40, num_kv_heads=10)
    assert legal_tp(topology_of([8]), model) == (1, 2)
    text = refusal(topology_of([8]), model, tp=4)
    assert "tp 4; legal here: 1, 2 (common divisors of heads 40; kv_heads 10; ranks per host 8)" in text


def test_f4_21_unequal_machines() -> None:
    topology = topology_of([4], [1], [2], [1])
    assert degrees(topology) == (8, 1, 1)
    text = refusal(topology, pp=4)
    assert "every stage has the same dp x tp" in text
    assert "uses all 8 ranks" in text


def test_described_stages_that_do_not_fit() -> None:
    text = refusal(topology_of([4]), layers_per_stage=(22, 21, 21))
    assert "pp 3 x dp 1 x tp 1 = 3 ranks, the job has 4" in text
    assert "where: HolmesConfig.layers_per_stage" in text
    assert "1 of 4 ranks idle" in text


def test_world_size_mismatch() -> None:
    text = refusal(topology_of([8]), pp=3, dp=2, tp=1)
    assert "pp 3 x dp 2 x tp 1 = 6 ranks, the job has 8" in text
    assert "HolmesConfig.pp, dp, tp" in text
    assert "2 of 8 ranks idle" in text


def test_more_stages_than_blocks() -> None:
    text = refusal(topology_of([1] * 8), ModelFacts(num_blocks=6), pp=8)
    assert "8 stages (pp 8 x 1 per rank) for 6 blocks" in text
    assert "pp 4 x dp 2 x tp 1: uses all 8 ranks" in text


@given(
    clusters=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3),
    pp=st.integers(1, 6),
    tp=st.integers(1, 4),
    heads=st.sampled_from([None, 4, 6]),
)
def test_proposals_are_possible(clusters: list[list[int]], pp: int, tp: int, heads: int | None) -> None:
    topology = topology_of(*clusters)
    config = HolmesConfig(pp=pp, tp=tp)
    for layout in nearest_layouts(topology, config, ModelFacts(num_blocks=8, num_heads=heads), (pp, 1, tp)):
        assert layout.num_stages <= 8
        assert layout.world_size <= topology.world_size
        assert heads is None or heads % layout.tp == 0
        for stages, sizes in zip(layout.stages_per_cluster, clusters, strict=True):
            assert stages * layout.dp <= sum(size // layout.tp for size in sizes)
        if layout.world_size == topology.world_size:
            accepted = HolmesConfig(pp=layout.pp, dp=layout.dp, tp=layout.tp)
            assert choose_layout(topology, accepted, ModelFacts(num_blocks=8, num_heads=heads))[0] == layout


@given(
    batch=st.integers(1, 70),
    pp=st.integers(1, 6),
    schedule=st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv"]),
    wish=st.sampled_from([{}, {"num_microbatches": 7}, {"micro_batch_size": 3}]),
)
def test_micro_batches_suit_batch_and_schedule(batch: int, pp: int, schedule: str, wish: dict[str, int]) -> None:
    layout = Layout(tp=1, dp=1, stages_per_cluster=(pp,), virtual_stages=2, schedule=schedule, **wish)
    count = default_num_microbatches(batch, layout)
    assert 1 <= count <= batch
    if "interleaved" in schedule:
        assert count % max(1, count // pp) == 0


@pytest.mark.parametrize(("batch", "expected"), [(16, 8), (8, 8), (10, 10), (6, 6), (17, 8), (3, 3), (1, 1)])
def test_default_micro_batches_for_four_stages(batch: int, expected: int) -> None:
    assert default_num_microbatches(batch, Layout(tp=1, dp=1, stages_per_cluster=(4,))) == expected


def test_micro_batches_of_a_size() -> None:
    layout = Layout(tp=1, dp=1, stages_per_cluster=(2,), micro_batch_size=4)
    assert default_num_microbatches(10, layout) == 3
    assert default_num_microbatches(8, Layout(tp=1, dp=8, stages_per_cluster=(1,))) == 1


def test_schedules_with_needs() -> None:
    with pytest.raises(ConfigError, match=r"num_microbatches(?s:.)*use num_microbatches 4 or 6"):
        degrees(topology_of([4]), pp=2, dp=2, schedule="interleaved_1f1b", num_microbatches=5)
    layout = Layout(tp=1, dp=1, stages_per_cluster=(2,), virtual_stages=2, schedule="dualpipev")
    assert default_num_microbatches(5, layout) == 5
    with pytest.raises(ConfigError, match="at least 4 micro-batches"):
        default_num_microbatches(3, layout)
