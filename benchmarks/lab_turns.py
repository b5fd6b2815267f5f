# SPDX-License-Identifier: Apache-2.0
"""Jobs that are up together and train in turn, some steps each, so that all of them meet the same machine.

How fast a shared machine is changes by a fifth within an hour; two runs of a minute, one after the other, cannot show
a difference of some per cent. Here every job of a sitting has its own lab and waits, between steps, until it is its
turn: what is compared was measured within the minute or two of a round, many times over. The first step of a turn does
not count.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import lab_settings
from lab_systems import NOTES, RANKS

WARM_UP = 2  # steps of each job before its first turn
START = 300.0  # seconds that a job may take to start and warm up
SLOWEST = 600.0  # seconds that a step may take
_LOOK = 0.1  # seconds between two looks at whose turn it is

Key = tuple[str, str]  # setting and variant


@dataclass(kw_only=True)
class Run:
    """What was measured of one job.

    Args:
        sitting: Which jobs took turns with it: those of the same number.
        turns: Seconds of each step that counts, by turn.
        computes: Of Holmes: seconds per step that its busiest rank computes; 0 of others.
        across: Of Holmes: bytes per step between clusters (between hosts, where there is one cluster only), and those
            of them that replicas exchange (gradients, parameters).
        link: Of Holmes: how many of the former the rank sends that sends most.
        said: What it printed about its plan.
    """

    sitting: int
    turns: list[list[float]] = field(default_factory=list)
    computes: float = 0.0
    across: tuple[float, float] = (0.0, 0.0)
    link: float = 0.0
    said: list[str] = field(default_factory=list)


def take_turns(folder: Path, rank: int, steps: int) -> Callable[[], None]:
    """Return what a rank calls after each step: waits there when its turn is over.

    Args:
        folder: Of its job, where the sitting looks and writes.
        rank: Whose.
        steps: Of a turn.
    """

    def wait() -> None:
        done = len(NOTES) - WARM_UP
        if done < 0 or done % steps:
            return
        turn = done // steps
        part = folder / f"{rank}.part"
        part.write_text(json.dumps(NOTES))
        part.rename(folder / f"{turn}.{rank}")
        go = folder / f"{turn}.go"
        while not go.exists():
            if not folder.exists():
                raise SystemExit("the sitting has ended")
            time.sleep(_LOOK)

    return wait


class _Job:
    """A job of a sitting: a process that holds its lab, and files that it and the sitting write."""

    def __init__(self, key: Key, folder: Path, words: Sequence[str]) -> None:
        self.key, self.folder = key, folder
        self.failure = ""
        folder.mkdir()
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *words, "--hold", *key, str(folder)], stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the sitting, which ends its jobs in order
            )  # fmt: skip

    def go(self, turn: int) -> None:
        (self.folder / f"{turn}.go").touch()

    def wait(self, turn: int, seconds: float) -> bool:
        """Wait until all ranks wait for a turn; False if they never will."""
        wanted = [self.folder / f"{turn}.{rank}" for rank in range(RANKS)]
        end = time.monotonic() + seconds
        while not all(file.exists() for file in wanted):
            if self._process.poll() is not None or time.monotonic() > end:
                late = f"no answer for {seconds:.0f} s" if self._process.poll() is None else ""
                lines = self._log.read_text(errors="replace").splitlines()
                causes = [line for line in lines if "seen:" in line or "Error: " in line or "exitcode" in line]
                self.failure = late or next(iter(causes or lines[-1:]), "no output").strip()[:200]
                self.close()
                return False
            time.sleep(_LOOK / 2)
        return True

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def result(self, sitting: int, turns: int, steps: int) -> Run:
        """Return what was measured in the turns that have ended."""
        ranks = [json.loads((self.folder / f"{turns}.{rank}").read_text()) for rank in range(RANKS)]
        clock = [note[0] for note in ranks[0]]
        run = Run(sitting=sitting)
        for turn in range(turns):
            first = WARM_UP + turn * steps
            ends = clock[first : first + steps]
            run.turns.append([after - before for before, after in pairwise(ends)])
        spans = [(WARM_UP + turn * steps, WARM_UP + (turn + 1) * steps - 1) for turn in range(turns)]
        counted = turns * (steps - 1)
        sums = [[sum(notes[b][kind] - notes[a][kind] for a, b in spans) / counted for kind in (1, 2, 3)]
                for notes in ranks]  # fmt: skip
        run.computes = max(one[0] for one in sums)
        run.across = (sum(one[1] for one in sums), sum(one[2] for one in sums))
        run.link = max(one[1] for one in sums)
        words = ("by what was measured", "measured in", "predicted:")
        lines = self._log.read_text(errors="replace").splitlines()
        run.said = [line.partition("| ")[2].strip() for line in lines if any(word in line for word in words)]
        return run


def sit(
    keys: Sequence[Key], *, number: int, turns: int, steps: int, folder: Path, words: Sequence[str]
) -> tuple[dict[Key, Run], dict[Key, str]]:
    """Run jobs in turn.

    Args:
        keys: Which.
        number: Of the sitting.
        turns: How many each job has.
        steps: Of a turn; the first does not count.
        folder: For what is written in between.
        words: The program and its arguments that `hold` is called by.

    Returns:
        What was measured; and why nothing was.
    """
    jobs: list[_Job] = []
    try:
        for place, key in enumerate(keys):  # one after the other: each measures the machine as it starts
            jobs.append(_Job(key, folder / str(place), words))
            if not jobs[-1].wait(0, START + WARM_UP * SLOWEST) and place == 0:
                return {}, {key: jobs[-1].failure}  # nothing to compare with
        for turn in range(turns):
            if jobs[0].failure:  # nothing to compare with any more
                break
            live = [job for job in jobs if not job.failure]
            first = turn % len(live)
            for job in [*live[first:], *live[:first]]:
                job.go(turn)
                job.wait(turn + 1, steps * SLOWEST)
            parts = []
            for job in live:
                if not job.failure:
                    run = job.result(number, turn + 1, steps)
                    parts.append(f"{job.key[0]} {job.key[1]} {statistics.median(run.turns[-1]):.2f}")
            print(f"  turn {turn + 1}/{turns}: {', '.join(parts)}", flush=True)
        if jobs[0].failure:
            return {}, {job.key: job.failure or "its reference failed" for job in jobs}
        found = {job.key: job.result(number, turns, steps) for job in jobs if not job.failure}
        return found, {job.key: job.failure for job in jobs if job.failure}
    finally:
        for job in jobs:
            job.close()


def end_on_sigterm() -> None:
    """End in order on SIGTERM: what is up goes down on the way out."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, end)


def hold(setting: str, name: str, folder: Path, *, turns: int, words: Sequence[str]) -> None:
    """Be the process that holds one job of a sitting: its lab, and what its ranks print."""
    end_on_sigterm()

    def write(line: str) -> None:
        print(line, end="", flush=True)

    timeout = START + turns * 3600.0
    command = [sys.executable, *words, "--be", name, str(folder), "--replicas"]
    status = lab_settings.run(
        setting, name, lambda replicas: [*command, str(replicas)], folder, write=write, timeout=timeout
    )
    raise SystemExit(status)


def be(name: str, folder: Path, *, batch: int, turns: int, steps: int, replicas: int) -> None:
    """Be one rank of a job."""
    import lab_systems

    variant = lab_settings.VARIANTS[name]
    lab_systems.WAIT.append(take_turns(folder, int(os.environ["RANK"]), steps))
    options = {**variant.options, "replicas": replicas}
    lab_systems.train(variant.kind, options, batch=batch, steps=WARM_UP + turns * steps)
