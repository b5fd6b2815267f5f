# SPDX-License-Identifier: Apache-2.0
"""Call mode's optimizer and state: what a loop steps, saves and loads, of a model that lies on several ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn

from holmes_core.errors import HolmesError
from holmes_core.runtime import state
from holmes_core.runtime.engine import Engine

__all__ = ["CallState"]


class CallState(ABC):
    """The part of `CallMode` about optimizers and state.

    Attributes:
        engine: The engine.
    """

    engine: Engine
    _guard: Callable[[], AbstractContextManager[Any]]
    _load: Callable[..., Any]  # the module's own load_state_dict
    _save_pretrained: Callable[..., Any]
    _new: Any  # parameters before the split: those after it
    _hooked: WeakSet[torch.optim.Optimizer]  # those whose steps are followed

    @abstractmethod
    def reduce(self) -> None:
        """Sum new gradients over replicas and over stages that share parameters. Collective over all ranks."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise where the model was given back."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer step this rank's part: replace parameters that the split replaced, and follow its steps.

        Args:
            optimizer: Built before or after the split; its state, if any, is kept for what this rank steps.
        """
        if optimizer in self._hooked:
            return
        if any(p in self._new for group in optimizer.param_groups for p in group["params"]):
            saved = optimizer.state_dict() if optimizer.state else None
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [self._new.get(p, p) for p in group["params"]]
            if saved is not None:
                state.load_optimizer_state(self.engine, optimizer, saved)
        self._hooked.add(optimizer)
        optimizer.register_step_pre_hook(self._steps)
        optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step; `args` begins with the optimizer."""
        if (kwargs.get("closure") or (args[1] if len(args) > 1 else None)) and dist.get_world_size() > 1:
            raise HolmesError(
                seen=f"{type(optimizer).__name__}.step with a closure",
                where="the user's script",
                means="gradients are summed over ranks before the step, and the closure makes new ones inside of it",
                do="call what is in the closure first, then optimizer.step()",
            )
        self.engine.gradients.settle()  # where another optimizer has stepped before
        self.reduce()

    def _stepped(self) -> None:
        with self._guard():
            self.engine.broadcast_parameters()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole model's state on rank 0, meta tensors elsewhere. Collective over all ranks."""
        with self._guard():
            self._meet("the model's state")
            return state.full_state_dict(self.engine)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's whole state on rank 0, an empty one elsewhere. Collective over all ranks."""
        with self._guard():
            self._meet("the optimizer's state")
            return state.full_optimizer_state(self.engine, optimizer)

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        """Load a whole optimizer state; this rank keeps what it steps."""
        state.load_optimizer_state(self.engine, optimizer, saved)

    def load_state_dict(self, saved: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Stand in for the module's ``load_state_dict``: the whole model's state; this rank keeps its part."""
        own = vars(self.engine.root)
        own["load_state_dict"] = self._load
        try:
            missing, unexpected = state.load_state_dict(self.engine, self._with_ties(saved), strict=strict)
        finally:
            own["load_state_dict"] = self.load_state_dict
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def _with_ties(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Add the other names of tied weights: Hugging Face files hold one of them."""
        whole = dict(saved)
        for entry in self.engine.entries:
            found = next((saved[name] for name in entry.aliases if name in saved), None)
            for name in entry.aliases if found is not None else ():
                whole.setdefault(name, found)
        return whole

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the model's ``save_pretrained``: rank 0 writes the whole model. Collective over all ranks.

        With ``state_dict=`` (what `state_dict` returned) only rank 0 does anything.
        """
        if kwargs.get("state_dict") is None:
            kwargs["state_dict"] = self.state_dict()
        if self.engine.rank != 0:
            return None
        kwargs["state_dict"] = {k: v for k, v in kwargs["state_dict"].items()}
        return self._save_pretrained(save_directory, *args, **kwargs)

    def _meet(self, what: str) -> None:
        """Wait for all ranks before something that all must do, and name those that do not come."""
        self._check_open()
        if dist.get_world_size() == 1:
            return
        try:
            dist.monitored_barrier(self.engine.groups.world)
        except RuntimeError as error:
            raise HolmesError(
                seen=f"not all ranks came to collect {what}: {str(error).splitlines()[0][:200]}",
                where=f"rank {self.engine.rank}",
                means="every rank holds a part of the model, so every rank must make this call, not the main process"
                " alone",
                do="take the call out of `if accelerator.is_main_process:`; only rank 0 writes files anyway",
            ) from None  # the time-out is no echo of another rank's failure: keep FailureLog from taking it for one
