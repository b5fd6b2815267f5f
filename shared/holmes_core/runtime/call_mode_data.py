# SPDX-License-Identifier: Apache-2.0
"""The same batches on all ranks of a replica: those that its first stage's loader draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holmes_core.runtime.engine import Engine
from holmes_core.runtime.step_record import share

__all__ = ["replica_batches"]

_END = object()


def replica_batches(own: Iterator[Any], engine_of: Callable[[], Engine | None]) -> Iterator[Any]:
    """Yield the batches of the replica's first stage. Collective over the replica.

    Args:
        own: This rank's batches. Every rank draws them, so that the random states of all ranks go on alike.
        engine_of: Returns the engine; without one, or with one rank per replica, `own` is all there is.
    """
    engine = engine_of()
    if engine is None or engine.num_stages * engine.plan.layout.tp == 1:
        yield from own
        return
    source, group = engine.first_rank, engine.groups.replica
    while True:
        mine = next(own, _END)
        ended, batch = share((mine is _END, None if mine is _END else mine), source=source, group=group)
        if ended:
            return
        yield batch
