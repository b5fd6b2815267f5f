# SPDX-License-Identifier: Apache-2.0
"""Finding the blocks: which list is the chain, and when there is none."""

from __future__ import annotations

import pytest
from torch import nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.chain import find_chain
from tests.core.runtime.pipeline_models import Block, Gpt, Named, Wrapper, sequential
from tests.models import zoo


@pytest.mark.parametrize(
    ("name", "path", "blocks"),
    [
        ("llama", "model.layers", 5),
        ("gpt2", "transformer.h", 5),
        ("mixtral", "model.layers", 5),  # not the experts of a block
        ("bert", "bert.encoder.layer", 5),
        ("opt", "model.decoder.layers", 5),
        ("xlnet", "transformer.layer", 5),
        ("bart", "model.decoder.layers", 5),
    ],
)
def test_main_list_of_transformers_models(name: str, path: str, blocks: int) -> None:
    chain = find_chain(zoo.build(name))
    assert chain.path == path
    assert chain.names == tuple(f"{path}.{i}" for i in range(blocks))
    assert chain.sizes() is None
    assert chain.front_end == "block list"


@pytest.mark.parametrize("name", ["t5", "bart-seq2seq"])
def test_two_towers_are_refused(name: str) -> None:
    with pytest.raises(HolmesError, match="two lists of blocks") as caught:
        find_chain(zoo.build(name))
    assert "encoder-decoder" in str(caught.value)


def test_wrapped_and_sequential() -> None:
    assert find_chain(Wrapper()).path == "backbone.blocks"
    chain = find_chain(sequential())
    assert chain.names == ("0", "1", "2", "3", "4", "5")


def test_a_list_within_one_wrapper_item() -> None:
    model = nn.Sequential(nn.Embedding(4, 16), nn.Sequential(Block(), Block(), Block()))
    assert find_chain(model).path == "1"


def test_no_list() -> None:
    with pytest.raises(HolmesError, match="no list of blocks in Named") as caught:
        find_chain(Named())
    assert "split_points" in str(caught.value)
    assert "two (Block)" in str(caught.value)


def test_split_points_on_named_blocks() -> None:
    chain = find_chain(Named(), ["two", "four"])
    assert chain.names == ("tok", "one", "two", "three", "four", "out")
    assert chain.sizes() == (2, 2, 2)
    assert chain.front_end == "split points"


def test_split_points_on_a_module_list_and_a_sequential() -> None:
    assert find_chain(Gpt(), ["blocks.1"]).sizes() == (1, 4)
    assert find_chain(Gpt(), ["blocks.1", "blocks.4"]).sizes() == (1, 3, 1)
    assert find_chain(sequential(), ["2"]).sizes() == (2, 4)


@pytest.mark.parametrize(
    ("points", "words"),
    [
        (["blocks.9"], "name no module"),
        (["blocks.1", "head"], "different parent modules"),
        (["blocks.3", "blocks.1"], "not in the order"),
        (["blocks.1", "blocks.1"], "not in the order"),
        (["blocks.0"], "not in the order"),
    ],
)
def test_wrong_split_points(points: list[str], words: str) -> None:
    with pytest.raises(HolmesError, match=words):
        find_chain(Gpt(), points)


def test_one_module_in_two_places() -> None:
    block = Block()
    model = nn.Module()
    model.blocks = nn.ModuleList([block, Block(), block])
    with pytest.raises(HolmesError, match=r"'blocks\.0' and 'blocks\.2' are the same module"):
        find_chain(model)
