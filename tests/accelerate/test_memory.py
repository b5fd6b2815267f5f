# SPDX-License-Identifier: Apache-2.0
"""A pretrained model costs a rank its own part of the memory, from from_pretrained to the first step."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # transformers imports it, and it sets an environment variable
from transformers import LlamaConfig, LlamaForCausalLM

from tests.accelerate.test_launch import ACCELERATE, YAML
from tests.lightning.farm import ROOT

SCRIPT = ROOT / "tests" / "scripts" / "accelerate" / "large.py"


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_each_rank_holds_its_part_only(run_script: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    size = (tmp_path / "model" / "model.safetensors").stat().st_size
    (tmp_path / "plain").mkdir()
    run_script([SCRIPT, "plain", "model", "--copy"], env={"ACCELERATE_USE_CPU": "true"}).check()
    plain = json.loads((tmp_path / "plain" / "rank0.json").read_text())
    assert plain["peak"] > 0.95 * size  # what is measured really grows with the weights

    (tmp_path / "holmes.yaml").write_text(YAML)
    (tmp_path / "out").mkdir()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(tmp_path / "model")
    run_script([ACCELERATE, "launch", "--config", "holmes.yaml", SCRIPT, "out", "model"]).check()
    for rank in range(2):
        found = json.loads((tmp_path / "out" / f"rank{rank}.json").read_text())
        assert found["peak"] < 0.8 * size, (found["peak"], size)
        assert found["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert found["after"] == pytest.approx(plain["after"], rel=1e-5)
