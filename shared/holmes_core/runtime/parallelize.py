# SPDX-License-Identifier: Apache-2.0
"""`holmes_core.parallelize`: a plain torch loop in pipeline x data x tensor parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holmes_core.config import HolmesConfig
from holmes_core.runtime.call_mode import CallMode, named_parameter_slots, of_model
from holmes_core.runtime.failure import FailureLog
from holmes_core.runtime.setup import build_engine, share_random_state
from holmes_core.runtime.start import host_name, join, meet

__all__ = ["parallelize"]


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: HolmesConfig | Mapping[str, Any] | None = None,
) -> CallMode:
    """Split a model over the ranks of the job, in place, and let an optimizer step this rank's part.

    Start the script with torchrun (or ``holmes run -n``) and write::

        model, optimizer = make_model(), ...
        run = holmes_core.parallelize(model, optimizer, {"pp": 2})
        for batch in loader:              # replica run.replica of run.dp; the same on all ranks of a replica
            loss = model(**batch).loss
            loss.backward()
            run.clip_grad_norm_(1.0)      # not torch.nn.utils.clip_grad_norm_, which sees this rank's part only
            optimizer.step()
            optimizer.zero_grad()
        state = run.state_dict()          # the whole model on rank 0; all ranks call it

    Args:
        model: A whole model, the same on every rank; rank 0's weights count.
        optimizer: Built from the model's parameters; more may be added with ``run.adopt(optimizer)``.
        config: Settings; what is left out comes from the file in ``HOLMES_CONFIG``, else Holmes chooses.

    Returns:
        The run: clipping, state, and this rank's place.

    Raises:
        HolmesError: The model or the degrees do not fit the job.
    """
    mode = of_model(model)
    if mode is None:
        if not isinstance(config, HolmesConfig):
            config = HolmesConfig.load(kwargs=config or {}, env=os.environ)
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        meeting = meet(rank=rank, world_size=world, timeout=config.timeout)
        meeting = join(meeting, config=config, device_type=device.type)
        failures = FailureLog(rank=rank, place=f"host {host_name()}", watch=meeting.watch)
        failures.listen()
        before = named_parameter_slots(model)

        @contextmanager
        def guard() -> Iterator[None]:
            try:
                yield
            except Exception as error:
                named = failures.explain(error)
                if named is error:
                    raise
                raise named from None

        with guard():
            engine = build_engine(root=model, config=config, device=device, seed=share_random_state(), meeting=meeting)
        mode = CallMode(engine, before=before, guard=guard)
        if dist.get_world_size() == 1:
            failures.close()
    if optimizer is not None:
        mode.adopt(optimizer)
    return mode
