# SPDX-License-Identifier: Apache-2.0
"""Sum a step's gradients over replicas while the backward of its last call still runs.

In stages a call's backward runs before the script has said what it does with the loss: it may scale it, drop it, or
call the model again. So the sum starts with a guess: the gradient that the loss had last time. Before the optimizer's
step all ranks tell each other whether theirs was right, and that nothing has changed gradients since; otherwise what
was summed is thrown away and gradients are summed as if nothing had been guessed. A wrong guess costs time, never a
number; after the first one nothing is guessed any more. A backward that the script itself runs (of a model in one
piece, or of a loss made from outputs) needs no such guess, only whether it is the last of its step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.engine import Engine

__all__ = ["Ahead", "OneCall"]


class Ahead:
    """Decides for each training call whether its gradients leave early, and whether that was right.

    All ranks make the same calls, so all of them guess, or none.

    Args:
        engine: The engine.
        completes: Tells whether the call that begins now is the last of an optimizer step.
    """

    def __init__(self, engine: Engine, completes: Callable[[], bool]) -> None:
        self._engine, self._completes = engine, completes
        self._on = engine.config.overlap and engine.plan.layout.dp > 1
        self._guess, self._known = 1.0, False  # gradient of the loss at the last backward; whether there was one
        self._under_way = self._right = False
        self._wrong = False  # whether what left in this step has been thrown away
        self._left: list[tuple[nn.Parameter, Tensor | None, int]] = []  # gradients as the backward left them

    def begin(self) -> float | None:
        """A training call begins: return the gradient its loss is expected to get; None: nothing leaves early.

        What all ranks do must not depend on what one of them has: not on its gradients, not on their values.
        """
        self.another()
        if not (self._known and self.complete):
            return None
        self._under_way, self._right, self._left = True, False, []
        return self._guess

    @property
    def complete(self) -> bool:
        """Whether a training call that begins now is the last of an optimizer step, as far as is known."""
        return self._on and not self._wrong and self._completes()

    def begin_known(self, complete: bool) -> None:
        """A backward begins whose gradients need no guess: the script has made its loss from the model's outputs.

        Args:
            complete: Whether it is the last of an optimizer step.
        """
        self.another()
        if self._on and not self._wrong and complete:
            self._under_way, self._right, self._left = True, False, []
            self._engine.gradients.data_parallel.expect(self._engine._stages_of, keep=True)

    def another(self) -> None:
        """One more call in this step, or backward: what left early was not all.

        Other ranks may have no other: they learn of it before the step (`settle`).
        """
        if self._under_way:
            self._discard()
            self._wrong = True

    def ended(self) -> None:
        """A backward that `begin_known` was told of has ended."""
        if self._under_way:
            self._right, self._left = True, list(self._engine.gradients.data_parallel.left)

    def committed(self, params: Sequence[nn.Parameter], *, right: bool, grad: float | None = None) -> None:
        """A guessed loss was differentiated, the gradients are in place.

        Args:
            params: This rank's trainable parameters.
            right: Whether ``param.grad`` is now what left early (`OneCall.commit`).
            grad: Gradient of the call's loss, to be expected next time.
        """
        if grad is not None:
            self._known = True
            if grad and isfinite(grad):
                self._guess = grad
        if self._under_way:
            self._right = right
            self._left = [(p, p.grad, _version(p.grad)) for p in params]

    def settle(self) -> None:
        """Keep what was summed early if it is right on all ranks. Collective over all ranks, before the reduction."""
        if not self._on:
            return
        same = not self._engine.gradients.data_parallel.grown and all(
            p.grad is g and _version(g) == version for p, g, version in self._left
        )
        right = self._right and same if self._under_way else not self._wrong
        wrong = torch.tensor([0 if right else 1])
        with self._engine.pulse.reducing():
            dist.all_reduce(wrong, group=self._engine.groups.world)
            if int(wrong):
                self._discard()
                self._on = False  # on all ranks at once
        self._under_way, self._left, self._wrong = False, [], False

    def _discard(self) -> None:
        self._engine.gradients.data_parallel.discard()
        self._under_way, self._left = False, []

    def close(self) -> None:
        """Nothing leaves any more."""
        self._on = False


class OneCall:
    """The gradients of one training call: made apart from those there are, and added once its loss is differentiated.

    Args:
        params: This rank's trainable parameters.
        replicas: How many replicas the loss is averaged over.
        guess: What `Ahead.begin` returned; the call's gradients are made with that factor.
        onto: Whether those there are belong to the same optimizer step: with a guess both leave together, so the
            call's are made on top of copies.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, replicas: int, guess: float | None, onto: bool) -> None:
        self._replicas, self._guess, self._onto = replicas, guess, onto and guess is not None
        self._made: list[tuple[nn.Parameter, Tensor, Tensor | None, int]] = []
        self._untouched: list[tuple[nn.Parameter, Tensor, int]] = []
        self._before: list[tuple[nn.Parameter, Tensor | None, int, Tensor | None]] = []
        for param in params:
            earlier = param.grad
            param.grad = earlier.clone() if self._onto and earlier is not None else None
            self._before.append((param, earlier, _version(earlier), param.grad))

    @property
    def scale(self) -> float:
        """Factor on the loss while the call's gradients are made."""
        return 1.0 if self._guess is None else self._guess / self._replicas

    def end(self) -> None:
        """Put the gradients there were back, whether the call went well or not."""
        for param, earlier, version, copy in self._before:
            made, param.grad = param.grad, earlier
            if earlier is not None and copy is not None and made is copy and _version(made) == 0:
                self._untouched.append((param, earlier, version))
            elif made is not None:
                self._made.append((param, made, earlier if self._onto else None, version))
        self._before = []

    @torch.no_grad()
    def commit(self, grad: float) -> bool:
        """Add the call's gradients to ``param.grad``, times the gradient of its loss.

        Returns:
            Whether what is there now is what was made during the call, and left early if it was guessed.

        Raises:
            HolmesError: The gradients that were copied are not there any more to be taken off again.
        """
        factor = grad / (self._replicas if self._guess is None else self._guess)
        made, self._made = self._made, []
        there = [*((param, below, version) for param, _, below, version in made), *self._untouched]
        as_before = all(p.grad is below and (below is None or _version(below) == v) for p, below, v in there)
        if self._guess is not None and factor == 1.0 and as_before:
            for param, new, _, _ in made:
                param.grad = new
            return True
        for param, new, below, version in made:
            if below is not None:
                if _version(below) != version:
                    raise HolmesError(
                        seen="gradients that were changed in place between a call of the model and its loss's backward",
                        where="the user's script",
                        means="this call's gradients were summed over replicas together with them",
                        do="change gradients before the call or after the backward; or set overlap: false",
                    )
                new.sub_(below)
            if factor != 1.0:
                new.mul_(factor)
            if param.grad is None:
                param.grad = new
            else:
                param.grad.add_(new)
        return False


def _version(grad: Tensor | None) -> int:
    return -1 if grad is None else grad._version
