# SPDX-License-Identifier: Apache-2.0
"""Compare what two runs of a scenario returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TIGHT = 2e-5


def assert_same_training(
    found: dict[str, Any], expected: dict[str, Any], *, rel: float = TIGHT, norms: bool = True
) -> None:
    """Losses, gradient norms, rates, hooks, validation, logs, steps and final weights."""
    assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
    if norms:
        assert found["norms"] == pytest.approx(expected["norms"], rel=10 * rel)
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-9)
    assert found["events"] == expected["events"]
    assert (found["global_step"], found["epoch"]) == (expected["global_step"], expected["epoch"])
    assert len(found["validation"]) == len(expected["validation"])
    for mine, other in zip(found["validation"], expected["validation"], strict=True):
        assert mine == pytest.approx(other, rel=10 * rel)
    assert found["hand"] == pytest.approx(expected["hand"], rel=10 * rel)
    assert found["logged"] == pytest.approx(expected["logged"], rel=10 * rel)
    assert_same_weights(found["weights"], expected["weights"], atol=10 * rel)


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any], *, atol: float = 10 * TIGHT) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
