# SPDX-License-Identifier: Apache-2.0
"""Read logs line by line into a Log: events of known families, tracebacks, torchrun's failure blocks."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from holmes_core.doctor.logs.event import Event, Family, Log, contains
from holmes_core.doctor.logs.families_nccl import NCCL_FAMILIES
from holmes_core.doctor.logs.families_system import SYSTEM_FAMILIES
from holmes_core.doctor.logs.families_torch import TORCH_FAMILIES
from holmes_core.doctor.logs.lines import Line, parse_line

__all__ = ["families", "read_file", "read_lines"]

_FAMILIES = (*NCCL_FAMILIES, *TORCH_FAMILIES, *SYSTEM_FAMILIES)
_WORDS = tuple(dict.fromkeys(word for family in _FAMILIES for word in family.words))
_TRACEBACK = "Traceback (most recent call last)"
# Launchers put "[rank0]: ", "0: ", "(worker pid=1) " or "pod | " before the line.
_EXCEPTION = re.compile(
    r"^(?:\[[^\]]{1,40}\]:?\s?|\([^)]{1,60}\) |[\w.-]{1,60} \| |\d{1,6}: ){0,3}"
    r"(?P<type>[A-Za-z_][\w.]{0,120}(?:Error|Exception|Interrupt|Exit|Failure))(?:: ?(?P<text>.*))?$"
)
# "  rank      : 2 (local_rank: 0)" and "  exitcode  : -9 (pid: 11)"
# of torch/distributed/elastic/multiprocessing/errors.
_FAILURE = re.compile(r"\b(?P<key>host|rank|exitcode)\s+: (?P<value>\S+)(?P<pid> \(pid: \d+\))?")
_RANK_FILE = re.compile(r"rank[_.-]?(\d{1,6})[^/]*$")
_MOST_UNKNOWN = 1000
_MOST_PER_FAMILY = 20000  # a log of a job that retries for a night says the same a million times


def families() -> tuple[Family, ...]:
    """Return all families of messages."""
    return _FAMILIES


def read_file(path: Path) -> Iterator[str]:
    """Yield a file's lines; ``.gz`` is unpacked, and bytes that are no text are replaced.

    Raises:
        OSError: The file cannot be read.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace") as file:
        yield from file


def read_lines(sources: Iterable[tuple[str, Iterable[str]]]) -> Log:
    """Read logs.

    Args:
        sources: Name and lines of each.

    Returns:
        All that was recognised. Any text can be read.
    """
    log = Log()
    sizes: dict[tuple[str, int], int] = {}
    counts: dict[str, int] = {}
    for name, lines in sources:
        reader = _Blocks()
        number = 0
        named = _RANK_FILE.search(name)  # launchers that keep a file per rank
        for number, raw in enumerate(lines, 1):
            line = parse_line(raw, file=name, number=number)
            if line.rank is None and named is not None:
                line = replace(line, rank=int(named[1]))
            log.nccl_lines += bool(line.level)
            events = [*_match(line), *reader.read(line)]
            for event in events:
                counts[event.name] = counts.get(event.name, 0) + 1
                if event.name == "comm":
                    _learn_rank(log, sizes, event)
                if counts[event.name] <= _MOST_PER_FAMILY:
                    log.add(event)
            if line.level == "WARN" and not events and line.text and len(log.unknown) < _MOST_UNKNOWN:
                log.unknown.append(line)
        log.files[name] = number
    return log


def _match(line: Line) -> list[Event]:
    if not contains(line.text, _WORDS):
        return []
    return [event for family in _FAMILIES if (event := family.read(line)) is not None]


def _learn_rank(log: Log, sizes: dict[tuple[str, int], int], event: Event) -> None:
    key, size = (event.line.host, event.line.pid), int(event.get("size"))
    if event.line.pid and size > sizes.get(key, 0):
        sizes[key], log.ranks[key] = size, int(event.get("rank"))


class _Blocks:
    """What stands on several lines: a Python traceback's last line, torchrun's failure table."""

    def __init__(self) -> None:
        self._open: set[int | None] = set()
        self._host = ""
        self._rank: int | None = None
        self._root = False

    def read(self, line: Line) -> Iterator[Event]:
        """Yield the event that a line completes."""
        if _TRACEBACK in line.text:
            self._open.add(line.rank)
        elif self._open and line.rank in self._open:
            found = _EXCEPTION.match(line.text)
            if found is not None:
                self._open.discard(line.rank)
                fields = {"type": found["type"], "text": (found["text"] or "").strip()}
                yield Event(name="exception", line=line, fields=fields)
        yield from self._failure(line)

    def _failure(self, line: Line) -> Iterator[Event]:
        if "Root Cause (first observed failure)" in line.text:
            self._root = True
            return
        found = _FAILURE.search(line.text) if contains(line.text, ("host", "rank", "exitcode")) else None
        if found is None:
            return
        key, value = found["key"], found["value"]
        if key == "host":
            self._host = value
        elif key == "rank" and value.isdecimal() and len(value) < 8:
            self._rank = int(value)
        elif key == "exitcode" and found["pid"] and re.fullmatch(r"-?[1-9]\d{0,5}", value):
            where = replace(line, host=self._host, rank=self._rank)
            yield Event(name="exit", line=where, fields={"code": value, **({"root": "yes"} if self._root else {})})
            self._host, self._rank, self._root = "", None, False
