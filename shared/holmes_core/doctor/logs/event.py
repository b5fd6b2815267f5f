# SPDX-License-Identifier: Apache-2.0
"""Families of messages, and what a set of logs said in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from holmes_core.doctor.finding import Severity
from holmes_core.doctor.logs.lines import Line

__all__ = ["Event", "Family", "Log", "Verdict", "contains"]


def contains(text: str, words: tuple[str, ...]) -> bool:
    """Whether a text holds one of some words; a plain loop, since this runs for every line of every log."""
    for word in words:  # noqa: SIM110
        if word in text:
            return True
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a message means by itself, whatever else the log says.

    Args:
        id: The finding's name.
        severity: As in Finding.
        means: As in Finding.
        do: As in Finding.
        likelihood: As in Finding.
        crash: A process ends here: what its peers say afterwards is an echo.
        symptom: It follows from something else.
    """

    id: str
    severity: Severity
    means: str
    do: str
    likelihood: int = 60
    crash: bool = False
    symptom: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of message.

    Args:
        name: Of its events.
        words: The line holds one of them, or the pattern is not tried (a log may have millions of lines).
        pattern: Searched in the message; its named groups become the event's fields.
        verdict: For messages that say all by themselves; None where a rule decides.
    """

    name: str
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    verdict: Verdict | None = None

    def read(self, line: Line) -> Event | None:
        """Return the line's event, or None if it is of another kind."""
        if not contains(line.text, self.words):
            return None
        found = self.pattern.search(line.text)
        if found is None:
            return None
        fields = {name: value.strip() for name, value in found.groupdict().items() if value is not None}
        return Event(name=self.name, line=line, fields=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One message that was recognised.

    Args:
        name: Its family.
        line: Where it stands.
        fields: The family's named groups that were there.
    """

    name: str
    line: Line
    fields: Mapping[str, str] = field(default_factory=dict)

    def get(self, name: str) -> str:
        """Return a field, or an empty string."""
        return self.fields.get(name, "")


@dataclass(slots=True, kw_only=True)
class Log:
    """What all files together said.

    Args:
        events: In the order of files and lines.
        files: Name -> number of lines.
        nccl_lines: How many lines are NCCL's.
        unknown: Warnings of NCCL that belong to no family.
        ranks: (host, pid) -> global rank, from the largest communicator.
    """

    events: list[Event] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)
    nccl_lines: int = 0
    unknown: list[Line] = field(default_factory=list)
    ranks: dict[tuple[str, int], int] = field(default_factory=dict)
    _by_name: dict[str, list[Event]] = field(default_factory=dict)
    _hosts: dict[str, None] = field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Take an event in, in the order of files and lines."""
        self.events.append(event)
        self._by_name.setdefault(event.name, []).append(event)
        if event.line.host:
            self._hosts[event.line.host] = None

    def of(self, *names: str) -> Iterator[Event]:
        """Yield the events of some families, in order."""
        if len(names) == 1:
            return iter(self._by_name.get(names[0], ()))
        present = [name for name in names if name in self._by_name]
        return (event for event in self.events if event.name in present) if present else iter(())

    def hosts(self) -> list[str]:
        """Return the hosts that wrote, in order of appearance."""
        return list(self._hosts)

    def rank(self, line: Line) -> int | None:
        """Return the rank that wrote a line, or None."""
        return line.rank if line.rank is not None else self.ranks.get((line.host, line.pid))

    def where(self, *events: Event, most: int = 4) -> tuple[str, ...]:
        """Return the places of some events for a finding: files and lines, then hosts, then ranks."""
        places = list(dict.fromkeys(event.line.place for event in events))
        hosts = list(dict.fromkeys(event.line.host for event in events if event.line.host))
        ranks = sorted({rank for event in events if (rank := self.rank(event.line)) is not None})
        found = _shortened(places, most)
        if hosts:
            found.append(f"host {', '.join(_shortened(hosts, most))}")
        if ranks:
            found.append(f"rank {', '.join(_shortened([str(rank) for rank in ranks], 8))}")
        return tuple(found)


def _shortened(words: list[str], most: int) -> list[str]:
    return words if len(words) <= most else [*words[:most], f"and {len(words) - most} more"]
