# SPDX-License-Identifier: Apache-2.0
"""This process as a rank of the job: who takes part, and the control group, made before Accelerate makes one.

Accelerate would span the whole job with one NCCL communicator, which networks that cannot meet do not carry. It takes
a default group that exists already, so Holmes makes its own first.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState

from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.runtime.start import Meeting, join, meet

__all__ = ["accelerator", "enter", "on_cpu", "set_accelerator"]

#: Attribute of Accelerate's PartialState, the class: its shared state is pickled with TrainingArguments.
_MEETING = "_holmes_meeting"
_ACCELERATOR = "_holmes_accelerator"


def set_accelerator(accelerator: Any) -> None:
    """Make an accelerator the one that functions of `accelerate.utils` ask; the latest counts."""
    setattr(PartialState, _ACCELERATOR, weakref.ref(accelerator))


def accelerator() -> Any:
    """Return the latest HolmesAccelerator of this process, None without one."""
    found = getattr(PartialState, _ACCELERATOR, None)
    return None if found is None else found()


def on_cpu() -> bool:
    """Whether the launcher was told to use the CPU."""
    return os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on", "y", "t")


def enter(*, cpu: bool, config: HolmesConfig | None = None) -> Meeting:
    """Meet the other ranks and make the control group, once per process. Collective over all ranks.

    Args:
        cpu: Whether the CPU is to be used.
        config: The settings; read from the environment when None.

    Raises:
        HolmesError: Ranks, networks or environment do not fit; see `holmes_core.runtime.start`.
    """
    known: Meeting | None = getattr(PartialState, _MEETING, None)
    if known is not None and dist.is_initialized():
        return known
    if config is None:
        config = HolmesConfig.load(env=os.environ)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized() and "gloo" not in dist.get_backend():
        raise ConfigError(
            seen=f"a default process group on {dist.get_backend()} exists already",
            where="HolmesAccelerator",
            means="Holmes needs a control group on the CPU, made before anything else of the job",
            do="start the script with `accelerate launch --config holmes.yaml` or `holmes launch`; in code make the"
            " accelerator before TrainingArguments and before any init_process_group",
        )
    use_cuda = torch.cuda.is_available() and not cpu
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    meeting = meet(rank=rank, world_size=world, timeout=config.timeout)
    meeting = join(meeting, config=config, device_type="cuda" if use_cuda else "cpu")
    setattr(PartialState, _MEETING, meeting)
    return meeting
