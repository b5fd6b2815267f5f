# SPDX-License-Identifier: Apache-2.0
"""Precision, frozen parts, adapters, dropout, loaders: what scripts switch on, each beside one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lightning.compare import assert_same_training, assert_same_weights
from tests.lightning.farm import Farm

FIT = "tests.lightning.scenarios:fit"
PP2 = {"pp": 2, "num_microbatches": 4}
SHORT: dict[str, Any] = {"layers": 2, "rows": 32}


def _both(farm: Farm, world: int = 2, config: Any = PP2, **options: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    (expected,) = farm.run(FIT, strategy="auto", **(SHORT | options)).values
    return expected, farm.run(FIT, world=world, config=config, **(SHORT | options)).values


# bf16 has 8 bits of mantissa: 2^-8 = 0.4 % per rounding; losses are means over many tokens.
@pytest.mark.parametrize(
    ("precision", "rel"), [pytest.param("bf16-true", 4e-3, marks=pytest.mark.slow), ("bf16-mixed", 2e-3)]
)
def test_bf16(farm: Farm, precision: str, rel: float) -> None:
    expected, ranks = _both(farm, precision=precision)
    for found in ranks:
        assert found["losses"] == pytest.approx(expected["losses"], rel=rel)
        assert found["norms"] == pytest.approx(expected["norms"], rel=5e-2)
        assert found["validation"][-1]["val_loss"] == pytest.approx(expected["validation"][-1]["val_loss"], rel=rel)
        assert found["losses"] == ranks[0]["losses"]


def test_all_ranks_skip_a_step_with_inf_together(farm: Farm) -> None:
    """The gradient is infinite on the first stage only; the scaler of every rank must back off."""
    expected, ranks = _both(farm, precision="16-mixed", inf_at=2)
    assert expected["scales"] == [256.0, 128.0, 128.0, 128.0]
    for found in ranks:
        assert found["scales"] == expected["scales"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=5e-3)
        assert found["rates"] == expected["rates"]


@pytest.mark.parametrize(
    "frozen", [["embed", "layers.0."], pytest.param(["lm_head", "layers.1.", "model.norm"], marks=pytest.mark.slow)]
)
def test_a_whole_stage_may_be_frozen(farm: Farm, frozen: list[str]) -> None:
    expected, ranks = _both(farm, freeze=frozen)
    for found in ranks:
        assert_same_training(found, expected)
        assert found["trainable"] == expected["trainable"]


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_adapters_train_save_and_load(farm: Farm, tmp_path: Path, model: str) -> None:
    saved = str(tmp_path / "lora.ckpt")
    lora = {"lora": True, "model": model}
    expected, ranks = _both(farm, **lora, save=saved, load_into_new=True, lr=0.05)
    assert all("lora" in name for name in ranks[0]["trainable"])
    assert ranks[0]["losses"][-1] != pytest.approx(ranks[0]["losses"][0], rel=1e-3)
    for found in ranks:
        assert_same_training(found, expected)
        assert_same_weights(found["loaded_new"], found["weights"], atol=0)


def test_dropout_repeats_from_the_seed(farm: Farm) -> None:
    options = SHORT | {"dropout": 0.2, "no_val": True, "model": "gpt2"}
    first, again, other = (
        farm.run(FIT, world=2, config=PP2, **(options | more)).values for more in ({}, {}, {"dropout": 0.0})
    )
    for a, b, c in zip(first, again, other, strict=True):
        assert a["losses"] == b["losses"]
        assert a["losses"] != c["losses"]
        assert_same_weights(a["weights"], b["weights"], atol=0)


@pytest.mark.slow
def test_activation_checkpointing_with_dropout(farm: Farm) -> None:
    """The same numbers with and without: what is recomputed draws the same masks."""
    options = SHORT | {"dropout": 0.2, "no_val": True, "model": "gpt2"}
    plain = farm.run(FIT, world=2, config=PP2, **options).values
    kept = farm.run(FIT, world=2, config=PP2, **options, checkpointing=True).values
    for a, b in zip(plain, kept, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-6)


def test_workers_that_draw_at_random_feed_all_ranks_alike(farm: Farm) -> None:
    """Lightning seeds loader workers by world rank: each stage would augment in its own way."""
    (one,) = farm.run(FIT, strategy="auto", **SHORT, augment=True, workers=2, shuffle=True, no_val=True).values
    ranks = farm.run(FIT, world=2, config=PP2, **SHORT, augment=True, workers=2, shuffle=True, no_val=True).values
    assert all(torch.equal(a, b) for a, b in zip(ranks[0]["batches"], ranks[1]["batches"], strict=True))
    assert ranks[0]["losses"] == ranks[1]["losses"]
    # The order of rows is that of one process; what workers draw is not: the first stage is another world rank.
    assert [b[:, 3:].tolist() for b in ranks[0]["batches"]] == [b[:, 3:].tolist() for b in one["batches"]]


def test_streams(farm: Farm) -> None:
    (expected,) = farm.run(FIT, strategy="auto", **SHORT, stream=True).values
    for found in farm.run(FIT, world=2, config=PP2, **SHORT, stream=True).values:
        assert_same_training(found, expected)


@pytest.mark.slow
def test_rich_progress_bar_and_summary(farm: Farm) -> None:
    bars = {"RichProgressBar": {}, "RichModelSummary": {}}
    trainer = {"enable_progress_bar": True, "enable_model_summary": True}
    run = farm.run(FIT, world=2, config=PP2, **SHORT, callbacks=bars, trainer=trainer)
    assert run.values
    assert "Epoch 0" in run.logs[0]
    assert "Total params" in run.logs[0]


@pytest.mark.slow
def test_tqdm_progress_bar(farm: Farm) -> None:
    run = farm.run(
        FIT, world=2, config=PP2, **SHORT, callbacks={"TQDMProgressBar": {}}, trainer={"enable_progress_bar": True}
    )
    assert run.values
    assert "Epoch 0:" in run.logs[0]


def test_resume_across_layouts(farm: Farm, tmp_path: Path) -> None:
    """pp 2 -> one process -> pp 2 x dp 2, at ends of epochs; losses are those of a run that never stopped."""
    options = {"layers": 2, "rows": 16, "no_val": True, "save_epoch_ends": True, "folder": str(tmp_path)}
    options |= {"weights_only": False, "unsafe": True}
    whole = farm.run(FIT, strategy="auto", **options | {"folder": str(tmp_path / "whole")}, epochs=3).values[0]
    first = farm.run(FIT, world=2, config=PP2, **options, epochs=1).values[0]
    again = farm.run(
        FIT, world=2, config=PP2, **(options | {"folder": str(tmp_path / "again")}), epochs=2,
        resume=str(tmp_path / "epoch0.ckpt"),
    ).values[0]  # fmt: skip
    assert again["losses"] == pytest.approx(whole["losses"][len(first["losses"]) : 2 * len(first["losses"])], rel=2e-5)
    middle = farm.run(FIT, strategy="auto", **options, epochs=2, resume=str(tmp_path / "epoch0.ckpt")).values[0]
    last = farm.run(
        FIT, world=4, config={"pp": 2, "dp": 2, "num_microbatches": 2}, **options, epochs=3, dp=2,
        trainer={"use_distributed_sampler": False}, replica_rows=True, resume=str(tmp_path / "epoch1.ckpt"),
    ).values  # fmt: skip
    refused = farm.run(
        FIT, world=2, config=PP2, **(options | {"weights_only": True}), epochs=2, resume=str(tmp_path / "epoch0.ckpt")
    )
    assert 0 not in refused.codes, "this checkpoint must need weights_only=False, else the runs above prove nothing"
    assert all("weights_only=False in fit(...)" in log for log in refused.logs), refused.logs
    losses = first["losses"] + middle["losses"]
    assert losses == pytest.approx(whole["losses"][: len(losses)], rel=2e-5)
    for found in last:
        assert found["losses"] == pytest.approx(whole["losses"][len(losses) :], rel=2e-5)
        assert_same_weights(found["weights"], whole["weights"])
