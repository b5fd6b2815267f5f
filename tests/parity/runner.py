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
    """A set of processes per number of ranks, started when first needed; a case that fails ends its set."""

    def __init__(self) -> None:
        self._workers: dict[int, Workers] = {}

    def run(self, function: str, case: Case, *args: Any) -> Outcome:
        """Call `function(rank, case, *args)`, named as ``module:function``, in as many processes as the case has."""
        workers = self._workers.setdefault(case.ranks, Workers(case.ranks))
        workers.timeout = 60.0 + _BOUND * case.ranks
        return workers.run(_call, function, case, *args)

    def close(self) -> None:
        """End the processes."""
        for workers in self._workers.values():
            workers.close()
        self._workers.clear()
