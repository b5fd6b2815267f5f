# SPDX-License-Identifier: Apache-2.0
"""`holmes_core.parallelize`: a loop of one's own against one process; and what can be told without ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holmes_core.runtime.call_mode_outputs import LossOutput, MissingOutput, first_loss, pack, unpack
from tests.lightning.farm import Farm

LOOP = "tests.accelerate.pieces:torch_loop"


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    with Farm(tmp_path_factory.mktemp("farm"), "tests.accelerate.pieces") as farm:
        yield farm


@pytest.fixture(scope="module")
def expected(farm: Farm) -> dict[str, Any]:
    return farm.run(LOOP, settings={}).values[0]


@pytest.mark.parametrize(
    "config",
    [
        {"dp": 2},
        {"pp": 3, "num_microbatches": 2},
        {"pp": 2, "dp": 2, "num_microbatches": 2},
        pytest.param({"pp": 2, "dp": 2, "num_microbatches": 1, "sharding": "none"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plain_loop(farm: Farm, expected: dict[str, Any], config: dict[str, Any]) -> None:
    world = config.get("pp", 1) * config.get("dp", 1) * config.get("tp", 1)
    ranks = farm.run(LOOP, world=world, settings=config).values
    for found in ranks:
        if config.get("dp", 1) > 1:  # in stages the first step shows what a loss is multiplied by
            assert found["early"] == ["pp" not in config, True, True, True]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for step, loss in enumerate(expected["losses"]):  # each replica has a loss of its own; rows are equally long
        own = {round(found["losses"][step], 5) for found in ranks}
        assert sum(found["losses"][step] for found in ranks) / world == pytest.approx(loss, rel=1e-5)
        assert len(own) <= config.get("dp", 1)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, rtol=0, atol=1e-5, msg=name)


def test_importing_the_core_imports_no_torch() -> None:
    code = "import sys, holmes_core; assert 'parallelize' in holmes_core.__all__; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_output_of_a_training_call_has_a_loss_only() -> None:
    output = LossOutput(loss=torch.tensor(2.0))
    assert output.loss is output["loss"] is output[0]
    assert isinstance(output, dict)
    assert not hasattr(output, "logits")
    with pytest.raises(MissingOutput, match="logits"):
        _ = output["logits"]
    assert output.get("logits") is None


def test_outputs_are_packed_without_caches() -> None:
    from transformers.modeling_outputs import CausalLMOutputWithPast

    output = CausalLMOutputWithPast(loss=torch.tensor(1.0), logits=torch.ones(2, 3), past_key_values=object())
    tensors: list[torch.Tensor] = []
    again = unpack(pack(output, tensors), tensors)
    assert type(again) is CausalLMOutputWithPast
    assert list(again) == ["loss", "logits"]
    assert again.logits is output.logits


@pytest.mark.parametrize(
    ("output", "has"),
    [(torch.tensor(1.0), True), (torch.ones(2), False), ((torch.tensor(1.0), torch.ones(2)), True), ({}, False)],
)
def test_first_loss(output: Any, has: bool) -> None:
    assert (first_loss(output) is not None) == has
