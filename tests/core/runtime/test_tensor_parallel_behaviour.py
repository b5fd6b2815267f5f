# SPDX-License-Identifier: Apache-2.0
"""What must hold besides parity of whole families: adapters, dropout, checkpointing, meta models, refusals, safety."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from holmes_core.errors import HolmesError
from holmes_core.runtime import tp_modules, tp_regions
from holmes_core.runtime.tensor_parallel import apply_tensor_parallel, get_shard, plan_tensor_parallel
from tests.core.runtime.test_tensor_parallel import (
    TOLERANCE,
    batch,
    blocks_of,
    build,
    compare,
    merged,
    off,
    run_cases,
)

pytest.importorskip("transformers")
Group = dist.ProcessGroup


def split(model: nn.Module, group: Group, **kwargs: Any) -> Any:
    return apply_tensor_parallel(model, blocks=blocks_of(model), block_prefix="blocks", group=group, **kwargs)


# ---------------------------------------------------------------------------------------------------------- adapters


def lora(family: str, targets: list[str], *, transposed: bool = False) -> Callable[[Group], str]:
    def case(group: Group) -> str:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=3, lora_alpha=6, target_modules=targets, lora_dropout=0.0, fan_in_fan_out=transposed)
        model = get_peft_model(build(family), config)
        torch.manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained
        assert all("lora_" in name for name in trained)
        result = compare(model.train(), group, batch())
        assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
        shards = {n: get_shard(p) is not None for n, p in model.named_parameters() if "lora_" in n}
        row = ("o_proj", "down_proj", "c_proj")
        for name, sharded in shards.items():
            assert sharded == (("lora_A" in name) == any(part in name for part in row)), name
        return result

    return case


def lora_dropout(group: Group) -> str:
    """The input of a column-parallel layer is dropped alike on all ranks: replicated A must stay equal."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules=["q_proj", "o_proj"], lora_dropout=0.5)
    model = get_peft_model(build("llama", dropout=True), config).train()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    split(model, group)
    torch.manual_seed(5)
    model(**batch()).loss.backward()
    for _, parameter in model.named_parameters():
        if parameter.grad is not None:
            merged(parameter, parameter.grad, group)  # raises where a replicated gradient differs
    return ""


# ----------------------------------------------------------------------------------------------------------- dropout


@contextmanager
def recorded_masks() -> Iterator[list[Tensor]]:
    """Record what functional dropout drops; nn.Dropout goes through it, too."""
    masks: list[Tensor] = []
    original = functional.dropout

    def dropout(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        kept = original(torch.ones_like(tensor), p, training)
        if training and p > 0:
            masks.append(kept.detach() != 0)
        return tensor * kept

    functional.dropout = dropout
    try:
        yield masks
    finally:
        functional.dropout = original


def gpt2_with_dropout() -> nn.Module:
    torch.manual_seed(0)
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gpt2", n_embd=32, n_head=4, n_layer=2, vocab_size=97, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()


def dropout_masks(group: Group) -> str:
    model = gpt2_with_dropout()
    split(model, group)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        with recorded_masks() as masks:
            model(**batch())
        runs.append((masks, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True)), "same seed, other masks"
    assert not all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[2][0], strict=True))
    kinds = [mask.dim() for mask in runs[0][0]]
    assert kinds == [3, 4, 3, 3, 4, 3, 3], kinds  # embedding, then attention weights, attention output, MLP output
    for mask in runs[0][0]:
        parts = [torch.empty_like(mask, dtype=torch.uint8) for _ in range(2)]
        dist.all_gather(parts, mask.to(torch.uint8), group=group)
        same = torch.equal(parts[0], parts[1])
        assert same == (mask.dim() == 3), f"{'equal' if same else 'different'} masks of shape {tuple(mask.shape)}"
    first, second = (mask for mask in runs[0][0] if mask.dim() == 4)
    assert not torch.equal(first, second), "two layers drop the same"
    states = [torch.empty_like(runs[0][1]) for _ in range(2)]
    dist.all_gather(states, runs[0][1], group=group)
    assert torch.equal(states[0], states[1]), "the ranks leave the forward with different random states"
    model.eval()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model(**batch())
    assert torch.equal(before, torch.get_rng_state()), "evaluation drew random numbers"
    return ""


def dropout_checkpointing(group: Group) -> str:
    """Recomputation must see the masks of the forward: gradients equal those without checkpointing, up to rounding."""
    plain = gpt2_with_dropout()
    saved = copy.deepcopy(plain)
    for model in (plain, saved):
        split(model, group)
    saved.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for model in (plain, saved):
        torch.manual_seed(3)
        model(**batch()).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), saved.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6), name
    return ""


# ------------------------------------------------------------------------------------- meta models, stages, training


