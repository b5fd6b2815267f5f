# SPDX-License-Identifier: Apache-2.0
"""A model that was built lazily and filled equals one that plain from_pretrained loads, bit for bit."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # transformers imports it, and it sets an environment variable
from torch import nn

from holmes_core.errors import ConfigError
from holmes_core.runtime.lazy import SOURCE_ATTRIBUTE, lazy_loading
from holmes_core.runtime.materialize import materialize, materialize_whole, needs_materialize
from holmes_core.runtime.split import slots

transformers = pytest.importorskip("transformers")

AutoModel = transformers.AutoModelForCausalLM
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 3, "n_head": 4},
}


def make(family: str, **more: Any) -> Any:
    """Return a random model in which no two tensors are alike (fresh norms are all ones)."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **{**BASE, **FAMILIES.get(family, {}), **more})
    model = AutoModel.from_config(config)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model


def lazily(path: Path, cls: Any = AutoModel, **kwargs: Any) -> Any:
    with lazy_loading():
        model = cls.from_pretrained(path, **kwargs)
    assert needs_materialize(model)
    assert all(param.is_meta for param in model.parameters())
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_equal(model: nn.Module, reference: nn.Module) -> None:
    found, expected = tensors(model), tensors(reference)
    assert list(found) == list(expected)  # ties, too: a tied parameter has one name
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
        assert found[name].requires_grad == tensor.requires_grad, name
    assert model.training == reference.training
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, reference(input_ids=ids).logits)


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("how", ["plain", "sharded", "bfloat16"])
def test_equals_plain_from_pretrained(family: str, how: str, tmp_path: Path) -> None:
    make(family).save_pretrained(tmp_path, **({"max_shard_size": "20KB"} if how == "sharded" else {}))
    assert (how == "sharded") == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    kwargs = {"dtype": torch.bfloat16} if how == "bfloat16" else {}
    model = lazily(tmp_path, **kwargs)
    objects = [id(p) for p in model.parameters()]
    materialize_whole(model)
    assert objects == [id(p) for p in model.parameters()]  # an optimizer made before keeps working
    assert_equal(model, AutoModel.from_pretrained(tmp_path, **kwargs))


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "opt", "bloom"])
def test_base_model_prefix_is_added(family: str, tmp_path: Path) -> None:
    make(family).base_model.save_pretrained(tmp_path)
    model = lazily(tmp_path)
    report = materialize_whole(model)
    assert report.missing == ()
    assert_equal(model, AutoModel.from_pretrained(tmp_path))


def test_base_model_prefix_is_removed(tmp_path: Path) -> None:
    make("gpt2").save_pretrained(tmp_path)
    model = lazily(tmp_path, transformers.GPT2Model)
    materialize_whole(model)
    reference = transformers.GPT2Model.from_pretrained(tmp_path)
    assert all(torch.equal(tensors(model)[name], value) for name, value in tensors(reference).items())


def test_only_local_parameters_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of other stages are not read from the files at all, merged experts included."""
    from holmes_core.runtime.tensor_file import TensorInFile

    make("mixtral").save_pretrained(tmp_path)
    model = lazily(tmp_path)
    read = []
    plain = TensorInFile.__getitem__
    monkeypatch.setattr(TensorInFile, "__getitem__", lambda self, i: read.append(self.shape) or plain(self, i))
    local = {name: ".layers.1." in name for name, _, _, _ in slots(model)}
    report = materialize(model, local=local, device=torch.device("cpu"), seed=0)
    assert sorted(n for n in report.loaded) == sorted(n for n, here in local.items() if here)
    assert {n for n, p in model.named_parameters() if not p.is_meta} == {n for n, here in local.items() if here}
    assert len(read) == 4 + 2 + 1 + 3 * 4  # attention, norms, router, three matrices of each of four experts


def test_settings_reach_the_model(tmp_path: Path) -> None:
    """Overrides of the configuration, attention, and dtype="auto" work as outside."""
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = lazily(tmp_path, attn_implementation="eager", rms_norm_eps=0.1, use_cache=False)
    assert model.config._attn_implementation == "eager"
    assert model.config.use_cache is False
    assert model.dtype == torch.bfloat16  # the checkpoint's
    materialize_whole(model)
    plain = AutoModel.from_pretrained(tmp_path, attn_implementation="eager", rms_norm_eps=0.1, use_cache=False)
    assert_equal(model, plain)
    assert lazily(tmp_path, torch_dtype=torch.float32).dtype == torch.float32


def test_the_patch_is_undone(tmp_path: Path) -> None:
    before = dict(transformers.PreTrainedModel.__dict__)
    with pytest.raises(KeyError), lazy_loading(), lazy_loading():
        raise KeyError
    assert dict(transformers.PreTrainedModel.__dict__) == before
    make("llama").save_pretrained(tmp_path)
    assert not needs_materialize(AutoModel.from_pretrained(tmp_path))


def test_changes_before_filling_survive(tmp_path: Path) -> None:
    """Frozen parameters stay frozen, .to(dtype) counts, a copy of the model is filled on its own."""
    make("llama").save_pretrained(tmp_path)
    model = lazily(tmp_path)
    model.model.layers.requires_grad_(False)
    model.to(torch.bfloat16)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        materialize_whole(each)
        assert SOURCE_ATTRIBUTE not in each.__dict__
    reference = AutoModel.from_pretrained(tmp_path)
    reference.model.layers.requires_grad_(False)
    for each in (model, twin):
        # buffers computed after the cast are rounded once more than those computed before
        for name, param in reference.named_parameters():
            assert torch.equal(each.get_parameter(name), param.to(torch.bfloat16)), name
            assert each.get_parameter(name).requires_grad == param.requires_grad
        assert torch.equal(each.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq.to(torch.bfloat16))


def test_wrapped_by_adapters_before_filling(tmp_path: Path) -> None:
    """PEFT renames the parameters; the checkpoint's names still find them, and its own are initialised."""
    peft = pytest.importorskip("peft")
    make("llama").save_pretrained(tmp_path)
    model = peft.get_peft_model(lazily(tmp_path), peft.LoraConfig(target_modules=["q_proj"], r=2))
    materialize_whole(model)
    reference = peft.get_peft_model(
        AutoModel.from_pretrained(tmp_path), peft.LoraConfig(target_modules=["q_proj"], r=2)
    )
    for name, param in reference.named_parameters():
        if "lora_A" not in name:
            assert torch.equal(model.get_parameter(name), param), name
        else:
            assert model.get_parameter(name).std() > 0.01


