# SPDX-License-Identifier: Apache-2.0
"""Jobs of real processes that plan themselves: memory, plan.json, and numbers measured where hosts differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holmes_core.cluster.topology import build_topology
from holmes_core.config import HolmesConfig
from holmes_core.plan.layout import ModelFacts
from holmes_core.plan.plan import make_plan
from holmes_core.plan.plan_file import write_plan

LIGHTNING = """
import json, os, sys
import lightning.pytorch as L
import torch
from transformers import GPT2Config, GPT2LMHeadModel

shape = json.loads(sys.argv[1])

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = GPT2Config(n_positions=32, bos_token_id=None, eos_token_id=None, use_cache=False, **shape)
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

rows = torch.randint(0, shape["vocab_size"], (8, 32))
loader = torch.utils.data.DataLoader([{"input_ids": r, "labels": r} for r in rows], batch_size=2)
trainer = L.Trainer(strategy="holmes", accelerator="cpu", devices=2, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), loader)
if trainer.is_global_zero:
    print("TRAINED\\n", end="")
"""

PLAIN = """
import json, os, sys
import torch
from holmes_core.runtime.parallelize import parallelize
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
config = GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=6, n_head=2, bos_token_id=None,
    eos_token_id=None, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
os.environ["HOLMES_HOST"] = "h" + os.environ["RANK"]
random = torch.get_rng_state()
run = parallelize(model, optimizer, json.loads(sys.argv[1]))
losses = []
for step in range(3):
    ids = torch.randint(0, 300, (4, 32), generator=torch.Generator().manual_seed(step))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(round(loss.item(), 5))
if os.environ["RANK"] == "0":
    print("LOSSES " + json.dumps(losses) + "\\n", end="")
"""

# 57 M parameters: 0.9 GiB with AdamW; one head, so that it cannot be split inside layers.
LARGE = {"n_embd": 768, "n_layer": 8, "n_head": 1, "vocab_size": 512}
SMALL = {"n_embd": 64, "n_layer": 6, "n_head": 2, "vocab_size": 300}


def lightning(run_script: Any, tmp_path: Path, shape: dict[str, int], **config: Any) -> Any:
    (tmp_path / "train.py").write_text(LIGHTNING)
    (tmp_path / "holmes.yaml").write_text(json.dumps({"timeout": 60, **config}))
    return run_script(["train.py", json.dumps(shape)], env={"HOLMES_CONFIG": "holmes.yaml"}, timeout=240)


def words(run: Any) -> str:
    return " ".join(run.output.split())


def test_too_little_memory_is_refused_before_training(run_script: Any, tmp_path: Path) -> None:
    run = lightning(run_script, tmp_path, LARGE, pp=1, memory_limit=1.15)
    assert run.returncode != 0
    assert "does not fit the memory" in run.output, run.output
    assert "TRAINED" not in run.output
    assert "bytes) are missing" in words(run)
    assert "- pp: 2, dp: 1: pp 2 x dp 1 x tp 1" in words(run)


def test_open_degrees_are_chosen_so_that_the_model_fits(run_script: Any, tmp_path: Path) -> None:
    run = lightning(run_script, tmp_path, LARGE, memory_limit=1.15)
    assert run.returncode == 0, run.output
    assert "pp 1 x dp 2 x tp 1 would not fit the memory" in words(run)
    assert "2 ranks = pp 2 x dp 1 x tp 1" in run.output
    assert "TRAINED" in run.output


@pytest.mark.parametrize(("layers", "follows"), [(6, True), (8, False)])
def test_a_plan_is_followed_or_refused(run_script: Any, tmp_path: Path, layers: int, follows: bool) -> None:
    clusters = [{"name": "a", "ranks": [1]}, {"name": "b", "ranks": [0]}]
    config = HolmesConfig(pp=2, layers_per_stage=(4, 2), clusters=clusters, embedding="first")  # type: ignore[arg-type]
    facts = ModelFacts(num_blocks=6, num_heads=2, num_kv_heads=2, vocab_size=300, tied=True)
    write_plan(make_plan(config, build_topology(config, ["here", "here"]), facts), tmp_path / "plan.json")
    run = lightning(run_script, tmp_path, {**SMALL, "n_layer": layers}, plan="plan.json")
    assert (run.returncode == 0) == follows, run.output
    assert ("TRAINED" in run.output) == follows
    assert ("0-3" in run.output) == follows
    assert ("the model has 8 blocks" in words(run)) != follows


def test_measuring_changes_no_number(run_script: Any, tmp_path: Path) -> None:
    """Two ranks that call themselves two hosts: with and without measuring first, the losses are the same."""
    (tmp_path / "train.py").write_text(PLAIN)
    found = {}
    for probe in ("off", "auto"):
        config = json.dumps({"pp": 2, "timeout": 60, "probe": probe})
        run = run_script(["train.py", config], nproc=2, env={"XDG_CACHE_HOME": str(tmp_path / "cache")})
        assert run.returncode == 0, run.output
        assert ("measured in" in words(run)) == (probe == "auto")
        found[probe] = next(line for line in run.output.splitlines() if line.startswith("LOSSES"))
    assert found["auto"] == found["off"]
    assert len(list((tmp_path / "cache/holmes/probe").iterdir())) == 1
