# SPDX-License-Identifier: Apache-2.0
"""What cannot be trained is refused by name, on every rank, and every rank ends soon."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.lightning.farm import Farm, Run

BAD = "tests.lightning.scenarios:bad"
PP2 = {"pp": 2, "num_microbatches": 2}
PARTS = ("seen:", "means:", "do:")
#: Seconds from the first rank's error to the end of the last rank.
SOON = 30.0


def _failed(run: Run, *words: str, ranks: tuple[int, ...] | None = None) -> None:
    """All ranks ended with an error, soon after the first; these ranks say what is wrong and what to do."""
    assert all(code != 0 for code in run.codes), run.codes
    first = min([float(m) for log in run.logs for m in re.findall(r"left at ([\d.]+)", log)] + run.ends)
    assert max(run.ends) - first < SOON
    for rank in ranks if ranks is not None else range(len(run.logs)):
        for word in (*words, *PARTS):
            assert word in run.logs[rank], f"rank {rank} does not say {word!r}:\n{run.logs[rank][-3000:]}"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("manual", ["automatic_optimization is False", "return the loss from training_step"]),
        pytest.param("backward", ["OwnBackward.backward is overridden"], marks=pytest.mark.slow),
        ("no_blocks", ["no list of blocks in Blocks"]),
    ],
)
def test_refused_before_any_process_group(farm: Farm, how: str, words: list[str]) -> None:
    run = farm.run(BAD, world=2, config=PP2, how=how, timeout=90)
    _failed(run, *words)
    assert all("process group: False" in log for log in run.logs)


@pytest.mark.parametrize(
    "callback", [pytest.param("StochasticWeightAveraging", marks=pytest.mark.slow), "EMAWeightAveraging"]
)
def test_callbacks_that_copy_the_model_are_refused(farm: Farm, callback: str) -> None:
    run = farm.run(BAD, world=2, config=PP2, how="", callback=callback, timeout=90)
    _failed(run, f"callback {callback}", "average checkpoints after training")
    assert all("process group: False" in log for log in run.logs)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"pp": 3}, ["3", "2 ranks"]),
        pytest.param({"pp": 2, "layers": [1, 3]}, ["layers"], marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "layers_per_stage": [1, 1, 2]}, ["layers_per_stage describes 3 stages"], marks=pytest.mark.slow
        ),
        ({"pp": 2, "shedule": "1f1b"}, ["shedule", "did you mean 'schedule'"]),
        ({"pp": 2, "layers_per_stage": [1, 2]}, ["layers_per_stage", "4"]),
    ],
)
def test_impossible_layouts_are_refused_before_any_process_group(farm: Farm, config: Any, words: list[str]) -> None:
    run = farm.run(BAD, world=2, config=config, how="", timeout=90)
    assert all(code != 0 for code in run.codes), run.codes
    for log in run.logs:
        assert all(word in log for word in (*words, "do:")), log[-2000:]
        assert "process group: True" not in log


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            "several",
            ["configure_optimizers returned several optimizers", "one optimizer with several parameter groups"],
        ),
        ("lbfgs", ["optimizer LBFGS"]),
    ],
)
def test_optimizers_that_need_the_whole_model_are_refused(farm: Farm, how: str, words: list[str]) -> None:
    _failed(farm.run(BAD, world=2, config=PP2, how=how, timeout=90), *words)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("twice", ["calls the model a second time", "pp=1"]),
        pytest.param("twice_in_validation", ["calls the model a second time"], marks=pytest.mark.slow),
        ("generate", ["the step calls generate() of LlamaForCausalLM"]),
        ("none", ["the training step returned NoneType as its loss"]),
        pytest.param("none_before", ["the step ended after 0 of the model's 4 blocks"], marks=pytest.mark.slow),
    ],
)
def test_steps_that_do_not_fit_a_pipeline(farm: Farm, how: str, words: list[str]) -> None:
    _failed(farm.run(BAD, world=2, config=PP2, how=how, timeout=90), *words)


def test_replicas_that_log_different_keys(farm: Farm) -> None:
    """F3-37."""
    run = farm.run(BAD, world=2, config={"pp": 1, "dp": 2}, how="keys", ranks=[1], timeout=90)
    _failed(run, "replicas logged different keys", "['train_loss']", "['extra', 'train_loss']")


# Rank 0 runs the last stage.
@pytest.mark.parametrize(
    ("world", "failing"),
    [(2, 0), (2, 1), pytest.param(3, 1, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)],
)
def test_other_ranks_name_the_one_that_failed(farm: Farm, world: int, failing: int) -> None:
    run = farm.run(
        BAD, world=world, config={"pp": world, "num_microbatches": 4}, how="raise", ranks=[failing], timeout=90
    )
    others = tuple(r for r in range(world) if r != failing)
    _failed(run, f"rank {failing} (stage", "ValueError: the user's own mistake", "only lost its partner", ranks=others)
    assert "ValueError: the user's own mistake" in run.logs[failing]
    for rank in others:
        assert "Traceback (most recent call last)" not in run.logs[rank], run.logs[rank][-4000:]


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_others(farm: Farm, killed: int) -> None:
    run = farm.run(BAD, world=2, config=PP2, how="kill", ranks=[killed], timeout=90)
    assert run.codes[killed] == -9
    other = 1 - killed
    _failed(run, f"seen:  rank {killed} (stage", "killed", f"told on rank {other}", ranks=(other,))
