# SPDX-License-Identifier: Apache-2.0
"""Run the steps of a LightningModule through the engine, and tell all ranks what happened on the last stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from holmes_core.runtime.engine import Engine
from holmes_core.runtime.step_record import ListWatch, LogCall, StepRecord, merge_outputs, share
from holmes_lightning.refusals import refuse_generate

__all__ = ["StepRunner"]


class StepRunner:
    """The steps of one LightningModule.

    Args:
        engine: The engine.
        module: The LightningModule.
        metric_path: Finds the attribute path of a metric object.
    """

    def __init__(self, engine: Engine, module: Any, metric_path: Callable[[Any], str | None]) -> None:
        self._engine, self._module, self._metric_path = engine, module, metric_path
        replica = engine.groups.replica
        self._replica = replica if dist.get_world_size(replica) > 1 else None
        self._control = engine.groups.dp_control if engine.groups.dp_size > 1 else None

    def same_batch(self, batch: Any) -> Any:
        """Return the first stage's batch on every rank of the replica."""
        return share(batch, source=self._engine.first_rank, group=self._replica)

    def train(self, step: Callable[[Any], Any], batch: Any, *, accumulate: int, scale: float, completes: bool) -> Any:
        """Train on one batch (see `Engine.train`); returns on every rank what the step would return in one process."""
        record = StepRecord(self._metric_path)

        engine = self._engine

        def run(micro_batch: Any, index: int) -> Any:
            record.index, record.counts = index, not engine.probing
            try:
                return step(micro_batch)
            finally:
                if not record.counts:
                    watch.cut()

        with self._recorded(record) as watch:
            result = engine.train(run, batch, accumulate=accumulate, scale=scale, completes=completes)
        told = None
        if engine.holds_last:
            assert result.loss is not None
            weights = result.weights
            if engine.loss_rule.name([]) == "sum":  # a sum has no weights; values logged beside it are still averaged
                weights = [1.0 / (len(weights) * engine.groups.dp_size)] * len(weights)
            loss = result.loss
            if self._control is not None:
                loss = loss.cpu()
                dist.all_reduce(loss, group=self._control)
            calls = record.merge(weights, self._control)
            told = (float(loss), calls, merge_outputs(result.outputs, weights), watch.tails())
        loss, calls, extra, tails = share(told, source=engine.last_rank, group=self._replica)
        self._replay(calls, tails, watch, synced=True)
        value = torch.tensor(loss, device=engine.device)
        return {"loss": value, **extra} if extra else value

    def evaluate(self, step: Callable[[Any], Any], batch: Any, *, keep_result: bool) -> Any:
        """Run a validation, test or predict step on one batch."""
        record = StepRecord(self._metric_path)
        engine = self._engine
        with self._recorded(record) as watch:
            results = engine.evaluate(lambda whole, _: step(whole), [batch])
        told = (record.merge([1.0], None), watch.tails()) if engine.holds_last else None
        calls, tails = share(told, source=engine.last_rank, group=self._replica)
        self._replay(calls, tails, watch, synced=False)
        return results[0] if results else None

    @contextmanager
    def _recorded(self, record: StepRecord) -> Iterator[ListWatch]:
        """Replace ``self.log`` of the module while its step runs."""
        module = self._module
        vars(module)["log"] = record.log
        try:
            with refuse_generate(module) if self._engine.num_stages > 1 else nullcontext():
                yield ListWatch(module)
        finally:
            del vars(module)["log"]

    def _replay(self, calls: list[LogCall], tails: dict[str, list[Any]], watch: ListWatch, *, synced: bool) -> None:
        module, engine = self._module, self._engine
        if not engine.holds_last or engine.rank != engine.last_rank:
            ListWatch.extend(module, {k: v for k, v in tails.items() if k not in watch.tails()}, engine.device)
        for call in calls:
            kwargs = dict(call.kwargs)
            if call.is_metric:
                module.log(call.name, module.get_submodule(call.value), **kwargs)
                continue
            # Training values are merged over replicas already; others Lightning reduces at the end of the epoch.
            kwargs["sync_dist"] = not synced and self._control is not None
            kwargs.pop("sync_dist_group", None)
            module.log(call.name, torch.tensor(call.value, device=engine.device), **kwargs)