def test_missing_parameters_are_named_and_initialised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make("llama").model.save_pretrained(tmp_path)
    model = lazily(tmp_path)
    with caplog.at_level(logging.WARNING, logger="holmes_core"):
        report = materialize_whole(model, seed=3)
    assert report.missing == ("lm_head.weight",)
    assert "lm_head.weight" in caplog.text
    assert "lm_head.weight" in report.lines()[-1]
    assert 0.01 < model.lm_head.weight.std() < 0.03


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    make("llama").save_pretrained(tmp_path)
    with lazy_loading(), pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModel.from_pretrained(tmp_path, vocab_size=50)
    model = lazily(tmp_path, vocab_size=50, ignore_mismatched_sizes=True)
    assert set(materialize_whole(model).missing) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("same", [True, False])
def test_both_names_of_a_tie_in_the_file(same: bool, tmp_path: Path) -> None:
    """Tied if they are equal, as transformers does; left apart if they differ."""
    from safetensors.torch import load_file, save_file

    make("qwen2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["lm_head.weight"] = state["model.embed_tokens.weight"] + (0.0 if same else 1.0)
    save_file(state, file, metadata={"format": "pt"})
    model = lazily(tmp_path)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == same
    materialize_whole(model)
    assert_equal(model, AutoModel.from_pretrained(tmp_path))


def test_pickles(tmp_path: Path) -> None:
    """A zipped pickle is mapped; the old form can only be read whole and is refused with what to do."""
    model = make("gpt2")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    filled = lazily(tmp_path)
    materialize_whole(filled)
    assert_equal(filled, AutoModel.from_pretrained(tmp_path))
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with lazy_loading(), pytest.raises(ConfigError, match="save_pretrained"):
        AutoModel.from_pretrained(tmp_path)


def test_what_cannot_wait_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ordinary loading with the reason; a device_map of one device is no reason."""
    model = make("llama")
    model.save_pretrained(tmp_path)
    with lazy_loading(), caplog.at_level(logging.WARNING, logger="holmes_core"):
        loaded = transformers.LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
        assert not needs_materialize(loaded)
        assert "state_dict" in caplog.text
        assert needs_materialize(AutoModel.from_pretrained(tmp_path, device_map="cpu"))
        several = {"model": "cpu", "lm_head": "disk"}
        spread = AutoModel.from_pretrained(tmp_path, device_map=several, offload_folder=tmp_path / "off")
        assert not spread.model.embed_tokens.weight.is_meta
        assert "device_map" in caplog.text


def test_directory_of_an_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    make("llama").save_pretrained(tmp_path / "base")
    base = AutoModel.from_pretrained(tmp_path / "base")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    with lazy_loading(), caplog.at_level(logging.WARNING, logger="holmes_core"):
        model = AutoModel.from_pretrained(tmp_path / "adapter")
    assert "adapter" in caplog.text
    assert_equal(model, AutoModel.from_pretrained(tmp_path / "adapter"))


def test_saving_writes_what_plain_loading_would(tmp_path: Path) -> None:
    """The conversions for save_pretrained are remembered: merged experts are taken apart again."""
    make("mixtral").save_pretrained(tmp_path / "a")
    model = lazily(tmp_path / "a")
    materialize_whole(model)
    model.save_pretrained(tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
