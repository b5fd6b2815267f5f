# SPDX-License-Identifier: Apache-2.0
"""Both hosts: saved in one layout, loaded in another, bit-equal; from and to what other tools write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from holmes_core.convert import convert_checkpoint, main
from holmes_core.runtime.checkpoint import load_tree, load_whole
from tests.checkpoints.ranks import LAYOUTS
from tests.lightning.farm import Farm

LIGHTNING = "tests.checkpoints.hosts:by_lightning"
ACCELERATE = "tests.checkpoints.hosts:by_accelerate"
SHARDED = {"checkpoint": "sharded"}
ROWS, BATCH = 24, 4
#: Saved by, loaded by; twice around all layouts that both models allow.
PAIRS = [
    ("pp2", "tp2"), ("tp2", "dp2"), ("dp2", "zbv"), ("zbv", "one"), ("one", "pp2-tp2"), ("pp2-tp2", "pp2-dp2"),
    ("pp2-dp2", "two-clusters"), ("two-clusters", "dp2-tp2"), ("dp2-tp2", "interleaved"), ("interleaved", "dp2-whole"),
    ("dp2-whole", "tp2-turned"), ("tp2-turned", "pp2"), ("dp4", "tp2"), ("pp2-dp2", "one"),
]  # fmt: skip


def epoch(layout: str) -> int:
    """Steps to the end of an epoch: in the middle of one, the number of replicas must stay."""
    return ROWS // BATCH // LAYOUTS[layout][1].get("dp", 1)


def lightning(farm: Farm, layout: str, **options: Any) -> list[dict[str, Any]]:
    ranks, config = LAYOUTS[layout]
    return farm.run(LIGHTNING, world=ranks, config={**config, **options.pop("config", {})}, **options).values


def accelerate(farm: Farm, layout: str, **options: Any) -> list[dict[str, Any]]:
    ranks, config = LAYOUTS[layout]
    return farm.run(ACCELERATE, world=ranks, config={**config, **options.pop("config", {})}, **options).values


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key, value in expected.items():
            assert_same(found[key], value, f"{path}/{key}")
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, path
        assert torch.equal(found, expected), path
    elif isinstance(expected, (list, tuple)):
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}/{index}")
    else:
        assert found == expected, path


def check_lightning(farm: Farm, folder: Path, saved: str, loaded: str, **options: Any) -> None:
    """Save in parts after an epoch, load elsewhere, save as one file without a step in between."""
    parts, single = folder / f"{saved}.ckpt", folder / f"{saved}-{loaded}.ckpt"
    if not parts.exists():
        lightning(farm, saved, config=SHARDED, steps=epoch(saved), save=str(parts), **options)
    lightning(farm, loaded, steps=epoch(saved), resume=str(parts), save=str(single), **options)
    expected, found = load_whole(load_tree(parts)), torch.load(single, weights_only=True)
    assert len(expected["optimizer_states"][0]["state"]) == len(found["optimizer_states"][0]["state"]) > 0
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch", "loops"):
        assert_same(found[key], expected[key], key)


def check_accelerate(farm: Farm, folder: Path, saved: str, loaded: str, **options: Any) -> None:
    parts, single = folder / f"{saved}.parts", folder / f"{saved}-{loaded}"
    if not parts.exists():
        accelerate(farm, saved, config=SHARDED, save=str(parts), **options)
    accelerate(farm, loaded, steps=0, resume=str(parts), save=str(single), **options)
    expected = load_whole(load_tree(parts))
    weights = load_file(single / "model.safetensors")
    assert set(expected["models"][0]) - set(weights) <= {"lm_head.weight"}
    assert_same({key: expected["models"][0][key] for key in weights}, weights)
    assert_same(torch.load(single / "optimizer.bin", weights_only=True), expected["optimizers"][0])
    assert_same(
        torch.load(single / "scheduler.bin", weights_only=True), torch.load(parts / "scheduler.bin", weights_only=True)
    )


@pytest.mark.parametrize(("saved", "loaded"), PAIRS[3:4])
def test_lightning_loads_the_same_bits(farm: Farm, tmp_path: Path, saved: str, loaded: str) -> None:
    check_lightning(farm, tmp_path, saved, loaded, model="gpt2")


@pytest.mark.parametrize(("saved", "loaded"), PAIRS[:1])
def test_accelerate_loads_the_same_bits(farm: Farm, tmp_path: Path, saved: str, loaded: str) -> None:
    check_accelerate(farm, tmp_path, saved, loaded)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"model": "gpt2"}, {"model": "llama"}, {"model": "llama", "precision": "bf16-true"}]
)
@pytest.mark.parametrize("pair", PAIRS)
def test_lightning_matrix(farm: Farm, tmp_path: Path, pair: tuple[str, str], options: dict[str, Any]) -> None:
    check_lightning(farm, tmp_path, *pair, **options)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("pair", PAIRS)
def test_accelerate_matrix(farm: Farm, tmp_path: Path, pair: tuple[str, str], model: str) -> None:
    check_accelerate(farm, tmp_path, *pair, model=model)


# ---- other tools ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", ["auto", pytest.param("ddp", marks=pytest.mark.slow)])
def test_from_other_strategies_and_back(farm: Farm, tmp_path: Path, strategy: str) -> None:
    one, parts, back = tmp_path / "one.ckpt", tmp_path / "parts.ckpt", tmp_path / "back.ckpt"
    world = 2 if strategy == "ddp" else 1
    plain = farm.run(LIGHTNING, world=world, strategy=strategy, steps=3, save=str(one))
    assert plain.values
    lightning(farm, "pp2", config=SHARDED, steps=3, resume=str(one), save=str(parts))
    assert main([str(parts), str(back), "--single-file"]) == 0
    expected, found = torch.load(one, weights_only=True), torch.load(back, weights_only=True)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        assert_same(found[key], expected[key], key)
    again = farm.run(LIGHTNING, strategy="auto", steps=5, resume=str(back)).values[0]
    whole = farm.run(LIGHTNING, strategy="auto", steps=5, resume=str(one)).values[0]
    assert len(again["losses"]) == 2
    assert again["losses"] == whole["losses"]


@pytest.mark.slow
def test_from_plain_accelerate(farm: Farm, tmp_path: Path) -> None:
    plain, parts = tmp_path / "plain", tmp_path / "parts"
    farm.run(ACCELERATE, rank_env=[{}], plain=True, save=str(plain)).values  # noqa: B018
    accelerate(farm, "tp2", config=SHARDED, steps=0, resume=str(plain), save=str(parts))
    found, weights = load_whole(load_tree(parts)), load_file(plain / "model.safetensors")
    assert_same({key: found["models"][0][key] for key in weights}, weights)
    assert_same(found["optimizers"][0], torch.load(plain / "optimizer.bin", weights_only=True))


def test_hugging_face_and_back(farm: Farm, tmp_path: Path) -> None:
    """From safetensors in several files, with a tokenizer, through parts, to the same files."""
    source, parts, out = tmp_path / "source", tmp_path / "parts.ckpt", tmp_path / "out"
    torch.manual_seed(4)
    made = GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=1)
    )
    made.save_pretrained(source, max_shard_size="60KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    ranks, config = LAYOUTS["pp2-tp2"]
    run = farm.run(
        "tests.checkpoints.hosts:from_hub_folder", world=ranks, config={**config, **SHARDED}, folder=str(source),
        save=str(parts),
    )  # fmt: skip
    assert len(run.values) == 4
    convert_checkpoint(parts, out, tokenizer=source, max_shard_size="60KB")
    assert (out / "tokenizer.json").read_text() == (source / "tokenizer.json").read_text()
    found = AutoModelForCausalLM.from_pretrained(out)
    assert found.config.to_dict().keys() == made.config.to_dict().keys()
    assert found.config.n_layer == 3
    assert_same(found.state_dict(), made.state_dict())
    assert len(list(out.glob("*.safetensors"))) > 1


@pytest.mark.slow
def test_accelerate_folders_become_hugging_face_models(farm: Farm, tmp_path: Path) -> None:
    for name, config in (("parts", SHARDED), ("whole", {})):
        accelerate(farm, "pp2", config=config, save=str(tmp_path / name))
        convert_checkpoint(tmp_path / name, tmp_path / f"{name}-hf")
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-hf") for name in ("parts", "whole"))
    assert_same(one.state_dict(), other.state_dict())


# ---- callbacks and names --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_model_checkpoint_keeps_few(farm: Farm, tmp_path: Path, background: bool) -> None:
    config = {"pp": 2, "num_microbatches": 2, **SHARDED, "checkpoint_async": background}
    run = farm.run("tests.checkpoints.hosts:kept", world=2, config=config, folder=str(tmp_path / "kept"))
    for first, second in run.values:
        assert first == ["last.ckpt", "step=3.ckpt", "step=4.ckpt", "step 4", "4"]
        assert second == ["last.ckpt", "step=5.ckpt", "step=6.ckpt", "step 6", "2"]


@pytest.mark.slow
def test_accelerate_names_and_removes(farm: Farm, tmp_path: Path) -> None:
    config = {**SHARDED, "checkpoint_async": True}
    accelerate(farm, "pp2", config=config, steps=4, automatic=str(tmp_path))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["checkpoint_2", "checkpoint_3"]
    (found, *_) = accelerate(farm, "one", steps=0, resume="", automatic=str(tmp_path))
    assert found["rate"] == [pytest.approx(1e-3 / 5)]
