# SPDX-License-Identifier: Apache-2.0
"""Clocks that differ are named once, whatever the network's delays are."""

from __future__ import annotations

import json
import mmap
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holmes_core.doctor.logs.diagnose import diagnose
from holmes_core.doctor.logs.parts import Case
from holmes_core.doctor.logs.read import read_lines
from holmes_core.runtime.clocks import Clocks

DELAYS = (0.5, 3.0, 0.2, 0.001, 2.5, 0.4, 0.1, 0.1, 7.0, 0.3)


def talk(there: float, out: list[float], back: list[float]) -> list[str]:
    """Two hosts send each other datagrams that take so long; the other's clock is ahead by `there`."""
    mine, theirs, said = Clocks("a1"), Clocks("b1"), []
    for i, (one, other) in enumerate(zip(out, back, strict=True)):
        now = 1000.0 + i
        assert theirs.heard("a1", now, now + one + there) == ""
        said.append(mine.heard("b1", now + there, now + other, theirs.least("a1")))
    return [text for text in said if text]


@pytest.mark.parametrize(("skew", "words"), [(-75.0, "75.0 s behind that of a1"), (3.0, "3.0 s ahead of that of a1")])
def test_a_clock_that_differs_is_named_once(skew: float, words: str) -> None:
    (said,) = talk(skew, list(DELAYS * 5), list(DELAYS * 5))
    assert f"holmes: the clock of host b1 is {words} (measured to 0.001 s)" in said


@given(
    skew=st.floats(-100, 100),
    out=st.lists(st.floats(0, 60), min_size=12, max_size=12),
    back=st.lists(st.floats(0, 60), min_size=12, max_size=12),
)
def test_what_is_said_is_true_whatever_the_delays(skew: float, out: list[float], back: list[float]) -> None:
    said = talk(skew, out, back)
    least = min(out), min(back)
    if said:
        (by, way, error) = re.search(r"is ([\d.]+) s (behind|ahead of) .*to ([\de.+-]+) s", said[0]).groups()  # type: ignore[union-attr]
        found = float(by) * (1 if way == "ahead of" else -1)
        assert abs(found - skew) <= float(error) * 1.06 + 0.06  # as printed
        assert (found > 0) == (skew > 0)
        assert abs(skew) > 0.99
    else:
        assert abs(skew) <= 1.01 + max(least)


def test_delays_alone_say_nothing() -> None:
    assert talk(0.0, list(DELAYS * 5), [60.0] * 50) == []
    assert talk(0.9, [0.0] * 50, [0.0] * 50) == []


def test_no_delay_at_all_is_no_clock_that_was_set() -> None:
    """Of large numbers the differences are rounded, and a round trip of nothing may come out below it."""
    for skew in (15.289622147064527, -33.3, 2.7182818):
        assert len(talk(skew, [0.0] * 12, [0.0] * 12)) == 1


def test_a_clock_that_is_set_in_between_is_not_judged() -> None:
    clocks = Clocks("a1")
    assert not any(clocks.heard("b1", 1000.0 + i, 900.0 + i, back=2.0) for i in range(50))


_WATCHDOG = """
import sys, time
real, ahead = time.time, float(sys.argv.pop(1))
time.time = lambda: real() + ahead
from holmes_core.runtime.watchdog_process import main
main()
"""


@pytest.mark.parametrize("ahead", [30.0, 0.0])
def test_watchdogs_measure_and_doctor_tells(tmp_path: Path, ahead: float) -> None:
    """Two watchdog processes, one of a host whose clock is wrong; doctor reads what rank 0's has printed."""
    begun, addresses = [], []
    for rank, host in enumerate(("a1", "b1")):
        server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        server.bind(("127.0.0.1", 0))
        addresses.append([host, *server.getsockname()])
        commands, tell = os.pipe()
        events, told = os.pipe()
        record = os.memfd_create("pulse")
        os.ftruncate(record, mmap.PAGESIZE)
        about = {
            "rank": rank, "world": 2, "host": host, "parent": os.getpid(), "limit": 3.0, "commands": commands,
            "events": told, "server": server.fileno(), "record": record,
        }  # fmt: skip
        with (tmp_path / f"rank{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _WATCHDOG, str(ahead * rank), json.dumps(about)], stderr=log,
                pass_fds=(commands, told, server.fileno(), record),
            )  # fmt: skip
        begun.append((process, tell))
        for fd in (commands, told, events, record):
            os.close(fd)
        server.close()
    try:
        for _, tell in begun:
            os.write(tell, json.dumps({"do": "peers", "token": "t", "addresses": addresses}).encode() + b"\n")
        log = tmp_path / "rank0.log"
        until = time.monotonic() + (30 if ahead else 2.5)
        while "clock" not in log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        for _, tell in begun:
            os.write(tell, b'{"do": "bye"}\n')
            os.close(tell)
        codes = [process.wait(20) for process, _ in begun]
    assert codes == [0, 0], log.read_text()
    found = diagnose(Case(log=read_lines([(log.name, log.read_text().splitlines())])))
    if ahead:
        assert [one.id for one in found] == ["clock-skew"]
        assert "the clock of host b1 is 30.0 s ahead of that of a1" in found[0].seen
        assert found[0].severity == "warning"
    else:
        assert found == ()
    assert (tmp_path / "rank1.log").read_text() == ""
