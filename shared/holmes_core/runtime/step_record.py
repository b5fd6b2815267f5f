# SPDX-License-Identifier: Apache-2.0
"""Carry what happens in the user's step on the last stage to the other ranks: logged values and lists that grew.

A step runs once per micro-batch, on the last stage only; in one process it runs once per batch. Values it logs are
merged over micro-batches and replicas to what one process would have logged, then handed to all ranks, so that every
rank logs the same keys and values (ModelCheckpoint, EarlyStopping and schedulers then decide alike).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.errors import HolmesError

__all__ = ["ListWatch", "LogCall", "StepRecord", "merge_outputs", "share"]

_REDUCTIONS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    sum: "sum",
    max: "max",
    min: "min",
}


@dataclass(slots=True, kw_only=True)
class LogCall:
    """One ``self.log(name, value, **kwargs)``, merged over the batch.

    Attributes:
        name: The key.
        value: The number; for metric objects the attribute path of the metric in the module.
        is_metric: Whether `value` is such a path.
        kwargs: The other arguments of the call.
    """

    name: str
    value: Any
    is_metric: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)


class StepRecord:
    """Records log calls of one batch, by micro-batch.

    Args:
        metric_path: Returns the attribute path of a metric object, or None for other values.
    """

    def __init__(self, metric_path: Callable[[Any], str | None]) -> None:
        self._metric_path = metric_path
        self._values: dict[str, dict[int, list[Any]]] = {}
        self._kwargs: dict[str, dict[str, Any]] = {}
        self._metrics: dict[str, str] = {}
        self._batch_sizes: dict[str, int] = {}
        self.index = 0
        #: Whether what the step logs now counts; not so while the engine only tries it out.
        self.counts = True

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``LightningModule.log``."""
        if not self.counts:
            return
        for key, extra in zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False):
            kwargs[key] = extra
        self._kwargs[name] = kwargs
        if isinstance(kwargs.get("batch_size"), int):
            self._batch_sizes[name] = self._batch_sizes.get(name, 0) + kwargs["batch_size"]
        path = self._metric_path(value)
        if path is not None:
            self._metrics[name] = path
            return
        if isinstance(value, Mapping):
            raise HolmesError(
                seen=f"self.log({name!r}, ...) with a dict",
                where="the user's step",
                do="use self.log_dict, or log each value under a name of its own",
            )
        number = value.detach().float().mean() if isinstance(value, Tensor) else torch.tensor(float(value))
        self._values.setdefault(name, {}).setdefault(self.index, []).append(number)

    def merge(self, weights: Sequence[float], control: dist.ProcessGroup | None) -> list[LogCall]:
        """Merge over micro-batches, and over replicas where a group is given.

        Args:
            weights: Share of each micro-batch in the loss; they sum to one over the replicas of `control`.
            control: The data-parallel group on the CPU, or None.

        Returns:
            Calls in the order of their names' first appearance.
        """
        kinds = {name: _kind(self._kwargs[name].get("reduce_fx", "mean")) for name in self._values}
        local = [self._merge_local(name, kinds[name], weights) for name in self._values]
        merged = _over_replicas(list(kinds.items()), local, control) if control is not None and local else local
        numbers = dict(zip(self._values, merged, strict=True))
        calls = []
        for name, kwargs in self._kwargs.items():
            kwargs = dict(kwargs)
            if name in self._batch_sizes:
                kwargs["batch_size"] = self._batch_sizes[name]
            if name in self._metrics:
                calls.append(LogCall(name=name, value=self._metrics[name], is_metric=True, kwargs=kwargs))
            else:
                calls.append(LogCall(name=name, value=numbers[name], kwargs=kwargs))
        return calls

    def _merge_local(self, name: str, kind: str, weights: Sequence[float]) -> float:
        by_batch = self._values[name]
        values = {index: float(items[-1]) for index, items in by_batch.items()}
        if kind == "sum":
            return sum(values.values())
        if kind in ("max", "min"):
            return (max if kind == "max" else min)(values.values())
        if len(values) == len(weights):
            return sum(weights[index] * value for index, value in values.items() if weights[index])
        share = sum(weights) or 1.0  # logged on some micro-batches only: their plain mean, with the batch's whole share
        return share * sum(values.values()) / len(values)


