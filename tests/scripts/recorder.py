# SPDX-License-Identifier: Apache-2.0
"""What the comparison needs from a run: losses, gradient norms, validation values, hook order, final weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch


def make_recorder(host: Any, out: str) -> Any:
    """Return a Callback (of the Lightning that the script uses) that writes `out` (json) and `out`.pt (weights)."""

    class Recorder(host.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.validation: list[dict[str, float]] = []
            self.events: list[str] = []
            self.rates: list[float] = []

        def on_before_zero_grad(self, *_: Any) -> None:
            self.events.append("zero_grad")

        def on_before_backward(self, *_: Any) -> None:
            self.events.append("before_backward")

        def on_after_backward(self, *_: Any) -> None:
            self.events.append("after_backward")

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.events.append("optimizer_step")
            self.rates.append(optimizer.param_groups[0]["lr"])
            whole = getattr(trainer.strategy, "gradient_norm", None)
            if whole is not None:
                self.norms.append(float(whole()))
            else:
                squares = [p.grad.float().square().sum() for p in module.parameters() if p.grad is not None]
                self.norms.append(math.sqrt(float(torch.stack(squares).sum())))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            self.validation.append({k: float(v) for k, v in trainer.callback_metrics.items()})

        def on_fit_end(self, trainer: Any, module: Any) -> None:
            rank = trainer.global_rank
            record = {
                "losses": self.losses,
                "norms": self.norms,
                "validation": self.validation,
                "events": self.events[:40],
                "rates": self.rates,
                "global_step": trainer.global_step,
                "epoch": trainer.current_epoch,
                "logged": {k: float(v) for k, v in trainer.logged_metrics.items()},
            }
            Path(f"{out}.rank{rank}.json").write_text(json.dumps(record))
            if rank == 0:
                torch.save({k: v.detach().float().clone() for k, v in module.state_dict().items()}, f"{out}.pt")

    return Recorder()
