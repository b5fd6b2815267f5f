# SPDX-License-Identifier: Apache-2.0
"""Users' own models over two and three real processes: exact, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.runtime import pipeline_models as models
from tests.models.pipeline import Workers, assert_same


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Workers]:
    workers = Workers(3)
    yield workers
    workers.close()


UNEVEN: dict[str, Any] = dict(pp=2, layers_per_stage=(2, 3))
EXACT = [
    ("Gpt", UNEVEN),
    ("Gpt", dict(pp=2, split_points=("blocks.1",))),
    ("Named", dict(pp=2, split_points=("three",))),
    ("sequential", dict(pp=2)),
    ("sequential", dict(pp=2, split_points=("4",))),
    ("ScaledBetween", UNEVEN),
    ("PositionEveryBlock", UNEVEN),
    ("NoGradBody", UNEVEN),
    ("Wrapper", UNEVEN),
    ("Checkpointed", UNEVEN),
    ("CheckpointedPairs", UNEVEN),  # the border is a border of checkpoints, too
    ("HandTied", dict(pp=2, placement={"tok": "ends"})),
    ("FirstResidual", dict(pp=2, placement={"tok": "ends"})),
]
REFUSED = [
    ("HandTied", UNEVEN, "depends on 'tok'"),
    ("FirstResidual", UNEVEN, "depends on 'tok'"),
    ("EveryBlockReadsEmbeddings", UNEVEN, "comes from 'tok'"),
    ("SkipConnections", UNEVEN, "comes from 'blocks.0'"),
    ("Buffered", UNEVEN, "depends on 'blocks.0'"),
    ("SharedDict", UNEVEN, "writes into its argument 1"),
    ("SharedTensor", UNEVEN, "writes into its argument 1"),
    ("StateList", UNEVEN, "comes from 'blocks.1'"),
    ("ReadsEmbedding", UNEVEN, "reads the values"),
    ("InFunction", UNEVEN, "autograd.Function Reversible"),
    ("CheckpointedReentrant", UNEVEN, "use_reentrant=False"),
    ("CheckpointedPairs", dict(pp=2, layers_per_stage=(3, 2)), "checkpoint reaches over the border"),
    ("Twice", UNEVEN, "a second time"),
    ("LayerDrop", UNEVEN, "layerdrop"),
    ("HiddenStates", UNEVEN, "asked to return hidden_states of every block"),
    ("Gpt", dict(pp=2, split_points=("nope",)), "name no module"),
]


@pytest.mark.parametrize(("name", "config"), EXACT)
def test_exact(two: Workers, name: str, config: dict[str, Any]) -> None:
    assert_same(two.run(models.run, name, config))


@pytest.mark.parametrize(("name", "config", "words"), REFUSED)
def test_refused(two: Workers, name: str, config: dict[str, Any], words: str) -> None:
    outcome = two.run(models.run, name, config)
    assert words in outcome.refusal, outcome
    assert all(outcome.errors)
    assert outcome.ended
    assert outcome.seconds < 30


def test_refused_auxiliary_loss_on_modules(two: Workers) -> None:
    outcome = two.run(models.run, "AuxAttribute", {**UNEVEN, "check_loss": False}, "aux_loss")
    assert "attribute 'aux_loss'" in outcome.refusal


@pytest.mark.parametrize("name", ["Gpt", "Wrapper", "ScaledBetween", "PositionEveryBlock", "Checkpointed"])
def test_three_stages_exact(three: Workers, name: str) -> None:
    found = assert_same(three.run(models.run, name, dict(pp=3, layers_per_stage=(1, 2, 2))))
    shared = {"pos", "backbone.pos", "temperature", "scale", "backbone.scale"}
    for rank in found:  # raw and scalar parameters around the blocks live on every stage, gradients summed
        assert shared & set(rank["names"])


def test_three_stages_named_blocks(three: Workers) -> None:
    assert_same(three.run(models.run, "Named", dict(pp=3, split_points=("two", "four"))))


@pytest.mark.parametrize("config", [UNEVEN, dict(pp=2)])
def test_sequence_classification_is_exact(two: Workers, config: dict[str, Any]) -> None:
    found = assert_same(two.run(models.classifier, config))
    assert {rank["rule"] for rank in found} <= {"samples", "shifted_tokens", "tokens"}


def test_gradient_checkpointing_of_transformers(two: Workers) -> None:
    found = assert_same(two.run(models.checkpointed_llama, UNEVEN))
    assert sorted(rank["calls"] for rank in found) == [0, 4]  # two micro-batches, forward and recomputed


@pytest.mark.parametrize("mistake", ["drop_received_gradient", "equal_weights", "own_shared_gradients"])
def test_mistakes_are_noticed(two: Workers, mistake: str) -> None:
    outcome = two.run(models.run, "PositionEveryBlock", UNEVEN, "token_loss", 5, (), False, mistake)
    outcome.check()
    with pytest.raises(AssertionError):
        assert_same(outcome)
