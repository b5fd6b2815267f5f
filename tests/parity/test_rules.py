# SPDX-License-Identifier: Apache-2.0
"""Single rules behind equal numbers, with values that can be checked by hand."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import Case
from tests.parity.runner import Worlds

pytestmark = pytest.mark.timeout(600)


def _case(**config: Any) -> Case:
    return Case(name="rule", description="", config=config)


def _accumulated(worlds: Worlds, batches: int, num_microbatches: int = 2) -> list[dict[str, float]]:
    case = _case(pp=2, num_microbatches=num_microbatches)
    values: list[dict[str, float]] = worlds.run("rules:accumulated_gradient", case, batches).check()
    return values


def _norms(worlds: Worlds, norms: list[float], max_norm: float, **config: Any) -> list[dict[str, float]]:
    values: list[dict[str, float]] = worlds.run("rules:norm_of_stages", _case(pp=2, **config), norms, max_norm).check()
    return values


def _tokens(
    worlds: Worlds, counts: list[int], sums: list[float], accumulate: int = 1, **config: Any
) -> tuple[float, list[list[float]]]:
    """The loss of all replicas, and each replica's weights."""
    case = _case(num_microbatches=len(counts), **config)
    ranks = worlds.run("rules:loss_of_tokens", case, counts, sums, accumulate).check()
    told = [rank for rank in ranks if rank["loss"] is not None and rank["place"][2] == 0]
    return sum(rank["loss"] for rank in told), [rank["weights"] for rank in told]


@pytest.mark.parametrize("batches", [1, 2, 3])
def test_gradients_of_batches_add_up(worlds: Worlds, batches: int) -> None:
    for found in _accumulated(worlds, batches):
        assert found["times"] == pytest.approx(batches, rel=1e-5)
        assert found["wrong"] < 1e-6
        assert found["num_microbatches"] == 2


def test_norm_is_that_of_the_whole_model(worlds: Worlds) -> None:
    for found in _norms(worlds, [3.0, 4.0], 1.0):
        assert found["norm"] == pytest.approx(5.0)
        assert found["scaled_by"] == pytest.approx(0.2, rel=1e-5)


def test_norm_is_over_all_stages_of_a_rank(worlds: Worlds) -> None:
    for found in _norms(worlds, [1.0, 2.0, 2.0, 4.0], 1.0, schedule="interleaved_1f1b"):
        assert found["norm"] == pytest.approx(5.0)
        assert found["scaled_by"] == pytest.approx(0.2, rel=1e-5)


def test_small_gradients_are_not_clipped(worlds: Worlds) -> None:
    for found in _norms(worlds, [0.3, 0.4], 1.0):
        assert found["scaled_by"] == pytest.approx(1.0)


def test_loss_is_the_mean_over_tokens(worlds: Worlds) -> None:
    loss, weights = _tokens(worlds, [10, 2], [20.0, 10.0], pp=2)
    assert loss == pytest.approx(30 / 12)
    assert weights == [pytest.approx([10 / 12, 2 / 12])]


def test_loss_does_not_depend_on_accumulation(worlds: Worlds) -> None:
    one, _ = _tokens(worlds, [10, 2], [20.0, 10.0], pp=2)
    two, weights = _tokens(worlds, [10, 2], [20.0, 10.0], accumulate=2, pp=2)
    assert one == two
    assert weights == [pytest.approx([10 / 12, 2 / 12])]


def test_loss_is_the_mean_over_tokens_of_all_replicas(worlds: Worlds) -> None:
    loss, weights = _tokens(worlds, [10, 2], [20.0, 10.0], pp=2, dp=2)
    assert loss == pytest.approx(30 / 12)
    assert weights == [pytest.approx([10 / 24, 2 / 24])] * 2


def test_tensor_parallel_ranks_count_their_tokens_once(worlds: Worlds) -> None:
    loss, weights = _tokens(worlds, [7, 5], [7.0, 5.0], dp=2, tp=2)
    assert loss == pytest.approx(1.0)
    assert weights == [pytest.approx([7 / 24, 5 / 24])] * 2


# ---- a folder of published cases, where one is given ---------------------------------------------------------------


def _folder_accumulated(worlds: Worlds, text: re.Match[str], expected: str) -> None:
    times = float(re.search(r"gradient = ([\d.]+) x", expected)[1])  # type: ignore[index]
    for found in _accumulated(worlds, 2, int(text[1])):
        assert found["times"] == pytest.approx(times, rel=1e-5)


def _folder_norms(worlds: Worlds, text: re.Match[str], expected: str) -> None:
    norm = float(re.search(r"norm (\d+)", expected)[1])  # type: ignore[index]
    top, bottom = re.search(r"scaled by (\d+)/(\d+)", expected).groups()  # type: ignore[union-attr]
    for found in _norms(worlds, [float(text[1]), float(text[2])], float(text[3])):
        assert found["norm"] == pytest.approx(norm)
        assert found["scaled_by"] == pytest.approx(int(top) / int(bottom), rel=1e-5)


def _folder_tokens(worlds: Worlds, text: re.Match[str], expected: str) -> None:
    right = float(re.search(r"Loss ([\d.]+)", expected)[1])  # type: ignore[index]
    counts, sums = [int(text[1]), int(text[3])], [float(text[2]), float(text[4])]
    for config in ({"pp": 2}, {"pp": 2, "dp": 2}):
        assert _tokens(worlds, counts, sums, **config)[0] == pytest.approx(right)


def _folder_denominator(worlds: Worlds, text: re.Match[str], expected: str) -> None:
    denominator = int(re.search(r"Denominator (\d+)", expected)[1])  # type: ignore[index]
    half = int(text[3]) // 2
    _, weights = _tokens(worlds, [half, half], [1.0, 1.0], tp=int(text[1]), dp=int(text[2]))
    assert weights == [pytest.approx([half / denominator] * 2)] * int(text[2])


_READERS: dict[str, Callable[[Worlds, re.Match[str], str], None]] = {
    r"same batch twice, (\d+) micro-batches, mean loss": _folder_accumulated,
    r"stage 0 gradient norm (\d+), stage 1 norm (\d+), max_norm (\d+)": _folder_norms,
    r"micro-batch 1: (\d+) tokens, loss sum (\d+); micro-batch 2: (\d+) tokens, loss sum (\d+)": _folder_tokens,
    r"TP=(\d+) x DP=(\d+), (\d+) valid tokens per DP rank": _folder_denominator,
}


def test_published_cases(worlds: Worlds) -> None:
    folder = os.environ.get("HOLMES_CASES")
    if not folder:
        pytest.skip("HOLMES_CASES names no folder of cases (each a folder with a case.json: input, expected)")
    checked = 0
    for file in sorted(Path(folder).glob("*/case.json")):
        case = json.loads(file.read_text())
        for pattern, reader in _READERS.items():
            if text := re.search(pattern, str(case.get("input", ""))):
                reader(worlds, text, case["expected"])
                checked += 1
    assert checked, f"no case in {folder} has an input that is understood here"
