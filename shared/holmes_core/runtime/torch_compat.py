# SPDX-License-Identifier: Apache-2.0
"""Everything of torch that is private or differs between releases, in one place.

The stage and the schedules are built on the runtime of ``torch.distributed.pipelining``; some of it has no public
name yet. Tested with torch 2.13 and 2.14; another release that moved a name fails here, at import, with that name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.pipelining import schedules as _schedules
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc as accumulator_of,
)
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining.schedules import (
    _Action as Action,
)
from torch.distributed.pipelining.schedules import (
    _ComputationType as ComputationType,
)
from torch.distributed.pipelining.schedules import (
    _PipelineScheduleRuntime as PipelineScheduleRuntime,
)
from torch.distributed.pipelining.schedules import (
    get_schedule_class,
)
from torch.utils._python_dispatch import _disable_current_modes

#: The logger on which torch prints the whole schedule table when an action fails.
SCHEDULE_LOGGER = _schedules.logger

__all__ = [
    "SCHEDULE_LOGGER",
    "Action",
    "ComputationType",
    "PipelineScheduleRuntime",
    "accumulator_of",
    "after_backward",
    "anything_compiled",
    "get_schedule_class",
    "in_backward",
    "plainly",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
    "storage_is_shared",
]


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread right now: what is called is recomputed for it, or a hook."""
    return int(torch._C._current_graph_task_id()) != -1


def after_backward(call: Callable[[], None]) -> None:
    """Call something when the backward that runs now has ended (as DistributedDataParallel does)."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def storage_is_shared(tensor: Tensor) -> bool:
    """Whether another tensor (a view, wherever it is held) has the same memory."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) > 2  # the tensor, `storage`


def anything_compiled() -> bool:
    """Whether torch.compile has compiled anything in this process so far."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


@contextmanager
def plainly() -> Iterator[None]:
    """Context in which tensors are just what they are: no subclasses, modes, function transforms or gradients."""
    with (
        torch.no_grad(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableFuncTorch(),
        _disable_current_modes(),
    ):
        yield
