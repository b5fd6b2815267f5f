# SPDX-License-Identifier: Apache-2.0
"""What crosses from one pipeline stage to the next: one hidden-state tensor and the form blocks wrap it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.placeholder import make_placeholder

__all__ = ["Boundary", "describe_output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """Shape and form of the activation that one stage hands to the next.

    Attributes:
        shape: Shape of the hidden state, usually (micro-batch, sequence, hidden).
        dtype: Its dtype; the gradient that comes back has the same.
        requires_grad: Whether a gradient comes back at all (not below frozen stages).
        form: ``"tensor"``, ``"tuple"`` or ``"list"``: how a block returns the hidden state.
        index: Position of the hidden state in that tuple or list.
        extras: What stands at the other positions: ``("value", v)``, or ``("tensor", shape, dtype)``.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    form: str = "tensor"
    index: int = 0
    extras: tuple[Any, ...] = ()

    def wrap(self, hidden: Tensor) -> Any:
        """Return ``hidden`` in the form in which a block returns it."""
        if self.form == "tensor":
            return hidden
        items: list[Any] = [
            extra[1] if extra[0] == "value" else make_placeholder(extra[1], dtype=extra[2], device=hidden.device)
            for extra in self.extras
        ]
        items.insert(self.index, hidden)
        return tuple(items) if self.form == "tuple" else items

    def placeholder(self, device: torch.device) -> Any:
        """Return what an absent block returns: the right form around a placeholder."""
        return self.wrap(make_placeholder(self.shape, dtype=self.dtype, device=device))


def _extra(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), value.dtype)
    if value is None or isinstance(value, (bool, int, float, str)):
        return ("value", value)
    return ("value", None)  # caches and the like: not used in training, not sent


def describe_output(output: Any, *, block: str) -> tuple[Tensor, Boundary]:
    """Find the hidden state in what a block returned.

    Args:
        output: A tensor, or a tuple or list that holds one floating-point tensor first.
        block: Name of the block, for the error.

    Returns:
        The hidden state and its `Boundary`.

    Raises:
        HolmesError: The output has another form.
    """
    if isinstance(output, Tensor):
        return output, Boundary(
            shape=tuple(output.shape), dtype=output.dtype, requires_grad=output.requires_grad
        )
    if isinstance(output, (tuple, list)) and type(output) in (tuple, list):
        for index, item in enumerate(output):
            if isinstance(item, Tensor) and item.is_floating_point():
                extras = tuple(_extra(value) for i, value in enumerate(output) if i != index)
                form = "tuple" if isinstance(output, tuple) else "list"
                return item, Boundary(
                    shape=tuple(item.shape),
                    dtype=item.dtype,
                    requires_grad=item.requires_grad,
                    form=form,
                    index=index,
                    extras=extras,
                )
    raise HolmesError(
        seen=f"block {block!r} returned {type(output).__name__}, not a tensor or a tuple that starts with one",
        where=f"the end of a pipeline stage, after block {block!r}",
        means="Holmes cannot tell which tensor the next stage continues from",
        do="return the hidden state from the block, or choose other stage borders with split_points=[...]",
    )
