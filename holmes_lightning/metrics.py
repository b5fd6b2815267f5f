# SPDX-License-Identifier: Apache-2.0
"""torchmetrics under a pipeline: states grow on the last stage; the others fetch them when a result is asked for."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch.distributed as dist
from torch import nn

from holmes_core.runtime.engine import Engine
from holmes_core.runtime.step_record import share

__all__ = ["connect_metrics", "metric_path", "release_metrics"]


def _is_metric(value: Any) -> bool:
    return isinstance(value, nn.Module) and hasattr(value, "_defaults") and hasattr(value, "compute")


def metric_path(root: nn.Module) -> Callable[[Any], str | None]:
    """Return a function from a metric object to its attribute path in `root`."""

    def path(value: Any) -> str | None:
        if not isinstance(value, nn.Module):
            return None
        return next((name for name, module in root.named_modules() if module is value), None)

    return path


def connect_metrics(engine: Engine) -> None:
    """Make every metric of the user's module reduce over replicas, and fetch its state from the last stage."""
    metric: Any
    for metric in engine.root.modules():
        if not _is_metric(metric) or "_holmes_compute" in vars(metric):
            continue
        metric.process_group = engine.groups.dp
        metric.distributed_available_fn = lambda: engine.groups.dp_size > 1
        if dist.get_world_size(engine.groups.replica) > 1:
            vars(metric)["_holmes_compute"] = metric.compute
            vars(metric)["compute"] = _pull_then_compute(metric, metric.compute, engine)


def release_metrics(root: nn.Module) -> None:
    """Undo `connect_metrics`."""
    metric: Any
    for metric in root.modules():
        if _is_metric(metric):
            original = vars(metric).pop("_holmes_compute", None)
            if original is not None:
                vars(metric)["compute"] = original
            metric.process_group = None
            metric.distributed_available_fn = _never


def _never() -> bool:
    return False


def _pull_then_compute(metric: Any, compute: Callable[[], Any], engine: Engine) -> Callable[[], Any]:
    def pull_then_compute() -> Any:
        if engine.interceptor is not None and engine.interceptor.running:
            return compute()  # inside the step only the last stage runs
        state = None
        if engine.rank == engine.last_rank:
            names = [*metric._defaults, "_update_count", "_computed"]
            state = {name: deepcopy(vars(metric).get(name, getattr(metric, name, None))) for name in names}
        state = share(state, source=engine.last_rank, group=engine.groups.replica)
        for name, value in state.items():
            setattr(metric, name, value)
        return compute()

    return pull_then_compute
