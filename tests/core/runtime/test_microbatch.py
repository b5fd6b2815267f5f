# SPDX-License-Identifier: Apache-2.0
"""Cutting batches: every row once, in order, in the container it came in."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.microbatch import batch_size_of, count, shape_key, slice_batch, split_sizes

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    name: str


@given(st.integers(1, 60), st.integers(1, 80))
def test_split_sizes(rows: int, parts: int) -> None:
    slices = split_sizes(rows, parts)
    sizes = [s.stop - s.start for s in slices]
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(rows))
    assert len(sizes) == min(rows, parts)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 60), st.integers(1, 80))
def test_tapered_sizes(rows: int, parts: int) -> None:
    even = [s.stop - s.start for s in split_sizes(rows, parts)]
    slices = split_sizes(rows, parts, taper=True)
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(rows))
    sizes = [s.stop - s.start for s in slices]
    if len(even) == 1 or even[-1] == 1:  # nothing to cut in two
        assert sizes == even
    else:
        assert sizes[1:-1] == even[:-1]
        assert sizes[0] + sizes[-1] == even[-1]
        assert 0 <= sizes[-1] - sizes[0] <= 1


def test_every_container() -> None:
    x = torch.arange(12).reshape(4, 3)
    batch = {
        "x": x,
        "scalar": torch.tensor(5.0),
        "other": torch.zeros(7),
        "names": ["a", "b", "c", "d"],
        "pair": Pair(x, [x, 1]),
        "sample": Sample(x, "n"),
        "flag": True,
    }
    part = slice_batch(batch, slice(1, 3), batch_size_of(batch))
    assert torch.equal(part["x"], x[1:3])
    assert part["scalar"].item() == 5.0
    assert part["other"].shape == (7,)
    assert part["names"] == ["b", "c"]
    assert isinstance(part["pair"], Pair)
    assert torch.equal(part["pair"].y[0], x[1:3])
    assert torch.equal(part["sample"].x, x[1:3])
    assert part["flag"] is True


def test_batch_encoding_stays_one() -> None:
    from transformers import BatchEncoding

    part = slice_batch(BatchEncoding({"input_ids": torch.zeros(4, 2)}), slice(0, 2), 4)
    assert isinstance(part, BatchEncoding)
    assert part["input_ids"].shape == (2, 2)


@pytest.mark.parametrize("batch", [{}, {"a": 1}, torch.tensor(1.0), {"x": torch.zeros(0, 3)}])
def test_no_batch_dimension(batch: Any) -> None:
    with pytest.raises(HolmesError, match="a batch of type"):
        batch_size_of(batch)


def test_counts() -> None:
    labels = torch.tensor([[5, -100, 7], [-100, -100, 9]])
    batches = [{"input_ids": labels, "labels": labels}, {"input_ids": labels[:1], "labels": labels[:1]}]
    assert count(batches, "tokens").tolist() == [3, 2]
    assert count(batches, "shifted_tokens").tolist() == [2, 1]
    assert count(batches, "samples").tolist() == [2, 1]
    assert count(batches, "sum").tolist() == [1, 1]
    assert count([{"x": torch.zeros(3), "labels": torch.tensor([0, 1, 2])}], "tokens").tolist() == [3]


def test_shape_keys_tell_shapes_and_not_values() -> None:
    a = {"x": torch.zeros(2, 3), "flag": True}
    assert shape_key(a) == shape_key({"x": torch.ones(2, 3), "flag": True})
    assert len({shape_key(a), shape_key({"x": torch.zeros(2, 4), "flag": True}), shape_key({**a, "flag": False})}) == 3
