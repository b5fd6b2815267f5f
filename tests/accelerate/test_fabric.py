# SPDX-License-Identifier: Apache-2.0
"""``Fabric(strategy="holmes")`` against Fabric in one process."""

from __future__ import annotations

import pytest
import torch

from tests.lightning.farm import Farm

LOOP = "tests.accelerate.pieces:fabric"


def test_fabric(farm: Farm) -> None:
    (expected,) = farm.run(LOOP, strategy="auto", rank_env=[{}]).values
    for found in farm.run(LOOP, world=2, config={"pp": 2, "num_microbatches": 2}, strategy="holmes").values:
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert found["step"] == 3
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-5)
        for name, value in found.get("weights", {}).items():
            torch.testing.assert_close(value, expected["weights"][name], rtol=0, atol=1e-5, msg=name)
