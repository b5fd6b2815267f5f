# SPDX-License-Identifier: Apache-2.0
"""Who failed first: a rank that raises says so in the job's store, the others name it instead of their own symptom."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

from holmes_core.errors import HolmesError

__all__ = ["FailureLog"]

_KEY = "holmes/first_failure"
_READERS = "holmes/first_failure_readers"
_SYMPTOMS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "timed out",
    "Timed out",
    "Socket closed",
    "NCCL error",
    "DistNetworkError",
    "failed to recv",
    "Failed to recv",
)


class FailureLog:
    """Shares the first failure of a job among its ranks.

    Args:
        rank: This rank.
        world_size: Ranks of the job.
        place: This rank's place in words, e.g. ``"stage 1 of 2, dp 0, tp 0, host n1"``.
        wait: Seconds to wait for another rank's report, and for others to read ours.
    """

    def __init__(self, *, rank: int, world_size: int, place: str, wait: float = 5.0) -> None:
        self._rank, self._world_size, self.place, self._wait = rank, world_size, place, wait
        self._handled = False
        self._heard = ""
        self._closed = threading.Event()

    def listen(self, every: float = 1.0) -> None:
        """Look for another rank's report in the background.

        The host of the store may be the one that fails: what it says must be here before it is gone, and a rank that
        waits in a collective notices nothing until then.
        """
        store = _store()
        if store is None or self._world_size == 1:
            return
        store = store.clone()  # a connection of its own: the main thread may wait in the other for long
        threading.Thread(target=self._listen, args=(store, every), name="holmes-failures", daemon=True).start()

    def _listen(self, store: Any, every: float) -> None:
        try:
            while not self._closed.wait(every):
                if store.check([_KEY]):
                    self._heard = store.get(_KEY).decode()
                    store.add(_READERS, 1)
                    return
        except Exception:  # the store is gone
            return

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()

    def explain(self, error: BaseException) -> BaseException:
        """Report this rank's own error, or turn the echo of another rank's failure into its name.

        Args:
            error: What this rank caught.

        Returns:
            The error to raise: `error` itself, or a `HolmesError` that names the rank that failed first.
        """
        if self._handled or not isinstance(error, Exception):
            return error
        self._handled = True
        store = _store()
        if store is None:
            return error
        if _is_symptom(error):
            return self._name_first(store, error)
        self._report(store, error)
        return error

    def _report(self, store: Any, error: Exception) -> None:
        text = f"{self._rank}\n{self.place}\n{type(error).__name__}: {error}"
        try:
            first = store.compare_set(_KEY, "", text).decode()
            if first == text and self._rank == 0:  # rank 0 may host the store: let the others read before it goes
                deadline = time.monotonic() + self._wait
                while time.monotonic() < deadline and store.add(_READERS, 0) < self._world_size - 1:
                    time.sleep(0.05)
        except Exception:  # the store is gone: nobody can be told any more
            return

    def _name_first(self, store: Any, error: Exception) -> Exception:
        deadline = time.monotonic() + self._wait
        text = ""
        try:
            while time.monotonic() < deadline and not (text := self._heard):
                if store.check([_KEY]):
                    text = store.get(_KEY).decode()
                    break
                time.sleep(0.05)
        except Exception:
            text = self._heard
        if text:
            rank, place, cause = text.split("\n", 2)
            if int(rank) != self._rank:
                return HolmesError(
                    seen=f"rank {rank} ({place}) failed: {cause}",
                    where=f"reported on rank {self._rank} ({self.place})",
                    means="all ranks of a job stop together",
                    do=f"look at the traceback of rank {rank}; this rank only lost its connection to it",
                )
        return HolmesError(
            seen=f"rank {self._rank} ({self.place}) lost its connection to another rank: {_first_line(error)}",
            means="a process of the job ended or hung without a word (killed, out of memory, host or link down)",
            do="look at the output of the other ranks and at the kernel log of their hosts (dmesg: out of memory)",
        )


def _store() -> Any:
    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def _is_symptom(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if not isinstance(seen, HolmesError) and any(symptom in str(seen) for symptom in _SYMPTOMS):
            return True
        seen = seen.__cause__
    return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
