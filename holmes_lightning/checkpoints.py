# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of HolmesStrategy: one file with the whole model and optimizer, which loads under any strategy."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from holmes_core.runtime import state
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

    _engine: Engine
    _whole: bool
    _feeds: Feeds
    _weights_only: bool | None
    _restore_late: bool | None = None
    _resumed = False

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A model on the meta device can take weights only once its part is real; others load before the split.

        Not always True: Lightning then forgets ``fit(weights_only=)`` (trainer.py, _restore_modules_and_callbacks).
        """
        if self._restore_late is None:
            self._restore_late = any(p.is_meta for p in self.lightning_module.parameters())
        return self._restore_late

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0, the same keys on the meta device elsewhere. Collective."""
        if self._engine is None or self._whole:
            return self.lightning_module.state_dict()
        return state.full_state_dict(self._engine)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights; each rank keeps its part."""
        if self._engine is None or self._whole:
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)
        else:
            state.load_state_dict(self._engine, checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """State as a single process would hold it, on rank 0. Collective."""
        return state.full_optimizer_state(self._engine, getattr(optimizer, "_optimizer", optimizer))

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
        """Read a single-file checkpoint."""
        if weights_only is None:
            weights_only = self._weights_only
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file, which loads under any strategy."""
        found = model_config(self.lightning_module)
        checkpoint["holmes"] = {
            "batches_seen": self._engine.batches_seen if self._engine is not None else 0,
            **self._data_state(),
            "model_path": found[0] if found else None,
            "model_config": found[1] if found else None,
        }
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        self.barrier()

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
