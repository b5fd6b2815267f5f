# SPDX-License-Identifier: Apache-2.0
"""Collectives as a script asks an Accelerator for them: over replicas, as the ranks of one replica hold the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.call_mode import CallMode
from holmes_core.runtime.engine import Engine

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = object

__all__ = ["CollectiveHooks"]


class CollectiveHooks(_Base):
    """The part of HolmesAccelerator that gathers and reduces."""

    _replicas: int
    _mode: CallMode | None
    flag_tensor: Tensor | None

    @property
    def _engine(self) -> Engine:
        mode = self._mode
        if mode is None:
            raise HolmesError(
                seen="values of all replicas are asked for before there is a model",
                where="gather, reduce or pad_across_processes",
                means="which ranks belong to which replica is settled when the model is prepared",
                do="call accelerator.prepare(model, ...) first",
            )
        return mode.engine

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors of all replicas along the first dimension, in the order of the replicas."""
        if self._replicas == 1:
            return tensor
        return recursively_apply(self._gather_one, tensor, error_on_other_type=True)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        mine = (tensor.detach().clone()[None] if tensor.ndim == 0 else tensor.detach()).contiguous()
        everyone = [torch.empty_like(mine) for _ in range(self._replicas)]
        group = self._engine.groups.dp if mine.device == self._engine.device else self._engine.groups.dp_control
        dist.all_gather(everyone, mine, group=group)
        return torch.cat(everyone)

    def _gather_objects(self, value: Any) -> Any:
        if self._replicas == 1:
            return value
        everyone: list[Any] = [None] * self._replicas
        dist.all_gather_object(everyone, value, group=self._engine.groups.dp_control)
        return [item for part in everyone for item in part]

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather, and drop what was added to make the last batch even."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        data = self._gather_objects(input_data) if use_gather_object else self.gather(input_data)
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        kept = state.remainder
        if use_gather_object:
            return data[:kept]
        return recursively_apply(lambda t: t[:kept] if t.ndim else t, data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce over replicas: ``sum``, ``mean``, ``max`` or ``none``."""
        if self._replicas == 1 or reduction == "none":
            return tensor

        def one(value: Tensor) -> Tensor:
            result = value.detach().clone()
            group = self._engine.groups.dp if value.device == self._engine.device else self._engine.groups.dp_control
            dist.all_reduce(result, op=dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=group)
            return result / self._replicas if reduction == "mean" else result

        return recursively_apply(one, tensor, error_on_other_type=True)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors to the largest size among replicas."""
        if self._replicas == 1:
            return tensor

        def one(value: Tensor) -> Tensor:
            if dim >= value.ndim or dim < -value.ndim:
                return value
            at = dim % value.ndim
            longest = torch.tensor(value.shape[at])
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=self._engine.groups.dp_control)
            if int(longest) == value.shape[at]:
                return value
            shape = [*value.shape]
            shape[at] = int(longest)
            padded = value.new_full(shape, pad_index)
            padded.narrow(at, int(longest) - value.shape[at] if pad_first else 0, value.shape[at]).copy_(value)
            return padded

        return recursively_apply(one, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Whether any rank of the job has set the trigger; resets it."""
        flag = torch.tensor(0 if self.flag_tensor is None else int(self.flag_tensor))
        if dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.flag_tensor = None
        return bool(flag)
