# SPDX-License-Identifier: Apache-2.0
"""Loops in the shapes of Accelerate's examples, with a classifier that is no causal language model, against plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.farm import Farm

SCRIPT = "tests.accelerate.scenarios:script"
PP2 = {"pp": 2, "num_microbatches": 2, "print_plan": False}


def holmes(farm: Farm, *words: str, config: dict[str, Any] = PP2, **arguments: Any) -> list[dict[str, Any]]:
    world = config.get("pp", 1) * config.get("dp", 1)
    return farm.run(SCRIPT, world=world, config=config, name="shapes.py", words=list(words), **arguments).values


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    assert expected["losses"]
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert len(rank["eval"]) == len(expected["eval"])
        for mine, other in zip(rank["eval"], expected["eval"], strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-5)
    assert set(found[0]["weights"]) == set(expected["weights"])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "words",
    [["folds"], ["memory"], ["stopping"], ["eval_mode", "--accumulate", "3"], ["tracking"], ["functions"]],
    ids=lambda words: words[0],
)
def test_same_as_one_process(farm: Farm, plain: Callable[..., dict[str, Any]], words: list[str]) -> None:
    expected = plain("shapes.py", *words)
    found = holmes(farm, *words)
    assert_same(found, expected)
    for name in ("sizes", "stopped", "functions", "profiled"):
        assert [rank.get(name) for rank in found] == [expected.get(name)] * 2
    for mine, other in zip(found[0].get("notes", []), expected.get("notes", []), strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


def test_collectives_of_accelerate_utils_count_replicas(farm: Farm) -> None:
    ranks = holmes(farm, "functions", config={**PP2, "dp": 2})
    for rank in ranks:
        gathered, objects, total, mean, padded = rank["functions"]
        assert (gathered, objects, total, mean) == ([0, 10, 1, 11], ["r0", "r1"], 3.0, 1.5)
        assert padded in ([1, -1], [1, 1])


def test_a_forgotten_train_mode_is_mentioned_once(farm: Farm) -> None:
    run = farm.run(SCRIPT, world=2, config=PP2, name="shapes.py", words=["eval_mode"])
    assert run.values
    assert run.logs[0].count("is trained in eval mode") == 1
    assert "is trained in eval mode" not in run.logs[1]


def test_checkpoints_by_step_and_by_epoch(farm: Farm, plain: Callable[..., dict[str, Any]]) -> None:
    expected = plain("shapes.py", "checkpoints")
    whole = holmes(farm, "checkpoints")
    assert_same(whole, expected)
    folder = Path(whole[0]["folder"])
    per_epoch = len(expected["losses"]) // 3
    for name, done in (("step_4", 4), ("epoch_0", per_epoch)):
        words = ["checkpoints", "--resume", str(folder / name)]
        for found in (
            holmes(farm, *words),
            farm.run(SCRIPT, name="shapes.py", words=words, rank_env=[{}]).values,  # in plain Accelerate
        ):
            rest = {**expected, "losses": expected["losses"][done:], "eval": expected["eval"][done // per_epoch :]}
            assert_same(found, rest)
