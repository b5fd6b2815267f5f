# SPDX-License-Identifier: Apache-2.0
"""What a model returned on the last stage, on all ranks of its replica.

The structure travels as a small pickled message, each tensor by a broadcast of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.step_record import share

__all__ = ["LossOutput", "MissingOutput", "Part", "broadcast", "first_loss", "pack", "shape_like", "unpack"]

_PLAIN = (bool, int, float, str, type(None))


class MissingOutput(HolmesError, AttributeError):
    """Something besides the loss was asked of a training call (an AttributeError, so ``hasattr`` says no)."""


class LossOutput(dict[str, Any]):
    """What a training call returns for a model that returns a mapping: ``.loss``, ``["loss"]``, ``[0]``.

    The other outputs stay on the last stage: they are large, and a training loop seldom reads them.
    """

    def __getitem__(self, key: Any) -> Any:
        if key == 0:
            return super().__getitem__("loss")
        if key not in self:
            raise _missing(str(key))
        return super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        if name == "loss":
            return super().__getitem__("loss")
        if name.startswith("__"):
            raise AttributeError(name)
        raise _missing(name)


def _missing(name: str) -> MissingOutput:
    return MissingOutput(
        seen=f"{name!r} of a training call that was given labels",
        where="the model's output",
        means="with labels the loss is computed on the last stage and its gradients with it; nothing else is sent to"
        " the other ranks",
        do="call the model without labels and compute loss and metrics from its logits; or read them in eval mode",
    )


def first_loss(output: Any) -> Tensor | None:
    """Return the scalar loss a model returned: its ``loss``, a scalar tensor, or the first of a tuple; else None."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Stands for a tensor in a packed output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


def pack(value: Any, tensors: list[Tensor]) -> Any:
    """Replace tensors by `Part` and collect them; values that no other rank could use (caches) become None."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Part(shape=tuple(value.shape), dtype=value.dtype, grad=value.requires_grad)
    if isinstance(value, Mapping):
        return type(value), {key: pack(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value), [pack(item, tensors) for item in value]
    return value if isinstance(value, _PLAIN) else None


def unpack(packed: Any, tensors: Sequence[Tensor]) -> Any:
    """Undo `pack`."""
    rest = iter(tensors)

    def build(value: Any) -> Any:
        if isinstance(value, Part):
            return next(rest)
        if not isinstance(value, tuple):
            return value
        kind, items = value
        if isinstance(items, dict):
            built = {key: build(item) for key, item in items.items()}
            built = {key: item for key, item in built.items() if item is not None}
            return built if kind is dict else kind(**built)
        made = [build(item) for item in items]
        return kind(*made) if hasattr(kind, "_fields") else kind(made)

    return build(packed)


def shape_like(packed: Any, tensors: Sequence[Tensor]) -> Any:
    """Return `packed` with the shapes of other tensors (micro-batches joined)."""
    return pack(unpack(packed, tensors), [])


def broadcast(engine: Engine, packed: Any, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Hand a packed output from the last stage to all ranks of the replica. Collective over the replica.

    Args:
        engine: The engine.
        packed: The output's structure; used on the last stage.
        tensors: Its tensors, in the order of `pack`; used on the last stage.

    Returns:
        Structure and tensors, on this rank's device, without gradients.
    """
    group = engine.groups.replica
    packed = share(packed, source=engine.last_rank, group=group)
    if dist.get_world_size(group) == 1:
        return packed, [tensor.detach() for tensor in tensors]
    parts: list[Part] = []
    _collect(packed, parts)
    found: list[Tensor] = []
    for index, part in enumerate(parts):
        if engine.rank == engine.last_rank:
            value = tensors[index].detach()
            sent = value.cpu().contiguous()
        else:
            sent = torch.empty(part.shape, dtype=part.dtype)
        dist.broadcast(sent, src=engine.last_rank, group=group)
        found.append(value if engine.rank == engine.last_rank else sent.to(engine.device))
    return packed, found


def _collect(packed: Any, parts: list[Part]) -> None:
    if isinstance(packed, Part):
        parts.append(packed)
    elif isinstance(packed, tuple):
        items = packed[1]
        for item in items.values() if isinstance(items, dict) else items:
            _collect(item, parts)
