# SPDX-License-Identifier: Apache-2.0
"""Profiles against real models: parameters exactly, FLOPs and kept bytes as torch counts them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest

from holmes_core.errors import ConfigError
from holmes_core.plan.profile import ModelProfile
from holmes_core.plan.profile_config import profile_of_config

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "llama/biases": {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"head_dim": 8},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen2_moe": {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    "gpt2": {},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
    "falcon/new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "phi": {},
    "phi3": {},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "olmo": {},
    "olmo2": {},
    "starcoder2": {},
    "stablelm": {},
    "cohere": {},
    "granite": {},
    "deepseek_v3": {**MLA, "n_routed_experts": 8, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1,
                    "num_experts_per_tok": 2, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _compiler_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch sets this variable when transformers makes it import its compiler."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/tmp/unused"))


def small_config(case: str, **more: Any) -> Any:
    import transformers

    family = case.split("/")[0]
    empty = transformers.AutoConfig.for_model(family)
    sizes = {key: value for key, value in SMALL.items() if hasattr(empty, key)}
    return transformers.AutoConfig.for_model(family, **{**sizes, **FAMILIES[case], **more})


def model_of(config: Any, device: str = "meta") -> Any:
    import torch
    import transformers

    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("case", FAMILIES)
def test_parameters_are_exact(case: str) -> None:
    config = small_config(case)
    profile = profile_of_config(config.to_dict(), seq=16)
    model = model_of(config)
    assert profile.parameters == sum(p.numel() for p in model.parameters())
    assert not profile.assumptions
    lists = [m for m in model.modules() if type(m).__name__ == "ModuleList" and len(m) == len(profile.blocks)]
    for block, mine in zip(lists[0], profile.blocks, strict=True):
        assert mine.parameters == sum(p.numel() for p in block.parameters())


def test_what_save_pretrained_leaves_out_is_known() -> None:
    """A published config.json lists what differs from the family's defaults only."""
    for case in ("gpt2", "opt", "gemma", "llama", "qwen2", "bloom", "falcon"):
        config = small_config(case)
        short = {"model_type": config.model_type, **config.to_diff_dict()}
        assert profile_of_config(short, seq=16).parameters == profile_of_config(config.to_dict(), seq=16).parameters


def _counted(config: Any, seq: int) -> tuple[float, float]:
    """Forward, and forward plus backward FLOPs of one sample, as torch counts them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config._experts_implementation = "eager"  # torch does not count its grouped products
    config._attn_implementation = "eager"  # fused kernels recompute scores in the backward pass and count them again
    model = model_of(config, "cpu")
    ids = torch.randint(0, min(90, config.vocab_size), (1, seq))
    with FlopCounterMode(display=False) as forward:
        out = model(input_ids=ids, labels=ids)
    counted = forward.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        out.loss.backward()
    return counted, counted + backward.get_total_flops()


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3", "gpt_neox", "gemma", "opt", "deepseek_v3", "mixtral"])
def test_flops_are_those_that_torch_counts(case: str) -> None:
    seq = 48
    config = small_config(case, vocab_size=256)
    profile = profile_of_config(config.to_dict(), seq=seq)
    forward, both = _counted(config, seq)
    assert profile.forward_flops == pytest.approx(forward, rel=0.001)
    assert profile.flops == pytest.approx(both, rel=0.001)


def _kept(config: Any, seq: int, *, autocast: bool) -> int:
    """Bytes that autograd keeps for the backward pass of one sample, parameters aside, each storage once."""
    import torch

    config._attn_implementation = "sdpa"
    model = model_of(config, "cpu").to(torch.float32 if autocast else torch.bfloat16).train()
    ids = torch.randint(0, min(90, config.vocab_size), (1, seq))
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, tuple[int, Any]] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(input_ids=ids, labels=ids)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", ["llama", "qwen3", "gpt2", "opt"])
def test_kept_bytes_of_a_block_within_fifteen_percent_of_torch(case: str, autocast: bool) -> None:
    seq = 256
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 384, "max_position_embeddings": 256}
    if case == "gpt2":
        sizes = {"hidden_size": 128, "max_position_embeddings": 256, "activation_function": "gelu"}
        sizes |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    if case == "opt":
        sizes |= {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0}
    if "head_dim" in FAMILIES[case]:
        sizes["head_dim"] = 32
    two, four = (small_config(case, **sizes, num_hidden_layers=count) for count in (2, 4))
    measured = (_kept(four, seq, autocast=autocast) - _kept(two, seq, autocast=autocast)) / 2
    block = profile_of_config(two.to_dict(), seq=seq, stream_bytes=4 if autocast else 2).blocks[1]
    copies = 2 * block.parameters if autocast else 0  # of the weights in bf16: counted with the weights
    assert block.activation_bytes + copies == pytest.approx(measured, rel=0.15)


def test_published_sizes() -> None:
    """Totals that the models' own pages give."""
    llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    profile = profile_of_config({**llama, "intermediate_size": 11008, "vocab_size": 32000}, seq=2048)
    assert profile.parameters == 6_738_415_616
    eight = {**llama, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    assert profile_of_config(eight, seq=2048).parameters == 8_030_261_248
    mixtral = {**eight, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
    moe = profile_of_config(mixtral, seq=2048)
    assert moe.parameters == 46_702_792_704
    assert moe.active_parameters == pytest.approx(12.9e9, rel=0.01)


def test_flops_follow_the_formula_of_megatron() -> None:
    """96 B s l h^2 (1 + s/6h + V/16lh) with recomputation, so 3/4 of it without (Narayanan et al. 2021)."""
    s, layers, h, v = 2048, 30, 3072, 51200
    config = {"model_type": "gpt2", "n_embd": h, "n_layer": layers, "n_head": 32, "vocab_size": v, "n_positions": s}
    expected = 72 * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
    # The head is not recomputed in our count: 3 passes of it against their 4, scaled by 3/4.
    assert profile_of_config(config, seq=s).flops == pytest.approx(expected, rel=0.02)


def test_long_sequences_and_windows() -> None:
    config = small_config("mistral", sliding_window=32, max_position_embeddings=4096).to_dict()
    windowed = profile_of_config(config, seq=4096)
    full = profile_of_config({**config, "sliding_window": None}, seq=4096)
    assert windowed.blocks[0].attention_flops * 128 == full.blocks[0].attention_flops
    assert windowed.parameters == full.parameters


def test_unknown_families_say_what_was_assumed() -> None:
    config = {**small_config("llama").to_dict(), "model_type": "brand_new"}
    del config["tie_word_embeddings"]
    profile = profile_of_config(config, seq=16)
    assert "'brand_new' is not in the table" in profile.assumptions[0]
    assert "tie_word_embeddings" in profile.assumptions[1]
    nested = profile_of_config({"model_type": "seeing", "text_config": small_config("llama").to_dict()}, seq=16)
    assert "text_config" in nested.assumptions[0]


def test_what_is_no_decoder_is_refused() -> None:
    with pytest.raises(ConfigError, match="no key hidden_size or n_embd"):
        profile_of_config({"model_type": "resnet"})
    with pytest.raises(ConfigError, match="num_hidden_layers is -1"):
        profile_of_config({**small_config("llama").to_dict(), "num_hidden_layers": -1})


def test_profile_goes_to_json_and_back() -> None:
    profile = profile_of_config(small_config("qwen2").to_dict(), seq=16)
    assert ModelProfile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert profile.facts().num_blocks == 3
    assert math.isclose(profile.flops, 3 * profile.forward_flops)


def test_no_torch() -> None:
    code = "import sys, holmes_core.plan.profile_config; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False).returncode == 0
