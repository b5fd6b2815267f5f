# SPDX-License-Identifier: Apache-2.0
"""What runs in each process: a case through the real engine, beside what one process computes."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.config import HolmesConfig
from holmes_core.runtime.schedule import SINGLE_STAGE
from holmes_core.runtime.schedule import _fits as fits
from holmes_core.runtime.setup import build_engine
from holmes_core.runtime.shard import get_shard
from holmes_core.runtime.torch_compat import get_schedule_class
from tests.models.pipeline import actions
from tests.parity.cases import Case
from tests.parity.mistakes import made
from tests.parity.reference import autocast, batch_of, build_model, make_optimizer, train_alone

__all__ = ["run_case", "run_twice"]

_TORCH_NAMES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def run_case(rank: int, case: Case) -> dict[str, Any]:
    """Train a case; what this rank saw, and how far its weights are from one process's."""
    alone = [train_alone(case) if rank == 0 else None]
    dist.broadcast_object_list(alone, src=0)
    assert alone[0] is not None
    found = train(case)
    weights = found.pop("weights")
    wrong: dict[str, float] = {}
    for name, (value, shard, place, size) in weights.items():
        expected = alone[0]["weights"][name]
        if shard is not None:
            expected = shard.take(expected, place, size)
        wrong[name] = float((value - expected).abs().max())
    found["weight_differences"] = wrong
    found["alone"] = {key: alone[0][key] for key in ("losses", "norms", "moved")}
    return found


def run_twice(rank: int, case: Case) -> list[dict[str, Any]]:
    """Train a case twice from one seed, and once from another."""
    runs = [train(case, seed=3), train(case, seed=3), train(case, seed=4)]
    for run in runs:
        run.pop("weights")
    return runs


def make_engine(case: Case, seed: int = 0) -> Any:
    """Build the model on this rank and split it."""
    model = build_model(case)
    convert = (lambda root: root.to(torch.bfloat16)) if case.precision == "bf16-true" else None
    config = HolmesConfig(**case.config, timeout=60, print_plan=False)
    engine = build_engine(root=model, config=config, device=torch.device("cpu"), seed=seed, convert=convert)
    if case.precision != "fp32":
        engine.loss_rule.half_precision()
    return engine


def close(engine: Any) -> None:
    """Let go of the engine."""
    dist.barrier()
    engine.release()
    engine.groups.close()


def train(case: Case, seed: int = 0) -> dict[str, Any]:
    """Train a case in the engine."""
    engine = make_engine(case, seed)
    with made(case.mistake, engine):
        found = _train(case, engine)
    close(engine)
    return found


def _train(case: Case, engine: Any) -> dict[str, Any]:
    model, place = engine.root, engine.place
    trained = list(engine.gradients.params.values())
    optimizer = make_optimizer(case, trained) if trained else None
    trace: list[tuple[int, str, int]] = []

    def step(batch: Any, index: int) -> Tensor:
        with autocast(case):
            loss: Tensor = model(**batch).loss
        return loss

    losses: list[float | None] = []
    norms, digests, unordered = [], [], []
    for number in range(case.steps):
        for micro in range(case.accumulate):
            for stage in engine.stages:
                stage.trace = trace
            batch = batch_of(case, step=number, micro=micro, dp=place.dp)
            # The check of the first batches runs at most two micro-batches and both together, forward only.
            checks = 0 if engine.loss_rule.settled else 3 * len(engine.stages)
            last = micro == case.accumulate - 1
            result = engine.train(step, batch, accumulate=case.accumulate, completes=last)
            losses.append(None if result.loss is None else float(result.loss))
            expected = torch_order(case.schedule, engine, result.num_microbatches)
            if engine.plan.layout.embedding_on_last:
                trace = without_embedding(trace, result.num_microbatches, holds=0 in engine.local_stages)
            executed, extra = trace[-len(expected) :], trace[: -len(expected)]
            trace.clear()
            if executed != expected or len(extra) > checks:
                unordered.append(f"step {number}, batch {micro}: {executed} is not torch's {expected}")
        engine.reduce_gradients()
        norm = engine.gradient_norm()
        norms.append(float(norm))
        if case.clip is not None:
            engine.gradients.scale(torch.clamp(case.clip / (norm + 1e-6), max=1.0))
        if optimizer:
            optimizer.step()
        for param in trained:
            param.grad = None
        engine.broadcast_parameters()
        # Looking at parameters waits for those that are on their way: then only at the end.
        looks = number == case.steps - 1 or not engine.config.overlap_param_gather
        digests.append(_digests(engine) if looks else {})
    weights = {
        name: (param.detach().clone(), get_shard(param), place.tp, engine.plan.layout.tp)
        for name, param in engine.parameters().items()
    }
    return {
        "place": (place.pp, place.dp, place.tp),
        "losses": losses,
        "norms": norms,
        "digests": digests,
        "unordered": unordered,
        "shared": [entry.name for entry in engine.entries if len(entry.owners) > 1],
        "weights": weights,
    }


