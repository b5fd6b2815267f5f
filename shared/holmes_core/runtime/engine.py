# SPDX-License-Identifier: Apache-2.0
"""The engine runs a Plan: it splits the model, runs batches through the pipeline and keeps gradients in step.

It knows neither Lightning nor Accelerate; both drive it the same way:

    engine = Engine(root=module, chain=chain, plan=plan, config=config, groups=groups, device=device)
    engine.split()                  # this rank keeps its part of the model
    engine.build()                  # stages, schedules, gradient groups
    result = engine.train(step, batch)
    engine.reduce_gradients()       # once per optimizer step
    norm = engine.gradient_norm()
    optimizer.step()
    engine.broadcast_parameters()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.batch_split import default_num_microbatches
from holmes_core.plan.plan import Plan
from holmes_core.runtime import microbatch, rng
from holmes_core.runtime.boundary import Boundary
from holmes_core.runtime.chain import Chain
from holmes_core.runtime.gradients import Gradients
from holmes_core.runtime.intercept import Interceptor, Window, restore_class
from holmes_core.runtime.loss import LossRule, read_loss
from holmes_core.runtime.process_groups import ProcessGroups
from holmes_core.runtime.pulse import Pulse
from holmes_core.runtime.schedule import before_embedding, build_schedule, run_forward, run_schedule
from holmes_core.runtime.split import ParamEntry, decide_stages, drop_absent, find_entries, slots
from holmes_core.runtime.stage import Edge, HolmesStage, StageBody
from holmes_core.runtime.wire import WHOLE, Wire

__all__ = ["Engine", "Step", "TrainResult"]

#: The user's step: (micro-batch, its index) to what the step returns.
Step = Callable[[Any, int], Any]


@dataclass(slots=True, kw_only=True)
class TrainResult:
    """What the last stage knows after a batch; on other stages only the number of micro-batches.

    Attributes:
        num_microbatches: How many micro-batches the batch was cut into.
        loss: This replica's part of the global loss, unscaled; their sum over replicas is the batch's loss. Scalar.
        outputs: What the step returned for each micro-batch.
        weights: Share of each micro-batch in the loss of all replicas; they sum to one over replicas.
    """

    num_microbatches: int
    loss: Tensor | None = None
    outputs: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One batch on its way through the pipeline."""

    step: Step
    batches: list[Any]
    train: bool
    factors: list[float] = field(default_factory=list)
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()


