# SPDX-License-Identifier: Apache-2.0
"""Calls of a model that is in one piece (one stage, batches not cut): autograd does what it does in any loop.

Nothing has to be known before the script's backward, so a call is a plain forward and returns what the model returns.
What is added are the seeds that make dropout the same in every layout, and sums of gradients over replicas that begin
while the backward runs, as in DistributedDataParallel. Gradients are averaged as they leave (`DataParallel.scale`), not
at the loss: what one call returns may go into the next, or into several losses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from holmes_core.runtime import rng
from holmes_core.runtime.call_mode_ahead import Ahead
from holmes_core.runtime.engine import Engine

__all__ = ["Direct", "calls_are_whole"]


def calls_are_whole(engine: Engine) -> bool:
    """Whether each call of the model is one forward of the whole batch on this rank."""
    layout = engine.plan.layout
    return engine.num_stages == 1 and layout.num_microbatches in (None, 1) and layout.micro_batch_size is None


class Direct:
    """Runs calls of a model in one piece and follows their backwards.

    Args:
        engine: The engine.
        ahead: Told of calls and backwards.
        guard: Context around what talks to other ranks.
        changed: Called when a backward begins and when it has ended: gradients are new.
    """

    def __init__(
        self,
        engine: Engine,
        ahead: Ahead,
        guard: Callable[[], AbstractContextManager[Any]],
        changed: Callable[[], None],
    ) -> None:
        self._engine, self._ahead, self._changed = engine, ahead, changed
        self._parallel = engine.gradients.data_parallel
        self._parallel.scale = 1.0 / self._parallel.size
        self._parallel.guard = guard
        self._backward: AbstractContextManager[None] | None = None  # while one runs
        self._complete = False  # whether the last call is the last of its optimizer step
        self._reduced = False  # whether gradients that are there have been summed already
        for param in engine.gradients.params.values():
            param.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], Any]) -> Any:
        """Run the model's own forward, seeded as the engine seeds it.

        Args:
            run: The forward.

        Returns:
            What it returned.
        """
        engine = self._engine
        self._backward = None  # of a backward that failed, nothing is left
        self._ahead.another()
        self._complete = self._ahead.complete
        with (
            engine.pulse.batch(step=engine.batches_seen, micro_batches=1, train=True),
            engine.pulse.micro_batch(0, waits=False),
            rng.fork(engine.device),
        ):
            rng.seed(rng.seed_of(engine.seed, 1, engine.batches_seen, engine.place.dp, 0), engine.device)
            output = run()
        engine.batches_seen += 1
        for tensor in tree_leaves(output):  # the first gradient of a backward; parameters tell of what is missed here
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._begins)  # type: ignore[no-untyped-call]
        return output

    def reduced(self) -> None:
        """Gradients have been summed."""
        self._reduced = True

    def _begins(self, grad: Tensor | None = None) -> None:
        if self._backward is not None:
            return
        if self._reduced:
            self._reduced = False
            self._take_back()
        self._changed()
        self._ahead.begin_known(self._complete)
        self._backward = self._engine.pulse.backward()
        self._backward.__enter__()
        self._parallel.completing(0)
        torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _take_back(self) -> None:
        """More is added to gradients that are summed already: let owners' be sums again, so that one scale fits all."""
        if self._parallel.shard_optimizer and self._parallel.size > 1:
            grads = [p.grad for p in self._engine.gradients.params.values() if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, float(self._parallel.size))

    def _accumulated(self, param: nn.Parameter) -> None:
        if self._backward is None:
            self._begins()
            self._parallel.accumulated(param)  # which came too early for the hook that is there for it

    def _ended(self) -> None:
        if self._backward is None:  # another call came before the end, after an error
            return
        self._parallel.completing(None)
        self._backward.__exit__(None, None, None)
        self._backward = None
        self._changed()
        self._ahead.committed(list(self._engine.gradients.params.values()), right=True)
