# SPDX-License-Identifier: Apache-2.0
"""Run a list of jobs on a number of ranks: each trains and saves in some layout, or loads in another and compares."""

from __future__ import annotations

import copy
import os
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from holmes_core.runtime import state
from holmes_core.runtime.checkpoint import load_tree
from holmes_core.runtime.checkpoint_saver import Saver
from tests.core.runtime.test_state import Job, adamw, gpt2, llama, tensors_of

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
    job = make_job(layout, model)
    job.train(range(2))
    saver = Saver(background=background, timeout=60)
    saver.save_sharded(folder / f"{model}-{layout}", tree_of(job), world=job.engine.groups.world)
    truth = whole(job)
    if background:
        job.train(range(2, 4))  # what is saved must not change any more
        saver.wait()
    if dist.get_rank() == 0:
        torch.save(truth, folder / f"{model}-{layout}.truth")


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


ACTIONS = {"save": save, "load": load, "go_on": go_on}


def _worker(rank: int, ranks: int, folder: str, jobs: Sequence[tuple[Any, ...]]) -> None:
    torch.set_num_threads(1)
    os.environ.update(TOKENIZERS_PARALLELISM="false")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found: dict[int, str] = {}
    for number, (action, *arguments) in enumerate(jobs):
        try:
            ACTIONS[action](Path(folder), *arguments)
            found[number] = ""
        except Exception as error:
            found[number] = f"rank {rank}: " + "".join(traceback.format_exception(error))[-3000:]
        torch.save(found, f"{folder}/results.{rank}")
        dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, ranks: int, jobs: Sequence[tuple[Any, ...]], seconds: float = 300.0) -> dict[int, str]:
    """Run jobs one after the other on so many ranks; returns what went wrong with each, by number."""
    (folder / "store").unlink(missing_ok=True)
    for old in folder.glob("results.*"):
        old.unlink()
    processes = mp.spawn(_worker, args=(ranks, str(folder), list(jobs)), nprocs=ranks, join=False)
    deadline, ending = time.monotonic() + seconds, f"not reached within {seconds:.0f} s"
    try:
        while not processes.join(timeout=1) and time.monotonic() < deadline:
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        ending = f"not reached: {error}"
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()
    files = [folder / f"results.{rank}" for rank in range(ranks)]
    parts = [torch.load(file) if file.exists() else {} for file in files]
    return {n: "\n".join(filter(None, (part.get(n, ending) for part in parts))) for n in range(len(jobs))}
