# SPDX-License-Identifier: Apache-2.0
"""Find what blocks hand on behind the hidden state's back.

Between stages only the hidden state travels. Lists and dicts that blocks fill for later blocks, tensors they write
into, and tensors they keep on themselves for the loss would be missing on the next stage without any error. So the
first passes of each stage are watched, and such models refused.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from holmes_core.errors import HolmesError

__all__ = ["check_kept_tensors", "check_unwrapped", "recorded_outputs", "snapshot", "written_since"]

_DEPTH = 4
_LOSS_LIKE = re.compile("loss|aux|logit|router|gate|prob|score|penalty", re.IGNORECASE)


def _walk(name: str, value: Any, depth: int = _DEPTH) -> Iterator[tuple[str, Any]]:
    yield name, value
    if depth and isinstance(value, Mapping):
        for key in list(value):
            yield from _walk(f"{name}[{key!r}]", value[key], depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _walk(f"{name}[{index}]", item, depth - 1)


def _state(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, (MutableMapping, Mapping)):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, (MutableSequence, MutableSet)):
        return [id(item) for item in value]
    return None


def snapshot(args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor | None) -> list[tuple[str, Any, Any]]:
    """Return the state of everything mutable among a block's arguments, the hidden state excepted."""
    named = [(f"argument {i}", value) for i, value in enumerate(args)]
    named += [(f"argument {key!r}", value) for key, value in kwargs.items()]
    return [
        (name, leaf, state)
        for top, value in named
        for name, leaf in _walk(top, value)
        if leaf is not hidden and (state := _state(leaf)) is not None
    ]


def written_since(before: list[tuple[str, Any, Any]]) -> str | None:
    """Return the name of an argument that was written to since its `snapshot`; None if none was."""
    return next((name for name, leaf, state in before if _state(leaf) != state), None)


def check_kept_tensors(blocks: list[tuple[str, nn.Module]]) -> None:
    """Refuse blocks that keep tensors of the autograd graph as attributes, as router losses often are.

    Raises:
        HolmesError: A module of a block holds one.
    """
    for block_name, block in blocks:
        for path, module in block.named_modules():
            for key, value in vars(module).items():
                if key in ("_parameters", "_buffers", "_modules") or _reparametrised(module, key):
                    continue
                if any(_for_a_loss(key, leaf) for _, leaf in _walk(key, value)):
                    raise HolmesError(
                        seen=f"module {'.'.join(filter(None, (block_name, path)))!r} keeps a tensor with gradient in"
                        f" its attribute {key!r} when its forward ends",
                        means="a loss that reads it on the last stage would miss the blocks of the other stages"
                        " (an auxiliary loss of routers, say)",
                        do="detach it if no loss uses it; otherwise train with pp=1",
                    )


def _for_a_loss(key: str, value: Any) -> bool:
    if not isinstance(value, Tensor) or value.grad_fn is None:
        return False
    return value.numel() == 1 or bool(_LOSS_LIKE.search(key))  # other tensors are states of recurrent layers


def _reparametrised(module: nn.Module, key: str) -> bool:
    """Whether an attribute is computed from parameters (weight_norm and spectral_norm do that, pruning, too)."""
    return any(name.startswith(f"{key}_") for name in module._parameters)


def check_unwrapped(start: FrameType | None, stop: object) -> None:
    """Refuse blocks that are called inside of a `torch.autograd.Function`, which hides their graph.

    Args:
        start: Frame of the call.
        stop: The step; the search ends at the frame in which a variable is this object.

    Raises:
        HolmesError: There is one on the way.
    """
    frame = start
    while frame is not None and frame.f_locals.get("step") is not stop:
        for value in frame.f_locals.values():
            if isinstance(value, torch.autograd.function.FunctionCtx):
                name = type(value).__name__.removesuffix("Backward")
                raise HolmesError(
                    seen=f"the model's blocks are called inside of the autograd.Function {name}",
                    where=f"{frame.f_code.co_filename}:{frame.f_lineno}",
                    means="their gradients are computed by that function, which knows nothing of pipeline stages"
                    " (reversible layers, reentrant checkpointing)",
                    do="pass use_reentrant=False to torch.utils.checkpoint; train reversible models with pp=1",
                )
        frame = frame.f_back


def recorded_outputs() -> list[str]:
    """Names of the outputs that transformers records from every block in the running forward (by hooks)."""
    module = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(module, "_active_collector", None)
    return [key for key in (collector.get() or {}) if not key.startswith("_")] if collector is not None else []
