# SPDX-License-Identifier: Apache-2.0
"""Processes that run the real engine over gloo, and the comparison with one process.

`Workers` keeps one set of processes and feeds it cases, one at a time: starting them costs seconds, a case a fraction
of one. A case that fails ends its processes, as it would in a job; the next case gets new ones.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Case", "Job", "Outcome", "Workers", "compare", "make_engine"]

_START_TIMEOUT = 240.0
_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload(["tests.models.preloaded"])


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a case ended on each rank: what it returned, or the type and text of its error; None: ended by a peer."""

    values: list[Any]
    errors: list[tuple[str, str] | None]
    seconds: float
    ended: bool  # all processes ended by themselves (after an error)

    def check(self) -> list[Any]:
        """Return the ranks' values; fail where one raised."""
        bad = [f"rank {r}: {e[1]}" for r, e in enumerate(self.errors) if e]
        assert not bad, "\n".join(bad)
        return self.values

    @property
    def refusal(self) -> str:
        """The text of the first HolmesError of a rank, empty if there is none."""
        return next((e[1] for e in self.errors if e and e[0] in ("HolmesError", "ConfigError")), "")


Case = Callable[..., Any]


class Workers:
    """`world` processes with an initialised default group, started when first needed."""

    def __init__(self, world: int, *, timeout: float = 60.0) -> None:
        self.world, self.timeout = world, timeout
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, case: Case, *args: Any) -> Outcome:
        """Call `case(rank, *args)` in every process (a function of an importable module)."""
        if not self._processes:
            self._start()
        start = time.monotonic()
        for pipe in self._pipes:
            pipe.send((case, args))
        values: list[Any] = [None] * self.world
        errors: list[tuple[str, str] | None] = [None] * self.world
        failed = False
        deadline = time.monotonic() + self.timeout
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.1, deadline - time.monotonic())):
                    failed, errors[rank] = True, ("Timeout", f"rank {rank} still runs after {self.timeout:.0f} s")
                    continue
                ok, value = pipe.recv()
            except EOFError:
                failed, errors[rank] = True, ("Died", f"rank {rank} ended without a word")
                continue
            if ok:
                values[rank] = value
            else:
                failed, errors[rank] = True, value
        ended = self._end(patience=10.0) if failed else True
        return Outcome(values=values, errors=errors, seconds=time.monotonic() - start, ended=ended)

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        self._end(patience=10.0)

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="holmes-test-")
        file = os.path.join(self._folder.name, "store")
        for rank in range(self.world):
            ours, theirs = _FORK.Pipe()
            process = _FORK.Process(target=_serve, args=(rank, self.world, file, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:  # importing torch takes long on a busy machine; cases are timed without it
            assert pipe.poll(_START_TIMEOUT), "a worker process did not start"
            pipe.recv()

    def _end(self, patience: float) -> bool:
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.1, deadline - time.monotonic()))
        ended = not any(process.is_alive() for process in self._processes)
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []
        return ended


