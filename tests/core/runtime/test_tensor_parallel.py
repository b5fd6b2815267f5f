# SPDX-License-Identifier: Apache-2.0
"""Two gloo ranks hold the halves of tiny models of many families; everything must equal one process.

The processes are started once; inside, one family after the other is compared. Each test then reads its family's line.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from holmes_core.runtime.tensor_parallel import (
    TensorParallelReport,
    apply_tensor_parallel,
    get_shard,
)

pytest.importorskip("transformers")

TOLERANCE = 2e-5
BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 97,  # odd: one padding row on the last rank
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_DROPOUT: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
}

# family -> (model type, settings that differ from BASE); a setting that the config class does not know is harmless
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-eager": ("llama", {"_attn_implementation": "eager", "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 4}),
    "gemma": ("gemma", {"head_dim": 8}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 4}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),
    "falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-alibi": ("falcon", {"multi_query": False, "alibi": True, "parallel_attn": False, "bias": True}),
    "phi": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
            "decoder_sparse_step": 1,
        },
    ),
    "gptj": ("gptj", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 64}),
    "codegen": ("codegen", {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4, "n_positions": 64}),
    "gpt_neo": (
        "gpt_neo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "stablelm": ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 4}),
    "gpt_bigcode": ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 2, "multi_query": False, "n_positions": 64}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {"use_qk_norm": True}),
    "granite": ("granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "glm4": ("glm4", {"head_dim": 8}),
    "gpt_oss": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "persimmon": ("persimmon", {"num_key_value_heads": 4, "qk_layernorm": True}),
}
"""Families whose merged logits, loss and gradients must equal one process."""


EXPECT: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"rest": 4},  # experts and a shared expert
    "gpt_oss": {"rest": 0, "whole": ["experts"]},  # transposed, interleaved, with biases
}


def build(family: str, *, dropout: bool = False, **more: Any) -> nn.Module:
    """Return a tiny model with weights large enough that every part of it matters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, changes = FAMILIES[family]
    settings = {**BASE, **({} if dropout else NO_DROPOUT), **changes, **more}
    implementation = settings.pop("_attn_implementation", None)
    config = AutoConfig.for_model(kind, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.1 if parameter.dim() > 1 else 0.2))
    model.config.use_cache = False
    return model.train()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the longest list of blocks."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    found = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    return list(found)


