# SPDX-License-Identifier: Apache-2.0
"""The recipes run as their users start them, and what they write can be loaded."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import lightning  # noqa: F401  (its import sets environment variables: here, not inside a test)
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from holmes_core.convert import main

RECIPES = Path(__file__).parents[2] / "recipes" / "lightning"


def run(script: str, *words: str, cwd: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RECIPES / script), "--accelerator", "cpu", *words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def load(folder: Path, tokenizer: bool = True) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    if tokenizer:
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == model.config.eos_token_id


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for i in range(6):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"The number of this file is {i}. " * 60)
    return tmp_path / "texts"


@pytest.mark.parametrize("tokenizer", ["bpe", pytest.param("bytes", marks=pytest.mark.slow)])
def test_pretrain(tmp_path: Path, texts: Path, tokenizer: str) -> None:
    sizes = "--size tiny --seq-len 32 --batch-size 4 --max-steps 8 --val-every 4 --val-batches 2 --vocab-size 300"
    words = [*sizes.split(), "--data", str(texts), "--tokenizer", tokenizer, "--out", "o"]
    out = run("pretrain_gpt.py", *words, "--strategy", "auto", "--devices", "1", cwd=tmp_path)
    assert "Validation perplexity" in out
    load(tmp_path / "o" / "hf")
    resumed = [*words, "--max-steps", "12", "--resume", "o/checkpoints/last.ckpt"]
    assert "for 12 steps" in run("pretrain_gpt.py", *resumed, "--strategy", "auto", "--devices", "1", cwd=tmp_path)


def logged(folder: Path, key: str) -> list[float]:
    with (folder / "logs" / "version_0" / "metrics.csv").open() as file:
        return [float(row[key]) for row in csv.DictReader(file) if row.get(key)]


def test_pretrain_on_two_stages_is_the_same_training(tmp_path: Path, texts: Path) -> None:
    sizes = "--size tiny --seq-len 32 --batch-size 4 --max-steps 10 --val-every 5 --val-batches 2 --tokenizer bytes"
    words = [*sizes.split(), "--data", str(texts)]
    run("pretrain_gpt.py", *words, "--strategy", "auto", "--devices", "1", "--out", "one", cwd=tmp_path)
    out = run("pretrain_gpt.py", *words, "--devices", "2", "--pp", "2", "--out", "two", cwd=tmp_path)
    assert "pp 2 x dp 1 x tp 1" in out
    for key, tolerance in (("train_loss", 1e-4), ("val_loss", 1e-4), ("val_ppl", 1e-3)):
        one, two = logged(tmp_path / "one", key), logged(tmp_path / "two", key)
        assert len(one) == len(two) > 0
        assert two == pytest.approx(one, rel=tolerance)
    assert main([str(tmp_path / "two" / "checkpoints" / "best.ckpt"), str(tmp_path / "best")]) == 0
    load(tmp_path / "best", tokenizer=False)


def test_finetune_on_two_stages(tmp_path: Path) -> None:
    words = ["--epochs", "1", "--max-steps", "3", "--devices", "2", "--pp", "2", "--out", "o"]
    assert "after 3 steps" in run("finetune_llama.py", *words, cwd=tmp_path)
    load(tmp_path / "o" / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
def test_finetune(tmp_path: Path, lora: bool) -> None:
    words = ["--max-steps", "4", "--epochs", "1", "--out", "o", *(["--lora"] if lora else [])]
    if lora:
        pytest.importorskip("peft")
    out = run("finetune_llama.py", *words, "--strategy", "auto", "--devices", "1", cwd=tmp_path)
    assert "after 4 steps" in out
    load(tmp_path / "o" / "hf")


def test_standard_library_split_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    from text_data import find_texts

    files = find_texts([], 300_000)
    assert files == find_texts([], 300_000)
    assert len(files) > 5
    assert not any("site-packages" in path.parts for path in files)


def test_shipped_instructions() -> None:
    lines = (RECIPES / "data" / "instructions.jsonl").read_text("ascii").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["instruction"] for row in rows}) == len(rows) >= 120
    assert all(set(row) == {"instruction", "response"} and row["response"] for row in rows)


def test_demo_yaml_is_a_valid_config() -> None:
    from holmes_core.config import HolmesConfig

    config = HolmesConfig.load({"config": str(RECIPES / "demo.yaml")}, {})
    assert (config.pp, config.dp) == (2, 2)
    assert yaml.safe_load((RECIPES / "demo.yaml").read_text())["clusters"][0]["ranks"] == [0, 1]
