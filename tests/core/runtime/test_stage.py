# SPDX-License-Identifier: Apache-2.0
"""Shapes on the edges: they may change from batch to batch and within one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

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
