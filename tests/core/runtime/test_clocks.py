# SPDX-License-Identifier: Apache-2.0
"""Clocks that differ are named once, whatever the network's delays are."""

from __future__ import annotations

import pytest

from holmes_core.runtime.clocks import Clocks

DELAYS = (0.5, 3.0, 0.2, 0.001, 2.5, 0.4, 0.1, 0.1, 7.0, 0.3)


@pytest.mark.parametrize(("skew", "words"), [(75.0, "75.0 s behind that of a1"), (-3.0, "3.0 s ahead of that of a1")])
def test_a_clock_that_differs_is_named_once(skew: float, words: str) -> None:
    clocks = Clocks("a1")
    said = [clocks.heard("b1", 1000.0 + i - skew, 1000.0 + i + DELAYS[i % 10]) for i in range(50)]
    assert [text for text in said if text] == [said[9]]
    assert f"holmes: the clock of host b1 is {words}" in said[9]


def test_delays_alone_say_nothing() -> None:
    clocks = Clocks("a1")
    assert not any(clocks.heard("b1", 1000.0 + i, 1000.0 + i + DELAYS[i % 10]) for i in range(50))
