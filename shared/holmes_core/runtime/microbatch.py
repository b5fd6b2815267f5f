# SPDX-License-Identifier: Apache-2.0
"""Cut a batch into micro-batches, and tell how much each weighs in the batch's loss."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from holmes_core.errors import HolmesError

__all__ = ["WEIGHT_RULES", "batch_size_of", "count", "shape_key", "slice_batch", "split_sizes"]

_SIZE_KEYS = ("input_ids", "inputs_embeds", "labels", "pixel_values", "x", "inputs")
#: Label value that losses ignore (torch's cross_entropy and transformers alike).
IGNORE = -100


def _children(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple)):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, f.name) for f in dataclasses.fields(value)]
    return None


def _find_size(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return int(value.shape[0]) if value.ndim else None
    if isinstance(value, Mapping):
        ordered = [value[k] for k in _SIZE_KEYS if k in value] + list(value.values())
    else:
        ordered = _children(value) or []
    for child in ordered:
        size = _find_size(child)
        if size is not None:
            return size
    return None


def batch_size_of(batch: Any) -> int:
    """Return the number of samples of a batch: the first dimension of its first tensor.

    Raises:
        HolmesError: The batch holds no tensor with a dimension.
    """
    size = _find_size(batch)
    if size is None or size == 0:
        raise HolmesError(
            seen=f"a batch of type {type(batch).__name__} that holds "
            + ("no tensor with a batch dimension" if size is None else "no sample"),
            where="the training DataLoader",
            means="Holmes cuts each batch along the first dimension of its tensors",
            do="return tensors from the collate function: a dict, tuple, list or dataclass of them",
        )
    return size


def split_sizes(batch_size: int, parts: int, *, taper: bool = False) -> list[slice]:
    """Return `parts` slices over `batch_size` rows, the larger ones first, none empty.

    Args:
        batch_size: Rows.
        parts: Slices; fewer where there are fewer rows.
        taper: Whether one of them is cut in two, for the beginning and the end. Single rows are not.
    """
    parts = max(1, min(parts, batch_size))
    base, extra = divmod(batch_size, parts)
    sizes = [base + (index < extra) for index in range(parts)]
    if taper and parts > 1 and base > 1:
        sizes = [base // 2, *sizes[:-1], base - base // 2]
    ends = [0, *itertools.accumulate(sizes)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def slice_batch(batch: Any, rows: slice, batch_size: int) -> Any:
    """Return the rows of a batch, in a container of the same type.

    Tensors and lists whose first dimension is `batch_size` are cut; everything else is handed to every micro-batch.
    """
    if isinstance(batch, Tensor):
        return batch[rows] if batch.ndim and batch.shape[0] == batch_size else batch
    if isinstance(batch, Mapping):
        cut = {key: slice_batch(value, rows, batch_size) for key, value in batch.items()}
        return _like_mapping(batch, cut)
    if isinstance(batch, tuple):
        items = [slice_batch(value, rows, batch_size) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if isinstance(batch, list):
        if len(batch) == batch_size and not any(isinstance(v, (Tensor, Mapping, list, tuple)) for v in batch):
            return batch[rows]
        return [slice_batch(value, rows, batch_size) for value in batch]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        changes = {f.name: slice_batch(getattr(batch, f.name), rows, batch_size) for f in dataclasses.fields(batch)}
        return dataclasses.replace(batch, **changes)
    return batch


def _like_mapping(original: Mapping[Any, Any], cut: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return cut
    kind: Any = type(original)
    try:
        return kind(cut)  # transformers' BatchEncoding and the like
    except TypeError:
        return cut


def shape_key(batch: Any) -> Any:
    """Return a hashable description of the shapes in a batch, equal on every rank that holds the same batch."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), str(batch.dtype))
    if isinstance(batch, Mapping):
        return tuple((str(key), shape_key(value)) for key, value in batch.items())
    children = _children(batch)
    if children is not None:
        return tuple(shape_key(child) for child in children)
    return batch if isinstance(batch, (bool, int)) else type(batch).__name__


def _labels(batch: Any) -> Tensor | None:
    """The labels: the entry of that name, else the first integer tensor with ignored positions in it."""
    if isinstance(batch, Mapping):
        value = batch.get("labels")
        if isinstance(value, Tensor) and not value.is_floating_point():
            return value
    for child in _children(batch) or []:
        if isinstance(child, Tensor):
            if child.ndim >= 2 and not child.is_floating_point() and bool((child == IGNORE).any()):
                return child
        elif (found := _labels(child)) is not None:
            return found
    return None


def _count_tokens(batch: Any, *, shifted: bool) -> float:
    labels = _labels(batch)
    if labels is None or labels.ndim < 2:
        return float(batch_size_of(batch))
    return float((labels[..., 1:] if shifted else labels).ne(IGNORE).sum())


#: How a micro-batch weighs: by name, from its content. The weights of a batch sum to one, except under "sum".
WEIGHT_RULES: dict[str, Callable[[Any], float]] = {
    "shifted_tokens": lambda batch: _count_tokens(batch, shifted=True),
    "tokens": lambda batch: _count_tokens(batch, shifted=False),
    "samples": lambda batch: float(batch_size_of(batch)),
    "sum": lambda batch: 1.0,
}


def count(batches: Sequence[Any], rule: str) -> Tensor:
    """Return what each micro-batch weighs under a rule, as float64; shape (micro-batches,)."""
    return torch.tensor([WEIGHT_RULES[rule](batch) for batch in batches], dtype=torch.float64)
