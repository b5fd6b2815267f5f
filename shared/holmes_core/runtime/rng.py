# SPDX-License-Identifier: Apache-2.0
"""Random numbers that repeat from a seed, whatever the layout's timing.

Each micro-batch has seeds of its own, made of the run's seed, the batch number, the micro-batch and the data-parallel
index: user code in the step draws the same numbers on every stage and tensor-parallel rank of a replica, and each
stage's blocks draw from a stream of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fork", "seed", "seed_of"]

_MASK = (1 << 63) - 1


def seed_of(*parts: int) -> int:
    """Mix integers into one seed (splitmix64 steps), equal in every process."""
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state & _MASK


def seed(value: int, device: torch.device) -> None:
    """Seed what draws on the CPU and on `device`, as ``torch.manual_seed``.

    That function also tells backends that do not exist, each with a stack trace: 1.4 ms of every micro-batch on a CPU.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(value)
    else:
        torch.manual_seed(value)


@contextmanager
def fork(device: torch.device) -> Iterator[None]:
    """Restore torch's random state afterwards, on the CPU and on `device`."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
