# SPDX-License-Identifier: Apache-2.0
"""Compare what two runs of a scenario returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TIGHT = 2e-5


def assert_same_training(
    found: dict[str, Any], expected: dict[str, Any], *, rel: float = TIGHT, means: tuple[str, ...] = ()
) -> None:
    """Losses, gradient norms, rates, hooks, validation, logs, steps and final weights.

    `means`: values that Lightning averages over replicas batch by batch, whatever the number of tokens in each.
    """

    def known(values: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in values.items() if key not in means}

    assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
    assert found["norms"] == pytest.approx(expected["norms"], rel=10 * rel)
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-9)
    assert found["events"] == expected["events"]
    assert (found["global_step"], found["epoch"]) == (expected["global_step"], expected["epoch"])
    assert len(found["validation"]) == len(expected["validation"])
    for mine, other in zip(found["validation"], expected["validation"], strict=True):
        assert known(mine) == pytest.approx(known(other), rel=10 * rel)
        assert mine == pytest.approx(other, rel=5e-2)
    assert found["hand"] == pytest.approx(expected["hand"], rel=10 * rel)
    assert known(found["logged"]) == pytest.approx(known(expected["logged"]), rel=10 * rel)
    assert_same_weights(found["weights"], expected["weights"], atol=10 * rel)


def assert_same_weights(found: dict[str, Any], expected: dict[str, Any], *, atol: float = 10 * TIGHT) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
