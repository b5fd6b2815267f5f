# SPDX-License-Identifier: Apache-2.0
"""The first cause of a job's end, in words: one value that travels from rank to rank, one message on each of them.

Imports nothing but the standard library: the watchdog process, which must start at once, reads it too.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from holmes_core.errors import HolmesError

__all__ = ["Cause", "RankLost", "ended", "message"]

_LONGEST = 500  # characters of one part: a cause travels in one datagram


class RankLost(HolmesError):
    """Another rank, its host or a link failed first, and this rank ends with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What failed first.

    Args:
        run: Number of the run in this process group (a process may train several times).
        rank: The rank that failed.
        place: Its host, stage and replica in words.
        what: What happened to it.
        when: Its last step and what it did.
        means: What that means.
        do: What a person can do.
        strong: Seen at the source (its exception, its exit status). A weak cause (silence, a lost connection, SIGTERM)
            may be an echo, and gives way to a strong one.
        quiet: Nothing to report: somebody ended all ranks together.
    """

    run: int
    rank: int
    place: str
    what: str
    when: str = ""
    means: str = ""
    do: str = ""
    strong: bool = True
    quiet: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain values, long texts cut."""
        return {name: value[:_LONGEST] if isinstance(value, str) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cause:
        """Read what `to_json` gave; unknown keys are ignored."""
        return cls(**{item.name: data[item.name] for item in fields(cls) if item.name in data})


def message(cause: Cause, *, rank: int, place: str, shared: str = "") -> RankLost:
    """Return the one error that a surviving rank ends with.

    Args:
        cause: What failed first.
        rank: The surviving rank.
        place: Its place in words.
        shared: The groups and transports that join the two ranks.
    """
    where = ", ".join(part for part in (cause.when, f"told on rank {rank} ({place})") if part)
    if shared and cause.rank != rank:
        where += f"; joined by {shared}"
    return RankLost(
        seen=f"rank {cause.rank} ({cause.place}) {cause.what}",
        where=where,
        means=cause.means or "all ranks of a job stop together; this rank only lost its partner",
        do=cause.do or f"look at the output of rank {cause.rank}",
    )


def ended(status: int | None, *, host: str, out_of_memory: bool) -> dict[str, Any]:
    """Describe how a process ended.

    Args:
        status: As wait(2) gives it; None when it could not be read any more.
        host: Where it ran.
        out_of_memory: Whether the kernel's out-of-memory killer was at work on that host in this moment.

    Returns:
        Fields of a `Cause`.
    """
    oom = f"look at the kernel's log on {host} (dmesg | grep -i 'out of memory') and at the scheduler's"
    if status is None:
        return {
            "what": "ended without a word (killed, or left by os._exit)",
            "do": f"look at the last output of that rank; {oom}",
            "strong": False,
        }
    number = status & 0x7F
    if not number:
        code = status >> 8
        return {
            "what": f"ended by itself with exit status {code}" + (" while others still train" if code == 0 else ""),
            "do": "look at the last output of that rank: a library or your code called exit",
            "strong": code != 0,
        }
    name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return {
            "what": f"was ended by {name}",
            "means": "its launcher, the scheduler or a person ended it",
            "do": f"look at the output of the launcher on {host} and at the scheduler's log (time limit, preemption)",
            "strong": False,
            "quiet": True,
        }
    if number == signal.SIGKILL and out_of_memory:
        return {
            "what": f"was killed ({name}) when host {host} was out of memory",
            "means": "the kernel ends the largest process when main memory is used up",
            "do": "use fewer data loader workers, a smaller batch or more stages per host; or give the job more memory",
        }
    if number == signal.SIGKILL:
        return {
            "what": f"was killed ({name})",
            "means": "another process or the kernel ended it; it could not say anything itself",
            "do": f"if nobody did it on purpose, memory was used up: {oom}",
        }
    hint = "; SIGBUS often means that /dev/shm is full" if number == signal.SIGBUS else ""
    return {
        "what": f"crashed ({name})",
        "means": "native code failed (a driver, a library, an extension)",
        "do": f"run it once with PYTHONFAULTHANDLER=1 for the Python line that called it{hint}",
    }
