# SPDX-License-Identifier: Apache-2.0
"""Where torch's autograd meets call mode: what the backward of a call's loss, or of its outputs, does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.call_mode_ahead import OneCall

__all__ = ["CallGradients", "Loss", "Outputs"]


class CallGradients:
    """The gradients of one training call, until its loss is differentiated."""

    def __init__(self, mode: Any, call: OneCall) -> None:
        self._mode = mode
        self._call: OneCall | None = call

    def commit(self, grad: Tensor) -> None:
        """Add them to ``param.grad``, times the gradient of the call's loss."""
        if self._call is None:
            raise HolmesError(
                seen="backward of one training call for the second time",
                where="loss.backward()",
                means="the gradients of a call are handed out once",
                do="call the model again, or add losses before one backward",
            )
        call, self._call = self._call, None
        self._mode.commit(call, float(grad))


class Loss(torch.autograd.Function):
    """The loss of a training call, whose backward hands the call's gradients out."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, gradients: CallGradients) -> Tensor:
        """Return `value`, tied to `anchor`, which requires a gradient."""
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Add the call's gradients to the parameters', times `grad`."""
        ctx.gradients.commit(grad)
        return None, None, None


class Outputs(torch.autograd.Function):
    """The outputs of an open forward, whose backward goes back through the stages."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, held: Any, *tensors: Tensor) -> Any:
        """Return the outputs' floating tensors, tied to `anchor`."""
        ctx.held = held
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Send the gradients of the outputs back through the stages. Collective over the replica."""
        mode, held, floating, count, whole = ctx.held
        if whole:
            mode.warn_of_eval_mode()
        by_index: list[Tensor | None] = [None] * count
        for index, grad in zip(floating, grads, strict=True):
            by_index[index] = None if grad is None else grad / mode.dp
        with mode._guard():
            mode._ahead.begin_known(mode._ahead.complete)
            held.backward(by_index)
        mode.mark_backward()
        mode._ahead.ended()
        return (None, None, *[None] * len(grads))
