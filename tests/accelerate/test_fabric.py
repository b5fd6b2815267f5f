# SPDX-License-Identifier: Apache-2.0
"""``Fabric(strategy="holmes")`` against Fabric in one process, and against its DistributedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lightning.farm import Farm

LOOP = "tests.accelerate.pieces:fabric"


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["step"] == 3
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-5)
    for name, value in found.get("weights", {}).items():
        torch.testing.assert_close(value, expected["weights"][name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("config", [{"pp": 2, "num_microbatches": 2}, {"tp": 2}], ids=["stages", "tensor-parallel"])
def test_as_in_one_process(farm: Farm, config: dict[str, Any]) -> None:
    (expected,) = farm.run(LOOP, strategy="auto", rank_env=[{}]).values
    for found in farm.run(LOOP, world=2, config=config, strategy="holmes").values:
        assert_same(found, expected)


def test_replicas_as_under_ddp(farm: Farm) -> None:
    """Each replica has its own batches and losses; the norms, weights and evaluation are those of both."""
    expected = farm.run(LOOP, world=2, strategy="ddp", rows=24).values
    found = farm.run(LOOP, world=2, config={"dp": 2}, strategy="holmes", rows=24).values
    for mine, other in zip(found, expected, strict=True):
        assert_same(mine, other)
        assert mine["early"] == [False, True, False] * 2  # not in no_backward_sync
    assert found[0]["losses"] != pytest.approx(found[1]["losses"], rel=1e-3)


@pytest.mark.slow
def test_replicas_of_stages_as_under_ddp(farm: Farm) -> None:
    expected = farm.run(LOOP, world=2, strategy="ddp", rows=24).values
    config = {"pp": 2, "dp": 2, "num_microbatches": 2}
    found = farm.run(LOOP, world=4, config=config, strategy="holmes", rows=24).values
    for mine in found:
        other = min(expected, key=lambda run: abs(run["losses"][0] - mine["losses"][0]))
        assert_same(mine, other)
