# SPDX-License-Identifier: Apache-2.0
"""Give all ranks of a replica the same batches: those that its first stage's loader draws.

Accelerate shards data over processes and, where it shards nothing, leaves each process its own random order. Here the
ranks of one replica must see one batch, whatever their loaders, workers and random masks draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from holmes_core.runtime.call_mode_data import replica_batches
from holmes_core.runtime.engine import Engine

__all__ = ["batch_size_of", "share_batches"]

_SHARED = "_holmes_shared"


def batch_size_of(obj: Any) -> int | None:
    """Return a data loader's samples per batch; None if it does not say, or is none."""
    if not isinstance(obj, DataLoader):
        return None
    found = obj.batch_size if obj.batch_size is not None else getattr(obj.batch_sampler, "batch_size", None)
    return found if isinstance(found, int) and found > 0 else None


def share_batches(loader: Any, engine_of: Callable[[], Engine | None]) -> Any:
    """Let a prepared loader yield its replica's batches; returns the loader.

    Args:
        loader: A loader of Accelerate, or a DataLoader.
        engine_of: Returns the engine once there is one.
    """
    # Accelerate's loaders iterate over `base_dataloader.__iter__()`, before they move a batch to the device.
    base = vars(loader).get("base_dataloader", loader)
    if _SHARED in vars(base) or base is loader:
        return loader
    vars(base)[_SHARED] = True
    vars(loader)["_holmes_engine_of"] = engine_of  # for loaders made from this one (skipped batches)
    make = base.__iter__

    vars(base)["__iter__"] = lambda: replica_batches(make(), engine_of)
    return loader
