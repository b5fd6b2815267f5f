# SPDX-License-Identifier: Apache-2.0
"""The hooks of HolmesStrategy, for either of Lightning's namespaces."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.config import HolmesConfig
from holmes_core.runtime import state
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.environment import set_missing
from holmes_core.runtime.failure import FailureLog
from holmes_core.runtime.memory import fits_in_memory
from holmes_core.runtime.probe import StepHint
from holmes_core.runtime.setup import build_engine, check_degrees, share_random_state
from holmes_core.runtime.start import Meeting, host_name, join, meet
from holmes_core.runtime.traffic import gather_traffic, write_traffic
from holmes_lightning.checkpoints import CheckpointHooks
from holmes_lightning.collectives import CollectiveHooks
from holmes_lightning.feed import Feeds, batch_size_of, progress_of
from holmes_lightning.metrics import connect_metrics, metric_path, release_metrics
from holmes_lightning.refusals import name_several_optimizers, refuse_optimizers, refuse_unsupported
from holmes_lightning.resume import resume_by_itself
from holmes_lightning.steps import StepRunner

__all__ = ["StrategyHooks"]

_ARRIVE = 5.0  # seconds that parameters have after a failure to arrive


class StrategyHooks(CollectiveHooks, CheckpointHooks):
    """Everything of HolmesStrategy that does not depend on the namespace (mixed in before ParallelStrategy)."""

    _namespace: str
    # Set in setup_environment and setup; asked for None only where a hook can come earlier.
    _engine: Engine = None  # type: ignore[assignment]
    _steps: StepRunner = None  # type: ignore[assignment]
    _failures: FailureLog = None  # type: ignore[assignment]
    _feeds: Feeds = None  # type: ignore[assignment]
    _feeds_after: Any = None
    _meeting: Meeting = None  # type: ignore[assignment]
    _looked = False  # for a checkpoint to go on from

    def _start(self, settings: Mapping[str, Any], weights_only: bool | None) -> None:
        self.config = HolmesConfig.load(kwargs=settings, env=os.environ)
        self._weights_only = weights_only
        self._block_sync = False
        self._num_nodes = 1
        self._whole = True
        self._stash: list[tuple[nn.Parameter, Tensor]] = []

    def _lightning(self, name: str) -> Any:
        return importlib.import_module(f"{self._namespace}.{name}")

    def _fabric(self, name: str) -> Any:
        fabric = "lightning.fabric" if self._namespace == "lightning.pytorch" else "lightning_fabric"
        return importlib.import_module(f"{fabric}.{name}")

    # ---- processes -----------------------------------------------------------------------------------------------
    @property
    def is_distributed(self) -> bool:
        """Whether Lightning must shard the data: over replicas, not ranks."""
        return self._engine is None or self._engine.plan.layout.dp > 1

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def num_nodes(self) -> int:
        """Hosts, as the Trainer was told."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """All ranks of a replica see the same samples."""
        assert self._engine is not None
        return {"num_replicas": self._engine.plan.layout.dp, "rank": self._engine.place.dp}

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            launcher = self._lightning("strategies.launchers.subprocess_script")._SubprocessScriptLauncher
            self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

    def set_world_ranks(self) -> None:
        """Tell the environment and the loggers which rank this is (a no-op under torchrun and SLURM)."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        self._fabric("utilities.rank_zero").rank_zero_only.rank = self.global_rank
        self._lightning("utilities.rank_zero").rank_zero_only.rank = self.global_rank

    def setup_environment(self) -> None:
        """Check what can be checked, then join the other ranks."""
        module = self.lightning_module
        refuse_unsupported(module.trainer, module)
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        # Lightning's launcher does this in the process that starts the others only.
        self._fabric("utilities.distributed")._set_num_threads_if_needed(self.num_processes)
        set_missing(
            {
                "MASTER_ADDR": self.cluster_environment.main_address,
                "MASTER_PORT": str(self.cluster_environment.main_port),
            }
        )
        met = self._meeting if dist.is_initialized() else None
        meeting = met or meet(rank=self.global_rank, world_size=self.world_size, timeout=self.config.timeout)
        check_degrees(self.config, module, meeting.topology(self.config))
        self._meeting = join(meeting, config=self.config, device_type=self.root_device.type)
        if self._failures is not None:
            self._failures.close()
        self._failures = FailureLog(rank=self.global_rank, place=f"host {host_name()}", watch=self._meeting.watch)
        self._failures.listen()
        if self.config.resume == "auto" and module.trainer.training and not self._looked:
            self._looked = True  # a second fit of this Trainer begins where the script says
            resume_by_itself(module.trainer)
        self._seed = share_random_state()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Where `configure_model` creates tensors: on the meta device when asked to, else on the CPU."""
        meta = empty_init or self.config.init == "meta"
        with torch.device("meta" if meta else "cpu"), self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Inside `configure_model`, ``from_pretrained`` waits until it is known which part this rank needs."""
        from holmes_core.runtime.lazy import lazy_loading

        with lazy_loading():
            yield

    # ---- set-up ----------------------------------------------------------------------------------------------------
    def setup(self, trainer: Any) -> None:
        """Split the model, build the engine, then the optimizer."""
        self.accelerator.setup(trainer)
        self._stop_between_steps(trainer)
        with self._named_failures():
            if self._engine is None or self._whole or self._engine.root is not self.lightning_module:
                self._build()
            else:  # too large to be made whole after the last run: still split
                self._move(self.root_device)
            self._load_pending()
            fitting = trainer.state.fn == self._lightning("trainer.states").TrainerFn.FITTING
            if fitting:
                self._resumed, self._feeds_after = False, None
                self._feeds.clear()
                self._reset_optimizers_and_schedulers()
                with name_several_optimizers():
                    self.setup_optimizers(trainer)
                refuse_optimizers(self.optimizers)
            self.setup_precision_plugin()
            if fitting:
                self._fabric("utilities.optimizer")._optimizers_to_device(self.optimizers, self.root_device)
        # Logged values are equal on all ranks here, with or without it.
        warnings.filterwarnings("ignore", r"It is recommended to use `self\.log\(.*sync_dist=True")
        precision = self.precision_plugin
        precision.clip_grad_by_norm = self._clip_grad_by_norm  # the class's __qualname__ is a checkpoint key: keep it
        self._share_found_inf(precision)

    def _build(self) -> None:
        root = self.lightning_module
        if self._engine is not None:
            self._engine.groups.close()
        engine = build_engine(
            root=root,
            config=self.config if self._engine is None else replace(self.config, print_plan=False),
            device=self.root_device,
            seed=self._seed,
            convert=self.precision_plugin.convert_module,
            meeting=self._meeting,
            hint=StepHint(batch=batch_size_of(root.trainer), precision=str(self.precision_plugin.precision)),
        )
        self.model = root
        self._engine, self._whole = engine, False
        place = engine.place
        self._feeds = Feeds(device=self.root_device, dp=self._dp_size, replica=place.dp)
        stages = "+".join(str(s) for s in engine.local_stages)
        self._failures.place = (
            f"stage {stages} of {engine.num_stages}, dp {place.dp}, tp {place.tp}, host {host_name()}"
        )
        if str(getattr(self.precision_plugin, "precision", "32-true")).startswith(("bf16", "16")):
            engine.loss_rule.half_precision()
        root._device_mesh = None
        connect_metrics(engine)
        self._steps = StepRunner(engine, root, metric_path(root))

    def _stop_between_steps(self, trainer: Any) -> None:
        """Let SIGTERM set a flag only; all ranks then stop at the end of a step.

        Lightning's handler (trainer/connectors/signal_connector.py) calls a collective from inside the signal handler,
        where this rank may be in the middle of others: ranks then wait for each other until the time-out.
        """
        connector = trainer._signal_connector

        def note(signum: int, _: Any) -> None:
            if not connector.received_sigterm and self.launcher is not None:
                self.launcher.kill(signum)
            connector.received_sigterm = True

        connector._sigterm_notifier_fn = note  # registered after `setup`

    def _reset_optimizers_and_schedulers(self) -> None:
        self._optimizers: list[Any] = []
        self._lightning_optimizers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []

    def _share_found_inf(self, precision: Any) -> None:
        """All ranks skip a half-precision step together: found_inf is the maximum over the job."""
        scaler = getattr(precision, "scaler", None)
        if scaler is None or getattr(scaler, "_holmes_shared", False):
            return
        unscale = scaler._unscale_grads_
        world = self._engine.groups.world

        def shared(*args: Any, **kwargs: Any) -> Any:
            found = unscale(*args, **kwargs)
            worst = torch.stack([v.detach().cpu() for v in found.values()]).max() if found else torch.zeros(())
            dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=world)
            return {device: value.copy_(worst.to(value)) for device, value in found.items()} or {
                self.root_device: worst.to(self.root_device)
            }

        scaler._unscale_grads_ = shared
        scaler._holmes_shared = True

    def _move(self, device: torch.device) -> None:
        self.lightning_module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))

    def model_to_device(self) -> None:
        """Done while the engine is built: parameters of other stages must stay where they are."""

    def process_dataloader(self, dataloader: Any) -> Any:
        """Watch training loaders, so that a checkpoint knows their place."""
        trainer = self.lightning_module.trainer
        if not trainer.training or self._feeds is None:
            return dataloader
        before = trainer.fit_loop._combined_loader
        if before is not self._feeds_after:  # reload_dataloaders_every_n_epochs
            self._feeds.clear()
            self._feeds_after = before
        with self._named_failures():
            return self._feeds.add(dataloader, progress_of(trainer.fit_loop) if self._resumed else None)

    def on_train_start(self) -> None:
        """Go on with the random numbers of the checkpoint."""
        if self._feeds is not None:
            self._feeds.restore()

    # ---- steps -----------------------------------------------------------------------------------------------------
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Give all ranks of a replica the same batch, whatever their loader workers drew, then move it."""
        if self._steps is not None:
            with self._named_failures():
                batch = self._steps.same_batch(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward of the whole pipeline; gradients wait in a stash until `backward`.

        Lightning calls zero_grad between the step and `backward`.
        """
        module, trainer = self.lightning_module, self.lightning_module.trainer
        engine = self._engine
        if self._resumed:
            self._feeds.started()
            self._resumed = False
        accumulate = trainer.accumulate_grad_batches
        if trainer.fit_loop.epoch_loop.batch_idx % accumulate == 0:  # as in loops/optimization/automatic.py
            for param in engine.gradients.params.values():
                param.grad = None
        with self._named_failures():
            self._check_saving()
        scaler = getattr(self.precision_plugin, "scaler", None)

        def step(micro_batch: Any) -> Any:
            with self.precision_plugin.train_step_context():
                return module.training_step(micro_batch, *args, **kwargs)

        with self._named_failures():
            output = self._steps.train(
                step,
                batch,
                accumulate=accumulate,
                scale=scaler.get_scale() if scaler is not None else 1.0,
                completes=not self._block_sync,
            )
        self._stash = [(p, p.grad) for p in engine.gradients.params.values() if p.grad is not None]
        for param, _ in self._stash:
            param.grad = None
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Put the gradients in place, and reduce them in the last batch of an accumulation window."""
        module, precision = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)
        closure_loss = precision.pre_backward(closure_loss, module)
        for param, grad in self._stash:
            param.grad = grad
        self._stash = []
        if not self._block_sync:
            with self._named_failures():
                self._engine.reduce_gradients()
        closure_loss = precision.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate without reducing."""
        self._block_sync = True
        try:
            yield
        finally:
            self._block_sync = False

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Step what this rank owns, then share the new values."""
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        with self._named_failures():
            self._engine.broadcast_parameters()
        return output

    def gradient_norm(self) -> Tensor:
        """2-norm of the whole model's gradient, each parameter once, equal on all ranks. Collective."""
        return self._engine.gradient_norm()

    def _clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        with self._named_failures():
            norm = self._engine.gradient_norm()
        factor = torch.clamp(clip_val / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
        self._engine.gradients.scale(factor.to(self.root_device))

    def validation_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward through the pipeline."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, batch, args, kwargs)

    def test_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward through the pipeline."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, batch, args, kwargs)

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the step forward through the pipeline; the result is on ranks that run the last stage."""
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, batch, args, kwargs)

    def _evaluate(self, name: str, context: Any, batch: Any, args: Any, kwargs: Any) -> Any:
        method = getattr(self.lightning_module, name)

        def step(whole: Any) -> Any:
            with context():
                return method(whole, *args, **kwargs)

        with self._named_failures():
            return self._steps.evaluate(step, batch, keep_result=name == "predict_step")

    # ---- end --------------------------------------------------------------------------------------------------------
    _failed = False

    @contextmanager
    def _named_failures(self) -> Iterator[None]:
        """Raise the name of the rank that failed first instead of this rank's lost connection."""
        try:
            yield
        except Exception as error:
            self._failed = True
            named = self._failures.explain(error) if self._failures is not None else error
            if named is error:
                raise
            raise named from None

    def on_exception(self, exception: BaseException) -> None:
        """Report a failure outside of the steps, so that other ranks can name it."""
        self._failed = True
        if self._failures is not None:
            self._failures.explain(exception)

    def teardown(self) -> None:
        """Make the module whole again on every rank, unless a rank failed."""
        engine = self._engine
        self._restore_late = None
        with self._named_failures():
            if engine is not None and self._failed:
                engine.gradients.give_up(_ARRIVE)
            elif engine is not None:
                engine.gradients.settle()
            self._finish_saving(together=not self._failed)
        if self._feeds is not None:
            self._feeds.release()
        if engine is not None and self.config.traffic_file and not self._failed:
            with self._named_failures():
                rows = gather_traffic(engine.groups.traffic, engine.plan, engine.device.type)
            if self.global_rank == 0:
                write_traffic(self.config.traffic_file, rows)
        if engine is not None:
            release_metrics(engine.root)
            self._move(torch.device("cpu"))
            if not self._failed and not self._whole:
                with self._named_failures():
                    if self.reduce_boolean_decision(fits_in_memory(state.model_bytes(engine), self.num_processes)):
                        engine.device = torch.device("cpu")
                        self._whole = state.restore_whole(engine)
            if self._whole:
                engine.release()
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        self._fabric("utilities.optimizer")._optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.precision_plugin.teardown()
        self.cluster_environment.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._failures is not None:
            self._failures.close()
