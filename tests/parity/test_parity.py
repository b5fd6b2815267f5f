# SPDX-License-Identifier: Apache-2.0
"""Numbers do not change: every layout, schedule and feature trains as one process does, step by step.

And each deliberate mistake is found: a comparison that finds nothing proves nothing.
"""

from __future__ import annotations

import pytest

from tests.parity.cases import FAST, MISTAKES, REPEATED, SLOW, Case, without_mistake
from tests.parity.judge import judge
from tests.parity.runner import Worlds

pytestmark = pytest.mark.timeout(900)


def _params(*lists: tuple[Case, ...]) -> list[object]:
    cases = sorted([case for cases in lists for case in cases], key=lambda case: case.ranks)  # processes are reused
    return [pytest.param(c, id=c.name, marks=pytest.mark.slow if c.slow else ()) for c in cases]


@pytest.mark.parametrize("case", _params(FAST, SLOW))
def test_trains_like_one_process(worlds: Worlds, case: Case) -> None:
    verdict = judge(case, worlds.run("worker:run_case", case).check())
    assert not verdict.problems, f"{case.description}: {verdict}"


@pytest.mark.parametrize("case", _params(MISTAKES))
def test_mistake_is_found(worlds: Worlds, case: Case) -> None:
    right = judge(case, worlds.run("worker:run_case", without_mistake(case)).check())
    assert not right.problems, "without the mistake nothing may differ"
    wrong = judge(case, worlds.run("worker:run_case", case).check())
    assert any(problem.startswith(case.seen_in) for problem in wrong.problems), wrong


@pytest.mark.parametrize("case", _params(REPEATED))
def test_dropout_repeats_from_its_seed(worlds: Worlds, case: Case) -> None:
    for first, second, other in worlds.run("worker:run_twice", case).check():
        assert first == second
        assert first["norms"] != other["norms"], "another seed draws other numbers"
