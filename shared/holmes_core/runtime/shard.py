# SPDX-License-Identifier: Apache-2.0
"""How one full parameter is laid out over the ranks of a tensor-parallel group.

A sharded parameter is an ordinary local tensor; what it is a part of is said by a ``TensorShard``, a plain value.
Everything that moves full weights in or out (loading, saving, gradient checks) goes through ``take`` and ``merge``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["SHARD_ATTRIBUTE", "TensorShard", "get_shard"]

SHARD_ATTRIBUTE = "holmes_shard"
"""The attribute that carries a parameter's ``TensorShard``. A copied parameter loses it; the report keeps the names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShard:
    """The layout of one parameter that is split along one dimension.

    The dimension is a sequence of *sections*, each split over the ranks on its own: a fused ``[q | k | v]`` weight has
    three, so that every rank holds a part of q, of k and of v. A section that the number of ranks does not divide is
    padded at its end with zeros if ``padded`` (the vocabulary), and refused otherwise.
    """

    dim: int
    """The dimension that is split, >= 0."""
    full_shape: tuple[int, ...]
    """Shape of the whole parameter, without padding."""
    sections: tuple[int, ...]
    """Sizes of the sections along ``dim``; they add up to ``full_shape[dim]``."""
    padded: bool = False
    """Whether zero rows may be added so that every rank holds equally many."""

    def __post_init__(self) -> None:
        """Refuse layouts that describe no tensor."""
        if not 0 <= self.dim < len(self.full_shape):
            raise ValueError(f"TensorShard.dim: {self.dim} is no dimension of shape {self.full_shape}")
        if sum(self.sections) != self.full_shape[self.dim] or min(self.sections, default=0) < 1:
            raise ValueError(
                f"TensorShard.sections: {self.sections} do not add up to {self.full_shape[self.dim]}, "
                f"dimension {self.dim} of shape {self.full_shape}"
            )

    def local_sizes(self, size: int) -> tuple[int, ...]:
        """Return how long each section is on one rank of ``size`` (padding included)."""
        for section in self.sections:
            if section % size and not self.padded:
                raise ValueError(f"TensorShard.sections: {section} is not divisible by {size} ranks")
        return tuple(-(-section // size) for section in self.sections)

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape of every rank's local tensor (padding included)."""
        shape = list(self.full_shape)
        shape[self.dim] = sum(self.local_sizes(size))
        return tuple(shape)

    def ranges(self, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return [start, stop) along ``dim`` of the full tensor that a rank holds, one pair per section (no padding).

        For readers that fetch parts of a file: ``get_slice(name)[start:stop]``. Where a pair is shorter than
        ``local_sizes`` says, zeros follow.
        """
        pairs = []
        offset = 0
        for section, length in zip(self.sections, self.local_sizes(size), strict=True):
            start = min(rank * length, section)
            pairs.append((offset + start, offset + min(start + length, section)))
            offset += section
        return tuple(pairs)

    def take(self, full: Tensor, rank: int, size: int) -> Tensor:
        """Return one rank's part of the full tensor, as a new contiguous tensor.

        Args:
            full: The whole parameter (or its gradient, or an optimizer state of its shape), shape ``full_shape``.
            rank: Rank in the tensor-parallel group.
            size: Number of ranks of the group.

        Raises:
            ValueError: The tensor does not have the full shape, or a section cannot be split.
        """
        if tuple(full.shape) != self.full_shape:
            raise ValueError(f"TensorShard.take: shape {tuple(full.shape)} given, {self.full_shape} expected")
        parts = []
        for (start, stop), length in zip(self.ranges(rank, size), self.local_sizes(size), strict=True):
            part = full.narrow(self.dim, start, stop - start)
            missing = length - (stop - start)
            parts.append(part)
            if missing:
                shape = list(self.full_shape)
                shape[self.dim] = missing
                parts.append(part.new_zeros(shape))
        return torch.cat(parts, dim=self.dim).contiguous()

    def merge(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the full tensor from all ranks' local tensors, in rank order; the padding is cut off.

        Raises:
            ValueError: A local tensor does not have the shape that ``take`` gives.
        """
        size = len(shards)
        lengths = self.local_sizes(size)
        expected = self.local_shape(size)
        for shard in shards:
            if tuple(shard.shape) != expected:
                raise ValueError(f"TensorShard.merge: shape {tuple(shard.shape)} given, {expected} expected")
        by_rank = [torch.split(shard, list(lengths), dim=self.dim) for shard in shards]
        sections = [
            torch.cat([parts[index] for parts in by_rank], dim=self.dim).narrow(self.dim, 0, section)
            for index, section in enumerate(self.sections)
        ]
        return torch.cat(sections, dim=self.dim).contiguous()

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as values that JSON knows."""
        return {
            "dim": self.dim,
            "full_shape": list(self.full_shape),
            "sections": list(self.sections),
            "padded": self.padded,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TensorShard:
        """Return the layout that ``to_dict`` wrote."""
        return cls(
            dim=int(values["dim"]),
            full_shape=tuple(values["full_shape"]),
            sections=tuple(values["sections"]),
            padded=bool(values["padded"]),
        )


def get_shard(param: Tensor) -> TensorShard | None:
    """Return how a parameter is sharded, or None for one that every tensor-parallel rank holds whole."""
    shard = getattr(param, SHARD_ATTRIBUTE, None)
    return shard if isinstance(shard, TensorShard) else None