def meta_model(group: Group) -> str:
    """Plan, split on meta, then fill from the full weights as a loader does; the check runs at the first call."""
    rank = dist.get_rank(group)
    for family in ("llama-tied", "gpt2", "mixtral"):
        real = build(family)
        model = copy.deepcopy(real).to("meta")
        if family == "llama-tied":
            model.tie_weights()
        plan = plan_tensor_parallel(model, blocks_of(model), 2)
        report = split(model, group)
        assert report.shards == plan
        assert all("first call" in text for text in report.checks)
        full = dict(real.named_parameters(remove_duplicate=False))
        for name, parameter in list(model.named_parameters()):
            shard = plan.get(name)
            assert parameter.is_meta
            assert get_shard(parameter) == shard
            value = full[name].detach() if shard is None else shard.take(full[name].detach(), rank, 2)
            assert value.shape == parameter.shape
            filled = nn.Parameter(value.clone())
            for module in model.modules():
                for key, other in module._parameters.items():
                    if other is parameter:
                        module._parameters[key] = filled
        for name, buffer in real.named_buffers():
            owner, _, short = name.rpartition(".")
            model.get_submodule(owner)._buffers[short] = buffer.clone()
        with torch.no_grad():
            assert off(model(**batch()).logits, real(**batch()).logits) < TOLERANCE, family
        block = blocks_of(model)[0]
        assert "FirstCall" not in type(block.forward).__name__
    return ""


def absent_stage(group: Group) -> str:
    """Modules of other stages are left as they are, and the plan still names their parameters."""
    model = build("llama")
    blocks = blocks_of(model)
    absent = [blocks[0], model.model.embed_tokens]
    for module in absent:
        module.to("meta")
    before = {name: p.shape for name, p in model.named_parameters()}
    report = split(model, group, skip=absent)
    assert report.regions == {"attention": 1, "mlp": 1}
    assert report.vocabulary == ("head",)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            assert parameter.shape == before[name]
            assert get_shard(parameter) is None
            assert ("norm" in name) != (name in report.shards)
    assert "forward" not in vars(blocks[0].mlp)
    assert "forward" not in vars(model.model.embed_tokens)
    return ""


def training_steps(group: Group) -> str:
    """An optimizer that was built before the split trains the local shards; three steps equal one process."""
    model = build("gpt2")
    reference = copy.deepcopy(model)
    model.transformer.wpe.weight.requires_grad_(False)
    reference.transformer.wpe.weight.requires_grad_(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True) for m in (model, reference)]
    split(model, group)
    for _ in range(3):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            each(**batch()).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.transformer.wpe.weight.requires_grad
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert off(merged(parameter, parameter.detach(), group), expected) < 1e-5, name
    return ""


def copies(group: Group) -> str:
    """A copy of a split model (an average of weights, say) is a model of its own."""
    model = build("llama")
    split(model, group)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        before = twin(**batch()).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(**batch()).logits, before)
        assert not torch.equal(model(**batch()).logits, before)
    return ""


def autocast(group: Group) -> str:
    for family in ("gpt2", "llama-tied", "opt"):
        model = build(family)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            expected = model(**batch()).logits
        split(model, group)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(**batch()).logits
        assert found.dtype == expected.dtype
        assert off(found.float(), expected.float()) < 5e-2, family
    return ""


def left_padding(group: Group) -> str:
    for family in ("llama", "llama-eager", "bloom", "gpt2", "mpt", "falcon-alibi"):
        if (found := compare(build(family), group, batch(left=True))) != "":
            return f"{family}: {found}"
    return ""


def teacher_beside(group: Group) -> str:
    """A module that holds a second model: only the one with the given blocks is split."""

    class Distillation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = build("gpt2")
            self.student = build("llama")

    root = Distillation()
    blocks = list(root.student.model.layers)
    report = apply_tensor_parallel(root, blocks=blocks, block_prefix="student.model.layers", group=group)
    assert set(report.vocabulary) == {"embedding", "head"}
    assert all(name.startswith("student.") for name in report.shards)
    assert all(get_shard(parameter) is None for parameter in root.teacher.parameters())
    return ""


def unknown_word(group: Group) -> str:
    model = build("llama")
    split(model, group)
    for wrong in (97, -1):  # 97 is the padding row
        ids = torch.tensor([[3, wrong]])
        try:
            model(input_ids=ids)
        except IndexError:
            continue
        return f"word {wrong} was looked up"
    return ""


# ------------------------------------------------------------------------------------------------------------ safety


class Fused(nn.Module):
    """Attention whose fused projection has the name of one layout and the order of another."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.n_head, self.n_embd = 4, 32
        self.query_key_value = nn.Linear(32, 96)
        self.dense = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.query_key_value(x).split(c, dim=2)  # [q | k | v], not by head
        q, k, v = (part.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(y.transpose(1, 2).reshape(b, t, c))  # insists on the full width


class Mixing(nn.Module):
    """An MLP that is no MLP: a softmax over what would be split."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x).softmax(-1) * 8)


