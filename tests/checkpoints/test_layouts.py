# SPDX-License-Identifier: Apache-2.0
"""What one layout saved in parts, every other loads bit-equal, and training goes on as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.ranks import LAYOUTS, MODELS
from tests.lightning.farm import Farm

#: model, saved by, loaded by
FAST = [
    ("tied", "pp2-tp2", "pp2-dp2"),
    ("tied", "pp2-tp2", "one"),
    ("untied", "two-clusters", "tp4"),
    ("bf16", "tp2-turned", "one"),
]
_NAMES = list(LAYOUTS)
#: Every layout saves for the next but one, for one process, and for two stages with two replicas.
ALL = [
    (model, saved, loaded)
    for model in MODELS
    for index, saved in enumerate(_NAMES)
    for loaded in {_NAMES[(index + 2) % len(_NAMES)], "one", "pp2-dp2"}
    if not (model == "bf16" and "tp4" in (saved, loaded))  # two key-value heads
]


def run(farm: Farm, folder: Path, pairs: list[tuple[str, str, str]], more: list[list[Any]] = ()) -> None:  # type: ignore[assignment]
    """Save once per layout, then load; ranks are forked once for each number of them and direction."""
    saves = list(dict.fromkeys((model, saved) for model, saved, _ in pairs))
    rounds = [
        [(LAYOUTS[saved][0], ["save", saved, model]) for model, saved in saves],
        [(LAYOUTS[loaded][0], ["load", loaded, model, saved]) for model, saved, loaded in pairs],
        [(LAYOUTS[str(job[1])][0], job) for job in more],
    ]
    for jobs in rounds:
        for ranks in sorted({ranks for ranks, _ in jobs}):
            mine = [job for number, job in jobs if number == ranks]
            results = farm.run(
                "tests.checkpoints.ranks:jobs", world=ranks, folder=str(folder), jobs=mine, timeout=900
            ).values
            for result in results:
                for job, wrong in zip(mine, result, strict=True):
                    assert not wrong, f"{job}: {wrong}"


def test_other_layouts_load_the_same_bits(farm: Farm, tmp_path: Path) -> None:
    """Then one goes on, and one saves in the background while it trains."""
    more = [["go_on", "pp2-dp2", "tied", "background"], ["load", "pp2-dp2", "tied", "background"]]
    run(farm, tmp_path, FAST, [["save_behind", "pp2-dp2", "tied"]])
    run(farm, tmp_path, [], more)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "saved"), list(dict.fromkeys(pair[:2] for pair in ALL)))
def test_all_layouts(farm: Farm, tmp_path: Path, model: str, saved: str) -> None:
    run(farm, tmp_path, [pair for pair in ALL if pair[:2] == (model, saved)])
