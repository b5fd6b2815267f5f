# SPDX-License-Identifier: Apache-2.0
"""Who failed first: a rank that raises says so to all others; they name it instead of their own lost connection."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType

from holmes_core.errors import HolmesError
from holmes_core.runtime.cause import RankLost
from holmes_core.runtime.watchdog import Watchdog
from holmes_core.runtime.watchdog_process import patience

__all__ = ["FailureLog"]

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
# Share of failure_timeout: how long the main thread has to raise by itself once the cause is known.
_GRACE = 0.15


class FailureLog:
    """This rank's failure to the others, and theirs to this rank.

    Args:
        rank: This rank.
        place: Its place in words, e.g. ``"host n1"``; set again when stage and replica are known.
        watch: This rank's watchdog; None in a job of one rank, or where none could be started.
    """

    def __init__(self, *, rank: int, place: str, watch: Watchdog | None) -> None:
        self._rank, self._place, self._watch = rank, place, watch
        self._pid = os.getpid()
        self._handled = False
        self._open = False
        self._heard: RankLost | None = None
        self._arrived = threading.Event()
        self._claims = threading.Lock()  # taken by the one that says why this rank ends

    @property
    def place(self) -> str:
        """This rank's place in words."""
        return self._place

    @place.setter
    def place(self, place: str) -> None:
        self._place = place
        if self._watch is not None:
            self._watch.place = place

    # ---- during a run --------------------------------------------------------------------------------------------
    def listen(self) -> None:
        """From now on the failure of any rank ends this one, too. All ranks call it."""
        if self._watch is None:
            return
        self._open = True
        self._watch.place = self._place
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            named = self.explain(error) if self._open and os.getpid() == self._pid else error
            if isinstance(named, RankLost):
                self._say(named)
            else:
                previous(kind, error, trace)

        sys.excepthook = hook
        atexit.register(self._watch.bye)
        self._watch.subscribe(self._end_with_others)
        self._watch.listen(True)

    def close(self) -> None:
        """The run is over: what happens to other ranks no longer matters here."""
        self._open = False
        if self._watch is not None:
            self._watch.listen(False)

    def _end_with_others(self, cause: RankLost | None) -> None:
        """Called in the watchdog's thread when another failure is known (None: the watchdog itself is gone)."""
        if not self._open:
            return
        assert self._watch is not None
        self._heard = cause or RankLost(
            seen=f"the watchdog process of rank {self._rank} ({self._place}) was killed",
            means="without it the failures of other ranks would go unnoticed",
            do="do not end the processes of a job one by one; look for an out-of-memory kill (dmesg)",
        )
        self._arrived.set()
        time.sleep(_GRACE * self._watch.limit)  # a main thread that can raise does it better: it cleans up
        if not self._open or not self._claims.acquire(blocking=False):
            return
        self._watch.told()
        self._say(self._heard)
        for child in multiprocessing.active_children():  # data loaders
            child.kill()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)

    def _say(self, cause: RankLost) -> None:
        with suppress(OSError, ValueError):
            print(f"holmes: rank {self._rank} ends, because of another failure\n{cause}\n", end="", file=sys.stderr)
            sys.stderr.flush()

    # ---- when something was caught -------------------------------------------------------------------------------
    def explain(self, error: BaseException) -> BaseException:
        """Report this rank's own error, or turn the echo of another failure into its name.

        Args:
            error: What this rank caught.

        Returns:
            The error to raise: `error` itself, or a `RankLost` that names what failed first.
        """
        if self._handled or isinstance(error, (RankLost, SystemExit, GeneratorExit)):
            return error
        if self._watch is None:
            return self._lost(error) if _is_symptom(error) else error
        self._handled = True
        if not isinstance(error, Exception):
            self._watch.report(f"was interrupted ({type(error).__name__})", weak=True)
            return error
        if not _is_symptom(error):
            self._claim()
            if isinstance(error, HolmesError):
                where = f" ({error.where})" if error.where else ""
                seen = f"failed: {type(error).__name__}: {error.seen}{where}"
                self._watch.report(seen, means=error.means or "", do=error.do)
            else:
                self._watch.report(f"failed: {type(error).__name__}: {error}"[:500])
            return error
        self._watch.symptom(_first_line(error))
        self._arrived.wait(patience(self._watch.limit))
        self._claim()
        return self._heard or self._lost(error)

    def _claim(self) -> None:
        if not self._claims.acquire(blocking=False):
            time.sleep(60)  # the watchdog's thread is saying it and ends the process
        assert self._watch is not None
        self._watch.told()

    def _lost(self, error: BaseException) -> HolmesError:
        return HolmesError(
            seen=f"rank {self._rank} ({self._place}) lost its connection to another rank: {_first_line(error)}",
            means="a process of the job ended or hung without a word (killed, out of memory, host or link down)",
            do="look at the output of the other ranks and at the kernel log of their hosts (dmesg: out of memory)",
        )


def _is_symptom(error: BaseException) -> bool:
    seen: BaseException | None = error
    while seen is not None:
        if not isinstance(seen, HolmesError) and any(symptom in str(seen) for symptom in _SYMPTOMS):
            return True
        seen = seen.__cause__
    return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
