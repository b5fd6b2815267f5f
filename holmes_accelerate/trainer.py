# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer under Holmes: the methods that save or resume on one rank get what all ranks must collect."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

from holmes_accelerate.checkpoints import read_progress, write_progress
from holmes_accelerate.loaders import share_batches
from holmes_accelerate.wrappers import HolmesOptimizer
from holmes_core.errors import HolmesError
from holmes_core.runtime.call_mode import of_model

__all__ = ["patch_saving"]


def patch_saving(module: ModuleType) -> None:
    """Replace the methods of Trainer that save and the function with which it skips batches.

    Without Holmes all do what they did.

    Args:
        module: ``transformers.trainer``.

    Raises:
        HolmesError: This version of transformers has other methods.
    """
    trainer: Any = module.Trainer
    for name in ("save_model", "_save", "_save_optimizer_and_scheduler", "_save_rng_state", "_load_rng_state"):
        if not callable(getattr(trainer, name, None)):
            raise HolmesError(
                seen=f"transformers.Trainer has no method {name}",
                means="this version saves in another way than those Holmes was tested with",
                do="use the versions in constraints.txt, or a loop of your own with Accelerator",
            )
    trainer.save_model = _save_model(trainer.save_model)
    trainer._save_optimizer_and_scheduler = _save_optimizer(trainer._save_optimizer_and_scheduler)
    trainer._save_rng_state = _with_progress(trainer._save_rng_state, write_progress)
    trainer._load_rng_state = _with_progress(trainer._load_rng_state, read_progress)
    skip = module.skip_first_batches

    @functools.wraps(skip)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        engine_of = vars(dataloader).get("_holmes_engine_of")
        skipped = skip(dataloader, num_batches)
        return skipped if engine_of is None else share_batches(skipped, engine_of)

    module.skip_first_batches = skip_first_batches  # type: ignore[attr-defined]


def _save_model(original: Any) -> Any:
    parameters = list(inspect.signature(original).parameters)

    @functools.wraps(original)
    def save_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode = of_model(self.model)
        if mode is None:
            return original(self, *args, **kwargs)
        # Trainer calls _save on the main process only: all ranks collect before, and it writes what was collected.
        given = dict(zip(parameters[1:], args, strict=False)) | kwargs
        state = mode.state_dict()
        output = given.get("output_dir") or self.args.output_dir
        self._save(output, state_dict=state)
        if self.args.push_to_hub and not given.get("_internal_call", False):
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        return None

    return save_model


def _save_optimizer(original: Any) -> Any:
    @functools.wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.optimizer, HolmesOptimizer):
            return original(self, *args, **kwargs)
        with self.optimizer.collected():
            return original(self, *args, **kwargs)

    return save


def _with_progress(original: Any, do: Any) -> Any:
    """Save or restore, with Trainer's random states, those of the pipeline (dropout)."""

    @functools.wraps(original)
    def method(self: Any, folder: Any) -> Any:
        result = original(self, folder)
        mode = of_model(self.model)
        if mode is not None and folder is not None:
            do(mode.engine, folder)
        return result

    return method
