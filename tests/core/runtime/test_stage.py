# SPDX-License-Identifier: Apache-2.0
"""Shapes on the edges: they may change from batch to batch and within one."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holmes_core.plan.layout import Layout
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.stage import HolmesStage
from holmes_core.runtime.torch_compat import stage_backward_input
from tests.core.runtime import pipeline_models as models
from tests.models.pipeline import Outcome, Workers


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


def _exact(outcome: Outcome) -> list[dict[str, Any]]:
    values = outcome.check()
    for rank in values:
        assert rank["loss"] < 1e-5
        assert rank["weights"] < 1e-5
    return values


SHAPES = [(6, 9), (6, 13), (5, 4), (1, 7), (6, 9), (7, 9), (2, 9), (6, 13)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved_1f1b", "zbv"])
def test_batches_of_changing_shapes(two: Workers, schedule: str) -> None:
    """Rows that no number of micro-batches divides, and fewer rows than micro-batches or stages."""
    config = dict(pp=2, schedule=schedule, num_microbatches=4)
    values = _exact(two.run(models.steps, "Gpt", config, SHAPES, "token_loss"))
    assert values[0]["counts"] == [min(4, rows) for rows, _ in SHAPES]


def test_shapes_that_depend_on_values(two: Workers) -> None:
    config = dict(pp=2, num_microbatches=3, dynamic_shapes=True)
    _exact(two.run(models.steps, "Gpt", config, SHAPES, "trimmed_loss"))
    outcome = two.run(models.steps, "Gpt", {**config, "dynamic_shapes": False}, [(6, 9)] * 3, "trimmed_loss")
    assert "dynamic_shapes: true" in outcome.refusal
    assert all(outcome.errors)
    assert outcome.ended


@pytest.mark.parametrize("layers", [(0, 5), (5, 0), (1, 4)])
def test_stages_without_blocks(two: Workers, layers: tuple[int, int]) -> None:
    config = dict(pp=2, num_microbatches=3, layers_per_stage=layers)
    _exact(two.run(models.steps, "Gpt", config, [(5, 7), (3, 4)], "token_loss"))


def test_activations_in_eight_bits_between_clusters(two: Workers) -> None:
    """Close to one process, and not equal to it; inside a cluster the setting changes nothing."""
    config = dict(pp=2, num_microbatches=3, wire_dtype="int8")
    clusters = [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}]
    apart = two.run(models.steps, "Gpt", {**config, "clusters": clusters}, SHAPES, "token_loss").check()
    assert 1e-6 < max(rank["loss"] for rank in apart) < 1e-2
    _exact(two.run(models.steps, "Gpt", config, SHAPES, "token_loss"))


@pytest.mark.parametrize("more", [{"defer_weights": True, "taper": True}, {"schedule": "zbv"}, {}])
def test_gradients_leave_before_a_stage_is_done_split_or_not(more: dict[str, Any]) -> None:
    workers = Workers(4)
    try:
        for left, there in workers.run(models.left_early, {"pp": 2, "dp": 2, "num_microbatches": 4, **more}).check():
            assert left == there > 0
        for left, _ in workers.run(models.left_early, {"pp": 2, "dp": 2, "overlap": False, **more}).check():
            assert left == 0
    finally:
        workers.close()


def test_a_split_backward_tells_of_each_parameter_the_last_first() -> None:
    torch.manual_seed(0)
    body = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    x = torch.randn(2, 4, requires_grad=True)
    body(x).square().sum().backward()
    expected = [p.grad.clone() for p in body.parameters()]
    body.zero_grad()
    told: list[nn.Parameter] = []
    stage = SimpleNamespace(body=body, accumulated=told.append)
    _, groups = stage_backward_input([body(x).square().sum()], None, [x], body.parameters())
    assert all(p.grad is None for p in body.parameters())
    HolmesStage._weights_backward(stage, groups)
    for param, grad in zip(body.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
    layers = [next(i for i, layer in enumerate(body) if any(p is param for p in layer.parameters())) for param in told]
    assert layers == [2, 2, 1, 1, 0, 0]


def test_a_tapered_batch_is_cut_smaller_at_its_ends() -> None:
    for taper, expected in ((True, [1, 2, 2, 2, 1]), (False, [2, 2, 2, 2])):
        layout = Layout(tp=1, dp=1, stages_per_cluster=(2,), num_microbatches=4, taper=taper)
        engine = SimpleNamespace(plan=SimpleNamespace(layout=layout))
        assert [len(part) for part in Engine.cut(engine, torch.arange(8))] == expected
