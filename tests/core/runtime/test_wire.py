# SPDX-License-Identifier: Apache-2.0
"""Eight bits per element on the wire: how far a value may move, and that what is not finite is not hidden."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from holmes_core.runtime.boundary import Boundary
from holmes_core.runtime.wire import BLOCK, Wire, dequantise, quantise
from tests.models.pipeline import Workers


@pytest.mark.parametrize("numel", [1, BLOCK - 1, BLOCK, 5 * BLOCK + 3])
def test_no_element_moves_by_more_than_half_a_step_of_its_block(numel: int) -> None:
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) * torch.logspace(-6, 6, numel)
    sent = quantise(flat)
    assert sent.dtype == torch.uint8
    assert sent.numel() == math.ceil(numel / BLOCK) * (BLOCK + 4)
    back = dequantise(sent, numel)
    for block, found in zip(flat.split(BLOCK), back.split(BLOCK), strict=True):
        assert (block - found).abs().max() <= block.abs().max() / 127 / 2 * 1.001
    assert torch.equal(dequantise(quantise(back), numel), back)  # what was rounded once stays


def test_zeros_and_whole_steps_are_exact() -> None:
    steps = torch.arange(-127, 128).float() / 4
    assert torch.equal(dequantise(quantise(steps), steps.numel()), steps)
    assert torch.equal(dequantise(quantise(torch.zeros(300)), 300), torch.zeros(300))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_overflow_is_seen_on_the_other_side(value: float) -> None:
    """A loss scaler must find it; other blocks are not touched."""
    flat = torch.ones(2 * BLOCK)
    flat[3] = value
    back = dequantise(quantise(flat), flat.numel())
    assert not back[:BLOCK].isfinite().all()
    assert torch.equal(back[BLOCK:], flat[BLOCK:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_boundary_tensor(dtype: torch.dtype) -> None:
    boundary = Boundary(shape=(2, 3, 50), dtype=dtype, requires_grad=True)
    tensor = torch.randn(boundary.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    wire = Wire(form="int8")
    sent = wire.pack(tensor, boundary)
    buffer = wire.buffer(boundary, torch.device("cpu"))
    assert (sent.shape, sent.dtype) == (buffer.shape, buffer.dtype)
    back = wire.unpack(sent, boundary)
    assert (back.shape, back.dtype) == (tensor.shape, dtype)
    assert (back - tensor).abs().max() <= tensor.abs().max() / 100


def share(rank: int, shape: tuple[int, ...], form: str) -> float:
    """In a worker: each rank packs its share of one tensor and gathers the rest; returns the largest difference."""
    boundary = Boundary(shape=shape, dtype=torch.float32, requires_grad=True)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wire = Wire(group=dist.group.WORLD, form=form)
    sent = wire.pack(tensor, boundary)
    assert sent.shape == wire.buffer(boundary, torch.device("cpu")).shape
    return float((wire.unpack(sent, boundary) - tensor).abs().max())


def test_shares_of_a_tensor_parallel_group() -> None:
    two = Workers(2)
    try:
        for shape in ((2, 3, 50), (1, 7, 3), (4, 128)):
            assert max(two.run(share, shape, "same").check()) == 0
            assert 0 < max(two.run(share, shape, "int8").check()) < 0.05
    finally:
        two.close()
