# SPDX-License-Identifier: Apache-2.0
"""Lines of a log without what launchers and loggers put before the message: which host, process and rank wrote it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["Line", "parse_line"]

_LONGEST = 16384  # characters; what comes after is data, and costs time in every pattern

# NCCL: "host:pid:tid [gpu] file.cc:123 NCCL WARN text" (src/debug.cc); plugins put a function's signature before it.
_TEXT = (
    r"(?:(?P<source>[^ ].{0,160}?:\d{1,6}) )?(?:N|R|CC)C(?:CL|OM) (?P<level>INFO|WARN|ERROR|TRACE|ABORT) ?(?P<text>.*)"
)
_NCCL = (
    re.compile(r"(?P<host>[A-Za-z0-9][\w.-]{0,253}):(?P<pid>\d{1,10}):\d{1,10} \[-?\d{1,4}\] " + _TEXT),
    re.compile(r"(?P<host>)(?P<pid>)" + _TEXT),  # a logger has taken the front away
)
_QUICK = (" NCCL ", "NCCL INFO", "NCCL WARN", "RCCL INFO", "RCCL WARN", "CCOM INFO", "CCOM WARN")
# "[rank3]:" of torch, "[Rank 3]" and "[PG 0 (default_pg) Rank 3]" of ProcessGroupNCCL, "[1,3]<stderr>:" of mpirun,
# "3: " of srun --label, "(rank=3, size=8)" of gloo.
_RANK = (
    ("[rank", re.compile(r"\[rank(\d{1,6})\]")),
    ("Rank ", re.compile(r"\[(?:PG [^\]]{0,200})?Rank (\d{1,6})\]")),
    (">:", re.compile(r"^\[\d+,(\d{1,6})\]<std(?:out|err)>:")),
    (": ", re.compile(r"^ {0,8}(\d{1,6}): ")),
    ("(rank=", re.compile(r"\(rank=(\d{1,6}), size=\d+")),
)
# UCX: "[1700000000.123456] [host:pid:thread]  file.c:123  UCX  ERROR text"
_UCX = re.compile(r"\[(?P<host>[A-Za-z0-9][\w.-]{0,253}):(?P<pid>\d{1,10})(?::[^\]]{0,12})?\]")
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,12}[A-Za-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Args:
        file: The log's name.
        number: From 1.
        text: The message; the whole line where its form is not known.
        host: Host that wrote it; empty if the line does not say.
        pid: Process; 0 if unknown.
        rank: Rank, where the line itself says.
        level: NCCL's ``INFO`` or ``WARN``; empty for lines of others.
    """

    file: str
    number: int
    text: str
    host: str = ""
    pid: int = 0
    rank: int | None = None
    level: str = ""

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.number}"


def parse_line(raw: str, *, file: str, number: int) -> Line:
    """Take a line apart. Any text is a line."""
    raw = raw[:_LONGEST].rstrip()
    if raw.startswith("{"):
        raw = _from_json(raw)
    if "\x1b" in raw:
        raw = _COLOURS.sub("", raw)
    rank = _rank(raw)
    if any(word in raw for word in _QUICK):
        found = next((match for pattern in _NCCL if (match := pattern.search(raw)) is not None), None)
        if found is not None:
            return Line(
                file=file,
                number=number,
                text=found["text"].strip(),
                host=found["host"],
                pid=int(found["pid"] or 0),
                rank=rank,
                level=found["level"],
            )
    if "UCX" in raw:
        found = _UCX.search(raw)
        if found is not None:
            return Line(file=file, number=number, text=raw, host=found["host"], pid=int(found["pid"]), rank=rank)
    return Line(file=file, number=number, text=raw, rank=rank)


def _from_json(raw: str) -> str:
    """Return the message of a line that a container engine or collector wrapped in JSON; else the line."""
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return raw
    found = [data[key] for key in ("log", "message", "msg", "MESSAGE") if key in data] if isinstance(data, dict) else []
    return found[0].rstrip() if found and isinstance(found[0], str) else raw


def _rank(raw: str) -> int | None:
    for word, pattern in _RANK:
        if word in raw:
            found = pattern.search(raw)
            if found is not None:
                return int(found[1])
    return None