def batch(words: int = 97, *, left: bool = False) -> dict[str, Tensor]:
    """Return two sequences, the second padded, and labels that leave the padding out."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(3, words, (2, 9), generator=generator)
    ids[0, :3] = words - torch.tensor([1, 2, 3])  # words of the last rank, next to its padding row
    mask = torch.ones_like(ids)
    mask[1, slice(0, 3) if left else slice(6, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def merged(parameter: Tensor, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the full tensor of a parameter's shape; replicated ones must be equal on both ranks."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    shard = get_shard(parameter)
    if shard is not None:
        return shard.merge(parts)
    assert all(torch.equal(parts[0], part) for part in parts), "replicated tensor differs between ranks"
    return tensor


def off(value: Tensor, expected: Tensor, scale: float | None = None) -> float:
    """Return the largest difference relative to the largest expected value."""
    value, expected = value.detach(), expected.detach()
    size = float(expected.abs().max()) if scale is None else scale
    return float((value - expected).abs().max()) / max(size, 1e-30)


def expected_report(report: TensorParallelReport, expect: dict[str, Any]) -> str:
    """Return "" when the report says what was expected: by default two blocks, all split, all compared at once."""
    regions = dict(report.regions)
    attention, rest = regions.pop("attention", 0), sum(regions.values())
    said = {
        "attention": attention,
        "rest": rest,
        "vocabulary": report.vocabulary,
        "whole": sorted({name.rpartition(".")[2] for name in report.whole}),
        "gathered": sorted({name.rpartition(".")[2] for name in report.gathered}),
        "now": all(text.endswith("now") for text in report.checks) and bool(report.checks),
    }
    defaults = {
        "attention": 2,
        "rest": 2,
        "vocabulary": ("embedding", "head"),
        "whole": [],
        "gathered": [],
        "now": True,
    }
    wrong = {key: value for key, value in said.items() if value != {**defaults, **expect}[key]}
    return f"report: {wrong}" if wrong else ""


def compare(model: nn.Module, group: dist.ProcessGroup, inputs: dict[str, Tensor], **expect: Any) -> str:
    """Return "" when the split model equals its copy made before, else what differs."""
    reference = copy.deepcopy(model)
    expected = reference(**inputs)
    expected.loss.backward()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    identities = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    report = apply_tensor_parallel(model, blocks=blocks_of(model), block_prefix="blocks", group=group)
    if (problem := expected_report(report, expect)) != "":
        return problem
    if [name for name, _ in model.named_parameters(remove_duplicate=False)] != names:
        return "parameter names changed"
    if {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} != identities:
        return "parameter objects changed"
    output = model(**inputs)
    output.loss.backward()
    if output.logits.shape != expected.logits.shape:
        return f"logits have shape {tuple(output.logits.shape)}"
    if (error := off(output.logits, expected.logits)) > TOLERANCE:
        return f"logits differ by {error:.1e}"
    if (error := off(output.loss, expected.loss)) > TOLERANCE:
        return f"loss differs by {error:.1e}"
    gradients = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in gradients.values())
    for name, parameter in model.named_parameters():
        if (parameter.grad is None) != (name not in gradients):
            return f"{name} has a gradient on one side only"
        if parameter.grad is None:
            continue
        value, wanted = merged(parameter, parameter.grad, group), gradients[name]
        scale = max(float(wanted.abs().max()), 1e-3 * largest)  # a key's bias has gradient zero but for rounding
        if value.shape != wanted.shape or (error := off(value, wanted, scale)) > TOLERANCE:
            return f"gradient of {name} differs by {error:.1e}"
    return ""


def family_cases() -> dict[str, Callable[[dist.ProcessGroup], str]]:
    """Return one comparison per family."""

    def case(family: str) -> Callable[[dist.ProcessGroup], str]:
        return lambda group: compare(build(family), group, batch(), **EXPECT.get(family, {}))

    return {family: case(family) for family in FAMILIES}


def worker(rank: int, ranks: int, store: str, results: str, names: list[str]) -> None:
    """Run all cases on one rank and write what rank 0 found."""
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import importlib
    import traceback

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    group = dist.new_group(list(range(ranks)), backend="gloo")
    found: dict[str, str] = {}
    for name in names:
        module, _, key = name.partition(":")
        try:
            found[name] = importlib.import_module(module).CASES[key](group)
        except (Exception, pytest.fail.Exception) as error:
            found[name] = "".join(traceback.format_exception(error))[-3000:]
    torch.save(found, f"{results}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run_cases(module: str, keys: list[str], *, ranks: int = 2, seconds: float = 240.0) -> dict[str, str]:
    """Run cases in several processes; a test reads its own line. A hang ends after ``seconds``."""
    with tempfile.TemporaryDirectory() as folder:
        store, results = str(Path(folder) / "store"), str(Path(folder) / "results")
        names = [f"{module}:{key}" for key in keys]
        processes = mp.spawn(worker, args=(ranks, store, results, names), nprocs=ranks, join=False)
        deadline = time.monotonic() + seconds
        try:
            while not processes.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the workers take longer than {seconds} s")
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
        found = [torch.load(f"{results}.{rank}") for rank in range(ranks)]
    return {key: next(filter(None, (part[f"{module}:{key}"] for part in found)), "") for key in keys}


CASES = family_cases()


@pytest.fixture(scope="module")
def outcome() -> dict[str, str]:
    """Run every family once."""
    return run_cases(__name__, list(CASES))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_family_equals_one_process(family: str, outcome: dict[str, str]) -> None:
    """Logits, loss and merged gradients of two ranks equal one process."""
    assert outcome[family] == ""
