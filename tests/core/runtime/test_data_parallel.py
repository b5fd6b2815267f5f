# SPDX-License-Identifier: Apache-2.0
"""Who steps which parameter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holmes_core.runtime.data_parallel import assign_owners


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9), st.data())
def test_owners_are_balanced(sizes: list[int], ranks: int, data: st.DataObject) -> None:
    load = data.draw(st.none() | st.lists(st.integers(0, 500), min_size=ranks, max_size=ranks))
    before = list(load) if load else None
    owners = assign_owners(sizes, ranks, load)
    assert load == before, "the caller's list is left alone"
    assert owners == assign_owners(sizes, ranks, load)
    assert len(owners) == len(sizes)
    total = list(load) if load else [0] * ranks
    for owner, size in zip(owners, sizes, strict=True):
        assert 0 <= owner < ranks
        total[owner] += size
    # Greedy: whoever ends fullest was the emptiest before its last (smallest) parameter.
    for rank in range(ranks):
        mine = [s for s, o in zip(sizes, owners, strict=True) if o == rank]
        if mine:
            assert total[rank] - min(mine) <= min(total)

