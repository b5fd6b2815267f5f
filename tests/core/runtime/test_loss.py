# SPDX-License-Identifier: Apache-2.0
"""How micro-batch losses add up: found on the first batches, or refused with what to set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holmes_core.errors import HolmesError
from holmes_core.runtime.loss import LossRule, read_loss
from tests.core.runtime import pipeline_models as models
from tests.models.pipeline import Workers, assert_same


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.mark.parametrize(
    ("loss", "setting", "rule"),
    [
        ("token_loss", "auto", "tokens"),
        ("token_loss", "tokens", "tokens"),
        ("sample_loss", "auto", "samples"),
        ("sample_loss", "samples", "samples"),
        ("sum_loss", "sum", "sum"),
    ],
)
def test_the_rule_is_found(two: Workers, loss: str, setting: str, rule: str) -> None:
    found = assert_same(two.run(models.run, "Gpt", dict(pp=2, loss_weight=setting), loss))
    assert {rank["rule"] for rank in found} == {rule}


@pytest.mark.parametrize(
    ("loss", "setting", "words"),
    [
        ("unfit_loss", "auto", "negatives within the batch"),
        ("sum_loss", "auto", "loss_weight: sum"),
        ("token_loss", "samples", "loss_weight: tokens"),
        ("sample_loss", "tokens", "loss_weight: samples"),
    ],
)
def test_a_loss_that_does_not_fit(two: Workers, loss: str, setting: str, words: str) -> None:
    outcome = two.run(models.run, "Gpt", dict(pp=2, loss_weight=setting), loss)
    assert "not the weighted mean" in outcome.refusal
    assert words in outcome.refusal
    assert [error and error[0] for error in outcome.errors] == ["HolmesError"] * 2  # every rank says so


def test_a_microbatch_without_any_label(two: Workers) -> None:
    """Its mean is NaN in its own process; it has no part in the batch's loss."""
    assert_same(two.run(models.empty_rows, dict(pp=2)))
    assert_same(two.run(models.empty_rows, dict(pp=2, schedule="zbv")))


@pytest.mark.parametrize("output", [torch.tensor(2.0), torch.tensor([2.0]), {"loss": torch.tensor(2.0), "x": 1}])
def test_read_loss(output: Any) -> None:
    assert read_loss(output).shape == ()
    assert float(read_loss(output)) == 2.0


@pytest.mark.parametrize("output", [None, 2.0, torch.zeros(2), {}, {"loss": None}])
def test_no_loss(output: Any) -> None:
    with pytest.raises(HolmesError, match="as its loss"):
        read_loss(output)


def test_probing_does_not_go_on_for_ever() -> None:
    """Rows without padding cannot tell tokens from samples: only the first batch is worth three more forwards."""
    rule = LossRule("auto")
    full = {"input_ids": torch.ones(4, 6, dtype=torch.long), "labels": torch.ones(4, 6, dtype=torch.long)}
    halves = [{key: value[:2] for key, value in full.items()}, {key: value[2:] for key, value in full.items()}]
    worth = [rule.worth_probing(*rule.probes(full, halves), None) for _ in range(5)]
    assert worth == [True, False, False, False, False]
    padded = {**full, "labels": full["labels"].clone()}
    padded["labels"][0, 2:] = -100
    halves = [{key: value[:2] for key, value in padded.items()}, {key: value[2:] for key, value in padded.items()}]
    assert rule.worth_probing(*rule.probes(padded, halves), None)  # this one can: it is checked, however late
    assert not rule.settled
    for _ in range(100):
        rule.worth_probing(*rule.probes(full, [full]), None)
    assert rule.settled
