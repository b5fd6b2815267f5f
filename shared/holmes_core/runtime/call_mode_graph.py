# SPDX-License-Identifier: Apache-2.0
"""A forward whose loss the script computes itself: all micro-batches forward now, all backward when it is asked for.

The order of GPipe, cut in the middle. What the stages hold for the backward is set aside in between, so that several
forwards may be open at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime import microbatch, rng
from holmes_core.runtime.call_mode_outputs import pack, shape_like
from holmes_core.runtime.engine import Engine, Step, _Pass
from holmes_core.runtime.schedule import run_forward
from holmes_core.runtime.stage import HolmesStage

__all__ = ["OpenForward"]

_HELD = ("_outputs", "_activations", "_in_boundary", "_out_boundary")


class OpenForward:
    """One batch that went forward and waits for the gradient of its outputs.

    Args:
        engine: The engine.
        step: The user's step.
        batch: This replica's batch.
        whole: Whether it goes through in one piece instead of micro-batches: a loss among the outputs is then exact.

    Attributes:
        packed, tensors: The output of the whole batch on the last stage (`call_mode_outputs.pack`); None and [] on
            others.
    """

    def __init__(self, engine: Engine, step: Step, batch: Any, *, whole: bool = False) -> None:
        self._engine = engine
        self._batches = [batch] if whole else engine.cut(batch)
        self._sizes = [microbatch.batch_size_of(b) for b in self._batches]
        self._parts: list[list[Tensor]] = []
        self.packed: Any = None
        self.tensors: list[Tensor] = []
        self._done = False
        run = _Pass(step=step, batches=self._batches, train=False, seeds=self._seeds())
        engine.batches_seen += 1
        engine._pass = run
        try:
            self._start()
            with rng.fork(engine.device):
                run_forward(engine.stages, len(self._batches))
            self._held = [{name: getattr(stage, name) for name in _HELD} for stage in engine.stages]
            self._close()
        finally:
            engine._pass = None
        if engine.holds_last:
            self._join([run.outputs[i] for i in range(len(self._batches))])

    def _seeds(self) -> tuple[int, ...]:
        engine = self._engine
        return engine.seed, 1, engine.batches_seen, engine.place.dp

    def _start(self) -> None:
        keys = [("open", torch.is_grad_enabled(), microbatch.shape_key(b)) for b in self._batches]
        for stage in self._engine.stages:
            stage.start_step(keys, has_backward=True)

    def _close(self) -> None:
        for stage in self._engine.stages:
            stage.finish_step()

    def _join(self, outputs: list[Any]) -> None:
        packed: list[Any] = []
        for output in outputs:
            tensors: list[Tensor] = []
            packed.append(pack(output, tensors))
            self._parts.append(tensors)
        for column in zip(*self._parts, strict=True):
            self.tensors.append(self._joined(column))
        self.packed = shape_like(packed[0], self.tensors)

    def _joined(self, column: Sequence[Tensor]) -> Tensor:
        if all(t.ndim and t.shape[0] == n for t, n in zip(column, self._sizes, strict=True)):
            if len({t.shape[1:] for t in column}) == 1:
                return torch.cat([t.detach() for t in column])
        elif all(t.ndim == 0 for t in column) and column[0].is_floating_point():
            total = sum(self._sizes)
            shares = [t.detach() * (n / total) for t, n in zip(column, self._sizes, strict=True)]
            return torch.stack(shares).sum(0)
        elif len(column) == 1:
            return column[0].detach()
        raise HolmesError(
            seen=f"an output of shapes {[tuple(t.shape) for t in column]} for micro-batches of {self._sizes} samples",
            where="the model's output in training",
            means="outputs of micro-batches are joined along the samples, and these are not made of samples",
            do="return tensors with the batch in the first dimension, or set num_microbatches: 1",
        )

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        """Send the gradients of the outputs back through all stages; parameters' gradients are added to.

        Args:
            grads: Gradient of each of `tensors`, the same on all ranks that run the last stage.

        Raises:
            HolmesError: It ran before.
        """
        if self._done:
            raise _twice()
        self._done = True
        engine, n = self._engine, len(self._batches)
        self._start()
        for stage, held in zip(engine.stages, self._held, strict=True):
            for name, value in held.items():
                setattr(stage, name, value)
            if stage.is_last:
                for index in range(n):
                    stage._outputs[index] = (self._surrogate(index, grads), stage._outputs[index][1])
        self._held = []
        with torch.enable_grad(), rng.fork(engine.device):
            self._run_backward(n)
        self._close()
        self._parts = []

    def _surrogate(self, index: int, grads: Sequence[Tensor | None]) -> Tensor:
        """Return a scalar whose gradient at this micro-batch's outputs is the one that was given."""
        start = sum(self._sizes[:index])
        share = self._sizes[index] / sum(self._sizes)
        with torch.enable_grad():
            total = torch.zeros((), device=self._engine.device)
            for tensor, grad in zip(self._parts[index], grads, strict=True):
                if grad is None or not tensor.requires_grad:
                    continue
                own = grad * share if tensor.ndim == 0 else grad[start : start + self._sizes[index]]
                total = total + (tensor.float() * own.float()).sum()
        return total

    def _run_backward(self, n: int) -> None:
        stages = self._engine.stages
        local: dict[int, HolmesStage] = {stage.stage_index: stage for stage in stages}
        sends: list[Any] = []
        for stage in sorted(stages, key=lambda s: -s.stage_index):
            for index in range(n):
                after = local.get(stage.stage_index + 1)
                if after is not None:
                    stage.set_local_bwd_input(after.get_local_bwd_output(index), index)
                else:
                    for op in stage.get_bwd_recv_ops(index):
                        op.op(op.tensor, group=op.group, group_src=op.group_peer).wait()
                stage.backward_one_chunk(index, last_backward=index == n - 1)
                if stage.stage_index - 1 not in local:
                    for op in stage.get_bwd_send_ops(index):
                        sends.append(op.op(op.tensor, group=op.group, group_dst=op.group_peer))
        for work in sends:
            work.wait()


def _twice() -> HolmesError:
    return HolmesError(
        seen="backward of one training call for the second time",
        where="loss.backward()",
        means="the gradients of a call are handed out once; the stages have freed what they were computed from",
        do="call the model again, or add losses before one backward",
    )
