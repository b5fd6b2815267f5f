# SPDX-License-Identifier: Apache-2.0
"""Run the user's own forward code on every stage, with calls of the model's blocks intercepted.

A model's blocks form a chain: each takes the hidden state that the one before returned. A stage owns a window of
the chain. When the user's step runs on a stage, blocks before the window return placeholders, the last of them
returns the activation that the previous stage sent, blocks inside run, and after the window's last block the step is
left by `StageAbort`, except on the last stage, where it goes on to the head, the loss and the user's logging.
No code here knows an architecture. What a model does with the hidden state between two blocks is done once, by the
stage of the second; whatever else of an earlier block or absent module reaches a block or the loss is an error.

Interception replaces ``__call__`` (by a subclass made for the purpose, as FSDP2 does), not ``forward``: activation
checkpointing layers wrap ``forward`` inside ``__call__``, and the border must lie outside of what is recomputed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from holmes_core.errors import HolmesError
from holmes_core.runtime import refusals
from holmes_core.runtime.boundary import Boundary, describe_output
from holmes_core.runtime.placeholder import AbsentParameter, find_placeholder, make_placeholder, stand_in
from holmes_core.runtime.side_effects import (
    check_kept_tensors,
    check_unwrapped,
    recorded_outputs,
    snapshot,
    written_since,
)

__all__ = ["Interceptor", "StageAbort", "Window", "restore_class"]


class StageAbort(BaseException):
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

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
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
        self._step: Callable[[], Any] | None = None
        self._watch = False
        self._ran: set[int] = set()  # blocks that ran in some forward: those that may be recomputed
        self._watched: set[tuple[int, bool]] = set()  # (stage, grad mode) of passes already watched
        self._absent: list[tuple[str, nn.Module]] = []  # modules outside the chain, with parameters elsewhere
        self._called: set[str] = set()  # those called in this pass
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
        self._step = step
        watched = (window.stage, torch.is_grad_enabled())
        self._watch = watched not in self._watched
        self._called.clear()
        self.captured = None
        result = None
        absent = self._mark_absent()
        try:
            result = step()
        except StageAbort:
            pass
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error) and not isinstance(error, HolmesError):
                raise refusals.empty_parameter(
                    [name for name, _ in self._absent], self._due(), window.stage
                ) from error
            raise
        finally:
            self._window = self._received = self._boundary = self._on_enter = self._step = None
            for param in absent:
                param.__class__ = nn.Parameter
        reached = self.captured is not None if not window.is_last else self._cursor == len(self._chain)
        if not reached:
            raise refusals.not_reached(self._cursor, len(self._chain), window.stage)
        if window.is_last:
            self._check_real(window, result, "the result of the step")
        elif self._watch:
            check_kept_tensors(self._chain[window.start : window.stop])
        self._watched.add(watched)
        return result

    def backward(self) -> _Backward:
        """Mark a backward pass: blocks called inside it are recomputed by activation checkpointing."""
        return _Backward(self)

    @property
    def running(self) -> bool:
        """Whether the user's step is running right now."""
        return self._window is not None

    def _mark_absent(self) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        blocks = [(name, module) for name, block in self._chain for module in block.modules()]
        for name, module in (*self._absent, *blocks):
            for param in module._parameters.values():
                if param is not None and param.is_meta and type(param) is nn.Parameter:
                    param.__class__ = AbsentParameter
                    param.source, param.real_device = name, self._device  # type: ignore[attr-defined]
                    found.append(param)
        return found

    # ---- calls of blocks ---------------------------------------------------------------------------------------
    def _block_call(self, index: int) -> Callable[..., Any]:
        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self._call_block(index, module, forward, args, kwargs)

        return call

    def _call_block(self, index: int, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self._chain[index][0]
        if self._in_backward:
            if index not in self._ran:
                raise refusals.recomputed(name)
            return forward(module, *args, **kwargs)
        window = self._window
        if window is None:
            raise refusals.outside(name)
        if self.captured is not None:  # user code swallowed the abort and went on
            raise StageAbort
        if index != self._cursor:
            raise refusals.out_of_order(name, self._due(), window.stage)
        if self._watch:
            self._check_call(name)
        self._cursor += 1

        if not window.is_first and index < window.start:
            assert self._boundary is not None
            if index < window.start - 1:
                return self._boundary.placeholder(self._device, name)
            assert self._received is not None
            self._enter()
            output = self._boundary.wrap(self._received, name)
            if window.start == window.stop and not window.is_last:
                self._capture(output, name)
            return output

        if index == window.start:
            if not window.is_first and index == 0:  # all stages before hold no block: take over the input instead
                args, kwargs = _replace_input(args, kwargs, name, self._received)
            elif window.is_first and window.stop == 0 and not window.is_last:
                self._capture(_input(args, kwargs, name)[1], name)
            self._enter()
        self._check_arguments(window, name, args, kwargs)
        self._ran.add(index)
        if not self._watch or window.is_last:
            output = forward(module, *args, **kwargs)
        else:
            before = snapshot(args, kwargs, _find_input(args, kwargs)[1])
            output = forward(module, *args, **kwargs)
            if (written := written_since(before)) is not None:
                raise refusals.writes(name, written)
        if index == window.stop - 1 and not window.is_last:
            self._capture(output, name)
        return output

    def _enter(self) -> None:
        if self._on_enter is not None:
            self._on_enter()
            self._on_enter = None

    def _capture(self, output: Any, name: str) -> None:
        captured = describe_output(output, block=name)
        assert self._window is not None
        self._check_real(self._window, captured[0], f"the output of block {name!r}")
        self.captured = captured
        raise StageAbort

    # ---- checks ------------------------------------------------------------------------------------------------
    def _check_call(self, name: str) -> None:
        """On the first passes: nothing hides the block's graph or wants an output of every block."""
        if self._cursor == 0:
            check_unwrapped(sys._getframe(), self._step)
        if recorded := recorded_outputs():
            raise refusals.recorded(recorded, name)

    def _check_arguments(self, window: Window, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = [(f"argument {i}", value) for i, value in enumerate(args)]
        named += [(f"argument {key!r}", value) for key, value in kwargs.items()]
        bad = [(what, source) for what, value in named if (source := find_placeholder(value)) is not None]
        if not bad:
            return
        raise refusals.argument([what for what, _ in bad], name, bad[0][1], window.stage, self._is_block(bad[0][1]))

    def _check_real(self, window: Window, value: Any, what: str) -> None:
        source = find_placeholder(value)
        if source is not None:
            raise refusals.depends(what, source, window.stage, self._is_block(source))

    def _is_block(self, name: str) -> bool:
        return any(name == block for block, _ in self._chain)

    def _due(self) -> str | None:
        """The block that is to be called next; None after the last."""
        return self._chain[self._cursor][0] if self._cursor < len(self._chain) else None

    # ---- modules outside the chain -----------------------------------------------------------------------------
    def absent(self, name: str, module: nn.Module) -> None:
        """Make a module outside the chain, whose parameters live on other stages, return placeholders."""
        self._absent.append((name, module))

        def call(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            return self._call_absent(name, module, forward, args, kwargs)

        _swap_class(module, call)

    def _call_absent(
        self, name: str, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        window = self._window
        if window is None:
            raise refusals.outside(name)
        if self._cursor == len(self._chain) and name in self._called:
            raise refusals.again(name, window.stage)
        self._called.add(name)
        if window.is_first or self._cursor >= max(window.start, 1):
            raise refusals.not_here(name, window.stage, self._cursor == 0)
        assert self._boundary is not None
        on_meta = tree_map_only(
            Tensor, lambda t: torch.empty_like(t, device="meta").as_subclass(Tensor), (args, kwargs)
        )
        params = [p for p in module.parameters() if type(p) is AbsentParameter]
        for param in params:
            param.__class__ = nn.Parameter  # type: ignore[assignment]
        try:  # its parameters are on the meta device: run it there for the shapes
            with torch.no_grad():
                return stand_in(forward(module, *on_meta[0], **on_meta[1]), self._device, name)
        except HolmesError:
            raise
        except Exception:  # it holds other modules or buffers, which are real
            return make_placeholder(
                self._boundary.shape, dtype=self._boundary.dtype, device=self._device, source=name
            )
        finally:
            for param in params:
                param.__class__ = AbsentParameter

def _find_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str | None, Tensor | None]:
    """Where a block's hidden state is among its arguments: the first floating-point tensor."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in named:
        if isinstance(value, Tensor) and value.is_floating_point():
            return key, value
    return None, None


def _input(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[int | str, Tensor]:
    key, value = _find_input(args, kwargs)
    if key is None or value is None:
        raise HolmesError(
            seen=f"block {name!r} is called without a floating-point tensor",
            means="Holmes cannot find the hidden state that the next stage continues from",
            do="give the first stage at least one block (layers_per_stage)",
        )
    return key, value


def _replace_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], name: str, received: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    key, _ = _input(args, kwargs, name)
    if isinstance(key, int):
        return (*args[:key], received, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: received}


class _Backward:
    __slots__ = ("_interceptor",)

    def __init__(self, interceptor: Interceptor) -> None:
        self._interceptor = interceptor

    def __enter__(self) -> None:
        self._interceptor._in_backward = True

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._interceptor._in_backward = False
        cause = error  # torch wraps what a recomputed block raises
        while cause is not None and not isinstance(cause, HolmesError):
            cause = cause.__cause__
        if isinstance(cause, HolmesError) and cause is not error:
            raise cause from None
