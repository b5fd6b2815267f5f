# SPDX-License-Identifier: Apache-2.0
"""Run cases in sets of processes that are started once per number of ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tests.models.pipeline import Outcome, Workers
from tests.parity.cases import Case

__all__ = ["Worlds"]


def _call(rank: int, function: str, *args: Any) -> Any:
    """Call `module:function` of this package; only the processes import torch."""
    module, _, name = function.partition(":")
    return getattr(import_module(f"tests.parity.{module}"), name)(rank, *args)


#: Seconds that a case may take on a busy machine, per rank.
_BOUND = 45.0


class Worlds:
    """One set of processes at a time; a case that fails ends it, and the next one gets a new set."""

    def __init__(self) -> None:
        self._workers: Workers | None = None

    def run(self, function: str, case: Case, *args: Any) -> Outcome:
        """Call `function(rank, case, *args)`, named as ``module:function``, in as many processes as the case has."""
        world = case.ranks
        if self._workers is None or self._workers.world != world:
            self.close()
            self._workers = Workers(world)
        self._workers.timeout = 60.0 + _BOUND * world
        return self._workers.run(_call, function, case, *args)

    def close(self) -> None:
        """End the processes."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None
