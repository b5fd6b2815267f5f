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
from holmes_core.plan.one_f_one_b import embedding_on_last
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.schedule import before_embedding, torch_actions, trailing_weights
from holmes_core.runtime.torch_compat import stage_backward_input
from holmes_core.runtime.weights import WeightsBackward, WeightsTogether
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


EMBEDDING_LAST = {"defer_weights": True, "taper": True, "embedding": "last"}


@pytest.mark.parametrize("more", [EMBEDDING_LAST, {"defer_weights": True, "taper": True}, {"schedule": "zbv"}, {}])
def test_gradients_leave_before_a_stage_is_done_split_or_not(more: dict[str, Any]) -> None:
    workers = Workers(4)
    try:
        config = {"pp": 2, "dp": 2, "num_microbatches": 4, **more}
        for model in ("Gpt",) if "embedding" in more else ("Gpt", "sequential"):
            for left in workers.run(models.left_early, config, model).check():
                assert left["one_stage"] > 0
                assert left["done"] == left["all"]
                if "embedding" in more and left["stages"] == 2:  # its gradients leave while weights' parts are left
                    assert left["late"] < left["embedded"] < left["all"]
                    assert left["end"] == left["all"]
                else:
                    assert left["end"] == left["one_stage"]
        for left in workers.run(models.left_early, {**config, "overlap": False}, "Gpt").check():
            assert left["begin"] == 0
    finally:
        workers.close()


@pytest.mark.parametrize("shared", [False, True])
def test_split_backwards_are_ended_together_parameter_by_parameter_the_last_first(shared: bool) -> None:
    torch.manual_seed(0)
    body = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    batches = [torch.randn(2, 4, requires_grad=True) for _ in range(3)]
    sum(body(x).square().sum() for x in batches).backward()
    expected = [p.grad.clone() for p in body.parameters()]
    body.zero_grad()
    told: list[tuple[nn.Parameter, torch.Tensor]] = []
    parts = [stage_backward_input([body(x).square().sum()], None, [x], body.parameters())[1] for x in batches]
    assert all(p.grad is None for p in body.parameters())
    unused = nn.Parameter()
    first = set(body[0].parameters()) if shared else set()
    backward = WeightsBackward(
        [*body.parameters(), unused], parts, lambda param: told.append((param, param.grad.clone())), first
    )
    assert backward.unused() == [unused]
    backward.run(0.5)
    paused = len(told)
    backward.run()
    for param, grad in zip(body.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)
    assert all(torch.equal(param.grad, then) for param, then in told)  # complete when told
    order = [next(i for i, layer in enumerate(body) if any(p is one for p in layer.parameters())) for one, _ in told]
    assert order == ([0, 0, 2, 2, 1, 1] if shared else [2, 2, 1, 1, 0, 0])
    # Half of what is not shared: one of two layers; of three, one and of the next not all micro-batches.
    assert paused == (4 if shared else 2)


def test_weights_parts_at_the_end_of_a_stage_wait_for_its_last() -> None:
    orders = torch_actions(embedding_on_last(2, 5, split=True, tapered=True))
    # The embedding's own backward passes come before the last of them.
    assert trailing_weights(orders[1], 2) == WeightsTogether(micro_batches=frozenset({4}))
    together = WeightsTogether(micro_batches=frozenset({0, 3, 4}), pause=3, part=7 / 8)
    assert trailing_weights(orders[1], 2, embedding=0) == together
    assert trailing_weights(orders[1], 0) == trailing_weights(orders[0], 1) == WeightsTogether()
    assert before_embedding(2, split=True, tapered=True) == 7 / 8
    for other in ({"tapered": False}, {"split": False}, {"pp": 3}):
        assert before_embedding(**{"pp": 2, "split": True, "tapered": True, **other}) == 1.0


def test_a_tapered_batch_is_cut_smaller_at_its_ends() -> None:
    for taper, expected in ((True, [1, 2, 2, 2, 1]), (False, [2, 2, 2, 2])):
        layout = Layout(tp=1, dp=1, stages_per_cluster=(2,), num_microbatches=4, taper=taper)
        engine = SimpleNamespace(plan=SimpleNamespace(layout=layout))
        assert [len(part) for part in Engine.cut(engine, torch.arange(8))] == expected
