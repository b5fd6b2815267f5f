# SPDX-License-Identifier: Apache-2.0
"""Run in each process: one rule of the arithmetic at a time, with numbers that can be checked by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.parity.cases import Case
from tests.parity.reference import batch_of, build_model
from tests.parity.worker import close, make_engine

__all__ = ["accumulated_gradient", "loss_of_tokens", "norm_of_stages"]


def accumulated_gradient(rank: int, case: Case, batches: int) -> dict[str, float]:
    """Train on the same batch several times without dividing; the gradient relative to one batch's in one process."""
    alone = build_model(case)
    batch = batch_of(case, step=0, micro=0, dp=0)
    alone(**batch).loss.backward()
    expected = {name: param.grad for name, param in alone.named_parameters() if param.grad is not None}
    whole = torch.stack([grad.norm() for grad in expected.values()]).norm()
    engine = make_engine(case)
    for _ in range(batches):
        result = engine.train(lambda part, _: engine.root(**part).loss, batch)
    engine.reduce_gradients()
    times = float(engine.gradient_norm() / whole)
    wrong = 0.0
    for name, param in engine.parameters().items():
        assert param.grad is not None
        wrong = max(wrong, float((param.grad - batches * expected[name]).abs().max() / whole))
    close(engine)
    return {"times": times, "wrong": wrong, "num_microbatches": result.num_microbatches}


def norm_of_stages(rank: int, case: Case, norms: Sequence[float], max_norm: float) -> dict[str, float]:
    """Give each stage a gradient of a known norm; the norm that is reported, and this rank's after clipping."""
    engine = make_engine(case)
    for param in engine.gradients.params.values():
        param.grad = torch.zeros_like(param)
    in_first_block = {stage: f"model.layers.{engine.windows[stage].start}." for stage in engine.local_stages}
    for stage, prefix in in_first_block.items():
        name = next(name for name in engine.gradients.params if name.startswith(prefix))
        engine.gradients.params[name].grad.view(-1)[0] = norms[stage]
    norm = engine.gradient_norm()
    engine.gradients.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    left = torch.stack([param.grad.norm() for param in engine.gradients.params.values()]).norm()
    own = torch.tensor([norms[stage] for stage in engine.local_stages]).norm()
    close(engine)
    return {"norm": float(norm), "scaled_by": float(left / own)}


def loss_of_tokens(
    rank: int, case: Case, counts: Sequence[int], sums: Sequence[float], accumulate: int
) -> dict[str, Any]:
    """Train on micro-batches of one row with known token counts and sums of token losses."""
    engine = make_engine(case)
    length = max(counts) + 2
    ids = torch.arange(len(counts) * length).view(len(counts), length) % 90 + 2
    labels = torch.full_like(ids, -100)
    for row, count in enumerate(counts):
        labels[row, 1 : 1 + count] = ids[row, 1 : 1 + count]
    each = torch.tensor([[total / count] for total, count in zip(sums, counts, strict=True)]).expand(-1, length)
    batch = {"input_ids": ids, "labels": labels, "each": each.contiguous()}

    def step(part: dict[str, Tensor], index: int) -> Tensor:
        logits = engine.root(input_ids=part["input_ids"]).logits
        valid = part["labels"][:, 1:] != -100
        return logits.sum() * 0.0 + part["each"][:, 1:][valid].mean()

    result = engine.train(step, batch, accumulate=accumulate)
    found = {"loss": None if result.loss is None else float(result.loss), "weights": result.weights}
    close(engine)
    return {**found, "place": (engine.place.pp, engine.place.dp, engine.place.tp)}
