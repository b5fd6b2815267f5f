# SPDX-License-Identifier: Apache-2.0
"""Deliberate mistakes in a running engine, one at a time. Each is one that a real code base has shipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from holmes_core.runtime import engine as engine_module
from holmes_core.runtime import tp_collectives
from holmes_core.runtime.loss import LossRule
from holmes_core.runtime.stage import Edge

__all__ = ["made"]


@contextmanager
def made(mistake: str | None, engine: Any) -> Iterator[None]:
    """Make a mistake, and undo what outlives the engine."""
    undo = _MISTAKES[mistake](engine) if mistake else None
    try:
        yield
    finally:
        if undo:
            undo()


def _norm_of_one_stage(engine: Any) -> None:
    gradients = engine.gradients

    def norm() -> torch.Tensor:
        grads = [p.grad for p in gradients.params.values() if p.grad is not None]
        return torch.stack([grad.norm() for grad in grads]).norm()

    gradients.norm = norm


def _weighted_by_samples(engine: Any) -> None:
    engine.loss_rule = LossRule("samples")
    engine.loss_rule.settled = True


def _tied_gradient_not_summed(engine: Any) -> None:
    engine.gradients._shared.clear()


def _replicas_not_summed(engine: Any) -> None:
    engine.gradients.data_parallel.reduce_gradients = lambda: None


def _scaled_once_more(engine: Any) -> None:
    train = engine.train

    def scaled(*args: Any, **kwargs: Any) -> Any:
        result = train(*args, **kwargs)
        engine.gradients.scale(1 / result.num_microbatches)
        return result

    engine.train = scaled


def _first_mask_for_all(engine: Any) -> None:
    cut = engine.cut

    def cut_badly(batch: Any) -> list[Any]:
        parts = cut(batch)
        return [{**part, "attention_mask": parts[0]["attention_mask"][: len(part["labels"])]} for part in parts]

    engine.cut = cut_badly


def _labels_one_batch_late(engine: Any) -> None:
    train, before = engine.train, []

    def late(step: Any, batch: Any, **kwargs: Any) -> Any:
        before.append(batch["labels"])
        if engine.holds_last:
            batch = {**batch, "labels": before[max(0, len(before) - 2)]}
        return train(step, batch, **kwargs)

    engine.train = late


def _mean_over_replicas(engine: Any) -> None:
    weigh = engine._weights

    def weights(batches: list[Any]) -> list[float]:
        found = weigh(batches)
        return [weight / sum(found) / engine.plan.layout.dp for weight in found] if engine.holds_last else found

    engine._weights = weights


def _tokens_counted_on_every_rank(engine: Any) -> None:
    weigh = engine._weights
    engine._weights = lambda batches: [weight / engine.plan.layout.tp for weight in weigh(batches)]


def _tensor_parallel_gradient_not_summed(engine: Any) -> Callable[[], None]:
    right = tp_collectives._Copy.backward
    tp_collectives._Copy.backward = staticmethod(lambda ctx, *grads: (grads[0], None))

    def undo() -> None:
        tp_collectives._Copy.backward = staticmethod(right)

    return undo


def _stages_in_wrong_order(engine: Any) -> None:
    order = [0, 2, 1, 3]  # stage 0 sends to stage 2, that to stage 1, that to stage 3
    world = dist.group.WORLD
    assert world is not None
    for stage in engine.stages:
        place = order.index(stage.stage_index)

        def edge(place: int) -> Edge | None:
            if not 0 <= place < len(order):
                return None
            return Edge(peer=engine.plan.grid.rank_at(pp=order[place], dp=0, tp=0), group=world)

        stage.forward_in = stage.backward_out = edge(place - 1)
        stage.forward_out = stage.backward_in = edge(place + 1)


def _another_schedule(engine: Any) -> Callable[[], None]:
    right = engine_module.build_schedule
    engine_module.build_schedule = lambda name, *args, **kwargs: right("gpipe", *args, **kwargs)

    def undo() -> None:
        engine_module.build_schedule = right

    return undo


_MISTAKES: dict[str, Callable[[Any], Callable[[], None] | None]] = {
    "norm_of_one_stage": _norm_of_one_stage,
    "weighted_by_samples": _weighted_by_samples,
    "tied_gradient_not_summed": _tied_gradient_not_summed,
    "replicas_not_summed": _replicas_not_summed,
    "scaled_once_more": _scaled_once_more,
    "first_mask_for_all": _first_mask_for_all,
    "labels_one_batch_late": _labels_one_batch_late,
    "mean_over_replicas": _mean_over_replicas,
    "tokens_counted_on_every_rank": _tokens_counted_on_every_rank,
    "tensor_parallel_gradient_not_summed": _tensor_parallel_gradient_not_summed,
    "another_schedule": _another_schedule,
    "stages_in_wrong_order": _stages_in_wrong_order,
}
