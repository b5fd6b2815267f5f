# SPDX-License-Identifier: Apache-2.0
"""What crosses from one pipeline stage to the next: one hidden-state tensor and the form blocks wrap it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.placeholder import Absent, make_placeholder

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
        extras: What stands at the other positions, as `_extra` describes it.
        source: Name of the block that returned it.
        compute: The dtype of autocast in the step that made it; None without autocast.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    form: str = "tensor"
    index: int = 0
    extras: tuple[Any, ...] = ()
    source: str = "a block"
    compute: torch.dtype | None = None

    def wrap(self, hidden: Tensor, source: str | None = None) -> Any:
        """Return ``hidden`` in the form in which a block returns it.

        Args:
            hidden: The hidden state.
            source: Name of the block that seems to return it.
        """
        if self.form == "tensor":
            return hidden
        items = [_stand_in(extra, hidden.device, source or self.source) for extra in self.extras]
        items.insert(self.index, hidden)
        return tuple(items) if self.form == "tuple" else items

    def placeholder(self, device: torch.device, source: str | None = None) -> Any:
        """Return what an absent block returns: the right form around a placeholder."""
        source = source or self.source
        return self.wrap(make_placeholder(self.shape, dtype=self.dtype, device=device, source=source), source)

    def to_json(self) -> list[Any]:
        """Return what `from_json` reads."""
        return [
            list(self.shape),
            str(self.dtype)[6:],
            self.requires_grad,
            self.form,
            self.index,
            list(self.extras),
            self.source,
            None if self.compute is None else str(self.compute)[6:],
        ]

    @classmethod
    def from_json(cls, value: list[Any]) -> Boundary:
        """Return the boundary that `to_json` described."""
        shape, dtype, requires_grad, form, index, extras, source, compute = value
        return cls(
            shape=tuple(shape),
            dtype=getattr(torch, dtype),
            requires_grad=requires_grad,
            form=form,
            index=index,
            extras=_frozen(extras),
            source=source,
            compute=None if compute is None else getattr(torch, compute),
        )


def _extra(value: Any) -> tuple[Any, ...]:
    """Describe a value that is not sent, for `_stand_in`, in terms that go through json."""
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype)[6:])
    if value is None or isinstance(value, (bool, int, float, str)):
        return ("value", value)
    if type(value) in (tuple, list):
        return (type(value).__name__, *(_extra(item) for item in value))
    return ("object", type(value).__name__)


def _stand_in(extra: tuple[Any, ...], device: torch.device, source: str) -> Any:
    kind, *rest = extra
    if kind == "tensor":
        return make_placeholder(rest[0], dtype=getattr(torch, rest[1]), device=device, source=source)
    if kind == "value":
        return rest[0]
    if kind == "object":
        return Absent(rest[0], source)
    items = [_stand_in(item, device, source) for item in rest]
    return tuple(items) if kind == "tuple" else items


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _compute(tensor: Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


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
            shape=tuple(output.shape),
            dtype=output.dtype,
            requires_grad=output.requires_grad,
            source=block,
            compute=_compute(output),
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
                    source=block,
                    compute=_compute(item),
                )
    raise HolmesError(
        seen=f"block {block!r} returned {type(output).__name__}, not a tensor or a tuple that starts with one",
        where=f"the end of a pipeline stage, after block {block!r}",
        means="Holmes cannot tell which tensor the next stage continues from",
        do="return the hidden state from the block, or choose other stage borders with split_points=[...]",
    )
