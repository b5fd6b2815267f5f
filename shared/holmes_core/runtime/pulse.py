# SPDX-License-Identifier: Apache-2.0
"""What a rank is doing right now, in a few numbers in memory that its watchdog reads: no message, no system call.

Also how long it computed and waited, which tells slow ranks from slow links (`holmes_core.runtime.stragglers`). Times
are those of the host's clock around the calls: on a GPU, where calls return before the work is done, they say what the
rank does, not how long the GPU took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["ACTIONS", "EDGES", "Pulse"]

#: What a rank can be doing, by number.
ACTIONS = (
    "starting",
    "in its first batch",
    "computing",
    "waiting for another stage",
    "evaluating",
    "reducing gradients",
    "between batches (data loader, optimizer, callbacks, checkpoint)",
    "waiting for parameters that another replica stepped",
)
_STEP, _ACTION, _SINCE, _BUSY, _BATCHES, _SECONDS, _COMPUTE, _MICRO, _REDUCE, _WAITS = range(10)
#: Pipeline edges whose waits are counted: forward and backward of the first eight stages of a rank.
EDGES = 16
_LENGTH = _WAITS + EDGES


class Pulse:
    """The numbers, and the calls that keep them.

    Args:
        buffer: Shared memory of at least `SIZE` bytes; private memory when None (nobody watches).
    """

    SIZE = 8 * _LENGTH

    def __init__(self, buffer: Any = None) -> None:
        self._values = memoryview(bytearray(self.SIZE) if buffer is None else buffer)[: self.SIZE].cast("d")
        self._left = 0.0

    def values(self) -> list[float]:
        """Return a copy of the numbers."""
        return [float(value) for value in self._values]

    # ---- written by the rank -------------------------------------------------------------------------------------
    def _do(self, action: int, now: float) -> None:
        self._values[_ACTION], self._values[_SINCE] = action, now

    @contextmanager
    def batch(self, *, step: int, micro_batches: int, train: bool) -> Iterator[None]:
        """Around the passes of one batch."""
        begin = self._left = time.monotonic()
        v = self._values
        v[_STEP], v[_MICRO], v[_BUSY] = step, micro_batches, 1
        self._do((2 if step else 1) if train else 4, begin)
        yield  # after an error what it did last is still told
        v[_BUSY] = 0
        now = time.monotonic()
        if train:
            v[_BATCHES] += 1
            v[_SECONDS] += now - begin
        self._do(6, now)

    @contextmanager
    def micro_batch(self, edge: int, *, waits: bool) -> Iterator[None]:
        """Around one forward (even `edge`) or backward (odd); before it, the rank waited if `waits`."""
        begin = time.monotonic()
        v = self._values
        if waits:
            v[_WAITS + edge % EDGES] += begin - self._left
        self._do(2, begin)
        yield
        now = self._left = time.monotonic()
        v[_COMPUTE] += now - begin
        self._do(3, now)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward that the script itself has started, of the batch before."""
        begin = time.monotonic()
        v = self._values
        v[_BUSY] = 1
        self._do(2, begin)
        try:
            yield
        finally:  # a script may catch an error and go on
            v[_BUSY] = 0
        now = time.monotonic()
        v[_SECONDS] += now - begin
        v[_COMPUTE] += now - begin
        self._do(6, now)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Around the reduction of gradients."""
        begin = time.monotonic()
        self._values[_BUSY] = 1
        self._do(5, begin)
        yield
        now = time.monotonic()
        self._values[_REDUCE] += now - begin
        self._values[_BUSY] = 0
        self._do(6, now)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Around a wait for parameters, wherever it happens; it is no computing."""
        if threading.current_thread() is not threading.main_thread():  # the others' doings are not told
            yield
            return
        begin = time.monotonic()
        v = self._values
        action, busy = int(v[_ACTION]), v[_BUSY]
        v[_BUSY] = 1
        self._do(7, begin)
        yield
        now = time.monotonic()
        v[_BUSY] = busy
        v[_REDUCE] += now - begin if action != 5 else 0.0
        if busy and action in (1, 2):
            v[_COMPUTE] -= now - begin  # a pass will count it
        self._do(action, now)

    # ---- read by watchdogs -----------------------------------------------------------------------------------------
    def busy_for(self, now: float) -> float:
        """Return for how many seconds the rank has done the same thing inside a batch; 0 outside of batches."""
        return now - self._values[_SINCE] if self._values[_BUSY] else 0.0

    @staticmethod
    def describe(record: Sequence[float]) -> str:
        """Say in words what a rank is doing."""
        if not record or not record[_SINCE]:
            return "before its first batch"
        action = ACTIONS[int(record[_ACTION])]
        return f"{'after' if action.startswith('between') else 'at'} step {record[_STEP]:.0f}, {action}"

    @staticmethod
    def progress(record: Sequence[float]) -> tuple[float, float]:
        """Order ranks by how far they are: the one that keeps others waiting comes first."""
        waits = int(record[_ACTION]) in (3, 5, 7)
        return record[_STEP], float(waits)

    @staticmethod
    def times(record: Sequence[float]) -> tuple[float, float, float, float, float, list[float]]:
        """Return batches, micro-batches per batch, seconds in batches, computing, reducing; waits by edge."""
        return (
            record[_BATCHES], record[_MICRO], record[_SECONDS], record[_COMPUTE], record[_REDUCE],
            list(record[_WAITS:_LENGTH]),
        )  # fmt: skip
