# SPDX-License-Identifier: Apache-2.0
"""Names the rank or the link that has become slow, while the job runs. Pure arithmetic on what `Pulse` counts.

A rank is slow when it computes much longer per batch than the ranks of the same stage, or than it did before while the
others do not. A link is slow when batches take much longer than computing explains; the stage that waits first, seen
along the pipeline, waits for it. Judged over windows of many batches, so that one slow batch says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from holmes_core.runtime.pulse import Pulse

__all__ = ["Watcher"]

_BATCHES, _SECONDS = 20, 2.0  # a window has at least so many batches and seconds ...
_FEW_BATCHES, _LONG = 5, 30.0  # ... or so few, when they take so long
_HISTORY = 20  # windows that "before" means
_SLOWER = 1.5  # times the seconds of computing that count as slow
_LONGER = 1.4  # times the seconds of a batch that computing explains
_WAIT = 0.2  # share of a batch spent waiting that is worth a word
_REPEAT = 60.0  # seconds until the same thing is said again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Window:
    """One rank's seconds per batch."""

    batch: float
    compute: float
    reduce: float
    waits: tuple[float, ...]
    micro_batches: float


class Watcher:
    """Looks at the records of all ranks and says what is slow.

    Args:
        pipeline: ``stages``: number of stages; ``ranks``: rank -> ``place`` (words), ``stages`` (its stages) and
            ``edges`` (per `Pulse` edge ``[stage that waits, link in words]`` or None). Keys may be text (JSON).
    """

    def __init__(self, pipeline: Mapping[str, Any]) -> None:
        self._stages = int(pipeline["stages"])
        self._ranks = {int(rank): about for rank, about in pipeline["ranks"].items()}
        self._start: dict[int, Sequence[float]] = {}
        self._since = 0.0
        self._windows = 0
        self._before: dict[int, list[_Window]] = {rank: [] for rank in self._ranks}
        self._said: dict[str, float] = {}

    def look(self, records: Mapping[int, Sequence[float]], now: float) -> list[str]:
        """Return what to say, usually nothing.

        Args:
            records: Rank to `Pulse.values`.
            now: Time in seconds, of any clock that runs evenly.
        """
        if not set(self._ranks) <= set(records):
            return []
        if not self._start:
            self._start, self._since = dict(records), now
            return []
        done = min(Pulse.times(records[r])[0] - Pulse.times(self._start[r])[0] for r in self._ranks)
        lasted = now - self._since
        if not (done >= _BATCHES and lasted >= _SECONDS) and not (done >= _FEW_BATCHES and lasted >= _LONG):
            return []
        found = {rank: _window(self._start[rank], records[rank]) for rank in self._ranks}
        self._start, self._since = dict(records), now
        self._windows += 1
        if self._windows == 1:  # warm-up
            return []
        slow = self._slow_ranks(found)
        subjects = slow or self._slow_links(found)
        for rank, window in found.items():
            self._before[rank] = [*self._before[rank], window][-_HISTORY:]
        return [f"holmes: {text}" for subject, text in subjects if self._may_say(subject, now)]

    def _may_say(self, subject: str, now: float) -> bool:
        if now - self._said.get(subject, -_REPEAT) < _REPEAT:
            return False
        self._said[subject] = now
        return True

    def _slow_ranks(self, found: Mapping[int, _Window]) -> list[tuple[str, str]]:
        before = {rank: median(w.compute for w in old) for rank, old in self._before.items() if old}
        grown = {rank: found[rank].compute / old for rank, old in before.items() if old}
        said = []
        for rank, about in self._ranks.items():
            mine = found[rank].compute
            peers = [found[r].compute for r, other in self._ranks.items() if r != rank
                     and other["stages"] == about["stages"]]  # fmt: skip
            usual = median(peers) if peers else None
            old = before.get(rank)
            # Where everything became slower (a longer sequence, a busy machine), nobody is to blame.
            trend = median([factor for r, factor in grown.items() if r != rank] or [1.0])
            than = []
            if usual and mine > _SLOWER * usual:
                than.append(f"{usual:.3g} s on the other ranks of its stage")
            if old and mine > _SLOWER * old * max(1.0, trend) and (not usual or mine > 1.2 * usual):
                than.append(f"{old:.3g} s before")
            if than and mine > _WAIT * found[rank].batch:
                text = f"rank {rank} ({about['place']}) has become slow: it computes {mine:.3g} s per batch"
                said.append((f"rank {rank}", f"{text}; {', '.join(than)}"))
        return said

    def _slow_links(self, found: Mapping[int, _Window]) -> list[tuple[str, str]]:
        batch = max(window.batch for window in found.values())
        micro = max(1.0, max(window.micro_batches for window in found.values()))
        bubble = (self._stages - 1) / micro
        explained = max(window.compute for window in found.values()) * (1 + bubble)
        if batch <= _LONGER * explained:
            return []
        usual = bubble / (1 + bubble)
        waiting: dict[tuple[int, int], tuple[float, int, str]] = {}
        for rank, about in self._ranks.items():
            for edge, label in enumerate(about["edges"]):
                share = found[rank].waits[edge] / found[rank].batch if found[rank].batch else 0.0
                if label is not None and share > max(_WAIT, usual):
                    stage, link = label
                    # Forward waits begin at the slow link and pass on to later stages, backward waits to earlier ones.
                    order = (edge % 2, -stage if edge % 2 else stage)
                    waiting[order] = max(waiting.get(order, (0.0, 0, "")), (share, stage, link))
        if not waiting:
            return []
        share, stage, link = waiting[min(waiting)]
        return [(link, f"stage {stage} waits {share:.0%} of each step for {link}".replace("%", " %"))]


def _window(start: Sequence[float], end: Sequence[float]) -> _Window:
    batches, _, *before, waits = Pulse.times(start)
    now, micro, *after, waited = Pulse.times(end)
    count = max(1.0, now - batches)
    seconds, compute, reduce = ((b - a) / count for a, b in zip(before, after, strict=True))
    return _Window(
        batch=seconds,
        compute=compute,
        reduce=reduce,
        waits=tuple((b - a) / count for a, b in zip(waits, waited, strict=True)),
        micro_batches=micro,
    )
