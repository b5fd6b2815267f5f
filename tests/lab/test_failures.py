# SPDX-License-Identifier: Apache-2.0
"""A host, a network or one link is lost while a job trains in a lab: every surviving rank names it and ends in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holmes_core.lab.job import Finished, run_job
from holmes_core.lab.session import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("trains_on.py")


class Breaks:
    """Takes the output of a job; does something once every rank has trained some steps."""

    def __init__(self, ranks: int, action: Callable[[], None], after: int = 10) -> None:
        self.ranks, self.action, self.after = ranks, action, after
        self.lines: list[str] = []
        self.arrived: set[str] = set()
        self.at = 0.0

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if f"step {self.after} done" in line:
            self.arrived.add(line.split()[0])
            if len(self.arrived) == self.ranks and not self.at:
                self.at = time.monotonic()
                self.action()


def ip(lab: Lab, host: str, *words: str) -> None:
    namespace = lab.state.namespaces[host]
    subprocess.run(["ip", "netns", "exec", namespace, *words], check=True, capture_output=True)


def train(lab: Lab, out: Path, action: Callable[[], None], *, config: str = "", **options: int) -> tuple[Finished, str]:
    (out / "holmes.yaml").write_text(f"timeout: 120\nprobe: 'off'\nprint_plan: false\n{config}")
    broken = Breaks(lab.spec.world_size, action, after=options.get("after", 10))
    words = [sys.executable, str(SCRIPT), str(options.get("steps", 100_000)), str(options.get("width", 16))]
    done = run_job(lab, words, env={"HOLMES_CONFIG": str(out / "holmes.yaml")}, timeout=180, grace=60, write=broken)
    text = "".join(broken.lines)
    assert broken.at, text[-5000:]
    until = time.monotonic() + 10
    while (left := [pid for host in lab.state.namespaces for pid in lab.processes(host)]) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left, f"processes are left behind: {left}"
    if options.get("fails", 1):
        assert done.returncode not in (0, 124), text[-5000:]
        assert time.monotonic() - broken.at < 32  # 30, and what the job's end takes
    return done, text


def said_by(text: str, rank: int) -> str:
    """What a rank named as the cause: exactly one message."""
    lines = [line for line in text.splitlines() if re.match(rf"\S+:{rank}\b", line)]
    seen = [line for line in lines if "seen: " in line]
    assert len(seen) == 1, "\n".join(lines[-30:])
    assert not any("Traceback" in line for line in lines)
    return seen[0]


def test_a_host_goes_down(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab()

    def lose() -> None:  # all at once: its rank and the rank's watchdog
        for pid in lab.processes("a1"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    _, text = train(lab, tmp_path, lose)
    for rank in (1, 2, 3):  # rank 0, on a1, had the store
        assert re.search(r"rank 0 .* is lost with its host a1: no sign of life from its ranks 0", said_by(text, rank))


def test_a_host_loses_its_network(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab()
    _, text = train(lab, tmp_path, lambda: ip(lab, "b1", "ip", "link", "set", "eth0", "down"))
    for rank in (0, 1, 3):
        assert re.search(
            r"rank 2 .* (is lost with its host b1|has lost the network of its host b1)", said_by(text, rank)
        )
    assert "has lost the network of its host b1" in said_by(text, 2)


def test_one_link_is_cut(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab()
    _, text = train(lab, tmp_path, lambda: ip(lab, "a2", "ip", "link", "set", "rdma0", "down"))
    for rank in range(4):
        found = said_by(text, rank)
        assert re.search(r"rank [01] .* is not reached any more over a[12]:rdma0", found), found
        assert "nothing came for 12 s" in found


def test_a_link_becomes_slow(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    clusters = [{"name": name, "kind": kind, "hosts": 1} for name, kind in (("a", "infiniband"), ("b", "roce"))]
    lab = make_lab(clusters=clusters)
    slow = ("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", "4mbit", "burst", "16k", "limit", "1m")

    def throttle() -> None:
        for host in ("a1", "b1"):
            ip(lab, host, *slow)

    done, text = train(lab, tmp_path, throttle, steps=300, width=256, after=200, fails=0)
    assert done.returncode == 0, text[-5000:]
    said = [line for line in text.splitlines() if "holmes: stage" in line]
    assert len(said) == 1, said
    assert re.search(
        r"waits \d+ % of each step for link (roce|infiniband)-0 -> (roce|infiniband)-0 \(host [ab]1 -> [ab]1, rank",
        said[0],
    )
