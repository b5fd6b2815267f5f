# SPDX-License-Identifier: Apache-2.0
"""Run a list of jobs on a number of ranks: each trains and saves in some layout, or loads in another and compares."""

from __future__ import annotations

import copy
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.runtime import state
from holmes_core.runtime.checkpoint import load_tree
from holmes_core.runtime.checkpoint_saver import Saver
from tests.core.runtime.test_state import Job, adamw, gpt2, llama, tensors_of
from tests.lightning.farm import Context

#: name -> ranks, settings
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"pp": 1}),
    "pp2": (2, {"pp": 2, "num_microbatches": 2}),
    "tp2": (2, {"tp": 2}),
    "tp2-turned": (2, {"tp": 2, "rank_order": (1, 0)}),
    "dp2": (2, {"dp": 2}),
    "dp2-whole": (2, {"dp": 2, "sharding": "none"}),
    "zbv": (2, {"pp": 2, "schedule": "zbv", "num_microbatches": 4}),
    "pp4": (4, {"pp": 4, "num_microbatches": 4}),
    "dp4": (4, {"dp": 4}),
    "tp4": (4, {"tp": 4}),
    "pp2-dp2": (4, {"pp": 2, "dp": 2, "num_microbatches": 2}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2, "num_microbatches": 2}),
    "dp2-tp2": (4, {"dp": 2, "tp": 2}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved_1f1b", "num_microbatches": 2}),
    "two-clusters": (
        4,
        {
            "pp": 2,
            "dp": 2,
            "num_microbatches": 2,
            "clusters": [{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2, 3]}],
        },
    ),
}


def llama4(seed: int = 0) -> nn.Module:
    """An untied LLaMA with enough key-value heads for four ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, num_key_value_heads=4, use_cache=False, **sizes))


def half(seed: int = 0) -> nn.Module:
    """A LLaMA whose master weights are bfloat16."""
    return llama(seed).to(torch.bfloat16)


MODELS = {"tied": gpt2, "untied": llama4, "bf16": half}


def make_job(layout: str, model: str, seed: int = 0) -> Job:
    made = MODELS[model](seed)
    return Job(made, copy.deepcopy(LAYOUTS[layout][1]), adamw)


def whole(job: Job) -> dict[str, Any]:
    assert job.optimizer is not None
    return {
        "model": state.full_state_dict(job.engine),
        "optimizer": state.full_optimizer_state(job.engine, job.optimizer),
    }


def tree_of(job: Job) -> dict[str, Any]:
    assert job.optimizer is not None
    return {
        "model": state.sharded_state_dict(job.engine),
        "optimizer": state.sharded_optimizer_state(job.engine, job.optimizer, "optimizer.0"),
        "note": {"step": 2, "words": ["a", "b"], "rng": torch.get_rng_state()},
    }


def save(folder: Path, layout: str, model: str, background: bool = False) -> None:
    """Train two steps, save a folder and, beside it, what one process would have saved."""
    job, name = make_job(layout, model), f"{model}-{'background' if background else layout}"
    job.train(range(2))
    saver = Saver(background=background, timeout=60)
    saver.save_sharded(folder / name, tree_of(job), world=job.engine.groups.world)
    truth = whole(job)
    if background:
        job.train(range(2, 4))  # what is saved must not change any more
        saver.wait()
    if dist.get_rank() == 0:
        torch.save(truth, folder / f"{name}.truth")


def load(folder: Path, layout: str, model: str, saved_by: str) -> None:
    """Load into a model of other weights, and compare with what one process would have saved."""
    job = make_job(layout, model, seed=1)
    tree = load_tree(folder / f"{model}-{saved_by}")
    assert tree["note"]["words"] == ["a", "b"]
    assert tree["note"]["rng"].dtype == torch.uint8
    assert state.load_state_dict(job.engine, tree["model"]) == ([], [])
    assert job.optimizer is not None
    state.load_optimizer_state(job.engine, job.optimizer, tree["optimizer"])
    found = whole(job)
    if dist.get_rank() == 0:
        assert_equal(found, torch.load(folder / f"{model}-{saved_by}.truth"))


def go_on(folder: Path, layout: str, model: str, saved_by: str) -> None:
    """Two steps after loading end where two steps without a break end."""
    whole_run, job = make_job(layout, model), make_job(layout, model, seed=1)
    whole_run.train(range(4))
    tree = load_tree(folder / f"{model}-{saved_by}")
    state.load_state_dict(job.engine, tree["model"])
    assert job.optimizer is not None
    state.load_optimizer_state(job.engine, job.optimizer, tree["optimizer"])
    job.train(range(2, 4))
    found, expected = whole(job), whole(whole_run)
    if dist.get_rank() == 0:
        assert_equal(found["model"], expected["model"])


def assert_equal(found: Any, expected: Any) -> None:
    """Same keys in the same order, tensors bit-equal."""
    found, expected = tensors_of(found), tensors_of(expected)
    assert list(found) == list(expected)
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        else:
            assert found[key] == value, key


ACTIONS: dict[str, Any] = {"save": save, "save_behind": partial(save, background=True), "load": load, "go_on": go_on}


def jobs(context: Context, *, folder: str, jobs: list[list[Any]]) -> list[str]:
    """Run jobs one after the other on all ranks; returns what went wrong with each."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = []
    for action, *arguments in jobs:
        try:
            ACTIONS[action](Path(folder), *arguments)
            found.append("")
        except Exception as error:
            found.append(f"rank {context.rank}: " + "".join(traceback.format_exception(error))[-3000:])
        dist.barrier()
    dist.destroy_process_group()
    return found
