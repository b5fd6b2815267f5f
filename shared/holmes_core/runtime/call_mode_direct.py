# SPDX-License-Identifier: Apache-2.0
"""Calls of a model that is in one piece (one stage, batches not cut): autograd does what it does in any loop.

Nothing has to be known before the script's backward, so a call is the model's own forward and returns what that
returns. Hooks on the parameters follow each backward: gradients are summed over replicas, and leave while it runs, as
in DistributedDataParallel. They are averaged as they leave (`DataParallel.factor`), not at the loss: what one call
returns may go into the next, or into several losses, and parts of the model may be called by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from holmes_core.errors import HolmesError
from holmes_core.runtime import rng
from holmes_core.runtime.call_mode_ahead import Ahead
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.torch_compat import after_backward, in_backward

__all__ = ["Direct", "calls_are_whole"]


def calls_are_whole(engine: Engine) -> bool:
    """Whether each call of the model is one forward of the whole batch on this rank."""
    layout = engine.plan.layout
    return engine.num_stages == 1 and layout.num_microbatches in (None, 1) and layout.micro_batch_size is None


class Direct:
    """Runs calls of a model in one piece and follows their backwards.

    Args:
        engine: The engine.
        ahead: Told of backwards.
        guard: Context around what talks to other ranks.
        changed: Called when gradients begin to change, and when a backward has ended.
    """

    def __init__(
        self,
        engine: Engine,
        ahead: Ahead,
        guard: Callable[[], AbstractContextManager[Any]],
        changed: Callable[[], None],
    ) -> None:
        self._engine, self._ahead, self._guard, self._changed = engine, ahead, guard, changed
        self._parallel = engine.gradients.data_parallel
        self._parallel.factor = 1.0 / self._parallel.size
        self._parallel.guard = guard
        self._backward: AbstractContextManager[None] | None = None  # while one runs
        self._grown = False  # whether it has added to a gradient
        self._undone = False  # whether averages have been made sums for it
        self._complete: bool | None = None  # whether the last call is the last of its optimizer step; None: no call
        self._reduced = False  # whether gradients that are there have been summed already
        self._params = list(engine.gradients.params.values())
        self._hooks: list[Any] = []
        for param in self._params:
            self._hooks.append(param.register_hook(self._arrives))  # type: ignore[no-untyped-call]
            self._hooks.append(param.register_post_accumulate_grad_hook(self._grows))  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Any]) -> Any:
        """Run the model's own forward.

        Args:
            run: The forward.

        Returns:
            What it returned.
        """
        engine = self._engine
        if in_backward():
            return self._recomputed(run)
        self._recover()
        self._complete = self._ahead.complete
        with (
            engine.pulse.batch(step=engine.batches_seen, micro_batches=1, train=True),
            engine.pulse.micro_batch(0, waits=False),
        ):
            output = self._seeded(run)
        engine.batches_seen += 1
        for tensor in tree_leaves(output):  # to count the whole backward; parameters tell of what is missed here
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(self._begins)  # type: ignore[no-untyped-call]
        return output

    def _recomputed(self, run: Callable[[], Any]) -> Any:
        if self._engine.plan.layout.tp > 1:
            raise HolmesError(
                seen="a call of the whole model inside a backward (torch.utils.checkpoint around it)",
                where="the user's script",
                means="with tensor parallelism each call has a seed of its own, so dropout would differ from the first",
                do="recompute inside of the model (gradient_checkpointing_enable)",
            )
        return run()

    def _recover(self) -> None:
        """Forget a backward that has failed; the script goes on."""
        if self._backward is None and not self._grown:
            return
        if self._undone and not self._grown:
            self._scale(1.0 / self._parallel.size)
        self._backward, self._grown, self._undone = None, False, False
        self._ahead.another()

    def _seeded(self, run: Callable[[], Any]) -> Any:
        """Draw from the script's own generator, as any forward does; tensor-parallel ranks must draw the same."""
        engine = self._engine
        if engine.plan.layout.tp == 1:
            return run()
        with rng.fork(engine.device):
            rng.seed(rng.seed_of(engine.seed, 1, engine.batches_seen, engine.place.dp, 0), engine.device)
            return run()

    def reduces(self) -> None:
        """Gradients are about to be summed.

        Raises:
            HolmesError: A backward still makes them.
        """
        if self._grown and in_backward():
            raise HolmesError(
                seen="an optimizer's step, or clipping, in the middle of a backward",
                where="a hook on parameters",
                means="gradients are summed over replicas once per optimizer step, when all of them are there",
                do="step after loss.backward()",
            )
        self._recover()
        self._reduced = True

    def close(self) -> None:
        """Follow no more backwards."""
        for hook in self._hooks:
            hook.remove()

    # ---- a backward ----------------------------------------------------------------------------------------------
    def _begins(self, grad: Tensor | None = None) -> None:
        """A backward is under way; whether it is for the parameters is not known yet (``torch.autograd.grad``)."""
        if self._backward is not None:
            return
        self._backward = self._engine.pulse.backward()
        self._backward.__enter__()
        after_backward(self._ended)

    def _arrives(self, grad: Tensor) -> None:
        """The gradient of a parameter has been computed; it may be added to those that are there."""
        self._begins()
        if self._reduced and not self._undone:
            self._undone = True
            self._scale(float(self._parallel.size))

    def _grows(self, param: nn.Parameter) -> None:
        """It has been added."""
        if self._grown:
            return
        self._grown, self._reduced = True, False
        self._changed()
        with self._guard():
            self._ahead.begin_known(self._ahead.complete if self._complete is None else self._complete)
        self._parallel.completing(0)
        self._parallel.accumulated(param)  # its own hook came too early for this one

    def _scale(self, factor: float) -> None:
        """Make averages sums again, since more is added to them and all is averaged later; or the other way round."""
        grads = [p.grad for p in self._params if p.grad is not None]
        if grads and self._parallel.shard_optimizer and self._parallel.size > 1:  # those that one replica owns alone
            torch._foreach_mul_(grads, factor)

    def _ended(self) -> None:
        if self._backward is None:  # another call came before the end, after an error
            return
        grown, self._grown = self._grown, False
        if grown:
            self._complete = None
            self._parallel.completing(None)
        elif self._undone:
            self._scale(1.0 / self._parallel.size)
        self._undone = False
        self._backward.__exit__(None, None, None)
        self._backward = None
        if grown:
            self._changed()
            self._ahead.ended()
