# SPDX-License-Identifier: Apache-2.0
"""No block is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_core.errors import ConfigError
from holmes_core.plan.partition import check_layers_per_stage, equal_partition


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
