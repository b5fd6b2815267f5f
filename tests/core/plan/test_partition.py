# SPDX-License-Identifier: Apache-2.0
"""No block is ever lost."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.errors import ConfigError
from holmes_core.plan.partition import (
    check_layers_per_stage,
    equal_partition,
    fill_stages,
    paper_partition,
    self_adapting_partition,
)


@given(num_stages=st.integers(1, 64), more=st.integers(0, 200))
def test_f4_01_the_sum_is_always_right(num_stages: int, more: int) -> None:
    split = equal_partition(num_stages + more, num_stages)
    assert len(split) == num_stages
    assert sum(split) == num_stages + more
    assert max(split) - min(split) <= 1
    assert split[-1] == min(split)


@pytest.mark.parametrize(
    ("blocks", "stages", "expected"),
    [
        (30, 4, (7, 8, 8, 7)),
        (6, 4, (1, 2, 2, 1)),
        (7, 4, (2, 2, 2, 1)),
        (3, 2, (2, 1)),
        (5, 1, (5,)),
        (5, 3, (2, 2, 1)),
    ],
)
def test_left_over_blocks_go_to_the_middle(blocks: int, stages: int, expected: tuple[int, ...]) -> None:
    assert equal_partition(blocks, stages) == expected


def test_fewer_blocks_than_stages() -> None:
    with pytest.raises(ConfigError, match=r"3 blocks for 4 stages(?s:.)*at most 3 stages"):
        equal_partition(3, 4)
    assert check_layers_per_stage((1, 0, 1, 1), num_blocks=3, num_stages=4) == (1, 0, 1, 1)


def test_f4_03_ends_may_be_empty() -> None:
    assert check_layers_per_stage((0, 2, 2, 2), num_blocks=6, num_stages=4) == (0, 2, 2, 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((4, 4), r"has 2 entries, the pipeline has 3 stages(?s:.)*layers_per_stage 3,3,2"),
        ((4, 4, 4), r"sums to 12, the model has 8 blocks"),
        ((4, 0, 4), r"leaves stage 1 without a block"),
    ],
)
def test_wrong_splits(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_layers_per_stage(layers, num_blocks=8, num_stages=3)
    assert "HolmesConfig.layers_per_stage" in str(caught.value)


@pytest.mark.parametrize(
    ("blocks", "speeds", "expected"),
    [
        (30, (197, 160), (16, 14)),  # the published splits of a 3.6B and a 39.1B model
        (48, (197, 160), (26, 22)),
        (30, (160, 197), (14, 16)),
        (10, (1, 1, 1), (3, 3, 4)),
        (4, (100, 1, 1), (2, 1, 1)),
    ],
)
def test_paper_partition(blocks: int, speeds: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert paper_partition(blocks, speeds) == expected


@given(speeds=st.lists(st.floats(0.01, 100), min_size=1, max_size=12), more=st.integers(0, 60))
def test_paper_partition_places_every_block(speeds: list[float], more: int) -> None:
    split = paper_partition(len(speeds) + more, speeds)
    assert sum(split) == len(speeds) + more
    assert min(split) >= 1


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], list[float], list[int]]:
    stages = draw(st.integers(1, 4))
    numbers = st.floats(0.1, 10)
    costs = draw(st.lists(numbers, min_size=stages, max_size=9))
    limits = draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    speeds, extra = (draw(st.lists(numbers, min_size=stages, max_size=stages)) for _ in range(2))
    return costs, speeds, extra, limits


@given(pipelines())
@settings(max_examples=200, deadline=None)
def test_self_adapting_partition_is_the_optimum(job: tuple[list[float], list[float], list[float], list[int]]) -> None:
    costs, speeds, extra, limits = job

    def times(split: tuple[int, ...]) -> list[float]:
        ends = [sum(split[:stage]) for stage in range(len(split) + 1)]
        parts = [sum(costs[a:b]) for a, b in pairwise(ends)]
        return [e + part / speed for e, part, speed in zip(extra, parts, speeds, strict=True)]

    cuts = combinations(range(1, len(costs)), len(speeds) - 1)
    splits = [tuple(b - a for a, b in pairwise((0, *cut, len(costs)))) for cut in cuts]
    fitting = [s for s in splits if all(n <= limit for n, limit in zip(s, limits, strict=True))]
    if not fitting:
        with pytest.raises(ConfigError, match="memory for"):
            self_adapting_partition(costs, speeds, extra=extra, max_blocks=limits)
        return
    split = self_adapting_partition(costs, speeds, extra=extra, max_blocks=limits)
    assert split in fitting
    slowest = min(max(times(s)) for s in fitting)
    assert max(times(split)) == pytest.approx(slowest)
    even = min(sum(t * t for t in times(s)) for s in fitting if max(times(s)) <= slowest * (1 + 1e-9))
    assert sum(t * t for t in times(split)) == pytest.approx(even)


@given(pipelines())
@settings(max_examples=200, deadline=None)
def test_filling_stages_is_as_good_where_blocks_are_alike(
    job: tuple[list[float], list[float], list[float], list[int]],
) -> None:
    costs, speeds, extra, limits = job
    split = fill_stages(len(costs), [1 / speed for speed in speeds], extra, limits)
    if split is None:
        with pytest.raises(ConfigError, match="memory for"):
            self_adapting_partition([1.0] * len(costs), speeds, extra=extra, max_blocks=limits)
        return
    exact = self_adapting_partition([1.0] * len(costs), speeds, extra=extra, max_blocks=limits)
    slowest = [max(e + n / v for e, n, v in zip(extra, s, speeds, strict=True)) for s in (split, exact)]
    assert sum(split) == len(costs)
    assert slowest[0] == pytest.approx(slowest[1])


def test_f4_01_equal_speeds_give_a_balanced_split() -> None:
    assert sorted(self_adapting_partition([1.0] * 30, [1.0] * 4)) == [7, 7, 8, 8]


def test_f4_03_embedding_and_head_count() -> None:
    assert self_adapting_partition([1.0] * 6, [1.0] * 4, extra=[1, 0, 0, 1]) == (1, 2, 2, 1)


def test_self_adapting_partition_of_unequal_networks() -> None:
    # 17 / 197 < 14 / 160: the proportional rule is near the optimum, not at it.
    assert self_adapting_partition([1.0] * 30, [197, 160]) == (17, 13)
    assert self_adapting_partition([1.0] * 48, [197, 160]) == (27, 21)
    # The head of a large vocabulary costs the last stage some blocks; memory moves blocks away from the first.
    assert self_adapting_partition([1.0] * 32, [1.0] * 4, extra=[0, 0, 0, 4]) == (9, 9, 9, 5)
    assert self_adapting_partition([1.0] * 32, [1.0] * 4, max_blocks=[6, 32, 32, 32]) == (6, 8, 9, 9)


def test_self_adapting_partition_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"memory for 3, 4 blocks per stage, the model has 8(?s:.)*too few"):
        self_adapting_partition([1.0] * 8, [1.0, 1.0], max_blocks=[3, 4])
    with pytest.raises(ConfigError, match="stage 1 has no room"):
        self_adapting_partition([1.0] * 8, [1.0, 1.0], max_blocks=[8, 0])
    with pytest.raises(ConfigError, match="positive speed"):
        self_adapting_partition([1.0] * 8, [1.0, 0.0])
    with pytest.raises(ConfigError, match="3 blocks for 4 stages"):
        paper_partition(3, [1.0] * 4)
