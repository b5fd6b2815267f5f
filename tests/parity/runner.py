# SPDX-License-Identifier: Apache-2.0
"""Run cases in sets of processes that are started once per number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.models.pipeline import Outcome, Workers
from tests.parity.cases import Case

__all__ = ["Worlds"]

#: Seconds that a case may take on a busy machine, per rank and twenty steps.
_BOUND = 45.0


class Worlds:
    """One set of processes at a time; a case that fails ends it, and the next one gets a new set."""

    def __init__(self) -> None:
        self._workers: Workers | None = None

    def run(self, function: Callable[..., Any], case: Case | None, *args: Any, ranks: int = 0) -> Outcome:
        """Call `function(rank, case, *args)` in all processes."""
        world = case.ranks if case is not None else ranks
        if self._workers is None or self._workers.world != world:
            self.close()
            self._workers = Workers(world)
        self._workers.timeout = 60.0 + _BOUND * world
        return self._workers.run(function, *([case] if case is not None else []), *args)

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