def _kind(reduce_fx: Any) -> str:
    if isinstance(reduce_fx, str):
        return {"avg": "mean"}.get(reduce_fx.lower(), reduce_fx.lower())
    return _REDUCTIONS.get(reduce_fx, "mean")


def _over_replicas(kinds: Sequence[tuple[str, str]], local: list[float], control: dist.ProcessGroup) -> list[float]:
    names = [name for name, _ in kinds]
    mine = torch.tensor([float(zlib.crc32("\n".join(names).encode())), *local], dtype=torch.float64)
    size = dist.get_world_size(control)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)]), group=control)
    everyone = [torch.empty(int(n), dtype=torch.float64) for n in lengths]
    same = len({int(n) for n in lengths}) == 1
    if same:
        dist.all_gather(everyone, mine, group=control)
        same = len({float(row[0]) for row in everyone}) == 1
    if not same:
        logged: list[Any] = [None] * size
        dist.all_gather_object(logged, names, group=control)
        raise HolmesError(
            seen=f"replicas logged different keys in one step: {logged}",
            where="self.log in the training step",
            means="logged values are averaged over replicas, so each replica must log the same keys",
            do="log the same keys on every batch",
        )
    everyone = [row[1:] for row in everyone]
    table = torch.stack(everyone)
    picked = {"max": table.max(0).values, "min": table.min(0).values}
    return [float(picked.get(kind, table.sum(0))[i]) for i, (_, kind) in enumerate(kinds)]


class ListWatch:
    """Notices plain lists of an object that grew during a step (``self.outputs.append(...)``)."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._lengths = {k: len(v) for k, v in vars(owner).items() if type(v) is list and not k.startswith("_")}

    def cut(self) -> None:
        """Drop what was appended since."""
        for key, length in self._lengths.items():
            value = vars(self._owner).get(key)
            if type(value) is list:
                del value[length:]

    def tails(self) -> dict[str, list[Any]]:
        """Return what was appended since, tensors on the CPU and detached."""
        found = {}
        for key, length in self._lengths.items():
            value = vars(self._owner).get(key)
            if type(value) is list and len(value) > length:
                found[key] = [_to_cpu(item) for item in value[length:]]
        return found

    @staticmethod
    def extend(owner: Any, tails: Mapping[str, list[Any]], device: torch.device) -> None:
        """Append on this rank what grew on the last stage."""
        for key, items in tails.items():
            getattr(owner, key).extend(_to_device(item, device) for item in items)


def _map_tensors(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    if type(value) is dict:
        return {key: _map_tensors(item, fn) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, fn) for item in value)
    return value


def _to_cpu(value: Any) -> Any:
    return _map_tensors(value, lambda t: t.detach().cpu())


def _to_device(value: Any, device: torch.device) -> Any:
    return _map_tensors(value, lambda t: t.to(device))


def merge_outputs(outputs: Sequence[Any], weights: Sequence[float]) -> dict[str, Any]:
    """Merge what the step returned besides the loss: scalars by weight, tensors along the batch, else the last one."""
    merged: dict[str, Any] = {}
    total = sum(weights) or 1.0
    for key in outputs[0] if outputs and isinstance(outputs[0], Mapping) else ():
        if key == "loss":
            continue
        values = [output.get(key) for output in outputs]
        if all(isinstance(v, Tensor) and v.ndim == 0 for v in values):
            merged[key] = sum(w * float(v) for w, v in zip(weights, values, strict=True)) / total
            merged[key] = torch.tensor(merged[key])
        elif all(isinstance(v, Tensor) and v.ndim > 0 and v.shape[1:] == values[0].shape[1:] for v in values):
            merged[key] = torch.cat([v.detach() for v in values])
        else:
            merged[key] = _to_cpu(values[-1])
    return merged


def share(value: Any, *, source: int, group: dist.ProcessGroup | None) -> Any:
    """Hand a small object from global rank `source` to all ranks of a group (CPU backend); None: no group, no-op."""
    if group is None or dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source, group=group)
    return box[0]
