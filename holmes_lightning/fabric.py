# SPDX-License-Identifier: Apache-2.0
"""``Fabric(strategy="holmes")``: the loop is the user's own, so the model's calls drive the engine (call mode)."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.config import HolmesConfig
from holmes_core.errors import HolmesError
from holmes_core.plan.grid import make_grid
from holmes_core.plan.layout import ModelFacts, choose_layout, pin
from holmes_core.runtime.call_mode import CallMode, named_parameter_slots, of_model
from holmes_core.runtime.call_mode_data import replica_batches
from holmes_core.runtime.checkpoint import is_archive, raise_everywhere
from holmes_core.runtime.checkpoint_latest import check_file
from holmes_core.runtime.checkpoint_saver import save_file
from holmes_core.runtime.environment import set_missing
from holmes_core.runtime.failure import FailureLog
from holmes_core.runtime.setup import build_engine, share_random_state
from holmes_core.runtime.start import host_name, join, meet

__all__ = ["make_fabric_strategy_class"]


class _ReplicaLoader:
    """A loader that yields its replica's batches."""

    def __init__(self, loader: Any, engine_of: Any) -> None:
        self.__dict__.update(loader.__dict__)
        self._loader, self._engine_of = loader, engine_of

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return replica_batches(iter(self._loader), self._engine_of)