def _serve(rank: int, world: int, file: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    pipe.send("ready")
    while True:
        try:
            case, args = pipe.recv()
        except EOFError:
            break
        try:
            value = case(rank, *args)
        except BaseException as error:
            pipe.send((False, (type(error).__name__, f"{error}\n\n{traceback.format_exc()}")))
            break  # as an uncaught error does: the sockets close, and the peers stop waiting
        pipe.send((True, value))
    os._exit(0)


# ------------------------------------------------------------------------------------------------ inside the processes


@dataclass(kw_only=True)
class Job:
    """A model, its batch and step, for `compare`.

    build: the model, the same on each call. batch: replica index to batch. step: (model) to the engine's step.
    config: for HolmesConfig. tolerance: of losses and gradients, relative to the largest of each parameter.
    """

    build: Callable[[], Any]
    batch: Callable[[int], Any]
    step: Callable[[Any], Callable[[Any, int], Any]]
    config: Mapping[str, Any]
    tolerance: float = 1e-5
    logits: Callable[[Any, Any], Any] | None = None
    prepare: Callable[[Any], None] | None = None  # before the split, on both models
    mistake: Callable[[Any], None] | None = None  # a deliberate mistake in the engine or its model
    trace: bool = False  # record what the stages executed, beside what torch's schedule lists


_GROUPS: dict[Any, Any] = {}


def make_engine(model: Any, config: Mapping[str, Any]) -> Any:
    """Split `model` over all processes and return its engine, ready to train."""
    import torch
    import torch.distributed as dist

    from holmes_core.cluster.topology import build_topology
    from holmes_core.config import HolmesConfig
    from holmes_core.plan.layout import ModelFacts
    from holmes_core.plan.plan import make_plan
    from holmes_core.runtime.chain import find_chain
    from holmes_core.runtime.engine import Engine
    from holmes_core.runtime.process_groups import ProcessGroups

    cfg = HolmesConfig(**config)
    chain = find_chain(model, cfg.split_points)
    plan = make_plan(cfg, build_topology(cfg, ["h"] * dist.get_world_size()), ModelFacts(num_blocks=len(chain.blocks)))
    key = str((plan.layout.pp, plan.layout.dp, plan.layout.virtual_stages, plan.groups))
    device = torch.device("cpu")
    if key not in _GROUPS:
        _GROUPS[key] = ProcessGroups(plan, rank=dist.get_rank(), device=device, timeout=60)
    engine = Engine(root=model, chain=chain, plan=plan, config=cfg, groups=_GROUPS[key], device=device)
    engine.split()
    engine.build()
    return engine


def compare(job: Job) -> dict[str, Any]:
    """Run one batch in the pipeline and in this process alone; return both and the largest differences."""
    import torch
    import torch.distributed as dist

    from holmes_core.runtime.loss import read_loss

    model, alone = job.build(), job.build()
    if job.prepare:
        job.prepare(model)
        job.prepare(alone)
    engine = make_engine(model, job.config)
    if job.mistake:
        job.mistake(engine)
    dp = engine.plan.layout.dp
    batches = [job.batch(i) for i in range(dp)]
    joined = batches[0] if dp == 1 else {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
    torch.manual_seed(0)
    expected = read_loss(job.step(alone)(joined, 0))
    if expected.requires_grad:
        expected.backward()
    own = batches[engine.place.dp]
    found: dict[str, Any] = dict(logits=0.0, expected=float(expected.detach()))
    if job.logits:
        parts = engine.cut(own)
        with torch.no_grad():
            outputs = engine.evaluate(lambda part, _: job.logits(model, part), parts)
            if engine.holds_last:
                for part, output in zip(parts, outputs, strict=True):
                    right = job.logits(alone, part)
                    found["logits"] = max(found["logits"], float((output - right).abs().max() / right.abs().max()))
    if job.trace:  # the check of the loss rule runs forwards of its own
        engine._check_loss(job.step(model), own, engine.cut(own))
        assert engine.loss_rule.settled
    trace: list[tuple[int, str, int]] | None = [] if job.trace else None
    for stage in engine.stages:
        stage.trace = trace
    result = engine.train(job.step(model), own)
    if job.trace:
        schedule = engine._schedules[result.num_microbatches]
        found["trace"] = trace
        found["order"] = actions(schedule.pipeline_order[engine.place.pp])
        found["schedule"] = type(schedule).__name__
    engine.reduce_gradients()
    loss = torch.zeros(()) if result.loss is None else result.loss.detach().clone()
    if engine.holds_last and dp > 1:
        dist.all_reduce(loss, group=engine.groups.dp)
    found["loss"] = float(loss) if engine.holds_last else None
    found["rule"] = engine.loss_rule._rule
    found["norm"] = float(engine.gradient_norm())
    right = [p.grad for p in alone.parameters() if p.grad is not None]
    found["expected_norm"] = float(torch.stack([g.norm() for g in right]).norm()) if right else 0.0
    reference = dict(alone.named_parameters())
    wrong: dict[str, float] = {}
    scale = max([float(g.abs().max()) for g in right], default=1.0)
    for name, param in engine.parameters().items():
        a, b = param.grad, reference[name].grad
        if a is None and (b is None or not engine.gradients.steps(param)):
            continue
        a = torch.zeros_like(param) if a is None else a
        b = torch.zeros_like(param) if b is None else b
        largest = float(b.abs().max())
        # A bias of keys has no gradient in exact arithmetic: only rounding, which is compared with other gradients.
        error = float((a - b).abs().max()) / (max(largest, 1e-3 * scale) if largest > 1e-5 * scale else 1e-2 * scale)
        if not error <= 2 * job.tolerance:
            wrong[name] = error
    found["wrong"] = wrong
    found["checked"] = len(engine.parameters())
    found["names"] = sorted(engine.parameters())
    engine.release()
    return found


def actions(order: list[Any]) -> list[tuple[int, str, int]]:
    """The compute actions of a list of torch's, as `HolmesStage.trace` spells them."""
    flat: list[tuple[int, str, int]] = []
    for action in order:
        if action is None:
            continue
        parts = action.sub_actions or (action,)
        for part in parts:
            kind = part.computation_type.value
            if kind in ("F", "B", "I", "W"):
                flat.append((part.stage_index, kind, part.microbatch_index))
    return flat


def assert_same(outcome: Outcome, *, tolerance: float = 1e-5) -> list[dict[str, Any]]:
    """Fail unless loss, logits, gradients and norm are those of one process on every rank."""
    values = outcome.check()
    for rank, found in enumerate(values):
        assert found["checked"], f"rank {rank} holds no parameter"
        assert not found["wrong"], f"rank {rank}: gradients differ: {found['wrong']}"
        assert found["logits"] <= tolerance, f"rank {rank}: logits differ by {found['logits']}"
        assert abs(found["norm"] - found["expected_norm"]) <= 2 * tolerance * found["expected_norm"], found
        if found["loss"] is not None:
            assert abs(found["loss"] - found["expected"]) <= tolerance * abs(found["expected"]), found
    assert any(found["loss"] is not None for found in values)
    return values
