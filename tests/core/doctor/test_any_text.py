# SPDX-License-Identifier: Apache-2.0
"""Any text is a log: nothing crashes, plain noise has no findings, and a huge log takes no time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.doctor.finding import Finding
from holmes_core.doctor.logs.diagnose import diagnose, silence
from holmes_core.doctor.logs.event import contains
from holmes_core.doctor.logs.lines import parse_line
from holmes_core.doctor.logs.parts import Case
from holmes_core.doctor.logs.read import families, read_lines
from tests.core.doctor.test_logs import FAULTS, HEALTHY

ALL = [line for lines, _, _ in FAULTS.values() for line in lines] + [
    line for lines in HEALTHY.values() for line in lines
]
WORDS = sorted({word for family in families() for word in family.words} | set(" ".join(ALL).split()))

MESSAGES = tuple({word for family in families() for word in family.words if " " in word or "-" in word})


def check(lines: list[str]) -> tuple[Finding, ...]:
    log = read_lines([("a", lines)])
    found = diagnose(Case(log=log))
    assert silence(log)
    for one in found:
        assert Finding.from_json(one.to_json()) == one
        assert one.seen
        assert one.means
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=200), max_size=20))
def test_any_text(lines: list[str]) -> None:
    check(lines)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=20))
def test_words_of_messages_in_any_order(lines: list[str]) -> None:
    check(lines)


@st.composite
def damaged(draw: st.DrawFn) -> list[str]:
    """Known messages, cut and changed anywhere."""
    changed = []
    for line in draw(st.lists(st.sampled_from(ALL), min_size=1, max_size=12)):
        start = draw(st.integers(0, len(line)))
        end = draw(st.integers(start, len(line)))
        changed.append(line[:start] + draw(st.text(max_size=6)) + line[end:])
    return changed


@settings(max_examples=200, deadline=None)
@given(damaged())
def test_lines_cut_and_changed_anywhere(lines: list[str]) -> None:
    check(lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=10_000, deadline=None)
@given(st.one_of(damaged(), st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), max_size=20)))
def test_ten_thousand_logs(lines: list[str]) -> None:
    check(lines)


NOISE = st.lists(
    st.one_of(
        st.builds("epoch {} step {} loss {:.4f}".format, st.integers(0, 99), st.integers(0, 10**6), st.floats(0, 20)),
        st.builds(
            "{}%|####    | {}/{} [00:12<00:30, 3.21it/s]".format, st.integers(0, 100), st.integers(), st.integers()
        ),
        # hypothesis also tries texts that it finds in the code: messages, which are no noise.
        st.text(alphabet="abcdefghijklmnopqrstuvwxyz0123456789 .,:/=-_\n", max_size=120).filter(
            lambda text: not contains(text, MESSAGES)
        ),
        st.sampled_from(
            [
                "INFO:root:connected to the data base at 10.0.0.1:5432",
                "GPU available: True (cuda), used: True",
                "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8",
                "All distributed processes registered. Starting with 8 processes",
                "FutureWarning: torch.load with weights_only=False",
                "2026-01-01 10:00:00 host: 10.0.0.1 rank: 3 status: fine",
                "saving checkpoint to ckpt/step=100.ckpt ... done (timeout 600)",
                "INFO failed tests: 0; no error; exitcode : 0",
                "172.17.0.2 - - GET /metrics 200",
                "0: 1: 2: 3",
            ]
        ),
    ),
    max_size=30,
)


@settings(max_examples=150, deadline=None)
@given(NOISE)
def test_noise_has_no_findings(lines: list[str]) -> None:
    assert check(lines) == ()


def test_a_long_line_and_a_long_log_are_read_quickly() -> None:
    line = "n1:1:2 [0] NCCL INFO NET/IB : Using " + "[0]mlx5_0:1/IB " * 20000
    begin = time.monotonic()
    parse_line(line, file="a", number=1)
    check([line, "connect " * 50000, "NCCL WARN " * 20000, "Unable to " * 50000, "(" * 100000])
    noise = [f"n1:1:2 [0] NCCL INFO Channel {number:02}/0 : 0[0] -> 8[0] [send] via P2P/IPC" for number in range(20000)]
    check(noise)
    assert time.monotonic() - begin < 30


def test_a_message_that_is_repeated_for_a_night() -> None:
    lines = ["n1:1:2 [0] NCCL INFO Call to connect returned Connection timed out, retrying"] * 30000
    (found,) = check(lines)
    assert found.id == "connect-timeout"
