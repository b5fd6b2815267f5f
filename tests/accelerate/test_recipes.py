# SPDX-License-Identifier: Apache-2.0
"""The Accelerate recipes run as their users start them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from holmes_core.config import HolmesConfig
from tests.lightning.farm import ROOT

RECIPES = ROOT / "recipes" / "accelerate"
LAUNCH = [Path(sys.executable).parent / "accelerate", "launch", "--config"]
SMALL = ["--size", "tiny", "--seq-len", "32", "--batch-size", "4", "--max-bytes", "20000", "--eval-every", "4"]


def lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("step ")]


@pytest.mark.slow
def test_pretraining_is_the_same_in_one_process_and_resumes(run_script: Any, tmp_path: Path) -> None:
    script = RECIPES / "pretrain_gpt.py"
    one = run_script([script, "--cpu", *SMALL, "--max-steps", "8", "--out", "one"], timeout=200).check()
    words = [*LAUNCH, RECIPES / "two.yaml", script, *SMALL]
    half = run_script([*words, "--max-steps", "4", "--out", "two"], timeout=200).check()
    assert "pp 2 x dp 1 x tp 1" in half
    rest = run_script([*words, "--max-steps", "8", "--resume", "two/checkpoint", "--out", "rest"], timeout=200).check()
    assert "step     8" in lines(rest)[-1]
    assert len(lines(one)) == 2
    assert (tmp_path / "rest" / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--lora"]], ids=["whole", "lora"])
def test_finetuning(run_script: Any, tmp_path: Path, words: list[str]) -> None:
    run = [*LAUNCH, RECIPES / "two.yaml", RECIPES / "finetune_llama.py", "--max-steps", "4", "--out", "o", *words]
    assert "held-out loss" in run_script(run, timeout=250).check()


@pytest.mark.parametrize("name", ["demo.yaml", "two.yaml", "holmes.yaml"])
def test_yaml_files(name: str) -> None:
    data = yaml.safe_load((RECIPES / name).read_text())
    config = HolmesConfig.load({"config": str(RECIPES / name)}, {})
    if config.pp is not None:
        assert data["num_processes"] == config.pp * (config.dp or 1)
