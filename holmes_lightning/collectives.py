# SPDX-License-Identifier: Apache-2.0
"""Collectives as Lightning asks a strategy for them: over replicas, or decisions and broadcasts over the whole job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.runtime.engine import Engine

if TYPE_CHECKING:  # either namespace's class at run time, see strategy.py
    from lightning.pytorch.strategies.parallel import ParallelStrategy as _Base
else:
    _Base = object

__all__ = ["CollectiveHooks"]


class CollectiveHooks(_Base):
    """The part of HolmesStrategy that users' ``sync_dist`` and ``all_gather`` reach."""

    _engine: Engine
    _failed: bool

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over replicas: along the pipeline and over tensor-parallel ranks values are equal."""
        if not isinstance(tensor, Tensor) or (group is None and (self._engine is None or self._dp_size == 1)):
            return tensor
        sync = self._fabric("utilities.distributed")._sync_ddp_if_available
        return sync(tensor, group if group is not None else self._engine.groups.dp, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from all replicas; shape (dp, ...)."""
        if group is None and (self._engine is None or self._dp_size == 1):
            return tensor
        gather = self._fabric("utilities.distributed")._all_gather_ddp_if_available
        return gather(tensor, group=group if group is not None else self._engine.groups.dp, sync_grads=sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide together, all ranks of the job."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision))
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks, at most ``timeout`` seconds."""
        if dist.is_initialized() and not self._failed:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Hand an object of global rank `src` to all ranks."""
        if not dist.is_initialized():
            return obj
        box = [obj]
        dist.broadcast_object_list(box, src)
        return box[0]

    @property
    def _dp_size(self) -> int:
        return self._engine.plan.layout.dp
