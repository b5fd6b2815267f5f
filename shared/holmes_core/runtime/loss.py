# SPDX-License-Identifier: Apache-2.0
"""How micro-batch losses make up the batch's loss, and the check that they do.

A mean over tokens is not the mean of micro-batch means where token counts differ. Each micro-batch's loss is weighted
by its share (transformers' loss: sum of token losses / number of tokens). The rule is found on the first batches, by
comparing the loss of two micro-batches with the loss of both together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime import microbatch

__all__ = ["LossRule", "read_loss"]

_RULES = ("shifted_tokens", "tokens", "samples", "sum")
#: Relative difference that rounding explains, by the precision of the loss.
_TOLERANCE = 2e-5
_TOLERANCE_HALF = 5e-3
#: Batches that are looked at for one that settles the rule.
_MAX_BATCHES = 100


def read_loss(output: Any) -> Tensor:
    """Return the loss in what a training step returned.

    Raises:
        HolmesError: There is none, or it is not a scalar.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise HolmesError(
            seen=f"the training step returned {what} as its loss",
            where="the last pipeline stage",
            means="every stage waits for one scalar loss per micro-batch; a step cannot be skipped by returning None",
            do='return a scalar tensor, or a dict with the key "loss"',
        )
    return loss.reshape(())


