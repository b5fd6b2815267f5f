# SPDX-License-Identifier: Apache-2.0
"""One script, everything switched on: each rank of a pipeline sees what one process sees."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.compare import assert_same_training, assert_same_weights
from tests.lightning.farm import Farm, Run

FIT = "tests.lightning.scenarios:fit"
PP2 = {"pp": 2, "num_microbatches": 4}
PP2DP2 = {"pp": 2, "dp": 2, "num_microbatches": 2}
FULL: dict[str, Any] = {
    "epochs": 4,
    "before": ["validate"],
    "after": ["validate", "test", "predict"],
    "csv": True,
    "layers": 3,
    "trainer": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.05,  # always active
        "enable_checkpointing": True,
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "inference_mode": False,
        "num_sanity_val_steps": 1,
    },
    "callbacks": {
        "ModelCheckpoint": {
            "monitor": "val_loss", "save_top_k": 2, "save_last": True, "filename": "{epoch}-{val_loss:.3f}",
        },
        "EarlyStopping": {"monitor": "val_loss", "patience": 1, "min_delta": 0.004},
        "LearningRateMonitor": {},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def shuffled(farm: Farm, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    folder = tmp_path_factory.mktemp("shuffled")
    reference = farm.run(FIT, strategy="auto", shuffle=True, folder=str(folder / "one"), **FULL)
    saved = str(folder / "end.ckpt")
    split = farm.run(FIT, world=2, config=PP2, shuffle=True, folder=str(folder / "two"), save=saved, **FULL)
    return reference, split


def _pairs(runs: tuple[Run, Run]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    (expected,) = runs[0].values
    return [(found, expected) for found in runs[1].values]


def test_the_script_bites(shuffled: tuple[Run, Run]) -> None:
    (one,) = shuffled[0].values
    assert min(one["norms"]) > 0.5, "clipping at 0.05 is always active"
    assert 2 <= one["epoch"] < 4, "early stopping stops the run"
    assert len(set(one["rates"])) > 2


def test_training_is_that_of_one_process(shuffled: tuple[Run, Run]) -> None:
    for found, expected in _pairs(shuffled):
        assert_same_training(found, expected)


def test_checkpoints_and_stopping_agree_on_all_ranks(shuffled: tuple[Run, Run]) -> None:
    for found, expected in _pairs(shuffled):
        assert found["best"] == expected["best"]
        assert found["kept"] == expected["kept"]
        assert len(found["kept"]) == 2
        assert found["epoch"] == expected["epoch"]
        assert found["callback_metrics"] == pytest.approx(expected["callback_metrics"], rel=2e-4)
    folders = [Path(run.values[0]["folder"]) for run in shuffled]
    names = [sorted(p.name for p in folder.rglob("*.ckpt")) for folder in folders]
    assert names[0] == names[1]
    assert "last.ckpt" in names[0]


def test_validate_test_and_predict(shuffled: tuple[Run, Run]) -> None:
    for found, expected in _pairs(shuffled):
        for verb in ("before_validate", "after_validate", "after_test"):
            assert found[verb][0] == pytest.approx(expected[verb][0], rel=2e-4), verb
    (one,), ranks = shuffled[0].values, shuffled[1].values
    assert len(one["after_predict"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(ranks[0]["after_predict"], one["after_predict"], strict=True))


def test_rank_zero_reports(shuffled: tuple[Run, Run]) -> None:
    reference, split = shuffled
    rows = []
    for run in (reference, split):
        with next(Path(run.values[0]["folder"]).rglob("metrics.csv")).open() as file:
            rows.append(list(csv.DictReader(file)))
    assert [r["step"] for r in rows[0]] == [r["step"] for r in rows[1]]
    for one, two in zip(*rows, strict=True):
        for key, value in one.items():
            assert (two[key] == "") == (value == ""), key
            if value:
                assert float(two[key]) == pytest.approx(float(value), rel=2e-4), key
    assert "Trainable params" in split.logs[0]
    assert "LlamaForCausalLM" in split.logs[0]
    counts = [
        [line for line in log.splitlines() if "Total params" in line] for log in (reference.logs[0], split.logs[0])
    ]
    assert counts[0] == counts[1]
    assert "Epoch 1/" in split.logs[0]
    assert "Epoch 1/" not in split.logs[1]
    assert split.logs[0].count("Holmes plan:") == 1


def test_checkpoint_loads_in_one_process(farm: Farm, shuffled: tuple[Run, Run], tmp_path: Path) -> None:
    saved = torch.load(Path(shuffled[1].values[0]["folder"]).parent / "end.ckpt", weights_only=True)
    one = next(p for p in Path(shuffled[0].values[0]["folder"]).rglob("last.ckpt"))
    plain = torch.load(one, weights_only=True)
    assert set(saved) - {"holmes"} == set(plain)
    assert list(saved["state_dict"]) == list(plain["state_dict"])
    (mine,), (other,) = saved["optimizer_states"], plain["optimizer_states"]
    assert mine["param_groups"] == other["param_groups"]
    assert list(mine["state"]) == list(other["state"])
    assert_same_weights(saved["state_dict"], {k: v for k, v in shuffled[1].values[0]["weights"].items()}, atol=0)
    loaded = farm.run("tests.lightning.scenarios:load", path=str(Path(tmp_path).parent), layers=3,
                      checkpoint=str(Path(shuffled[1].values[0]["folder"]).parent / "end.ckpt")).values  # fmt: skip
    assert_same_weights(loaded[0]["weights"], saved["state_dict"], atol=0)


def test_two_replicas_with_schedulers_per_epoch_and_plateau(farm: Farm) -> None:
    options = {"epochs": 4, "layers": 2, "rows": 16, "schedulers": "epoch", "optimizer": "sgd"}
    (expected,) = farm.run(FIT, strategy="auto", like_replicas=True, **options).values
    assert len(set(expected["rates"])) >= 4
    split = farm.run(FIT, world=4, config=PP2DP2, shuffle=True, dp=2, **options)
    for found in split.values:
        assert_same_training(found, expected, means=("val_loss", "mean_seen"))
        assert found["sampler"]["num_replicas"] == 2  # F3-28
    _one_batch_per_replica(split.values)


def _one_batch_per_replica(ranks: list[dict[str, Any]]) -> None:
    """F3-26: samples follow the replica, not the world rank; together the replicas see each row once."""
    by_replica: dict[int, list[list[torch.Tensor]]] = {}
    for rank in ranks:
        by_replica.setdefault(rank["sampler"]["rank"], []).append(rank["batches"])
    assert sorted(by_replica) == list(range(ranks[0]["sampler"]["num_replicas"]))
    for same in by_replica.values():
        assert len(same) == 2
        assert all(torch.equal(a, b) for a, b in zip(*same, strict=True))
    firsts = [same[0] for same in by_replica.values()]
    assert not any(torch.equal(a, b) for a, b in zip(*firsts, strict=True))


def test_stage_local_clipping_would_be_seen(farm: Farm) -> None:
    """Negative control: clip by the norm of the own stage, and the comparison above fails."""
    options = {"layers": 2, "rows": 32, "no_val": True, "trainer": {"gradient_clip_val": 0.05}, "optimizer": "sgd"}
    options["lr"] = 2.0
    (expected,) = farm.run(FIT, strategy="auto", **options).values
    good = farm.run(FIT, world=2, config=PP2, **options).values
    bad = farm.run(FIT, world=2, config=PP2, clip_by_stage=True, **options).values
    assert good[0]["losses"] == pytest.approx(expected["losses"], rel=2e-5)
    assert bad[0]["losses"] != pytest.approx(expected["losses"], rel=2e-5)
