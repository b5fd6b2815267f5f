# SPDX-License-Identifier: Apache-2.0
"""One process: the model, its data, and the training that every layout must repeat."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.parity.cases import Case

__all__ = ["autocast", "batch_of", "build_model", "make_optimizer", "train_alone"]

VOCAB = 96


def build_model(case: Case) -> nn.Module:
    """The model with its first weights, the same on each call."""
    torch.manual_seed(0)
    model: nn.Module
    if case.model == "gpt2":
        special = {"bos_token_id": 0, "eos_token_id": 1, "loss_type": "ForCausalLM"}
        config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=case.blocks, n_head=4, **special)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = case.dropout
        config.tie_word_embeddings = case.tied
        model = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=case.blocks)
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
        config.tie_word_embeddings, config.attention_dropout = case.tied, case.dropout
        model = LlamaForCausalLM(config)
    for name, param in model.named_parameters():
        if any(fnmatch(name, pattern) for pattern in case.frozen):
            param.requires_grad = False
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batch_of(case: Case, *, step: int, micro: int, dp: int) -> dict[str, Tensor]:
    """A replica's batch: rows of unequal token counts."""
    rows = case.rows[step % len(case.rows)]
    length = case.lengths[step % len(case.lengths)]
    if case.uneven:
        rows, length = max(1, rows - dp), length + dp
    rng = torch.Generator().manual_seed(10_000 * step + 100 * micro + dp)
    ids = torch.randint(2, VOCAB, (rows, length), generator=rng)
    counts = torch.randint(2, length + 1, (rows, 1), generator=rng)
    mask = (torch.arange(length)[None] < counts).long()
    if case.padding == "left":
        mask = mask.flip(1)
    elif case.padding == "none":
        mask = torch.ones_like(mask)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def join(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All replicas' rows in one batch, padded to the longest on the right."""
    longest = max(batch["labels"].shape[1] for batch in batches)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.cat([nn.functional.pad(b[key], (0, longest - b[key].shape[1]), value=fill[key]) for b in batches])
        for key in batches[0]
    }


def autocast(case: Case) -> Any:
    """The context of a step."""
    return torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16-mixed" else nullcontext()


def make_optimizer(case: Case, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer."""
    if case.optimizer == "adamw":
        return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)
    return torch.optim.SGD(params, lr=case.lr, momentum=0.9, weight_decay=0.01)


_KNOWN: dict[Case, dict[str, Any]] = {}


def train_alone(case: Case) -> dict[str, Any]:
    """Train on the replicas' batches joined: losses, norms, last weights, and how far they moved."""
    dp = case.degrees[1]
    key = replace(case, name="", description="", config=(), layers=case.blocks, mistake=None, seen_in="", slow=False)
    key = (key, dp)
    if key not in _KNOWN:
        _KNOWN[key] = _train_alone(case, dp)
    return _KNOWN[key]


def _train_alone(case: Case, dp: int) -> dict[str, Any]:
    model = build_model(case)
    if case.precision == "bf16-true":
        model.to(torch.bfloat16)
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(case, trained)
    losses, norms = [], []
    for step in range(case.steps):
        for micro in range(case.accumulate):
            batch = join([batch_of(case, step=step, micro=micro, dp=d) for d in range(dp)])
            with autocast(case):
                loss = model(**batch).loss
            (loss / case.accumulate).backward()
            losses.append(float(loss.detach()))
        limit = case.clip if case.clip is not None else float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(trained, limit)))
        optimizer.step()
        optimizer.zero_grad()
    last = {name: param.detach().clone() for name, param in model.named_parameters()}
    moved = max(float((last[name] - first[name]).abs().max()) for name in last)
    return {"losses": losses, "norms": norms, "weights": last, "moved": moved}
