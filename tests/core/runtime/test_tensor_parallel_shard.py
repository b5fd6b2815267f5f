# SPDX-License-Identifier: Apache-2.0
"""Layouts as plain values, and decisions that need no second process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holmes_core.errors import ConfigError
from holmes_core.runtime.shard import TensorShard, get_shard
from holmes_core.runtime.tensor_parallel import legal_tensor_parallel_sizes, plan_tensor_parallel

transformers = pytest.importorskip("transformers")
# Imports torch's inductor, which sets an environment variable: here, so that no single test gets the blame.
pytest.importorskip("transformers.models.llama.modeling_llama")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[TensorShard, int]:
    """Return a layout and a number of ranks that it can be split over."""
    size = draw(st.integers(1, 5))
    padded = draw(st.booleans())
    lengths = st.integers(1, 9) if padded else st.integers(1, 4).map(lambda n: n * size)
    sections = tuple(draw(st.lists(lengths, min_size=1, max_size=3)))
    before, after = (tuple(draw(st.lists(st.integers(1, 3), max_size=2))) for _ in range(2))
    shard = TensorShard(dim=len(before), full_shape=(*before, sum(sections), *after), sections=sections, padded=padded)
    return shard, size


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_merge_is_the_inverse_of_take(case: tuple[TensorShard, int]) -> None:
    shard, size = case
    full = torch.arange(1, 1 + torch.Size(shard.full_shape).numel()).reshape(shard.full_shape)
    parts = [shard.take(full, rank, size) for rank in range(size)]
    assert {tuple(part.shape) for part in parts} == {shard.local_shape(size)}
    assert torch.equal(shard.merge(parts), full)
    assert sum(int((part != 0).sum()) for part in parts) == full.numel()  # padding is zero, nothing appears twice
    held = [
        position for rank in range(size) for start, stop in shard.ranges(rank, size) for position in range(start, stop)
    ]
    assert sorted(held) == list(range(shard.full_shape[shard.dim]))
    assert TensorShard.from_dict(shard.to_dict()) == shard


def test_fused_sections_of_unequal_size_are_cut_one_by_one() -> None:
    shard = TensorShard(dim=0, full_shape=(8,), sections=(4, 2, 2))  # q has two heads per key-value head
    full = torch.tensor([0, 1, 2, 3, 10, 11, 20, 21])
    assert shard.take(full, 0, 2).tolist() == [0, 1, 10, 20]
    assert shard.take(full, 1, 2).tolist() == [2, 3, 11, 21]


@pytest.mark.parametrize(("words", "size", "padded"), [(151669, 4, 151672), (250682, 8, 250688), (50257, 2, 50258)])
def test_vocabulary_is_padded_to_a_multiple_of_the_ranks(words: int, size: int, padded: int) -> None:
    shard = TensorShard(dim=0, full_shape=(words, 1), sections=(words,), padded=True)
    assert shard.local_shape(size) == (padded // size, 1)
    full = torch.ones(words, 1)
    assert [int(shard.take(full, rank, size).sum()) for rank in (0, size - 1)] == [
        padded // size,
        padded // size - (padded - words),
    ]


def test_wrong_layouts_and_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="do not add up"):
        TensorShard(dim=0, full_shape=(4,), sections=(2, 1))
    with pytest.raises(ValueError, match="no dimension"):
        TensorShard(dim=1, full_shape=(4,), sections=(4,))
    shard = TensorShard(dim=0, full_shape=(4,), sections=(4,))
    with pytest.raises(ValueError, match="expected"):
        shard.take(torch.zeros(8), 0, 2)  # a shard of a shard: the size would be multiplied by the ranks twice
    with pytest.raises(ValueError, match="expected"):
        shard.merge([torch.zeros(4), torch.zeros(4)])
    with pytest.raises(ValueError, match="not divisible"):
        shard.take(torch.zeros(4), 0, 3)


def tiny(kind: str, **settings: Any) -> tuple[nn.Module, list[nn.Module]]:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return model, list(max(lists, key=lambda m: sum(p.numel() for p in m.parameters())))


def test_plan_of_a_meta_model_names_every_sharded_parameter() -> None:
    model, blocks = tiny("qwen3", num_hidden_layers=2, hidden_size=1024, vocab_size=151936, tie_word_embeddings=True)
    plan = plan_tensor_parallel(model, blocks, 2)
    assert plan["model.embed_tokens.weight"] == plan["lm_head.weight"]
    assert plan["lm_head.weight"].local_shape(2) == (75968, 1024)
    assert plan["lm_head.weight"].full_shape == (151936, 1024)
    assert plan["model.layers.1.self_attn.o_proj.weight"].dim == 1
    assert "model.layers.1.self_attn.q_norm.weight" not in plan
    assert all(p.is_meta and get_shard(p) is None for p in model.parameters())  # nothing was changed
    assert plan_tensor_parallel(model, blocks, 1) == {}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal", "refused"), [(16, 2, (1, 2), (4, 8)), (40, 10, (1, 2, 5, 10), (4, 8))]
)
def test_key_value_heads_decide_which_sizes_are_legal(
    heads: int, kv_heads: int, legal: tuple[int, ...], refused: tuple[int, ...]
) -> None:
    model, blocks = tiny(
        "llama",
        num_hidden_layers=1,
        hidden_size=heads * 8,
        intermediate_size=80,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32,
    )
    assert legal_tensor_parallel_sizes(model, blocks) == legal
    for size in refused:
        with pytest.raises(ConfigError) as caught:
            plan_tensor_parallel(model, blocks, size)
        assert f"kv_heads = {kv_heads}" in caught.value.seen
        assert caught.value.do.endswith(", ".join(map(str, legal)))


def test_one_shared_key_value_head_is_refused() -> None:
    model, blocks = tiny("falcon", num_hidden_layers=1, hidden_size=64, num_attention_heads=4, multi_query=True)
    with pytest.raises(ConfigError, match="kv_heads = 1"):
        plan_tensor_parallel(model, blocks, 2)


def test_a_model_of_which_nothing_can_be_split_says_what_was_looked_for() -> None:
    blocks = [nn.Sequential(nn.Conv1d(4, 4, 1)), nn.Sequential(nn.Conv1d(4, 4, 1))]
    with pytest.raises(ConfigError, match="q_proj") as caught:
        plan_tensor_parallel(nn.ModuleList(blocks), blocks, 2)
    assert "down_proj" in str(caught.value)
    assert "Sequential" in caught.value.seen


def test_latent_attention_stays_whole_while_experts_are_split() -> None:
    model, blocks = tiny(
        "deepseek_v3",
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        vocab_size=64,
    )
    names = plan_tensor_parallel(model, blocks, 2)
    assert "model.layers.0.mlp.down_proj.weight" in names
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in names
    assert not any("self_attn" in name for name in names)


def test_encoder_layers_with_a_fast_path_of_their_own_are_left_alone() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    with pytest.raises(ConfigError, match="fast path"):
        plan_tensor_parallel(layer, [layer], 2)
