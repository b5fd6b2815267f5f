# SPDX-License-Identifier: Apache-2.0
"""The standard loop of Accelerate, split over ranks, against one plain process: losses, norms, rates, weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lightning.farm import Farm

SCRIPT = "tests.accelerate.scenarios:script"
PP2 = {"pp": 2, "num_microbatches": 2}
PP2_TP2 = {"pp": 2, "tp": 2, "num_microbatches": 2}
PP2_DP2 = {"pp": 2, "dp": 2, "num_microbatches": 2}


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def holmes(farm: Farm, config: dict[str, Any], *words: str, **arguments: Any) -> list[dict[str, Any]]:
    world = config.get("pp", 1) * config.get("dp", 1) * config.get("tp", 1)
    env = {"REPLICAS": str(config.get("dp", 1))}
    return farm.run(
        SCRIPT, world=world, config=config, env=env, name="loop.py", words=list(words), **arguments
    ).values


def assert_same(
    found: list[dict[str, Any]], expected: dict[str, Any], *, rel: float = 1e-5, weights: float = 1e-5
) -> None:
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], rel=rel)
        assert rank["norms"] == pytest.approx(expected["norms"], rel=10 * rel)
        assert rank["rates"] == pytest.approx(expected["rates"], rel=1e-9)
        for mine, other in zip(rank["eval"], expected["eval"], strict=True):
            assert mine[1] == other[1]
            assert mine[2] == pytest.approx(other[2], rel=10 * rel)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], value, rtol=0, atol=weights, msg=name)
    assert list(found[0]["weights"]) == list(expected["weights"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (PP2, ["--accumulate", "3", "--layers", "3"]),
        slow(PP2, ["--by_hand", "--accumulate", "2", "--model", "llama", "--clip_value", "0.01"]),
        (PP2, ["--own_loss", "--accumulate", "2", "--order", "scheduler,eval,train,optimizer,model"]),
        slow(PP2, ["--separately", "--order", "optimizer,train,model,eval,scheduler"]),
        (PP2_TP2, ["--model", "llama", "--accumulate", "2"]),
        slow({"pp": 2, "schedule": "interleaved_1f1b", "num_microbatches": 2}, ["--own_loss"]),
    ],
    ids=["accumulate", "by-hand", "own-loss", "separately", "tp", "interleaved"],
)
def test_same_as_one_process(
    farm: Farm, plain: Callable[..., dict[str, Any]], config: dict[str, Any], words: list[str]
) -> None:
    expected = plain("loop.py", *words)
    found = holmes(farm, config, *words)
    assert_same(found, expected)
    assert [rank["rows"] for rank in found] == [expected["rows"]] * len(found)  # same batches on all ranks
    assert {rank["processes"] for rank in found} == {1}


@pytest.mark.parametrize("sharding", ["optimizer", slow("none")])
def test_replicas(farm: Farm, plain: Callable[..., dict[str, Any]], sharding: str) -> None:
    """Two replicas with batches of 4 train as one process with batches of 8 (rows of one length: equal weights)."""
    words = ["--unpadded", "--in_order", "--accumulate", "2", "--rows", "48"]
    expected = plain("loop.py", *words, replicas=2)
    found = holmes(farm, {**PP2_DP2, "sharding": sharding}, *words)
    assert_same(found, expected)
    assert {rank["processes"] for rank in found} == {2}
    for step, whole in enumerate(expected["rows"]):
        parts = sorted({tuple(rank["rows"][step]) for rank in found})
        assert len(parts) == 2
        assert sorted(sum(parts, ())) == sorted(whole)


@pytest.mark.slow
def test_adamw_in_bf16(farm: Farm, plain: Callable[..., dict[str, Any]]) -> None:
    words = ["--mixed_precision", "bf16", "--optimizer", "adamw", "--epochs", "1"]
    expected = plain("loop.py", *words)
    found = holmes(farm, PP2, *words)
    assert_same(found, expected, rel=5e-3, weights=4e-3)