@functools.cache
def make_fabric_strategy_class(namespace: str) -> type[Any]:
    """Return the strategy for ``"lightning.fabric"`` or ``"lightning_fabric"``."""
    base = importlib.import_module(f"{namespace}.strategies.parallel").ParallelStrategy
    sync = importlib.import_module(f"{namespace}.strategies.strategy")._BackwardSyncControl
    tools = importlib.import_module(f"{namespace}.utilities.distributed")
    rank_zero = importlib.import_module(f"{namespace}.utilities.rank_zero").rank_zero_only
    launchers = importlib.import_module(f"{namespace}.strategies.launchers.subprocess_script")

    class _Accumulation(sync):  # type: ignore[misc, valid-type]
        def no_backward_sync(self, module: Any, enabled: bool) -> AbstractContextManager[Any]:
            mode = of_model(module)
            return mode.no_sync() if enabled and mode is not None else nullcontext()

    class HolmesFabricStrategy(base):  # type: ignore[misc, valid-type]
        """Pipeline, data and tensor parallel training for Fabric; keywords are fields of HolmesConfig."""

        def __init__(self, **settings: Any) -> None:
            super().__init__()
            self.config = HolmesConfig.load(kwargs=settings, env=os.environ)
            self._num_nodes = 1
            self._mode: CallMode | None = None
            self._layout: Any = None
            self._replica = 0
            self._backward_sync_control = _Accumulation()

        # ---- processes ----
        @property
        def root_device(self) -> torch.device:
            devices = self.parallel_devices or [torch.device("cpu")]
            return devices[self.local_rank % len(devices)]

        @property
        def num_nodes(self) -> int:
            return self._num_nodes

        @num_nodes.setter
        def num_nodes(self, num_nodes: int) -> None:
            self._num_nodes = num_nodes

        @property
        def num_processes(self) -> int:
            return len(self.parallel_devices) if self.parallel_devices is not None else 1

        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any] | None:
            if self._layout is None or self._layout.dp == 1:
                return None
            return {"num_replicas": self._layout.dp, "rank": self._replica}

        def _configure_launcher(self) -> None:
            if not self.cluster_environment.creates_processes_externally:
                launcher = launchers._SubprocessScriptLauncher
                self._launcher = launcher(self.cluster_environment, self.num_processes, self.num_nodes)

        def setup_environment(self) -> None:
            self.accelerator.setup_device(self.root_device)
            environment = self.cluster_environment
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
            rank_zero.rank = self.global_rank
            set_missing({"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)})
            world, config = self.world_size, self.config
            self._meeting = meet(rank=self.global_rank, world_size=world, timeout=config.timeout)
            topology = self._meeting.topology(config)
            self._layout, _ = choose_layout(topology, config, ModelFacts(num_blocks=10**6))
            grid = make_grid(
                topology,
                self._layout,
                rank_order=config.rank_order,
                last_stage_on_rank_zero=config.last_stage_on_rank_zero,
            )
            self._replica = grid.coordinates(self.global_rank).dp
            self._meeting = join(self._meeting, config=config, device_type=self.root_device.type)
            self._failures = FailureLog(rank=self.global_rank, place=f"host {host_name()}", watch=self._meeting.watch)
            self._failures.listen()

        # ---- set-up ----
        def setup_module(self, module: Any) -> Any:
            mode = of_model(module)
            if mode is None:
                if self._mode is not None:
                    raise HolmesError(
                        seen=f"a second model ({type(module).__name__})",
                        where="fabric.setup",
                        means="one pipeline trains one model",
                        do="put both into one module whose forward returns the loss",
                    )
                if getattr(self.precision, "scaler", None) is not None:
                    raise HolmesError(
                        seen="precision 16-mixed",
                        where="Fabric(precision=...)",
                        means="its scaler looks for overflow on each rank alone",
                        do='use precision="bf16-mixed"',
                    )
                before = named_parameter_slots(module)
                with self._named_failures():
                    engine = build_engine(
                        root=module,
                        config=pin(self.config, self._layout),
                        device=self.root_device,
                        seed=share_random_state(),
                        meeting=self._meeting,
                    )
                mode = CallMode(engine, before=before, guard=self._named_failures)
                if str(getattr(self.precision, "precision", "32-true")).startswith(("bf16", "16")):
                    mode.half_precision()
            self._mode = mode
            return module

        def setup_optimizer(self, optimizer: Any) -> Any:
            if self._mode is None:
                raise HolmesError(
                    seen="an optimizer before its model", where="fabric.setup", do="use fabric.setup(model, optimizer)"
                )
            self._mode.adopt(optimizer)
            return optimizer

        def module_to_device(self, module: Any) -> None:
            if of_model(module) is None:
                module._apply(lambda t: t if t.is_meta else t.to(self.root_device))

        def process_dataloader(self, dataloader: Any) -> Any:
            return _ReplicaLoader(dataloader, lambda: self._mode.engine if self._mode is not None else None)

        # ---- gradients ----
        def clip_gradients_norm(
            self, module: Any, optimizer: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: bool = True
        ) -> Tensor:
            assert self._mode is not None
            self._mode.reduce()
            self.precision.unscale_gradients(optimizer)
            norm = self._mode.clip_grad_norm_(max_norm, norm_type)
            if error_if_nonfinite and not torch.isfinite(norm):
                raise RuntimeError(f"the total gradient norm is {float(norm)}: it cannot be clipped")
            return norm

        def clip_gradients_value(self, module: Any, optimizer: Any, clip_val: Any) -> None:
            assert self._mode is not None
            self._mode.reduce()
            self.precision.unscale_gradients(optimizer)
            self._mode.clip_grad_value_(clip_val)

        # ---- state ----
        def get_module_state_dict(self, module: Any) -> dict[str, Any]:
            mode = of_model(module)
            return module.state_dict() if mode is None else mode.state_dict()

        def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            return optimizer.state_dict() if self._mode is None else self._mode.optimizer_state_dict(optimizer)

        def _local(self, path: Any) -> Path | None:
            """A path that Holmes writes itself; None: a URL, or a CheckpointIO of the user's own."""
            own = type(self.checkpoint_io).__name__ != "TorchCheckpointIO"
            return None if own or "://" in str(path) else Path(os.path.abspath(path))

        def save_checkpoint(self, path: Any, state: Any, storage_options: Any = None, filter: Any = None) -> None:
            local = self._local(path) if storage_options is None else None
            if local is None:
                super().save_checkpoint(path, state, storage_options, filter)
                return
            # Lightning writes to the system's folder for temporary files and moves: mostly to another disk, that is a
            # copy, and one that is killed leaves half a file under the checkpoint's name.
            found = self._convert_stateful_objects_in_state(state, filter=filter or {})
            problem: Exception | None = None
            if self.is_global_zero:
                try:
                    save_file(local, found)
                except Exception as error:
                    problem = error
            raise_everywhere(problem)

        def load_checkpoint(
            self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
        ) -> dict[str, Any]:
            dist.barrier()  # rank 0 may still be writing it
            if not isinstance(state, dict):
                return super().load_checkpoint(path, state, strict, weights_only)
            if (local := self._local(path)) is not None and is_archive(local):
                check_file(local)  # torch compares no checksum
            found = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
            missing = sorted(set(state) - set(found))
            if strict and missing:
                raise KeyError(f"the checkpoint {path} has no {missing}; it has {sorted(found)}")
            for name, obj in list(state.items()):
                value = found.pop(name, None)
                if name in missing:
                    continue
                if isinstance(obj, torch.optim.Optimizer) and self._mode is not None:
                    self._mode.load_optimizer_state_dict(obj, value)
                elif isinstance(obj, torch.nn.Module):
                    obj.load_state_dict(value, strict=strict)
                elif hasattr(obj, "load_state_dict"):
                    obj.load_state_dict(value)
                else:
                    state[name] = value
            return found

        # ---- collectives ----
        def _dp_group(self) -> Any:
            return self._mode.engine.groups.dp if self._mode is not None and self._layout.dp > 1 else None

        def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
            group = group or self._dp_group()
            if group is None or not isinstance(tensor, Tensor):
                return tensor
            return tools._sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

        def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
            group = group or self._dp_group()
            if group is None:
                return tensor
            return tools._all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)

        def barrier(self, *args: Any, **kwargs: Any) -> None:
            if dist.is_initialized():
                dist.barrier()

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            if not dist.is_initialized():
                return obj
            box = [obj]
            dist.broadcast_object_list(box, src)
            return box[0]

        @contextmanager
        def _named_failures(self) -> Iterator[None]:
            try:
                yield
            except Exception as error:
                named = self._failures.explain(error)
                if named is error:
                    raise
                raise named from None

    HolmesFabricStrategy.__module__ = "holmes_lightning.fabric"
    HolmesFabricStrategy.__qualname__ = "HolmesFabricStrategy"
    return HolmesFabricStrategy