class LossRule:
    """Which `microbatch.WEIGHT_RULES` a run's loss obeys.

    Args:
        setting: ``HolmesConfig.loss_weight``; or ``"items"`` for calls that are told the number of items to divide
            by (transformers' ``num_items_in_batch``), whose losses add up if the model heeds it.
    """

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._rule: str | None = None
        self._fitting = list(_RULES)
        self._half = False
        self._probed = False
        self._looked_at = 0
        self.settled = False

    def name(self, batches: Sequence[Any]) -> str:
        """The rule for these micro-batches."""
        return self._rule or self._allowed()[0]

    def _allowed(self) -> list[str]:
        if self._setting == "auto":
            return list(_RULES[:3])
        if self._setting == "items":
            return ["sum", *_RULES[:3]]
        return ["shifted_tokens", "tokens"] if self._setting == "tokens" else [self._setting]

    # ---- the check -----------------------------------------------------------------------------------------------
    def probes(self, batch: Any, batches: Sequence[Any]) -> tuple[list[Any], bool]:
        """Choose two micro-batches and their union; also whether they tell every allowed rule from the others.

        Returns:
            ``[first, second, both]`` (empty for a batch of one sample), and whether the outcome settles the rule.
        """
        size = microbatch.batch_size_of(batch)
        if size < 2:
            return [], False
        if len(batches) < 2:
            batches = [microbatch.slice_batch(batch, rows, size) for rows in microbatch.split_sizes(size, 2)]
        ends = [0, *itertools.accumulate(microbatch.batch_size_of(part) for part in batches)]
        counts = microbatch.count(batches, "shifted_tokens")
        pair = max(range(len(batches) - 1), key=lambda i: abs(float(counts[i] - counts[i + 1])))
        both = microbatch.slice_batch(batch, slice(ends[pair], ends[pair + 2]), size)
        probes = [batches[pair], batches[pair + 1], both]
        shares = {rule: self._share(probes, rule) for rule in _RULES[:3]}
        has_tokens = microbatch.count(probes[2:], "tokens").item() != microbatch.count(probes[2:], "samples").item()
        conclusive = not has_tokens or len({round(share, 9) for share in shares.values()}) == len(shares)
        return probes, conclusive

    def worth_probing(self, probes: Sequence[Any], conclusive: bool, replicas: dist.ProcessGroup | None) -> bool:
        """Whether this batch's probes (three more forwards) can tell anything new; the same answer on all ranks.

        Rows without padding never tell tokens from samples: the first batch is checked, later ones only where they
        do. After `_MAX_BATCHES` the search ends with what is known.

        Args:
            probes: What `probes` chose for this rank's batch.
            conclusive: Whether they would settle the rule.
            replicas: The data-parallel group on the CPU, or None for one replica.
        """
        self._looked_at += 1
        if self._looked_at > _MAX_BATCHES:
            self.settled = True
            return False
        worth = torch.tensor(int(bool(probes) and (conclusive or not self._probed)))
        if replicas is not None:
            dist.all_reduce(worth, op=dist.ReduceOp.MAX, group=replicas)
        self._probed |= bool(worth)
        return bool(worth)

    @staticmethod
    def _share(probes: Sequence[Any], rule: str) -> float:
        counts = microbatch.count(probes[:2], rule)
        total = float(counts.sum())
        return float(counts[0]) / total if total else 0.5

    @contextmanager
    def undisturbed(self, root: nn.Module) -> Iterator[None]:
        """Run probes without dropout and without a trace in metrics."""
        training = [(module, module.training) for module in root.modules()]
        metrics = [(m, _metric_state(m)) for m in root.modules() if hasattr(m, "_defaults")]
        root.eval()
        try:
            yield
        finally:
            for module, mode in training:
                module.training = mode
            for metric, state in metrics:
                metric.__dict__.update(state)

    def settle(
        self,
        probes: Sequence[Any],
        losses: Sequence[float],
        *,
        conclusive: bool,
        holds_last: bool,
        replicas: dist.ProcessGroup | None,
        replica: dist.ProcessGroup,
        last_rank: int,
    ) -> None:
        """Keep the rules that explain the probes' losses; agreed on by all ranks.

        Raises:
            HolmesError: No allowed rule does.
        """
        fits = torch.ones(len(_RULES) + 1, dtype=torch.int32)
        if holds_last:
            fits[: len(_RULES)] = torch.tensor([int(self._explains(probes, losses, rule)) for rule in _RULES])
            fits[-1] = int(conclusive and bool(probes))
            if replicas is not None:
                rules, done = fits[:-1].clone(), fits[-1:].clone()
                dist.all_reduce(rules, op=dist.ReduceOp.MIN, group=replicas)
                dist.all_reduce(done, op=dist.ReduceOp.MAX, group=replicas)
                fits = torch.cat([rules, done])
        dist.broadcast(fits, src=last_rank, group=replica)
        self._fitting = [rule for rule, ok in zip(_RULES, fits.tolist(), strict=False) if ok and rule in self._fitting]
        allowed = [rule for rule in self._allowed() if rule in self._fitting]
        if not allowed:
            raise self._mismatch(losses)
        self._rule = allowed[0]
        self.settled = bool(fits[-1])

    def _explains(self, probes: Sequence[Any], losses: Sequence[float], rule: str) -> bool:
        if not probes:
            return True
        first, second, both = losses
        share = self._share(probes, rule)
        parts = [(share, first), (1 - share, second)]
        predicted = first + second if rule == "sum" else sum(w * loss for w, loss in parts if w)
        if not (predicted == predicted and both == both):  # NaN: not for this check to judge
            return True
        tolerance = _TOLERANCE_HALF if self._half else _TOLERANCE
        return abs(predicted - both) <= tolerance * max(abs(both), 1e-3)

    def half_precision(self) -> None:
        """Allow for the rounding of 16-bit compute."""
        self._half = True

    def _mismatch(self, losses: Sequence[float]) -> HolmesError:
        named = {"shifted_tokens": "tokens", "tokens": "tokens", "samples": "samples", "sum": "sum"}
        fitting = sorted({named[rule] for rule in self._fitting})
        numbers = [f"{loss:.6g}" for loss in losses]
        shown = f" (two micro-batches: {', '.join(numbers[:-1])}; both together: {numbers[-1]})" if numbers else ""
        do = (
            f"set loss_weight: {fitting[0]}"
            if fitting
            else "make the loss a mean (or sum) over the samples or label tokens of its batch; or, if the difference is"
            " meant (negatives within the batch, batch norm), use num_microbatches: 1 or check_loss: false"
        )
        return HolmesError(
            seen="the loss of a batch is not the weighted mean of its micro-batches' losses under"
            f" loss_weight: {self._setting}{shown}",
            where="the check of the first batches",
            means="split into micro-batches the model would train to another loss than in one process",
            do=do,
        )


def _metric_state(metric: Any) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache", "_update_called"]
    return {name: deepcopy(metric.__dict__[name]) for name in names if name in metric.__dict__}
