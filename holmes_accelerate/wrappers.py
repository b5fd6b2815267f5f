# SPDX-License-Identifier: Apache-2.0
"""Accelerate's wrappers around optimizer and scheduler, for an optimizer that steps a part of the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

from holmes_core.runtime.call_mode import CallMode

__all__ = ["HolmesOptimizer", "HolmesScheduler"]


class HolmesOptimizer(AcceleratedOptimizer):
    """An optimizer whose saved state is that of one process.

    Args:
        optimizer: The script's optimizer.
        mode_of: Returns the split model's `CallMode` once there is one.
        scaler: Scales the loss in half-precision training.
    """

    def __init__(self, optimizer: Any, mode_of: Callable[[], CallMode | None], scaler: Any = None) -> None:
        super().__init__(optimizer, device_placement=False, scaler=scaler)
        self._mode_of = mode_of
        self._collected: Any = None

    def state_dict(self) -> Any:
        """Return the whole state on rank 0, without states elsewhere. Collective over all ranks."""
        if self._collected is not None:
            return self._collected
        mode = self._mode_of()
        return super().state_dict() if mode is None else mode.optimizer_state_dict(self.optimizer)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a whole state; this rank keeps what it steps."""
        mode = self._mode_of()
        if mode is None:
            super().load_state_dict(state_dict)
        else:
            mode.load_optimizer_state_dict(self.optimizer, state_dict)

    @contextmanager
    def collected(self) -> Any:
        """Collect the state now, on all ranks, for code that asks for it on the main process only."""
        self._collected = self.state_dict()
        try:
            yield
        finally:
            self._collected = None


class HolmesScheduler(AcceleratedScheduler):
    """A scheduler that steps once per replica, as Accelerate's does once per process under data parallelism.

    Args:
        scheduler: The script's scheduler.
        optimizers: The optimizers it follows.
        step_with_optimizer: Whether it steps only where the optimizer did.
        split_batches: Whether a loader's batch is split over replicas.
        replicas: How many there are.
    """

    def __init__(
        self, scheduler: Any, optimizers: Any, *, step_with_optimizer: bool, split_batches: bool, replicas: int
    ) -> None:
        # With split_batches the parent steps once, instead of once per process of the whole job.
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=True)
        self._times = 1 if split_batches or not step_with_optimizer else replicas

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step."""
        if not self.step_with_optimizer or not self.gradient_state.sync_gradients:
            super().step(*args, **kwargs)
            return
        for _ in range(self._times):
            total = getattr(self.scheduler, "total_steps", None)  # OneCycleLR refuses to go on after its last step
            if self._times == 1 or total is None or self.scheduler._step_count <= total:
                super().step(*args, **kwargs)
