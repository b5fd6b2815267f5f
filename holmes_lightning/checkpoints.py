# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of HolmesStrategy: one file that loads under any strategy, or a folder that all ranks write at once."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.runtime import checkpoint as checkpoints
from holmes_core.runtime import state
from holmes_core.runtime.checkpoint_parts import has_placeholders
from holmes_core.runtime.checkpoint_place import remove
from holmes_core.runtime.checkpoint_saver import Saver, save_file
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.model_facts import model_config
from holmes_lightning.feed import Feeds

if TYPE_CHECKING:  # either namespace's class at run time, see strategy.py
    from lightning.pytorch.strategies.parallel import ParallelStrategy as _Base
else:
    _Base = object

__all__ = ["CheckpointHooks"]


class CheckpointHooks(_Base):
    """The part of HolmesStrategy that saves and restores."""

    config: HolmesConfig
    _engine: Engine
    _whole: bool
    _feeds: Feeds
    _weights_only: bool | None
    _restore_late: bool | None = None
    _resumed = False
    _made_saver: Saver | None = None
    _pending: tuple[Mapping[str, Any], bool] | None = None

    @property
    def _saver(self) -> Saver:
        if self._made_saver is None:
            self._made_saver = Saver(background=self.config.checkpoint_async, timeout=self.config.timeout)
        return self._made_saver

    def _local(self, path: Any) -> Path | None:
        """A path that Holmes reads and writes itself; None: a URL, or a CheckpointIO of the user's own."""
        own = type(self.checkpoint_io).__name__ != "TorchCheckpointIO"
        return None if own or "://" in str(path) else Path(os.path.abspath(path))

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A model on the meta device can take weights only once its part is real; others load before the split.

        Not always True: Lightning then forgets ``fit(weights_only=)`` (trainer.py, _restore_modules_and_callbacks).
        """
        if self._restore_late is None:
            self._restore_late = any(p.is_meta for p in self.lightning_module.parameters())
        return self._restore_late

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0, the same keys on the meta device elsewhere (sharded: everywhere). Collective."""
        sharded = self.config.checkpoint == "sharded"
        if self._engine is None:
            return self.lightning_module.state_dict()
        if self._whole:
            return state.replicated_state_dict(self.lightning_module) if sharded else self.lightning_module.state_dict()
        return state.sharded_state_dict(self._engine) if sharded else state.full_state_dict(self._engine)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights; each rank keeps its part. From a sharded checkpoint only once the model is split."""
        found = checkpoint["state_dict"]
        if self._engine is not None and not self._whole:
            state.load_state_dict(self._engine, found, strict=strict)
        elif has_placeholders(found):
            self._pending = found, strict
        else:
            self.lightning_module.load_state_dict(found, strict=strict)

    def _load_pending(self) -> None:
        """Load what came before the model was split."""
        if self._pending is not None:
            (found, strict), self._pending = self._pending, None
            state.load_state_dict(self._engine, found, strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State as a single process would hold it, on rank 0. Collective."""
        inner = getattr(optimizer, "_optimizer", optimizer)
        if self.config.checkpoint != "sharded":
            return state.full_optimizer_state(self._engine, inner)
        known = [getattr(one, "_optimizer", one) for one in self.optimizers]
        index = next((i for i, one in enumerate(known) if one is inner), 0)
        return state.sharded_optimizer_state(self._engine, inner, f"optimizer_states.{index}")

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the state of what this rank steps."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            state.load_optimizer_state(self._engine, optimizer, saved)
            self._fabric("utilities.optimizer")._optimizer_to_device(optimizer, self.root_device)
        ours = checkpoint.get("holmes", {})
        self._engine.batches_seen = int(ours.get("batches_seen", 0))
        self._engine.seed = int(ours.get("seed", self._engine.seed))
        self._resumed = True
        self._feeds.load(ours.get("data", {}))
        # Lightning's own warning that it would start the epoch over.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch ended")

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either kind, after comparing its checksums; weights of a folder are read later."""
        if weights_only is None:
            weights_only = self._weights_only
        self._finish_saving()
        path, safe = self._local(checkpoint_path), True if weights_only is None else weights_only
        if checkpoints.is_sharded(checkpoint_path):
            found: dict[str, Any] = checkpoints.load_tree(checkpoint_path, weights_only=safe)
        elif path is not None and checkpoints.is_archive(path):
            found = checkpoints.load_file(path, weights_only=safe)
        else:
            found = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        return found

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file, which loads under any strategy, or a folder."""
        found = model_config(self.lightning_module)
        checkpoint["holmes"] = {
            "batches_seen": self._engine.batches_seen if self._engine is not None else 0,
            **self._data_state(),
            "model_path": found[0] if found else None,
            "model_config": found[1] if found else None,
        }
        path = self._local(filepath)
        if self.config.checkpoint == "sharded" and self._engine is not None:
            if path is None or storage_options is not None:
                raise ConfigError(
                    seen=f"a sharded checkpoint at {filepath} by {type(self.checkpoint_io).__name__}",
                    where="trainer.save_checkpoint",
                    means="all ranks write into a folder that they share, without a CheckpointIO",
                    do="save to a path of a shared file system without a CheckpointIO of your own, or use checkpoint:"
                    " single; checkpoint_async: true saves in the background",
                )
            self._saver.save_sharded(path, checkpoint, world=self._engine.groups.world)
            return
        if path is None or storage_options is not None:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            self.barrier()
            return
        problem: Exception | None = None
        if self.is_global_zero:
            try:
                kept = self._steady(checkpoint) if self.config.checkpoint_async else checkpoint
                self._saver.save(path, lambda: save_file(path, kept))
            except Exception as error:
                problem = error
        checkpoints.raise_everywhere(problem)

    @staticmethod
    def _steady(checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Copy what training changes; weights and optimizer states are copies already."""
        copies: dict[int, Any] = {}
        for key in ("state_dict", "optimizer_states"):
            checkpoints.map_tree(checkpoint.get(key), lambda value, _: copies.setdefault(id(value), value))
        return copy.deepcopy(checkpoint, copies)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a file or a folder; while a newer one is being saved, once that is complete."""
        path = self._local(filepath)
        if path is None:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            if self._made_saver is None:
                remove(path)
            else:
                self._made_saver.remove(path)

    def _check_saving(self) -> None:
        """Raise what a save in the background failed with."""
        if self._made_saver is not None:
            self._made_saver.check()

    def _finish_saving(self, together: bool = True) -> None:
        """Wait for a save in the background; raise on all ranks what it failed with. Collective if `together`."""
        problem: Exception | None = None
        try:
            if self._made_saver is not None:
                self._made_saver.wait()
        except Exception as error:
            problem = error
        if together and self.config.checkpoint_async and dist.is_initialized():
            checkpoints.raise_everywhere(problem)
        elif problem is not None:
            raise problem

    def _data_state(self) -> dict[str, Any]:
        """What goes on in the middle of an epoch, from the first stage of each replica. Collective."""
        engine, feeds = self._engine, self._feeds
        if engine is None or feeds is None:
            return {}
        mine = (engine.place.dp, feeds.mine()) if engine.rank == engine.first_rank else None
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        parts = dict(part for part in everyone if part is not None)
        return {"seed": engine.seed, "data": feeds.state([parts[d] for d in sorted(parts)])}
