# SPDX-License-Identifier: Apache-2.0
"""What crosses a stage border: the form a block returns, rebuilt on the other side."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holmes_core.errors import HolmesError
from holmes_core.runtime.boundary import Boundary, describe_output
from holmes_core.runtime.placeholder import Absent, Placeholder, find_placeholder

HIDDEN = torch.ones(2, 3, requires_grad=True)


class _Cache:
    pass


def _same(hidden: Any, output: Any) -> Any:
    boundary = describe_output(output, block="b")[1]
    again = Boundary.from_json(json.loads(json.dumps(boundary.to_json())))
    assert again == boundary
    return again.wrap(hidden)


def test_a_tensor() -> None:
    assert _same(HIDDEN, HIDDEN) is HIDDEN
    found, boundary = describe_output(HIDDEN, block="b")
    assert found is HIDDEN
    assert (boundary.shape, boundary.dtype, boundary.requires_grad) == ((2, 3), torch.float32, True)


def test_a_tuple_with_everything() -> None:
    indices = torch.arange(4)
    output = (indices, HIDDEN, None, 3, True, "x", HIDDEN * 2, (HIDDEN, [None, HIDDEN]), _Cache(), {"a": HIDDEN})
    wrapped = _same(HIDDEN, output)
    assert wrapped[1] is HIDDEN
    assert wrapped[2:6] == (None, 3, True, "x")
    assert isinstance(wrapped[0], Placeholder)
    assert wrapped[0].shape == (4,)
    assert wrapped[0].dtype == torch.int64
    assert isinstance(wrapped[6], Placeholder)
    assert isinstance(wrapped[7][1][1], Placeholder)
    assert isinstance(wrapped[8], Absent)
    assert isinstance(wrapped[9], Absent)
    assert find_placeholder(wrapped[8]) == "b"
    with pytest.raises(HolmesError, match="'get' of the _Cache that b returned"):
        wrapped[8].get()


def test_lists_stay_lists() -> None:
    assert _same(HIDDEN, [HIDDEN, None]) == [HIDDEN, None]


@pytest.mark.parametrize("output", [None, {"x": HIDDEN}, (), (torch.arange(3),), "x"])
def test_other_forms_are_refused(output: Any) -> None:
    with pytest.raises(HolmesError, match="block 'b' returned"):
        describe_output(output, block="b")


def test_what_absent_blocks_return() -> None:
    boundary = describe_output((HIDDEN, HIDDEN), block="b")[1]
    first, second = boundary.placeholder(torch.device("cpu"), "a")
    assert find_placeholder(first) == find_placeholder(second) == "a"
    assert first.shape == (2, 3)
    assert first.untyped_storage().nbytes() == 4  # one element, whatever the shape


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple)),
    max_leaves=6,
)


@given(st.lists(values, max_size=4), st.integers(0, 4), st.booleans())
def test_plain_values_come_back_as_they_were(extras: list[Any], index: int, as_list: bool) -> None:
    output = [*extras[:index], HIDDEN, *extras[index:]]
    output = output if as_list else tuple(output)
    wrapped = _same(HIDDEN, output)
    assert type(wrapped) is type(output)
    assert [x for x in wrapped if x is not HIDDEN] == extras