class Direct(nn.Module):
    """An MLP that does not call its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.linear(x, self.c_fc.weight, self.c_fc.bias).relu())


class Plain(nn.Module):
    """The usual MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.c_fc(x).relu())


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention, self.mlp = Fused(None), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class OwnModel(nn.Module):
    """A model written by a user, not from transformers, with a tied head."""

    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wte, self.wpe = nn.Embedding(97, 32), nn.Embedding(16, 32)
        self.h = nn.ModuleList(Block(mlp) for _ in range(2))
        self.lm_head = nn.Linear(32, 97, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        from types import SimpleNamespace

        x = self.wte(input_ids) + self.wpe.weight[: input_ids.shape[1]]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(x)
        return SimpleNamespace(logits=logits, loss=functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def own_model(mlp: type[nn.Module], gathered: list[str]) -> Callable[[Group], str]:
    return lambda group: compare(OwnModel(mlp), group, batch(), gathered=gathered)


def refused(group: Group) -> str:
    """Where no way of splitting is right, nothing has been changed yet, and block and class are named."""
    model = OwnModel(Direct)
    before = {name: p.shape for name, p in model.named_parameters()}
    with pytest.raises(HolmesError) as caught:
        split(model, group)
    assert "h.0 (Block)" in str(caught.value.where)
    assert {name: p.shape for name, p in model.named_parameters()} == before
    return ""


def different_weights(group: Group) -> str:
    model = build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += dist.get_rank(group)
    with pytest.raises(HolmesError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        split(model, group)
    return ""


def mistakes_are_found(group: Group) -> str:
    """Negative controls: with one collective left out, the self-check refuses, or takes the way that is still right."""
    patch = pytest.MonkeyPatch
    for name in ("copy_to_region", "reduce_from_region"):
        with patch.context() as mistake:
            mistake.setattr(tp_modules, name, lambda tensor, context: tensor)
            with pytest.raises(HolmesError):
                split(build("llama"), group)
    with patch.context() as mistake:  # gradients of per-head norms that are not summed
        mistake.setattr(tp_modules, "_summed_gradients", lambda module, context: nullcontext())
        report = split(build("qwen3"), group)
        assert [name.rpartition(".")[2] for name in report.gathered] == ["self_attn", "self_attn"]
    with patch.context() as mistake:  # fused [q | k | v] cut in one piece: only joined again it is right
        mistake.setattr(tp_regions.Linear, "column", one_piece)
        report = split(build("gpt2"), group)
        assert [name.rpartition(".")[2] for name in report.gathered] == ["attn", "attn"]
    return ""


def one_piece(linear: Any, sections: tuple[int, ...], region: Any, *, original: Any = tp_regions.Linear.column) -> None:
    original(linear, (sum(sections),), region)


def zero_bubble(group: Group) -> str:
    """Schedules that compute input gradients first and weight gradients later get the same gradients."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    model = build("qwen3")
    split(model, group)
    model(**batch()).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    hidden = model.model.embed_tokens(batch()["input_ids"]).detach().requires_grad_()
    inputs = {name: value for name, value in batch().items() if name != "input_ids"}
    loss = model(inputs_embeds=hidden, **inputs).loss
    parameters = [p for name, p in model.named_parameters() if "embed_tokens" not in name]
    _, groups = stage_backward_input([loss], None, [hidden], iter(parameters))
    stage_backward_weight(iter(parameters), groups)
    for name, parameter in model.named_parameters():
        if "embed_tokens" not in name:
            assert parameter.grad is not None, name
            assert off(parameter.grad, expected[name]) < TOLERANCE, name
    return ""


def four_ranks(family: str) -> Callable[[Group], str]:
    return lambda group: compare(build(family, num_key_value_heads=4), group, batch())


CASES: dict[str, Callable[[Group], str]] = {
    "lora llama": lora("llama", ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
    "lora gpt2": lora("gpt2", ["c_attn", "c_proj", "c_fc"], transposed=True),
    "lora phi3": lora("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
    "lora dropout": lora_dropout,
    "dropout masks": dropout_masks,
    "dropout with checkpointing": dropout_checkpointing,
    "meta model": meta_model,
    "absent stage": absent_stage,
    "training steps": training_steps,
    "copies": copies,
    "autocast": autocast,
    "left padding": left_padding,
    "teacher beside": teacher_beside,
    "unknown word": unknown_word,
    "own model": own_model(Plain, ["attention"]),
    "own model, mixing": own_model(Mixing, ["attention", "mlp"]),
    "refused": refused,
    "different weights": different_weights,
    "mistakes are found": mistakes_are_found,
    "zero bubble": zero_bubble,
}
FOUR = ("llama-tied", "gpt2", "bloom", "phi3", "olmo2", "mixtral")
"""Families that are also split over four ranks: 97 words leave three padding rows."""
CASES.update({f"four ranks, {family}": four_ranks(family) for family in FOUR})
ON_TWO = [case for case in CASES if not case.startswith("four")]
ON_FOUR = [case for case in CASES if case.startswith("four")]


@pytest.fixture(scope="module")
def on_two() -> dict[str, str]:
    return run_cases(__name__, ON_TWO)


@pytest.fixture(scope="module")
def on_four() -> dict[str, str]:
    return run_cases(__name__, ON_FOUR, ranks=4)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks(case: str, on_two: dict[str, str]) -> None:
    assert on_two[case] == ""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ON_FOUR)
def test_four_ranks(case: str, on_four: dict[str, str]) -> None:
    assert on_four[case] == ""
