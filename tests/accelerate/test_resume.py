# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: resumed runs end where uninterrupted ones do, also under another layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.farm import Farm

SCRIPT = "tests.accelerate.scenarios:script"
PP2 = {"pp": 2, "num_microbatches": 2}
LOOP = ["--optimizer", "adamw", "--layers", "3"]


@pytest.fixture(scope="module")
def whole_run(farm: Farm) -> dict[str, Any]:
    """An uninterrupted run that saves in the middle of its second epoch."""
    return farm.run(SCRIPT, world=2, config=PP2, name="loop.py", words=[*LOOP, "--save_at", "14"]).values[0]


def test_what_is_in_a_checkpoint(whole_run: dict[str, Any]) -> None:
    folder = Path(whole_run["folder"]) / "checkpoint"
    assert {p.name for p in folder.iterdir()} == {
        "model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "random_states_1.pkl", "done.txt",
        "holmes_state.json", "holmes_checkpoint.json",
    }  # fmt: skip
    state = torch.load(folder / "optimizer.bin", weights_only=True)
    assert len(state["state"]) == sum(len(group["params"]) for group in state["param_groups"])  # every stage's part


@pytest.mark.parametrize("config", [PP2, {"pp": 1}, None], ids=["same", "one-rank", "plain-accelerate"])
def test_resume(farm: Farm, whole_run: dict[str, Any], config: dict[str, Any] | None) -> None:
    words = [*LOOP, "--resume", whole_run["folder"] + "/checkpoint"]
    world = (config or {}).get("pp", 1)
    rank_env = None if config else [{}]
    for found in farm.run(SCRIPT, world=world, config=config, rank_env=rank_env, name="loop.py", words=words).values:
        assert found["losses"] == pytest.approx(whole_run["losses"][14:], rel=1e-5)
        assert found["rates"] == pytest.approx(whole_run["rates"][14:], rel=1e-9)
        for name, value in found.get("weights", {}).items():
            torch.testing.assert_close(value, whole_run["weights"][name], rtol=0, atol=2e-5, msg=name)


def test_resume_from_parts(farm: Farm, whole_run: dict[str, Any]) -> None:
    sharded = {**PP2, "checkpoint": "sharded"}
    run = farm.run(SCRIPT, world=2, config=sharded, name="loop.py", words=[*LOOP, "--save_at", "14"])
    folder = Path(run.values[0]["folder"]) / "checkpoint"
    names = {p.name for p in folder.iterdir()}
    assert {"state.pt", "rank-00000.safetensors", "rank-00001.safetensors", "scheduler.bin"} <= names
    assert not {"model.safetensors", "optimizer.bin"} & names
    for config in (PP2, {"pp": 1}):
        words = [*LOOP, "--resume", str(folder)]
        (found, *_) = farm.run(SCRIPT, world=config["pp"], config=config, name="loop.py", words=words).values
        assert found["losses"] == pytest.approx(whole_run["losses"][14:], rel=1e-5)
        assert found["rates"] == pytest.approx(whole_run["rates"][14:], rel=1e-9)


def test_trainer_resumes(farm: Farm, plain: Callable[..., dict[str, Any]]) -> None:
    words = ["--set", 'save_strategy="steps"', "save_steps=5", "data_seed=3"]
    whole = farm.run(SCRIPT, world=2, config=PP2, name="trainer.py", words=words).values[0]
    saved = Path(whole["folder"]) / "trainer" / "checkpoint-5"
    names = {p.name for p in saved.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= names
    assert json.loads((saved / "config.json").read_text())["model_type"] == "gpt2"
    found = farm.run(SCRIPT, world=2, config=PP2, name="trainer.py", words=["--resume", str(saved), *words]).values[0]
    assert found["logs"][-8:] == [pytest.approx(log, rel=1e-4) for log in whole["logs"][-8:]]
    for name, value in found["weights"].items():
        torch.testing.assert_close(value, whole["weights"][name], rtol=0, atol=1e-5, msg=name)
    assert_close_to_plain(whole, plain("trainer.py", *words))


@pytest.mark.parametrize("config", [PP2, pytest.param({"dp": 2}, marks=pytest.mark.slow)], ids=["stages", "replicas"])
def test_trainer_goes_on_with_the_same_dropout(farm: Farm, config: dict[str, Any]) -> None:
    """Resumed in the middle of an epoch, a run draws the masks that an uninterrupted one draws there."""
    words = ["--dropout", "0.3", "--set", 'save_strategy="steps"', "save_steps=4", 'eval_strategy="no"']
    whole = farm.run(SCRIPT, world=2, config=config, name="trainer.py", words=words).values[0]
    saved = Path(whole["folder"]) / "trainer" / "checkpoint-4"
    found = farm.run(SCRIPT, world=2, config=config, name="trainer.py", words=["--resume", str(saved), *words]).values
    rest = [log for log in whole["logs"] if log["step"] > 4]
    assert [log for log in found[0]["logs"] if log["step"] > 4] == [pytest.approx(log, rel=1e-4) for log in rest]
    for name, value in found[0]["weights"].items():
        torch.testing.assert_close(value, whole["weights"][name], rtol=0, atol=1e-6, msg=name)


def assert_close_to_plain(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5, msg=name)
