# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer, unmodified, against one plain process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lightning.farm import Farm

SCRIPT = "tests.accelerate.scenarios:script"
PP2 = {"pp": 2, "num_microbatches": 2}


def holmes(farm: Farm, config: dict[str, Any], *words: str, **arguments: Any) -> list[dict[str, Any]]:
    world = config.get("pp", 1) * config.get("dp", 1) * config.get("tp", 1)
    return farm.run(SCRIPT, world=world, config=config, name="trainer.py", words=list(words), **arguments).values


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], *, rel: float = 1e-5) -> None:
    for rank in found:
        assert len(rank["logs"]) == len(expected["logs"])
        for mine, other in zip(rank["logs"], expected["logs"], strict=True):
            assert mine == pytest.approx(other, rel=20 * rel)
            assert mine.get("loss", 0.0) == pytest.approx(other.get("loss", 0.0), rel=rel, abs=1e-4)  # logged rounded
        assert rank["global_step"] == expected["global_step"]
        assert rank["best"] == expected["best"]
    assert set(found[0]["weights"]) == set(expected["weights"])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], value, rtol=0, atol=rel, msg=name)


BEST = ['save_strategy="epoch"', "load_best_model_at_end=true", 'metric_for_best_model="eval_loss"']


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(["--model", "llama", "--set", "label_smoothing_factor=0.1"], marks=pytest.mark.slow),
        pytest.param(
            ["--set", *BEST, "greater_is_better=true", 'optim="adamw_torch_fused"', "learning_rate=0.0001"],
            marks=pytest.mark.slow,
        ),
        ["--lora", "--model", "llama", "--set", "learning_rate=0.5"],
        pytest.param(["--again"], marks=pytest.mark.slow),
    ],
    ids=["plain", "label-smoothing", "best-model", "lora", "again"],
)
def test_same_as_one_process(farm: Farm, plain: Callable[..., dict[str, Any]], words: list[str]) -> None:
    assert_same(holmes(farm, PP2, *words), plain("trainer.py", *words))


@pytest.mark.slow
def test_replicas(farm: Farm, plain: Callable[..., dict[str, Any]]) -> None:
    """Two replicas with unequal numbers of tokens: the mean is over the tokens of both, as in one process."""
    words = ["--accumulate", "2", "--set", "dataloader_drop_last=true", "data_seed=3", 'eval_strategy="no"']
    expected = plain("trainer.py", *words, "per_device_train_batch_size=8")
    config = {"pp": 2, "dp": 2, "num_microbatches": 2}
    assert_same(holmes(farm, config, *words, "per_device_train_batch_size=4"), expected)


OPTIONS = {
    "grouped": ["--rows", "ragged", "--set", 'train_sampling_strategy="group_by_length"'],
    "recomputed": ["--set", "gradient_checkpointing=true"],
    "packed": ["--model", "llama", "--rows", "packed"],
    "best-model": ["--set", *BEST, "greater_is_better=true"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_stages(farm: Farm, plain: Callable[..., dict[str, Any]], name: str) -> None:
    assert_same(holmes(farm, PP2, *OPTIONS[name]), plain("trainer.py", *OPTIONS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_with_replicas(farm: Farm, name: str) -> None:
    """As under DistributedDataParallel with as many processes, which share out batches in the same way."""
    expected = farm.run(SCRIPT, world=2, name="trainer.py", words=OPTIONS[name]).values[0]
    assert_same(holmes(farm, {"dp": 2}, *OPTIONS[name]), expected)


@pytest.mark.slow
def test_bf16(farm: Farm, plain: Callable[..., dict[str, Any]]) -> None:
    words = ["--set", "bf16=true"]
    assert_same(holmes(farm, PP2, *words), plain("trainer.py", *words), rel=2e-3)
