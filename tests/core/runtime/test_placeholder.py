# SPDX-License-Identifier: Apache-2.0
"""Placeholders: cheap, and never lost sight of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.placeholder import AbsentParameter, Placeholder, find_placeholder, make_placeholder

CPU = torch.device("cpu")


def _make(*shape: int) -> Tensor:
    return make_placeholder(shape or (2, 3), dtype=torch.float32, device=CPU, source="tok")


def test_it_costs_one_element() -> None:
    assert _make(1000, 1000).untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    "function",
    [
        lambda p: p + 1,
        lambda p: torch.ones(2, 3) * p,
        lambda p: p.transpose(0, 1).reshape(-1)[2:],
        lambda p: p.to(torch.bfloat16),
        lambda p: nn.LayerNorm(3)(p),
        lambda p: nn.Linear(3, 5)(p),
        lambda p: F.dropout(p, 0.5),
        lambda p: torch.cat([torch.ones(1, 3), p]),
        lambda p: torch.stack([torch.ones(2, 3), p]),
        lambda p: p.split(1)[1],
        lambda p: torch.where(torch.ones(2, 3) > 0, torch.ones(2, 3), p),
        lambda p: p.max(dim=1).values,
        lambda p: torch.einsum("ij,kj->ik", torch.ones(2, 3), p),
        lambda p: p.add_(1),
        lambda p: torch.ones(2, 3).add_(p),
    ],
)
def test_results_are_placeholders(function: Callable[[Tensor], Any]) -> None:
    assert find_placeholder(function(_make())) == "tok"


def _setitem(x: Tensor) -> Tensor:
    x[0] = _make(3)
    return x


def _view(x: Tensor) -> Tensor:
    x[0].copy_(_make(3))
    return x


def _augmented(x: Tensor) -> Tensor:
    x += _make()
    return x


def _out(x: Tensor) -> Tensor:
    torch.add(torch.ones(2, 3), _make(), out=x)
    return x


def _view_of_view(x: Tensor) -> Tensor:
    x.view(-1)[:3].mul_(_make(3))
    return x


@pytest.mark.parametrize("write", [_setitem, _view, _augmented, _out, _view_of_view])
def test_a_tensor_that_one_is_written_into_becomes_one(write: Callable[[Tensor], Tensor]) -> None:
    assert find_placeholder(write(torch.ones(2, 3))) == "tok"


@pytest.mark.parametrize(
    "read",
    [
        bool,
        float,
        int,
        lambda p: p.item(),
        lambda p: p.tolist(),
        lambda p: p.numpy(),
        lambda p: [1, 2][p.long()],
        lambda p: 1 if p > 0 else 2,
        lambda p: torch.equal(p, torch.zeros(())),
        lambda p: p.allclose(torch.zeros(())),
    ],
)
def test_values_cannot_be_read(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(HolmesError, match="computed from tok"):
        read(make_placeholder((), dtype=torch.float32, device=CPU, source="tok"))


def test_shapes_can_be_read() -> None:
    p = _make()
    assert (p.shape, p.dtype, p.device, p.ndim, len(p)) == ((2, 3), torch.float32, CPU, 2, 2)
    assert type(torch.zeros_like(p)) is Tensor
    assert type(p.new_ones(2)) is Tensor
    assert "Placeholder" in repr(p)


def test_it_is_found_in_containers() -> None:
    p = _make()
    assert find_placeholder({"a": [1, (None, {"b": p})]}) == "tok"
    assert find_placeholder([torch.ones(2), None, "x"]) is None


def _absent(*shape: int) -> nn.Parameter:
    param = nn.Parameter(torch.empty(shape, device="meta"))
    param.__class__ = AbsentParameter
    param.source, param.real_device = "head", CPU  # type: ignore[attr-defined]
    return param


@pytest.mark.parametrize(
    "function",
    [
        lambda w: F.linear(torch.ones(2, 3), w),
        lambda w: torch.ones(2, 3) @ w.t(),
        lambda w: F.embedding(torch.tensor([1, 2]), w),
        lambda w: torch.ones(4, 3) + w[:4],
        lambda w: w.float() * 2,
        lambda w: F.linear(_make(), w),
        lambda w: torch.ones(4, 3).add_(w),
    ],
)
def test_absent_parameters_give_placeholders(function: Callable[[Tensor], Any]) -> None:
    result = function(_absent(4, 3))
    assert isinstance(result, Placeholder)
    assert result.device == CPU


def test_absent_parameters_tell_their_shape_and_the_real_device() -> None:
    w = _absent(4, 3)
    assert (w.shape, w.size(0), w.numel(), w.dtype, w.device) == ((4, 3), 4, 12, torch.float32, CPU)
    assert isinstance(w, nn.Parameter)
