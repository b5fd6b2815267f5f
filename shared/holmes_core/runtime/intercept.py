# SPDX-License-Identifier: Apache-2.0
"""Run the user's own forward code on every stage, with calls of the model's blocks intercepted.

A model's blocks form a chain: each takes the hidden state that the one before returned. A stage owns a window of
the chain. When the user's step runs on a stage, blocks before the window return placeholders, the last of them
returns the activation that the previous stage sent, blocks inside run, and after the window's last block the step is
left by `StageAbort`, except on the last stage, where it goes on to the head, the loss and the user's logging.
No code here knows an architecture.

Interception replaces ``__call__`` (by a subclass made for the purpose, as FSDP2 does), not ``forward``: activation
checkpointing layers wrap ``forward`` inside ``__call__``, and the border must lie outside of what is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.boundary import Boundary, describe_output
from holmes_core.runtime.placeholder import contains_placeholder, make_placeholder

__all__ = ["Interceptor", "StageAbort", "Window", "restore_class"]


class StageAbort(BaseException):  # noqa: N818 - control flow, not an error
    """Leaves the user's step once a stage has done its part.

    A BaseException, so that ``except Exception`` in user code cannot swallow it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of the chain that one stage runs: blocks ``start`` up to, not including, ``stop``."""

    stage: int
    start: int
    stop: int
    is_first: bool
    is_last: bool


def _swap_class(module: nn.Module, call: Callable[..., Any]) -> None:
    original = type(module)

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return call(self, original.__call__, args, kwargs)

    namespace = {
        "__call__": __call__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "_holmes_original_class": original,
    }
    module.__class__ = type(original.__name__, (original,), namespace)


def restore_class(module: nn.Module) -> None:
    """Give an intercepted module its own class back."""
    original = type(module).__dict__.get("_holmes_original_class")
    if original is not None:
        module.__class__ = original


class Interceptor:
    """The state of one rank's current pass through the user's step.

    Args:
        chain: Names and modules of the model's blocks, in the order they are called.
        device: Where placeholders live.
    """

    def __init__(self, chain: list[tuple[str, nn.Module]], device: torch.device) -> None:
        self._chain = chain
        self._device = device
        self._window: Window | None = None
        self._cursor = 0
        self._received: Tensor | None = None
        self._boundary: Boundary | None = None
        self._on_enter: Callable[[], None] | None = None
        self._in_backward = False
        self._whole = False
        self.captured: tuple[Tensor, Boundary] | None = None
        for index, (_, block) in enumerate(chain):
            _swap_class(block, self._block_call(index))

    # ---- a pass ------------------------------------------------------------------------------------------------
    def run(
        self,
        window: Window,
        step: Callable[[], Any],
        *,
        received: Tensor | None = None,
        boundary: Boundary | None = None,
        on_enter: Callable[[], None] | None = None,
    ) -> Any:
        """Run ``step`` for one stage.

        Args:
            window: The stage's blocks.
            step: The user's step; it must call the model exactly once.
            received: The activation from the previous stage, None on the first.
            boundary: Its form.
            on_enter: Called when the first block of the window is about to run.

        Returns:
            What ``step`` returned on the last stage, None elsewhere (see `captured`).
        """
        if self._window is not None:
            raise RuntimeError("a pipeline stage is already running in this process")
        self._window, self._cursor = window, 0
        self._received, self._boundary, self._on_enter = received, boundary, on_enter
        self.captured = None
        result = None
        try:
            result = step()
        except StageAbort:
            pass
        finally:
            self._window = self._received = self._boundary = self._on_enter = None
        reached = self.captured is not None if not window.is_last else self._cursor == len(self._chain)
        if not reached:
            raise self._not_reached(window)
        return result

    def backward(self) -> _Backward:
        """Mark a backward pass: blocks called inside it are recomputed by activation checkpointing."""
        return _Backward(self)

    @property
    def running(self) -> bool:
        """Whether the user's step is running right now."""
        return self._window is not None

    # ---- calls of blocks ---------------------------------------------------------------------------------------
    def _block_call(self, index: int) -> Callable[..., Any]:
        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self._call_block(index, module, forward, args, kwargs)

        return call

    def _call_block(self, index: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._in_backward:
            return forward(module, *args, **kwargs)
        window = self._window
        if window is None:
            raise self._outside(self._chain[index][0])
        if index != self._cursor:
            raise self._out_of_order(index)
        self._cursor += 1
        name = self._chain[index][0]

        if not window.is_first and index < window.start:
            if index < window.start - 1:
                assert self._boundary is not None
                return self._boundary.placeholder(self._device)
            assert self._received is not None and self._boundary is not None
            self._enter()
            output = self._boundary.wrap(self._received)
            if window.start == window.stop and not window.is_last:
                self._capture(output, name)
            return output

        if index == window.start:
            if not window.is_first and index == 0:  # all stages before hold no block: take over the input instead
                args, kwargs = self._replace_input(args, kwargs)
            elif window.is_first and window.stop == 0 and not window.is_last:
                self._capture(self._first_tensor(args, kwargs, name), name)
            self._check_no_placeholder(name, args, kwargs)
            self._enter()
        output = forward(module, *args, **kwargs)
        if index == window.stop - 1 and not window.is_last:
            self._capture(output, name)
        return output

    def _enter(self) -> None:
        if self._on_enter is not None:
            self._on_enter()
            self._on_enter = None

    def _capture(self, output: Any, name: str) -> None:
        self.captured = describe_output(output, block=name)
        raise StageAbort

    def _replace_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._received, *args[1:]), kwargs
        for key in ("hidden_states", "x", "input", "inputs"):
            if key in kwargs:
                return args, {**kwargs, key: self._received}
        raise HolmesError(
            seen=f"block {self._chain[0][0]!r} is called with keywords {sorted(kwargs)} only",
            where="the first block of the model",
            means="Holmes cannot tell which of them is the hidden state",
            do="give the first stage at least one block (layers_per_stage)",
        )

    def _first_tensor(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Tensor:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                return value
        raise HolmesError(
            seen=f"block {name!r} is called without a floating-point tensor",
            means="Holmes cannot find the hidden state that the next stage continues from",
            do="give the first stage at least one block (layers_per_stage)",
        )

    def _check_no_placeholder(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bad = [f"argument {i}" for i, value in enumerate(args) if contains_placeholder(value)]
        bad += [f"argument {key!r}" for key, value in kwargs.items() if contains_placeholder(value)]
        if bad:
            assert self._window is not None
            raise HolmesError(
                seen=f"{', '.join(bad)} of block {name!r} was computed by a module of another pipeline stage",
                where=f"stage {self._window.stage}, first block {name!r}",
                means="only the hidden state travels between stages; the other arguments of a block must be computable"
                " on every stage",
                do='keep the module that makes it on every stage: placement={"its.name": "all"}; where a block hands'
                " several tensors to the next one the model cannot be pipelined: use pp=1",
            )

    # ---- modules outside the chain -----------------------------------------------------------------------------
    def absent(self, name: str, module: nn.Module) -> None:
        """Make a module outside the chain, whose parameters live on other stages, return placeholders."""

        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self._call_absent(name, module, args, kwargs)

        _swap_class(module, call)

    def _call_absent(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        window = self._window
        if window is None:
            raise self._outside(name)
        if window.is_first or self._cursor >= max(window.start, 1):
            raise HolmesError(
                seen=f"module {name!r} was called on stage {window.stage}, which does not hold its parameters",
                where=f"stage {window.stage}, {'before' if self._cursor == 0 else 'after'} the stage's blocks",
                means="Holmes placed the module on another stage",
                do=f'say where it is used: placement={{"{name}": "first" | "last" | "ends" | "all"}}',
            )
        assert self._boundary is not None
        if isinstance(module, nn.Embedding):
            ids = args[0] if args else kwargs["input"]
            return make_placeholder(
                (*ids.shape, module.embedding_dim), dtype=module.weight.dtype, device=self._device
            )
        return make_placeholder(self._boundary.shape, dtype=self._boundary.dtype, device=self._device)

    # ---- errors ------------------------------------------------------------------------------------------------
    def _outside(self, name: str) -> HolmesError:
        return HolmesError(
            seen=f"{name!r} was called outside of training_step, validation_step, test_step and predict_step",
            means="the model is split over pipeline stages; only inside those steps do all stages run together",
            do="move the call into one of these steps, run it before fit or on the exported model, or train with pp=1",
        )

    def _out_of_order(self, index: int) -> HolmesError:
        assert self._window is not None
        name = self._chain[index][0]
        if self._cursor == len(self._chain):
            seen = f"the step called the model a second time (block {name!r} again)"
            means = (
                "a step is one pass through the pipeline; two passes (contrastive losses, DPO, generate()) cannot be"
                " pipelined"
            )
            do = "call the model once on the concatenated inputs and split its output, or train with pp=1"
        else:
            seen = f"block {name!r} was called where {self._chain[min(self._cursor, len(self._chain) - 1)][0]!r} was due"
            means = "Holmes pipelines blocks that are called once each, one after another (no layer drop, no reuse)"
            do = "set layerdrop to 0, or name the stage borders with split_points=[...], or train with pp=1"
        return HolmesError(seen=seen, where=f"stage {self._window.stage}", means=means, do=do)

    def _not_reached(self, window: Window) -> HolmesError:
        at = self._cursor
        return HolmesError(
            seen=f"the step ended after {at} of the model's {len(self._chain)} blocks",
            where=f"stage {window.stage}, which runs blocks {window.start} to {window.stop - 1}",
            means="every stage waits for the model's forward to pass through its blocks once in each step",
            do="call the model once, on every path of the step",
        )


class _Backward:
    __slots__ = ("_interceptor",)

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor

    def __enter__(self) -> None:
        self._interceptor._in_backward = True

    def __exit__(self, *exc: object) -> None:
        self._interceptor._in_backward = False
