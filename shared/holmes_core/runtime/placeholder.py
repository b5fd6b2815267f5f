# SPDX-License-Identifier: Apache-2.0
"""A cheap stand-in for values that only another pipeline stage can compute.

Later stages run the user's own forward code, too: embeddings that live on the first stage return a `Placeholder`
there. It has the right shape, dtype and device, costs one element of memory, and everything computed from it is a
placeholder again, so a value that would reach a real block or the loss by mistake is found instead of trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from holmes_core.errors import HolmesError

__all__ = ["Absent", "AbsentParameter", "Placeholder", "find_placeholder", "make_placeholder", "mark", "stand_in"]

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
# These turn a tensor's values into Python values, in which nothing could be traced any more.
_READS = frozenset(
    {
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.__complex__,
        Tensor.__contains__,
        Tensor.is_nonzero,
        torch.is_nonzero,
        Tensor.equal,
        torch.equal,
        Tensor.allclose,
        torch.allclose,
    }
)


_METADATA = frozenset({Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__})


class Placeholder(Tensor):
    """A tensor whose values mean nothing; results of operations on it are placeholders, too.

    Attributes:
        source: What would have computed it, for errors.
    """

    source: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            raise _read_error(func, find_placeholder((args, kwargs)))
        if any(isinstance(leaf, AbsentParameter) for leaf in _leaves((args, kwargs), 5)):
            return _through_meta(func, args, kwargs)
        written = list(_written(func, args, kwargs))
        try:
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
        except RuntimeError:  # a placeholder's elements share one memory location: torch writes to no such tensor
            if not any(isinstance(target, Placeholder) and 0 in target.stride() for target in written):
                raise
            return None if func is Tensor.__setitem__ else written[0]
        if func in _VALUE_FREE:
            return out
        source = find_placeholder((args, kwargs)) or "another module"
        for target in written:
            _mark_in_place(target, source)
        return mark(out, source)


class AbsentParameter(nn.Parameter):
    """The class of a parameter of another stage (empty, on the meta device) while the user's step runs.

    A step may read a parameter without calling its module (a raw table of positions, a head that uses the
    embedding's weight). Mixed with real tensors, an empty one gives numbers without any error; here it gives a
    placeholder, which is found where it matters. ``param.device`` answers for the real device.
    """

    source: str
    real_device: torch.device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.device.__get__:
            return args[0].real_device
        if getattr(func, "__name__", "") in ("__get__", "__set__") or func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return _through_meta(func, args, kwargs)


def _through_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on empty arguments, for the shapes of the placeholders that it returns."""
    leaves = [leaf for leaf in _leaves((args, kwargs), 5) if isinstance(leaf, Tensor)]
    absent = next(leaf for leaf in leaves if isinstance(leaf, AbsentParameter))
    source, device = absent.source, absent.real_device
    with torch._C.DisableTorchFunctionSubclass():
        written = [target for target in _written(func, args, kwargs) if not target.is_meta]
        on_meta = tree_map_only(
            Tensor, lambda t: t if t.is_meta else torch.empty_like(t, device="meta"), (args, kwargs)
        )
        with torch.no_grad():
            out = func(*on_meta[0], **on_meta[1])
    for target in written:
        _mark_in_place(target, source)
    return stand_in(out, device, source) if not written or out is None else written[0]


def stand_in(value: Any, device: torch.device, source: str) -> Any:
    """Return ``value`` with every tensor in it replaced by a placeholder of its shape and dtype."""

    def one(tensor: Tensor) -> Tensor:
        return make_placeholder(tensor.shape, dtype=tensor.dtype, device=device, source=source)

    return tree_map_only(Tensor, one, value)


def _written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Tensors that a function writes into: by torch's convention those of ``name_``, ``__iname__`` and ``out=``."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    if in_place and args and isinstance(args[0], Tensor) and name not in ("__int__", "__index__", "__invert__"):
        yield args[0]
    out = kwargs.get("out")
    yield from (t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, Tensor))


def _mark_in_place(tensor: Tensor | None, source: str) -> None:
    while tensor is not None:  # a write into a view is a write into its base
        if type(tensor) is Tensor:
            tensor.__class__ = Placeholder
            tensor.source = source  # type: ignore[attr-defined]
        with torch._C.DisableTorchFunctionSubclass():
            tensor = tensor._base


def _read_error(func: Any, source: str | None) -> HolmesError:
    return HolmesError(
        seen=f"the step reads the values ({getattr(func, '__name__', func)}) of something computed from {source}",
        means="another pipeline stage computes it; here only its shape is known",
        do=f'keep the module on every stage: placement={{"{source}": "all"}}; or read values after the model\'s'
        " blocks only; or train with pp=1",
    )


def mark(value: Any, source: str) -> Any:
    """Return ``value`` with every tensor in it made a placeholder (sharing its memory)."""

    def one(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Placeholder):
            tensor = tensor.as_subclass(Placeholder)
        if not hasattr(tensor, "source"):
            tensor.source = source
        return tensor

    return tree_map_only(Tensor, one, value)


def make_placeholder(
    shape: Iterable[int], *, dtype: torch.dtype, device: torch.device, source: str = "another module"
) -> Tensor:
    """Return a placeholder of ``shape``; it shares one zero element, whatever the shape.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        device: Where it lives.
        source: Name of the module that would have computed it.
    """
    placeholder: Tensor = mark(torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)), source)
    return placeholder


class Absent:
    """Stands for an object other than a tensor (a cache, say) that a block of another stage returned.

    Args:
        kind: The object's type.
        source: What would have returned it.
    """

    __slots__ = ("kind", "source")

    def __init__(self, kind: str, source: str) -> None:
        self.kind, self.source = kind, source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise HolmesError(
            seen=f"the step uses {name!r} of the {self.kind} that {self.source} returned",
            means="another pipeline stage made it; only the hidden state travels between stages",
            do="train with use_cache=False or pp=1",
        )


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        yield value
        return
    if depth:
        for item in value:
            yield from _leaves(item, depth - 1)


def find_placeholder(value: Any) -> str | None:
    """Return the source of a placeholder in ``value`` or in a (nested) tuple, list or dict; None if there is none."""
    for leaf in _leaves(value, 5):
        if isinstance(leaf, (Placeholder, Absent)):
            return getattr(leaf, "source", "another module")
    return None
