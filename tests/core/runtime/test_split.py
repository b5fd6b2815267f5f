# SPDX-License-Identifier: Apache-2.0
"""Which stage holds which parameter, and what is left of the others."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holmes_core.errors import ConfigError, HolmesError
from holmes_core.runtime.chain import find_chain
from holmes_core.runtime.split import decide_stages, drop_absent, output_head, slots, stage_of_blocks
from tests.core.runtime.pipeline_models import Gpt, Wrapper
from tests.models import zoo

SIZES = (2, 2, 1)
ALL = frozenset({0, 1, 2})


def _stages(model: nn.Module, **placement: str) -> dict[str, frozenset[int]]:
    return decide_stages(model, find_chain(model), SIZES, {k.replace("__", "."): v for k, v in placement.items()})


def test_stage_of_blocks() -> None:
    assert stage_of_blocks((2, 0, 1)) == [0, 0, 2]


def test_llama() -> None:
    stages = _stages(zoo.build("llama"))
    assert stages["model.embed_tokens.weight"] == {0}
    assert stages["lm_head.weight"] == {2}
    assert stages["model.norm.weight"] == ALL
    assert stages["model.layers.1.mlp.up_proj.weight"] == {0}
    assert stages["model.layers.4.mlp.up_proj.weight"] == {2}


def test_tied_weights_live_on_the_stages_of_all_their_names() -> None:
    stages = _stages(zoo.build("llama-tied"))
    assert stages["model.embed_tokens.weight"] == stages["lm_head.weight"] == {0, 2}


@pytest.mark.parametrize("name", ["camembert", "xlm-roberta", "roberta", "bert"])
def test_a_head_of_several_modules_is_on_the_last_stage(name: str) -> None:
    """Some classes register the head before the backbone."""
    stages = _stages(zoo.build(name))
    dense = next(n for n in stages if n.endswith("dense.weight") and "encoder" not in n)
    assert 2 in stages[dense]
    assert 0 not in stages[dense] or stages[dense] == ALL


def test_small_frozen_embeddings_are_everywhere() -> None:
    stages = _stages(zoo.build("roformer"))
    table = next(n for n in stages if "embed_positions" in n)
    assert stages[table] == ALL


def test_raw_parameters_of_modules_around_the_blocks_are_everywhere() -> None:
    stages = _stages(Wrapper())
    assert stages["backbone.pos"] == stages["backbone.scale"] == stages["temperature"] == ALL
    assert stages["backbone.tok.weight"] == {0}
    assert stages["head.weight"] == {2}


def test_parameter_lists_are_everywhere() -> None:
    model = Gpt()
    model.tables = nn.ParameterList([nn.Parameter(torch.zeros(64, 64))])
    assert _stages(model)["tables.0"] == ALL


def test_blocks_that_share_a_module() -> None:
    model = Gpt()
    model.blocks[4].up = model.blocks[0].up
    stages = _stages(model)
    assert stages["blocks.0.up.weight"] == stages["blocks.4.up.weight"] == {0, 2}


def test_placement() -> None:
    stages = _stages(Gpt(), tok="ends", head="all")
    assert stages["tok.weight"] == {0, 2}
    assert stages["head.weight"] == ALL
    with pytest.raises(ConfigError, match="nowhere"):
        _stages(Gpt(), nowhere="all")


def test_router_loss_is_refused() -> None:
    model = zoo.build("mixtral-router-loss")
    with pytest.raises(HolmesError, match="output_router_logits"):
        _stages(model)
    decide_stages(model, find_chain(model), (5,))  # one stage may


def test_output_head() -> None:
    model = zoo.build("llama")
    assert output_head(model) is model.lm_head
    assert output_head(Gpt()) is None


def test_drop_absent_keeps_names_order_and_ties() -> None:
    model = zoo.build("llama-tied")
    names = [name for name, *_ in slots(model)]
    stages = _stages(model)
    lost = drop_absent(model, find_chain(model), {name: 1 in where for name, where in stages.items()})
    assert [name for name, *_ in slots(model)] == names
    assert {name for name, _ in lost} == {"model.embed_tokens", "lm_head"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_meta
    for name, param in model.named_parameters():
        assert param.is_meta == (1 not in stages[name])
    assert type(model.lm_head.weight) is nn.Parameter
