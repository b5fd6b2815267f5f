# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of HolmesAccelerator: the files that Accelerate writes, with the whole model and optimizer in them."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.call_mode import CallMode, of_model

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = object

__all__ = ["CheckpointHooks"]

_OURS = "holmes_state.json"


class _Collected(nn.Module):
    """Stands for a model whose whole state is at hand."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state


class CheckpointHooks(_Base):
    """The part of HolmesAccelerator that saves and restores."""

    _mode: CallMode | None

    def _register_checkpoint_hooks(self) -> None:
        self.register_save_state_pre_hook(self._save_ours)
        self.register_load_state_pre_hook(self._load_models)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the whole state on rank 0, meta tensors of the whole shapes elsewhere. Collective over all ranks."""
        if isinstance(model, _Collected):
            return model.state
        mode = of_model(model)
        if mode is None:
            return super().get_state_dict(model, unwrap=unwrap)
        return OrderedDict(mode.state_dict())  # Accelerate takes tied weights out of an OrderedDict only

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write the whole model as safetensors, from rank 0. Collective over all ranks."""
        if of_model(model) is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        state = self.get_state_dict(model)
        if self.is_main_process:
            super().save_model(_Collected(state), save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()

    def _save_ours(self, models: list[Any], weights: list[Any], output_dir: Any) -> None:
        if self._mode is not None and self.is_main_process:
            engine = self._mode.engine
            ours = {"batches_seen": engine.batches_seen, "seed": engine.seed, "dp": engine.plan.layout.dp}
            with open(os.path.join(output_dir, _OURS), "w", encoding="utf-8") as file:
                json.dump(ours, file)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Write a checkpoint as Accelerate does; it loads under any layout. Collective over all ranks."""
        place = super().save_state(output_dir, safe_serialization, **kwargs)
        self.wait_for_everyone()  # a rank that goes on to load or to delete must find what rank 0 writes
        return place

    def _load_models(self, models: list[Any], input_dir: Any) -> None:
        for index, model in reversed(list(enumerate(models))):
            mode = of_model(model)
            if mode is None:
                continue
            mode.load_state_dict(_read_weights(input_dir, index))
            del models[index]  # Accelerate would load it as if it were whole
        try:
            with open(os.path.join(input_dir, _OURS), encoding="utf-8") as file:
                ours = json.load(file)
        except FileNotFoundError:  # saved without Holmes
            return
        if self._mode is not None:
            self._mode.engine.batches_seen, self._mode.engine.seed = int(ours["batches_seen"]), int(ours["seed"])


def _read_weights(folder: Any, index: int) -> dict[str, Any]:
    ending = f"_{index}" if index else ""
    safe = os.path.join(folder, f"model{ending}.safetensors")
    if os.path.isfile(safe):
        return dict(load_file(safe))
    pickled = os.path.join(folder, f"pytorch_model{ending}.bin")
    if os.path.isfile(pickled):
        return dict(torch.load(pickled, map_location="cpu", weights_only=True))
    raise HolmesError(
        seen=f"neither {os.path.basename(safe)} nor {os.path.basename(pickled)}",
        where=f"folder {folder}",
        do="give load_state a folder that save_state wrote, readable on every host",
    )
