# SPDX-License-Identifier: Apache-2.0
"""Tensors of a sharded checkpoint: which part a rank holds, and what stands for them meanwhile.

Hosts build and take apart nested dicts in which tensors are expected. While a sharded checkpoint is made or loaded, a
tensor on the meta device stands for each: it has the whole shape, costs nothing, keeps its place when a hook renames
or drops keys, and carries what it stands for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holmes_core.runtime.shard import TensorShard

__all__ = [
    "Chunk",
    "Part",
    "has_placeholders",
    "local_chunks",
    "map_tree",
    "part_of",
    "parts_in",
    "placeholder",
    "take_references",
    "with_references",
]

_ATTRIBUTE = "holmes_part"
#: The key of what a saved tree holds in the place of a tensor.
_REFERENCE = "holmes_tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A box of a whole tensor, and where it begins along one dimension of a local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def of(self, local: Tensor) -> Tensor:
        """Return a view of the chunk in the local tensor."""
        if tuple(local.shape) == self.sizes:
            return local
        return local.narrow(self.dim, self.start, self.sizes[self.dim])


def local_chunks(
    shape: Sequence[int], shard: TensorShard | None = None, rank: int = 0, size: int = 1
) -> tuple[Chunk, ...]:
    """Return what a rank of a tensor-parallel group holds of a tensor: all of it, or one box for each section.

    Padding is in no chunk.
    """
    shape = tuple(shape)
    if shard is None:
        return (Chunk(offsets=(0,) * len(shape), sizes=shape),)
    chunks, at = [], 0
    for (start, stop), length in zip(shard.ranges(rank, size), shard.local_sizes(size), strict=True):
        if stop > start:
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[shard.dim], sizes[shard.dim] = start, stop - start
            chunks.append(Chunk(offsets=tuple(offsets), sizes=tuple(sizes), dim=shard.dim, start=at))
        at += length
    return tuple(chunks)


@dataclass(slots=True, kw_only=True)
class Part:
    """One tensor of the whole state and what is here of it.

    Attributes:
        name: Its name in the checkpoint.
        shape: Of the whole tensor.
        dtype: Of the whole tensor.
        tensor: The local tensor; None where this rank neither holds nor wants any of it.
        chunks: What of it the local tensor is.
        source: The folder that it is to be read from; None while saving.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None
    chunks: tuple[Chunk, ...] = ()
    source: Any = None


def placeholder(part: Part) -> Tensor:
    """Return a meta tensor that stands for the whole tensor and carries the part."""
    made = torch.empty(part.shape, dtype=part.dtype, device="meta")
    setattr(made, _ATTRIBUTE, part)
    return made


def part_of(value: Any) -> Part | None:
    """Return what a placeholder carries."""
    found = getattr(value, _ATTRIBUTE, None) if isinstance(value, Tensor) else None
    return found if isinstance(found, Part) else None


def map_tree(value: Any, change: Callable[[Any, tuple[str, ...]], Any], path: tuple[str, ...] = ()) -> Any:
    """Apply `change` to what is no dict, list or tuple; it gets the value and the keys that lead there."""
    if isinstance(value, dict):
        return _rebuilt(value, {key: map_tree(inner, change, (*path, str(key))) for key, inner in value.items()})
    if type(value) in (list, tuple):
        return type(value)(map_tree(inner, change, (*path, str(index))) for index, inner in enumerate(value))
    return change(value, path)


def _rebuilt(old: dict[Any, Any], new: dict[Any, Any]) -> dict[Any, Any]:
    """Return the changed dict as one of the same class; the old one itself where nothing changed."""
    if all(new[key] is value for key, value in old.items()):
        return old
    made = copy.copy(old)
    made.update(new)
    return made


def parts_in(tree: Any) -> dict[str, Part]:
    """Return the parts of all placeholders in a tree that are here, by name."""
    found: dict[str, Part] = {}

    def note(value: Any, _: tuple[str, ...]) -> None:
        part = part_of(value)
        if part is not None and part.tensor is not None and part.source is None:
            found.setdefault(part.name, part)

    map_tree(tree, note)
    return found


def has_placeholders(tree: Any) -> bool:
    """Whether any value of a tree is a placeholder."""
    found: list[bool] = []
    map_tree(tree, lambda value, _: found.append(True) if part_of(value) is not None else None)
    return bool(found)


def with_references(tree: Any) -> Any:
    """Return a tree in which names, as plain dicts, take the place of placeholders."""

    def name(value: Any, _: tuple[str, ...]) -> Any:
        part = part_of(value)
        return value if part is None else {_REFERENCE: part.name}

    return map_tree(tree, name)


def take_references(tree: Any, make: Callable[[str], Tensor]) -> Any:
    """Undo `with_references`: `make` returns the placeholder of a name."""
    if isinstance(tree, dict):
        if len(tree) == 1 and isinstance(tree.get(_REFERENCE), str):
            return make(tree[_REFERENCE])
        return _rebuilt(tree, {key: take_references(value, make) for key, value in tree.items()})
    if type(tree) in (list, tuple):
        return type(tree)(take_references(value, make) for value in tree)
    return tree
