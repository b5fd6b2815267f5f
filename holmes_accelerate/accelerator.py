# SPDX-License-Identifier: Apache-2.0
"""HolmesAccelerator: Accelerate's methods on one side, the engine's call mode on the other. No parallelism here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import accelerate
import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.state import PartialState
from accelerate.utils import convert_to_fp32
from accelerate.utils.modeling import get_mixed_precision_context_manager

from holmes_accelerate import refusals
from holmes_accelerate.checkpoints import CheckpointHooks
from holmes_accelerate.collectives import CollectiveHooks
from holmes_accelerate.loaders import batch_size_of, share_batches
from holmes_accelerate.plugin import take_plugin
from holmes_accelerate.process import enter, on_cpu, set_accelerator
from holmes_accelerate.wrappers import HolmesOptimizer, HolmesScheduler
from holmes_core.config import HolmesConfig
from holmes_core.plan.grid import make_grid
from holmes_core.plan.layout import ModelFacts, choose_layout, pin
from holmes_core.runtime.call_mode import CallMode, named_parameter_slots, of_model
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.failure import FailureLog
from holmes_core.runtime.probe import StepHint
from holmes_core.runtime.setup import build_engine, share_random_state
from holmes_core.runtime.start import host_name

__all__ = ["HolmesAccelerator"]


class HolmesAccelerator(CollectiveHooks, CheckpointHooks, Accelerator):
    """An Accelerator that trains in pipeline x data x tensor parallelism over clusters with unequal networks.

    `num_processes` and `process_index` count replicas, because that is what scripts compute samples and seeds from;
    `is_main_process` and the like are about processes. All ranks make the same calls.

    Args:
        *args: As for `accelerate.Accelerator`.
        holmes_plugin: A `HolmesPlugin`; without it the file in ``HOLMES_CONFIG`` counts.
        **kwargs: As for `accelerate.Accelerator`.

    Raises:
        ConfigError: Settings contradict each other or the job.
    """

    _replicas, _replica = 1, 0
    _mode: CallMode | None = None
    _freed: CallMode | None = None
    _batch: int | None = None  # samples of a replica's batch in the first loader that was seen, for predictions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        too_new = refusals.check_version(accelerate.__version__)
        if too_new is not None and os.environ.get("RANK", "0") == "0":
            warnings.warn(too_new, stacklevel=2)
        plugin, kwargs = take_plugin(kwargs)
        self.holmes_config = plugin.config if plugin is not None else HolmesConfig.load(env=os.environ)
        refusals.refuse_other_engines(kwargs, os.environ)
        cpu = bool(kwargs.get("cpu")) or on_cpu()
        meeting = enter(cpu=cpu, config=self.holmes_config)
        # The layout must be known before the model: scripts ask how many replicas there are first.
        topology = meeting.topology(self.holmes_config)
        config = self.holmes_config
        self._layout, _ = choose_layout(topology, config, ModelFacts(num_blocks=10**6))
        grid = make_grid(
            topology,
            self._layout,
            rank_order=config.rank_order,
            last_stage_on_rank_zero=config.last_stage_on_rank_zero,
        )
        self._replicas, self._replica = self._layout.dp, grid.coordinates(meeting.rank).dp
        super().__init__(*args, **kwargs)
        self._meeting = meeting
        refusals.refuse_settings(self)
        self.dataloader_config.dispatch_batches = False  # Accelerate would dispatch over processes, not replicas
        self._failures = FailureLog(rank=meeting.rank, place=f"host {host_name()}", watch=meeting.watch)
        self._failures.listen()
        self._register_checkpoint_hooks()
        set_accelerator(self)

    # ---- who is who ----------------------------------------------------------------------------------------------
    @property
    def num_processes(self) -> int:
        """Replicas of the model: what a script divides or multiplies samples by."""
        return self._replicas

    @property
    def process_index(self) -> int:
        """This rank's replica."""
        return self._replica

    @property
    def device(self) -> torch.device:
        """This rank's device. A CPU has no number: moving to ``cpu:0`` would copy a whole model."""
        device: torch.device = self.state.device
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of the job."""
        return self.state.is_last_process

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Hand out parts of a list or tensor: one to each replica."""
        state = PartialState()
        saved = state.num_processes, state.process_index
        state.num_processes, state.process_index = self._replicas, self._replica
        try:
            with state.split_between_processes(inputs, apply_padding=apply_padding) as part:
                state.num_processes, state.process_index = saved
                yield part
        finally:
            state.num_processes, state.process_index = saved

    # ---- prepare -------------------------------------------------------------------------------------------------
    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """Prepare models first, so that the order of the arguments does not matter; then as Accelerate does."""
        for obj in args:
            self._see(obj)
        for obj in args:
            if isinstance(obj, torch.nn.Module):
                self.prepare_model(obj)
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Split the model in place; the object stays the same. Collective over all ranks."""
        mode = of_model(model)
        if mode is None:
            if self._mode is not None:
                raise refusals.second_model(self._mode.engine.root, model)
            if self._freed is not None:
                self._freed.close()
            mode = self._split(model)
        self._mode, self._freed = mode, None
        if model not in self._models:
            self._models.append(model)
        return model

    def _split(self, model: Any) -> CallMode:
        before = named_parameter_slots(model)
        with self._named_failures():
            engine = build_engine(
                root=model,
                config=pin(self.holmes_config, self._layout),
                device=self.device,
                seed=share_random_state(),
                meeting=self._meeting,
                hint=StepHint(batch=self._batch, precision=self.mixed_precision),
            )
        refusals.check_same_layout(self._layout, engine.plan.layout)
        _leave_files(engine)
        place = engine.place
        stages = "+".join(str(s) for s in engine.local_stages)
        self._failures.place = (
            f"stage {stages} of {engine.num_stages}, dp {place.dp}, tp {place.tp}, host {host_name()}"
        )
        mode = CallMode(
            engine,
            before=before,
            compute=self._autocast,
            convert=convert_to_fp32 if self.native_amp else _as_it_is,
            guard=self._named_failures,
            completes=lambda: self.sync_gradients,
        )
        if self.native_amp:
            mode.half_precision()
        for optimizer in self._optimizers:
            mode.adopt(optimizer.optimizer)
        return mode

    def _autocast(self) -> Any:
        if not self.native_amp:
            return nullcontext()
        return get_mixed_precision_context_manager(self.native_amp, self.autocast_handler)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Let the optimizer step this rank's part of the model."""
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        refusals.refuse_optimizer(optimizer)
        prepared = HolmesOptimizer(optimizer, lambda: self._mode, self.scaler)
        if self._mode is not None:
            self._mode.adopt(optimizer)
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Step the scheduler once per replica."""
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        own = [o for o in self._optimizers if getattr(scheduler, "optimizer", None) is o.optimizer]
        prepared = HolmesScheduler(
            scheduler,
            own or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
            replicas=self._replicas,
        )
        self._schedulers.append(prepared)
        return prepared

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Shard over replicas; all ranks of a replica get the same batches."""
        self._see(data_loader)
        loader = super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if isinstance(loader, DataLoaderDispatcher):
            raise refusals.dispatched()
        if "base_dataloader" not in vars(loader):
            raise refusals.unknown_loader(loader)
        return share_batches(loader, self._engine_or_none)

    def _see(self, obj: Any) -> None:
        size = batch_size_of(obj) if self._batch is None else None
        if size is not None:
            self._batch = max(1, size // self._replicas) if self.split_batches else size

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Go on in the middle of an epoch."""
        return share_batches(super().skip_first_batches(dataloader, num_batches), self._engine_or_none)

    def free_memory(self, *objects: Any) -> Any:
        """Let go of everything that was prepared; another model may be prepared then. All ranks call it."""
        objects = super().free_memory(*objects)
        # The same model may be prepared again (transformers.Trainer does that), so its groups are closed later.
        self._mode, self._freed = None, self._mode or self._freed
        return objects

    def clear(self, *objects: Any) -> Any:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    def _engine_or_none(self) -> Any:
        return self._mode.engine if self._mode is not None else None

    # ---- gradients -----------------------------------------------------------------------------------------------
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip by the norm of the whole model's gradient. Collective over all ranks."""
        if self._mode is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        self._check_parameters(parameters)
        self.unscale_gradients()
        return self._mode.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip every element of the gradient. Collective over all ranks."""
        if self._mode is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        self._check_parameters(parameters)
        self.unscale_gradients()
        self._mode.clip_grad_value_(clip_value)

    def _check_parameters(self, parameters: Any) -> None:
        assert self._mode is not None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not self._mode.covers(given):
            raise refusals.part_of_the_parameters()

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Reduce gradients, then divide by the scale of half-precision training."""
        if self._mode is not None:
            self._mode.reduce()
        super().unscale_gradients(optimizer)

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Nothing with one replica; refused with several."""
        if self._replicas > 1:
            raise refusals.uneven_inputs()
        with nullcontext():
            yield

    def _refuse_local_sgd(self) -> None:
        raise refusals.local_sgd()

    # ---- end -----------------------------------------------------------------------------------------------------
    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Raise the name of the rank that failed first instead of this rank's lost connection."""
        try:
            yield
        except Exception as error:
            named = self._failures.explain(error)
            if named is error:
                raise
            raise named from None

    def end_training(self) -> None:
        """Finish the checkpoint that is being saved and trackers, and leave the job."""
        self.finish_saving()
        self._failures.close()
        super().end_training()


def _as_it_is(output: Any) -> Any:
    return output


@torch.no_grad()
def _leave_files(engine: Engine) -> None:
    """Give this rank's weights memory of their own.

    ``from_pretrained`` maps them from their file, which is why a whole model costs a rank no memory before it is split.
    But a rank that saves into that directory would pull the file away from under the others.
    """
    for param in engine.parameters().values():
        if param.device.type == "cpu":
            param.data = param.data.clone()
