# SPDX-License-Identifier: Apache-2.0
"""The engine over four processes: pipeline and replicas together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.runtime import pipeline_models as models
from tests.models.pipeline import Workers, assert_same


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    workers = Workers(4)
    yield workers
    workers.close()


@pytest.mark.parametrize(
    "config",
    [
        dict(pp=2, dp=2),
        dict(pp=2, dp=2, sharding="none"),
        dict(pp=2, dp=2, schedule="zbv", num_microbatches=4),
        dict(pp=4, dp=1, layers_per_stage=(1, 1, 2, 1)),
        dict(pp=4, dp=1, num_microbatches=2),  # fewer micro-batches than stages
        dict(pp=1, dp=4),
        dict(pp=4, dp=1, num_microbatches=5, run_ahead=2, clusters=[{"ranks": [0, 1]}, {"ranks": [2, 3]}]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["Wrapper", "Gpt"])
def test_layouts(four: Workers, name: str, config: dict[str, Any]) -> None:
    assert_same(four.run(models.run, name, config))


def test_ranks_with_nothing_to_train(four: Workers) -> None:
    frozen = ("tok", "pos", "scale", "blocks.0", "blocks.1")
    assert_same(four.run(models.run, "Gpt", dict(pp=4, dp=1, layers_per_stage=(1, 1, 2, 1)), "token_loss", 5, frozen))


def test_changing_shapes_in_a_deep_pipeline(four: Workers) -> None:
    values = four.run(models.steps, "Gpt", dict(pp=4, dp=1), [(8, 6), (3, 9), (1, 4), (8, 6)], "token_loss").check()
    assert max(rank["loss"] for rank in values) < 1e-5
    assert max(rank["weights"] for rank in values) < 1e-5
