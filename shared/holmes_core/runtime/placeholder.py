# SPDX-License-Identifier: Apache-2.0
"""A cheap stand-in for values that only another pipeline stage can compute.

Later stages run the user's own forward code, too: embeddings that live on the first stage return a `Placeholder`
there. It has the right shape, dtype and device, costs one element of memory, and everything computed from it is a
placeholder again, so a value that would reach a real block by mistake is found instead of trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["Placeholder", "contains_placeholder", "make_placeholder"]

# What these return does not depend on the values of their tensor arguments, only on shape, dtype and device.
_VALUE_FREE = frozenset(
    {
        torch.zeros_like,
        torch.ones_like,
        torch.empty_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_empty,
        Tensor.new_full,
        Tensor.new_tensor,
    }
)


class Placeholder(Tensor):
    """A tensor whose values mean nothing; results of operations on it are placeholders, too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if func in _VALUE_FREE:
            return out
        return tree_map_only(Tensor, _mark, out)


def _mark(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, Placeholder) else tensor.as_subclass(Placeholder)


def make_placeholder(shape: Iterable[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a placeholder of ``shape``; it shares one zero element, whatever the shape."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)).as_subclass(Placeholder)


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    if depth:
        for item in value:
            yield from _leaves(item, depth - 1)


def contains_placeholder(value: Any) -> bool:
    """Whether ``value`` is a placeholder or a (nested) tuple, list or dict that holds one."""
    return any(isinstance(leaf, Placeholder) for leaf in _leaves(value, 4))
