# SPDX-License-Identifier: Apache-2.0
"""A Lightning checkpoint becomes a directory that transformers loads with equal logits and no complaint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from holmes_core.convert import ConvertError, convert_checkpoint, main

IDS = torch.arange(12).reshape(2, 6)


def gpt2(**kwargs: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=37, n_positions=16, **kwargs)).eval()


def llama(**kwargs: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=37, **kwargs)).eval()


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=2, vocab_size=37)
    return MixtralForCausalLM(config).eval()


def write(path: Path, model: torch.nn.Module, prefix: str = "model.", **extra: Any) -> Path:
    """Write what trainer.save_checkpoint writes, as far as it matters here."""
    state = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"epoch": 1, "global_step": 2, "state_dict": state, **extra}, path)
    return path


def noted(model: PreTrainedModel, path: str = "model") -> dict[str, Any]:
    return {"model_config": json.loads(json.dumps(model.config.to_dict())), "model_path": path}


def load(out: Path) -> torch.nn.Module:
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


@pytest.mark.parametrize(
    "model",
    [gpt2(), gpt2(tie_word_embeddings=False), llama(), llama(tie_word_embeddings=True), mixtral()],
    ids=["gpt2-tied", "gpt2", "llama", "llama-tied", "mixtral"],
)
def test_equal_logits(tmp_path: Path, model: PreTrainedModel) -> None:
    checkpoint = write(tmp_path / "a.ckpt", model, holmes=noted(model))
    loaded = load(convert_checkpoint(checkpoint, tmp_path / "hf"))
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=0)


@pytest.mark.parametrize("prefix", ["", "net.backbone.", "model._orig_mod.", "module.model."])
def test_prefixes(tmp_path: Path, prefix: str) -> None:
    model = gpt2()
    checkpoint = write(tmp_path / "a.ckpt", model, prefix, holmes=noted(model, "elsewhere"))
    torch.testing.assert_close(load(convert_checkpoint(checkpoint, tmp_path / "hf"))(IDS).logits, model(IDS).logits)


def test_shards_dtype_and_tied_weights_once(tmp_path: Path) -> None:
    model = gpt2()
    checkpoint = write(tmp_path / "a.ckpt", model, holmes=noted(model))
    out = convert_checkpoint(checkpoint, tmp_path / "hf", max_shard_size="10KB", dtype="bf16")
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    assert "transformer.wte.weight" in index
    assert "lm_head.weight" not in index
    assert load(out).dtype == torch.bfloat16
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert (out / "generation_config.json").is_file()


def test_separately_stored_tied_weights(tmp_path: Path) -> None:
    model = gpt2()
    state = {f"model.{name}": value.clone() for name, value in model.state_dict().items()}
    torch.save({"state_dict": state, "holmes": noted(model)}, tmp_path / "a.ckpt")
    load(convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "hf"))
    state["model.lm_head.weight"] += 1
    torch.save({"state_dict": state, "holmes": noted(model)}, tmp_path / "b.ckpt")
    with pytest.raises(ConvertError, match="differ"):
        convert_checkpoint(tmp_path / "b.ckpt", tmp_path / "hf2")


def test_two_models_need_a_key(tmp_path: Path) -> None:
    policy, reference = gpt2(), gpt2()
    torch.nn.init.ones_(reference.transformer.wpe.weight)
    both = torch.nn.ModuleDict({"policy": policy, "reference": reference})
    checkpoint = write(tmp_path / "a.ckpt", both, "")
    with pytest.raises(ConvertError, match=r"'policy', 'reference'(.|\n)*--model-key"):
        convert_checkpoint(checkpoint, tmp_path / "hf", config=policy.config.to_dict())
    assert not (tmp_path / "hf").exists()
    out = convert_checkpoint(checkpoint, tmp_path / "hf", config=policy.config.to_dict(), model_key="reference")
    assert torch.all(load(out).transformer.wpe.weight == 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 1}, "have no place"),
        ({"n_layer": 3}, "12 of the .* weights"),
        ({"vocab_size": 40}, r"transformer.wte.weight: checkpoint \(37, 16\), config \(40, 16\)"),
        ({"model_type": "llama"}, "289 of the 291 weights of LlamaForCausalLM are not"),
        ({"model_type": "bert"}, "no weight of the checkpoint belongs to BertLMHeadModel"),
        ({"model_type": "nonsense"}, "knows no such model"),
    ],
)
def test_wrong_config(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    model = gpt2()
    checkpoint = write(tmp_path / "a.ckpt", model)
    with pytest.raises(ConvertError, match=message):
        convert_checkpoint(checkpoint, tmp_path / "hf", config={**model.config.to_dict(), **change})
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConvertError, match="does not exist"):
        convert_checkpoint(tmp_path / "none.ckpt", tmp_path / "hf")
    with pytest.raises(ConvertError, match=r"holds no holmes_checkpoint.json(.|\n)*interrupted"):
        convert_checkpoint(tmp_path, tmp_path / "hf")
    (tmp_path / "text.ckpt").write_text("hello")
    with pytest.raises(ConvertError, match="cannot be read"):
        convert_checkpoint(tmp_path / "text.ckpt", tmp_path / "hf")
    whole = write(tmp_path / "a.ckpt", gpt2()).read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConvertError, match="cannot be read"):
        convert_checkpoint(tmp_path / "cut.ckpt", tmp_path / "hf")
    assert main([str(tmp_path / "a.ckpt"), str(tmp_path / "hf")]) == 1
    assert "no model config" in capsys.readouterr().err


def test_objects_in_the_file_are_named_and_not_run(tmp_path: Path) -> None:
    model = gpt2()
    extra = {"hyper_parameters": {"args": argparse.Namespace(lr=1)}, "holmes": noted(model)}
    with pytest.raises(ConvertError, match=r"argparse.Namespace(.|\n)*add_safe_globals"):
        convert_checkpoint(write(tmp_path / "a.ckpt", model, **extra), tmp_path / "hf")


def test_existing_out_is_kept(tmp_path: Path) -> None:
    model = gpt2()
    checkpoint = write(tmp_path / "a.ckpt", model, holmes=noted(model))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("x")
    with pytest.raises(ConvertError, match="not empty"):
        convert_checkpoint(checkpoint, tmp_path / "hf")
    assert (tmp_path / "hf" / "mine.txt").is_file()
    (tmp_path / "hf" / "model-00002-of-00002.safetensors").write_text("of an older one")
    assert main([str(checkpoint), str(tmp_path / "hf"), "--overwrite"]) == 0
    assert not (tmp_path / "hf" / "model-00002-of-00002.safetensors").exists()
    load(tmp_path / "hf")


def test_lora(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = gpt2()
    base = tmp_path / "base"
    model.save_pretrained(base)
    settings = {"r": 2, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    tuned = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    torch.manual_seed(1)
    for name, value in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value)
    want = tuned(IDS).logits.detach()
    checkpoint = write(tmp_path / "a.ckpt", tuned)
    with pytest.raises(ConvertError, match="--lora-config"):
        convert_checkpoint(checkpoint, tmp_path / "hf", config=base)
    checkpoint = write(tmp_path / "a.ckpt", tuned, hyper_parameters={"lora": settings})

    merged = load(convert_checkpoint(checkpoint, tmp_path / "merged", config=base, merge_lora=True))
    torch.testing.assert_close(merged(IDS).logits, want)

    adapter = convert_checkpoint(checkpoint, tmp_path / "adapter", config=base)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {p.name for p in adapter.iterdir()}
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    torch.testing.assert_close(again(IDS).logits, want)