def _digests(engine: Any) -> dict[str, str]:
    """What each parameter holds, by name and by the part of it; equal on all ranks that hold the same."""
    found = {}
    for name, param in engine.parameters().items():
        part = "" if get_shard(param) is None else f" part {engine.place.tp}"
        data = param.detach().contiguous().view(torch.uint8).numpy().tobytes()
        found[name + part] = hashlib.sha1(data).hexdigest()[:12]
    return found


# ------------------------------------------------------------------------------------------------ torch's own order


class _Recording:
    """Stands for a stage in torch's single-stage schedules, whose order is code, not a list."""

    def __init__(self, stage: Any) -> None:
        own = stage.num_stages - stage.group_size  # 1 where the embedding is a stage of its own
        self.stage_index, self.num_stages = stage.stage_index - own, stage.num_stages - own
        self.group_rank, self.group_size = stage.group_rank, stage.group_size
        self.is_first, self.is_last = False, False
        self.has_backward = True
        self.seen: list[tuple[int, str, int]] = []

    def forward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append((self.stage_index, "F", index))

    def backward_one_chunk(self, index: int, *args: Any, **kwargs: Any) -> None:
        self.seen.append((self.stage_index, "B", index))

    def no_operations(self, *args: Any) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_operations

    def perform_reduce_grad(self, *args: Any) -> None:
        pass

    clear_runtime_states = perform_reduce_grad


def without_embedding(trace: list[tuple[int, str, int]], n: int, *, holds: bool) -> list[tuple[int, str, int]]:
    """Take the embedding's stage out of a trace, after checking that it ran; blocks are then numbered as without it."""
    for kind in "FB":
        ran = [index for stage, what, index in trace if (stage, what) == (0, kind)]
        assert ran[len(ran) - n :] == (list(range(n)) if holds else []), trace
    return [(stage - 1, kind, index) for stage, kind, index in trace if stage]


def torch_order(schedule: str, engine: Any, num_microbatches: int) -> list[tuple[int, str, int]]:
    """What torch's schedule of this name executes on this rank; GPipe's order for too few micro-batches."""
    stages = engine.stages
    own = engine.plan.layout.embedding_on_last
    if not fits(schedule, engine.num_stages - own, engine.plan.layout.pp, num_microbatches):
        local = sorted(stage.stage_index - own for stage in stages if stage.stage_index >= own)
        return [(s, "F", i) for s in local for i in range(num_microbatches)] + [
            (s, "B", i) for s in reversed(local) for i in range(num_microbatches)
        ]
    if engine.config.defer_weights or engine.config.run_ahead:  # lists of our own: tests/core/runtime/test_schedule.py
        listed = engine._schedules[num_microbatches].pipeline_order[engine.place.pp]
        return [(stage - own, kind, i) for stage, kind, i in actions(listed) if stage >= own]
    cls = get_schedule_class(_TORCH_NAMES[schedule])
    if schedule in SINGLE_STAGE:  # the last local stage: the first may be an embedding
        recording = _Recording(stages[-1])
        theirs = cls(recording, num_microbatches, loss_fn=lambda *_: None, scale_grads=False)
        for name in ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses"):
            setattr(theirs, name, lambda *args, **kwargs: None)
        theirs._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
        return recording.seen
    theirs = cls(stages, num_microbatches, loss_fn=lambda *_: None, scale_grads=False)
    return actions(theirs.pipeline_order[engine.place.pp])