class Engine:
    """One rank's part of a Plan at work.

    Args:
        root: The user's module, whole (or on the meta device); changed in place.
        chain: Its blocks.
        plan: Who does what.
        config: The user's settings.
        groups: The process groups of `plan`.
        device: This rank's device.
        seed: Seed of the run, equal on all ranks.
    """

    def __init__(
        self,
        *,
        root: nn.Module,
        chain: Chain,
        plan: Plan,
        config: HolmesConfig,
        groups: ProcessGroups,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.root, self.chain, self.plan, self.config = root, chain, plan, config
        self.groups, self.device, self.seed = groups, device, seed
        self.rank = dist.get_rank()
        self.place = plan.grid.coordinates(self.rank)
        layout = plan.layout
        self.num_stages = layout.num_stages
        self.sizes = chain.sizes() or plan.layers_per_stage
        starts = [sum(self.sizes[:s]) for s in range(self.num_stages + 1)]
        self.windows = [
            Window(stage=s, start=starts[s], stop=starts[s + 1], is_first=s == 0, is_last=s == self.num_stages - 1)
            for s in range(self.num_stages)
        ]
        self.stages_of_rank = {p: list(layout.stages_of(p)) for p in range(layout.pp)}
        self.local_stages = self.stages_of_rank[self.place.pp]
        self.holds_last = self.num_stages - 1 in self.local_stages
        #: Steps of every batch trained so far; part of each micro-batch's seed.
        self.batches_seen = 0
        #: What this rank is doing, for its watchdog.
        self.pulse = Pulse()
        self.interceptor: Interceptor | None = None
        self.entries: list[ParamEntry] = []
        #: Modules outside the blocks whose parameters live on other stages.
        self.lost: list[tuple[str, nn.Module]] = []
        self.stages: list[HolmesStage] = []
        #: Set by `build`.
        self.gradients: Gradients = None  # type: ignore[assignment]
        self.loss_rule = LossRule(config.loss_weight)
        #: Whether each replica's batch has a loss of its own, which the host averages (as DistributedDataParallel
        #: does), instead of being a part of one loss over all replicas.
        self.loss_per_replica = False
        self._schedules: dict[int, Any] = {}
        self._stages_of: dict[nn.Parameter, list[int]] = {}
        self._pass: _Pass | None = None
        self._passes = 0

    # ---- set-up ------------------------------------------------------------------------------------------------
    def pp_rank_of(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        return self.plan.layout.pp_rank_of(stage)

    def split(self) -> None:
        """Keep this rank's part of the model: its stages' blocks and what it needs outside of them."""
        stages = decide_stages(self.root, self.chain, self.sizes, self.config.placement)
        local = {name: bool(where & set(self.local_stages)) for name, where in stages.items()}
        self.entries = find_entries(self.root, stages, local, self._owners)
        if self.num_stages == 1:
            return
        self.lost = drop_absent(self.root, self.chain, local)
        self.interceptor = Interceptor(list(zip(self.chain.names, self.chain.blocks, strict=True)), self.device)
        for name, module in self.lost:
            self.interceptor.absent(name, module)

    def _owners(self, stages: frozenset[int]) -> tuple[int, ...]:
        ranks = sorted({self.pp_rank_of(stage) for stage in stages})
        return tuple(self.plan.grid.rank_at(pp=p, dp=self.place.dp, tp=self.place.tp) for p in ranks)

    def build(self) -> None:
        """Make stages and gradient groups. The model is on its device, in its dtype, tensor-parallel by now."""
        in_block: dict[int, set[int]] = {}  # blocks of several stages may share a parameter
        for index, block in enumerate(self.chain.blocks):
            stage = next(w.stage for w in self.windows if w.start <= index < w.stop)
            for param in block.parameters():
                in_block.setdefault(id(param), set()).add(stage)
        params = self.parameters()
        trained = [p for p in params.values() if p.requires_grad]
        held = {s: [p for p in trained if s in in_block.get(id(p), (s,))] for s in self.local_stages}
        for stage, mine in held.items():
            for param in mine:
                self._stages_of.setdefault(param, []).append(stage)
        # Those on several stages, here or elsewhere, are complete late, or unused here: no others wait for them.
        late = {params[entry.name] for entry in self.entries if entry.local and len(entry.stages) > 1}
        late |= {param for param, stages in self._stages_of.items() if len(stages) > 1}
        self.gradients = Gradients(
            entries=self.entries,
            params=params,
            grid=self.plan.grid,
            place=self.place,
            groups=self.groups,
            shard_optimizer=self.plan.layout.sharding != "none",
            root=self.root,
            blocks=self.chain.blocks,
            overlap=self.config.overlap,
            overlap_param_gather=self.config.overlap_param_gather,
            waiting=lambda: self.pulse.arriving(),
            last=late,
            last_at=self._before_embedding(),
        )
        self.stages = [self._make_stage(self.windows[s], held[s], late) for s in self.local_stages]

    def _before_embedding(self) -> float:
        """Part of this rank's gradients that are complete before the embedding's, where it runs that and blocks."""
        layout, pp = self.plan.layout, len(self.stages_of_rank)
        here = layout.schedule == "1f1b" and self.num_stages == pp + 1 and 0 in self.local_stages
        return before_embedding(pp, split=layout.defer_weights, tapered=layout.taper) if here else 1.0

    def local_names(self) -> dict[str, bool]:
        """Whether this rank holds a parameter, by every name."""
        return {alias: entry.local for entry in self.entries for alias in entry.aliases}

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's real parameters by first name, in canonical order."""
        current = {name: param for name, _, _, param in slots(self.root)}
        return {entry.name: current[entry.name] for entry in self.entries if entry.local}

    def _make_stage(self, window: Window, held: list[nn.Parameter], late: set[nn.Parameter]) -> HolmesStage:
        body = StageBody(self._run, lambda: held)
        before, after = window.stage - 1, window.stage + 1
        edges = {
            "forward_in": (before, "fwd"),
            "backward_out": (before, "bwd"),
            "forward_out": (after, "fwd"),
            "backward_in": (after, "bwd"),
        }
        made: dict[str, Any] = {}
        for key, (neighbour, direction) in edges.items():
            made[key] = None
            if 0 <= neighbour < self.num_stages and neighbour not in self.local_stages:
                peer = self.plan.grid.rank_at(pp=self.pp_rank_of(neighbour), dp=self.place.dp, tp=self.place.tp)
                incoming = key.endswith("_in")
                pair = (peer, self.rank) if incoming else (self.rank, peer)
                group = self.groups.edge(*pair, direction)
                made[key] = Edge(peer=peer, group=group, count=self.groups.traffic.add, wire=self._wire(peer))
        stage = HolmesStage(
            body=body,
            window=window,
            num_stages=self.num_stages,
            device=self.device,
            group=self.groups.pipeline,
            dynamic_shapes=self.config.dynamic_shapes,
            **made,
        )
        stage.on_backward = partial(self._backward_context, window.stage)
        stage.completing = self.gradients.data_parallel.completing
        stage.accumulated = self.gradients.data_parallel.accumulated
        stage.shared = late
        stage.pausing = self.gradients.data_parallel.pausing
        return stage

    def _wire(self, peer: int) -> Wire:
        topology = self.plan.topology
        if topology.cluster_index(peer) == topology.cluster_index(self.rank):
            return WHOLE
        shared = self.groups.tp if self.plan.layout.tp > 1 else None
        return Wire(group=shared, form=self.config.wire_dtype)

    @contextmanager
    def _backward_context(self, stage: int) -> Iterator[None]:
        waits = stage + 1 < self.num_stages and stage + 1 not in self.local_stages
        watched = self.pulse.micro_batch(2 * self.local_stages.index(stage) + 1, waits=waits)
        with watched, self.interceptor.backward() if self.interceptor is not None else nullcontext():
            yield

    # ---- batches -----------------------------------------------------------------------------------------------
    def cut(self, batch: Any) -> list[Any]:
        """Cut a batch into micro-batches."""
        size = microbatch.batch_size_of(batch)
        try:
            n = default_num_microbatches(size, self.plan.layout)
        except ConfigError:  # too few samples for the schedule: `build_schedule` takes the GPipe order then
            n = size
        if n == 1:
            return [batch]
        slices = microbatch.split_sizes(size, n, taper=self.plan.layout.taper)
        return [microbatch.slice_batch(batch, rows, size) for rows in slices]

    def train(
        self,
        step: Step,
        batch: Any,
        *,
        accumulate: int = 1,
        scale: float = 1.0,
        completes: bool = False,
        keep: bool = False,
    ) -> TrainResult:
        """Run forward and backward of one batch; gradients are added to ``param.grad``, not yet reduced.

        Args:
            step: The user's step.
            batch: This replica's batch, the same on all its ranks.
            accumulate: Batches per optimizer step; each counts 1/accumulate, as in the host's own loop.
            scale: Factor on the loss for half-precision training.
            completes: Whether this batch completes the gradients of an optimizer step: `reduce_gradients` comes next,
                and nobody changes gradients before; summing them over replicas then begins during the backward.
            keep: Whether that may turn out to be wrong: gradients then stay where they are (`DataParallel.expect`).

        Returns:
            The `TrainResult`.

        Raises:
            HolmesError: The step's form or the batch does not fit a pipeline; or the batch's loss is not the
                weighted sum of its micro-batches' losses under any rule (`loss_weight`).
        """
        batches = self.cut(batch)
        # One micro-batch of one replica is the whole batch: nothing to weigh.
        cut = len(batches) > 1 or self.groups.dp_size > 1
        if cut and self.config.check_loss and not self.loss_rule.settled:
            self._check_loss(step, batch, batches)
        weights = self._weights(batches)
        run = _Pass(
            step=step,
            batches=batches,
            train=True,
            factors=[w / accumulate * scale for w in weights],
            seeds=(self.seed, 1, self.batches_seen, self.place.dp),
        )
        if completes:
            self.gradients.data_parallel.expect(self._stages_of, keep=keep)
        self._run_pass(run)
        if completes:
            self.gradients.data_parallel.complete()
        self.batches_seen += 1
        result = TrainResult(num_microbatches=len(batches))
        if self.holds_last:
            result.weights = weights
            result.outputs = [run.outputs[i] for i in range(len(batches))]
            total = torch.zeros((), dtype=torch.float32, device=self.device)
            for index, weight in enumerate(weights):
                if weight:
                    total = total + run.losses[index].float() * weight
            result.loss = total
        return result

    def evaluate(self, step: Step, batches: list[Any]) -> list[Any]:
        """Run the user's step forward only on each of `batches`; returns its results on the last stage."""
        run = _Pass(step=step, batches=batches, train=False, seeds=(self.seed, 2, self._passes, self.place.dp))
        self._passes += 1
        self._run_pass(run)
        return [run.outputs[i] for i in range(len(batches))] if self.holds_last else []

    @property
    def probing(self) -> bool:
        """Whether the step that runs now is forward only; inside `train`: a probe of the loss rule."""
        return self._pass is not None and not self._pass.train

    def _weights(self, batches: list[Any]) -> list[float]:
        if not self.holds_last:
            return [0.0] * len(batches)
        rule = self.loss_rule.name(batches)
        counts = microbatch.count(batches, rule)
        if rule == "sum":
            return [1.0] * len(batches)
        total = counts.sum()
        if self.groups.dp_size > 1 and not self.loss_per_replica:
            dist.all_reduce(total, group=self.groups.dp_control)
        return (counts / total.clamp_min(1e-300)).tolist() if float(total) else [0.0] * len(batches)

    def _check_loss(self, step: Step, batch: Any, batches: list[Any]) -> None:
        probes, conclusive = self.loss_rule.probes(batch, batches)
        replicas = self.groups.dp_control if self.groups.dp_size > 1 else None
        if not self.loss_rule.worth_probing(probes, conclusive, replicas):
            return
        losses: list[float] = []
        if probes:
            with self.loss_rule.undisturbed(self.root), torch.no_grad():
                outputs = self.evaluate(step, probes)
            losses = [float(read_loss(output)) for output in outputs]
        self.loss_rule.settle(
            probes,
            losses,
            conclusive=conclusive,
            holds_last=self.holds_last,
            replicas=replicas,
            replica=self.groups.replica,
            last_rank=self.last_rank,
        )

    @property
    def last_rank(self) -> int:
        """Global rank that runs the last stage for this replica (its first tensor-parallel rank)."""
        return self.plan.grid.rank_at(pp=self.pp_rank_of(self.num_stages - 1), dp=self.place.dp, tp=0)

    @property
    def first_rank(self) -> int:
        """Global rank that runs the first stage for this replica (its first tensor-parallel rank)."""
        return self.plan.grid.rank_at(pp=self.pp_rank_of(0), dp=self.place.dp, tp=0)

    def _run_pass(self, run: _Pass) -> None:
        keys = [(run.train, torch.is_grad_enabled(), microbatch.shape_key(b)) for b in run.batches]
        n = len(run.batches)
        for stage in self.stages:
            stage.start_step(keys, has_backward=run.train)
        self._pass = run
        try:
            watched = self.pulse.batch(step=self.batches_seen, micro_batches=n, train=run.train)
            with watched, rng.fork(self.device):
                if run.train:
                    if n not in self._schedules:
                        self._schedules[n] = build_schedule(
                            self.plan.layout.schedule,
                            self.stages,
                            n,
                            self.stages_of_rank,
                            self.plan.forwards_ahead(),
                            split=self.plan.layout.defer_weights,
                            tapered=self.plan.layout.taper,
                        )
                    run_schedule(self._schedules[n], early=all(stage.knows_shapes for stage in self.stages))
                else:
                    run_forward(self.stages, n)
            for stage in self.stages:
                stage.finish_step()
        finally:
            self._pass = None
            for stage in self.stages:
                stage.clear_runtime_states()

    def _run(
        self, window: Window, index: int, received: Tensor | None, boundary: Boundary | None
    ) -> tuple[Tensor, Boundary | None]:
        """Run the user's step on one micro-batch, for one stage (called by torch's schedule)."""
        waits = received is not None and window.stage - 1 not in self.local_stages
        with self.pulse.micro_batch(2 * self.local_stages.index(window.stage), waits=waits):
            return self._run_step(window, index, received, boundary)

    def _run_step(
        self, window: Window, index: int, received: Tensor | None, boundary: Boundary | None
    ) -> tuple[Tensor, Boundary | None]:
        run = self._pass
        assert run is not None
        rng.seed(rng.seed_of(*run.seeds, index), self.device)

        def step() -> Any:
            return run.step(run.batches[index], index)

        def enter() -> None:
            rng.seed(rng.seed_of(*run.seeds, index, 1 + window.stage), self.device)

        if self.interceptor is None:
            result = step()
        else:
            result = self.interceptor.run(
                window,
                step,
                received=received,
                boundary=boundary,
                on_enter=enter,
            )
            if not window.is_last:
                captured = self.interceptor.captured
                assert captured is not None
                self.interceptor.captured = None
                return captured
        run.outputs[index] = result
        if not run.train:
            return torch.zeros((), device=self.device), None
        loss = read_loss(result)
        run.losses[index] = loss.detach()
        factor = run.factors[index]
        if factor == 0.0:  # no token counts here; the mean over none is NaN, whose gradient would spread
            return torch.nan_to_num(loss) * 0.0, None
        return loss * factor, None

    # ---- gradients and parameters ----------------------------------------------------------------------------------
    def reduce_gradients(self) -> None:
        """Sum gradients over replicas, and over stages that hold the same parameter. Once per optimizer step."""
        with self.pulse.reducing():
            self.gradients.reduce()

    def gradient_norm(self) -> Tensor:
        """Return the 2-norm of the whole model's gradient, each parameter counted once; equal on all ranks."""
        return self.gradients.norm()

    def broadcast_parameters(self) -> None:
        """After the optimizer step: hand each parameter's new value to the ranks that did not step it.

        Returns before all are there: who looks at one that is not there waits for it.
        """
        self.gradients.broadcast_parameters()

    def release(self) -> None:
        """Give intercepted modules their own classes back, and follow gradients and parameters no more."""
        self.gradients.close()
        for module in self.root.modules():
            restore_class(module)
        self.interceptor = None
        self.stages = []
        self._schedules = {}
