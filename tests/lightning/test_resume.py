# SPDX-License-Identifier: Apache-2.0
"""A run that was stopped and goes on trains exactly as one that was not, in the middle of an epoch too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.compare import assert_same_weights
from tests.lightning.farm import Farm

FIT = "tests.lightning.scenarios:fit"
PP2 = {"pp": 2, "num_microbatches": 2}
SHORT = {"layers": 2, "epochs": 2, "rows": 40, "shuffle": True, "dropout": 0.1, "no_val": True}


def _both(farm: Farm, folder: Path, step: int, *, world: int = 2, config: Any = PP2, **options: Any) -> None:
    """Train without a stop, saving at `step`; go on from there; compare what comes after."""
    where = {"folder": str(folder), "save_at": [step]}
    whole = farm.run(FIT, world=world, config=config, **where, **options).values
    rest = farm.run(
        FIT, world=world, config=config, folder=str(folder), resume=str(folder / f"at{step}.ckpt"), **options
    ).values
    for a, b in zip(whole, rest, strict=True):
        assert len(b["losses"]) == len(a["losses"]) - step > 0
        for mine, other in zip(b["batches"], a["batches"][step:], strict=True):
            assert torch.equal(mine, other), f"rank {a['rank']} trains on another batch after the restart"
        assert b["losses"] == pytest.approx(a["losses"][step:], rel=1e-6)
        assert b["global_step"] == a["global_step"]
        assert b["epoch"] == a["epoch"]
        assert_same_weights(b["weights"], a["weights"], atol=1e-6)


@pytest.mark.parametrize(
    ("step", "options"),
    [
        (3, {}),
        (5, {}),  # the last batch of an epoch
        (7, {"workers": 2}),
        (2, {"augment": True}),  # in the main process: random state goes on
        pytest.param(3, {"stream": True}, marks=pytest.mark.slow),
        pytest.param(5, {"workers": 2}, marks=pytest.mark.slow),
        pytest.param(3, {"workers": 2, "persistent": True}, marks=pytest.mark.slow),
        pytest.param(5, {"epochs": -1, "max_steps": 9}, marks=pytest.mark.slow),
        pytest.param(7, {"epochs": -1, "max_steps": 9}, marks=pytest.mark.slow),
    ],
)
def test_goes_on_where_it_stopped(farm: Farm, tmp_path: Path, step: int, options: dict[str, Any]) -> None:
    _both(farm, tmp_path, step, **(SHORT | options))


@pytest.mark.parametrize("background", [pytest.param(False, marks=pytest.mark.slow), True])
def test_goes_on_from_a_folder(farm: Farm, tmp_path: Path, background: bool) -> None:
    config = {**PP2, "checkpoint": "sharded", "checkpoint_async": background}
    _both(farm, tmp_path, 3, config=config, **SHORT)
    assert {p.name for p in (tmp_path / "at3.ckpt").iterdir()} == {
        "rank-00000.safetensors", "rank-00001.safetensors", "state.pt", "holmes_checkpoint.json",
    }  # fmt: skip
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("step", "workers"), [(3, 0), pytest.param(7, 2, marks=pytest.mark.slow)])
def test_replicas_go_on_where_they_stopped(farm: Farm, tmp_path: Path, step: int, workers: int) -> None:
    _both(farm, tmp_path, step, config={"pp": 1, "dp": 2}, **(SHORT | {"dp": 2, "workers": workers}))


def test_other_number_of_replicas_in_mid_epoch_is_refused(farm: Farm, tmp_path: Path) -> None:
    """F3-36."""
    where = {"folder": str(tmp_path), **SHORT, "epochs": 1}
    farm.run(FIT, world=2, config={"pp": 1, "dp": 2}, save_at=[2], dp=2, **where).values  # noqa: B018
    run = farm.run(FIT, world=2, config=PP2, resume=str(tmp_path / "at2.ckpt"), **where)
    assert 0 not in run.codes
    for log in run.logs:
        assert "saved after 2 batches of an epoch, by 2 replicas with batches of 4; now there are 1 replicas" in log
