# SPDX-License-Identifier: Apache-2.0
"""Whole state in and out of a split job: what is saved looks as if one process had trained the model.

Weights and optimizer states are joined on global rank 0, one tensor at a time, and handed out by letting every rank
read its own parts. A checkpoint therefore knows no layout: any layout, or a single process, goes on from it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint import Reads
from holmes_core.runtime.checkpoint_parts import Part, local_chunks, part_of, placeholder
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.shard import SHARD_ATTRIBUTE, TensorShard, get_shard
from holmes_core.runtime.split import slots
from holmes_core.runtime.state_optimizer import (
    full_optimizer_state,
    load_optimizer_state,
    sharded_optimizer_state,
)
from holmes_core.runtime.state_transfer import ModelTensors, check_same, collect, describe, few
from holmes_core.runtime.tp_split import unwrap

__all__ = [
    "full_optimizer_state",
    "full_state_dict",
    "load_optimizer_state",
    "load_state_dict",
    "model_bytes",
    "replicated_state_dict",
    "restore_whole",
    "sharded_optimizer_state",
    "sharded_state_dict",
]

_EXTRA = "_extra_state"


def _local_state(engine: Engine) -> dict[str, Any]:
    try:
        return dict(engine.root.state_dict(keep_vars=True))
    except TypeError:  # the user's own state_dict(self)
        return dict(engine.root.state_dict())


def full_state_dict(engine: Engine, *, everywhere: bool = False) -> dict[str, Any]:
    """Return the state dict of the whole model, as one process would have it. Collective over all ranks.

    Args:
        engine: The engine, after `split`.
        everywhere: Give every rank the whole tensors.

    Returns:
        The keys of ``engine.root.state_dict()`` in their order. Rank 0: whole tensors, copies on the CPU, tied ones as
        one tensor. Other ranks: meta tensors of the whole shapes. Values that are no tensors, and what modules return
        from ``get_extra_state``, are this rank's own.

    Raises:
        HolmesError: The ranks' models differ in names, or a tensor has no values.
    """
    state = _local_state(engine)
    tensors = ModelTensors(engine)
    items = [
        tensors.item(key, value)
        for key, value in state.items()
        if isinstance(value, Tensor) and not key.endswith(_EXTRA)
    ]
    check_same(engine, [item.name for item in items], "tensors")
    found: list[Tensor] = []
    for row, (item, (same, dtype, shape, _)) in enumerate(zip(items, describe(engine, items), strict=True)):
        if same != row:
            found.append(found[same])
            continue
        ranks = engine.plan.grid.ranks[engine.pp_rank_of(item.stage)][0]
        whole = collect(engine, item.tensor, item.shard, ranks=ranks, shape=shape, dtype=dtype, everywhere=everywhere)
        found.append(torch.empty(shape, dtype=dtype, device="meta") if whole is None else whole)
    state.update({item.name: tensor for item, tensor in zip(items, found, strict=True)})
    return state


def sharded_state_dict(engine: Engine) -> dict[str, Any]:
    """Return the state dict of the whole model with placeholders for tensors. Collective over all ranks.

    A parameter may be saved by any replica of the stage that holds it; a buffer by the first replica, as replicas may
    have computed different ones.

    Args:
        engine: The engine, after `split`.

    Returns:
        The keys of ``engine.root.state_dict()`` in their order, on every rank; see
        `holmes_core.runtime.checkpoint_parts`. What is no tensor is this rank's own.

    Raises:
        HolmesError: The ranks' models differ in names, or a tensor has no values.
    """
    state, tensors, place = _local_state(engine), ModelTensors(engine), engine.place
    items = [
        tensors.item(key, value)
        for key, value in state.items()
        if isinstance(value, Tensor) and not key.endswith(_EXTRA)
    ]
    check_same(engine, [item.name for item in items], "tensors")
    found: list[Tensor] = []
    for row, (item, (same, dtype, shape, _)) in enumerate(zip(items, describe(engine, items), strict=True)):
        if same != row:
            found.append(found[same])
            continue
        part = Part(name=item.name, shape=shape, dtype=dtype)
        on_stage = engine.pp_rank_of(item.stage) == place.pp and not item.tensor.is_meta
        one_of = isinstance(item.tensor, nn.Parameter) or place.dp == 0
        if on_stage and one_of and (item.shard is not None or place.tp == 0):
            part.tensor = item.tensor
            part.chunks = local_chunks(shape, item.shard, place.tp, engine.plan.layout.tp)
        found.append(placeholder(part))
    state.update({item.name: tensor for item, tensor in zip(items, found, strict=True)})
    return state


def replicated_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict with placeholders for tensors that every rank holds whole (`restore_whole`)."""
    found = dict(module.state_dict(keep_vars=True))
    made: dict[int, Tensor] = {}
    for key, value in found.items():
        if isinstance(value, Tensor) and not key.endswith(_EXTRA):
            shape = tuple(value.shape)
            part = Part(name=key, shape=shape, dtype=value.dtype, tensor=value, chunks=local_chunks(shape))
            found[key] = made.setdefault(id(value), placeholder(part))
    return found


def load_state_dict(engine: Engine, state: Mapping[str, Any], *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Load the whole model's state; this rank copies what it holds. Every rank is given all of it.

    Not collective, except where the state comes from a sharded checkpoint: each rank reads its parts then, and all
    ranks raise what one of them meets.

    Goes through the module's own ``load_state_dict``, so that hooks and the user's overrides see the keys.

    Args:
        engine: The engine, after `split` (and tensor parallelism).
        state: The whole state dict. Its tensors may be memory-mapped: parts that this rank does not hold are not read.
        strict: Stop at missing and unexpected keys.

    Returns:
        Missing and unexpected keys.

    Raises:
        HolmesError: Keys do not fit (only with `strict`), or shapes do not.
    """
    tensors = ModelTensors(engine)
    own = {k: v for k, v in _local_state(engine).items() if isinstance(v, Tensor) and not k.endswith(_EXTRA)}
    local: dict[str, Any] = {}
    wrong: list[str] = []
    reads, place = Reads(), engine.place
    for key, value in state.items():
        target = own.get(key)
        local[key] = value
        if target is None or not isinstance(value, Tensor):
            continue
        item = tensors.item(key, target)
        one = value.dim() == 1 and value.numel() == 1 and item.shape == ()  # torch takes [x] for a scalar
        if tuple(value.shape) != item.shape and not one:
            wrong.append(f"{key}: {tuple(value.shape)} in the state, {item.shape} in the model")
        elif target.is_meta:
            local[key] = torch.empty(tuple(target.shape), dtype=target.dtype, device="meta")
        elif (part := part_of(value)) is not None:
            local[key] = reads.want(part, item.shard, place.tp, engine.plan.layout.tp)
        elif value.is_meta:
            wrong.append(f"{key}: its values are not in the state (a hook computed with it while it was loaded)")
        elif item.shard is not None:
            local[key] = _take(item.shard, value, engine)
    missing: list[str] = []
    unexpected: list[str] = []
    if any(part_of(value) is not None for value in state.values()):
        reads.run_together(engine.groups.world, skip=bool(wrong))
    if not wrong:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*to a meta parameter in the current model.*")
                result = engine.root.load_state_dict(local, strict=False)
        except RuntimeError as error:
            wrong.append(str(error))
        else:
            missing = list(getattr(result, "missing_keys", ()))
            unexpected = list(getattr(result, "unexpected_keys", ()))
    problems = [("entries do not fit", wrong)]
    if strict:
        problems += [("missing keys", missing), ("unexpected keys", unexpected)]
    lines = [f"{len(names)} {what}: {few(names)}" for what, names in problems if names]
    if lines:
        raise HolmesError(
            seen="\n".join(lines),
            where=f"loading a state dict into {type(engine.root).__name__}",
            do="load a checkpoint of the same model" + ("" if wrong else ", or load with strict=False"),
        )
    return missing, unexpected


def _take(shard: TensorShard, full: Tensor, engine: Engine) -> Tensor:
    rank, size = engine.place.tp, engine.plan.layout.tp
    (start, stop), *more = shard.ranges(rank, size)
    if not more and stop - start == shard.local_sizes(size)[0]:
        return full.narrow(shard.dim, start, stop - start)  # a view: nothing of a mapped file is read yet
    return shard.take(full, rank, size)


def restore_whole(engine: Engine) -> bool:
    """Give every rank the whole model back: what training ended with, on this rank's device. Collective.

    `Engine.release` gives intercepted modules their classes back. The engine cannot train afterwards, but
    `full_optimizer_state` still joins the optimizers' states.

    Args:
        engine: The engine, after training.

    Returns:
        Whether the model is whole now.
    """
    if engine.num_stages == 1 and engine.plan.layout.tp == 1:
        return True
    tensors = ModelTensors(engine)
    num_params = len(tensors.parameters)
    items = [tensors.item(name, param) for name, param in tensors.parameters]
    items += [tensors.item(name, buffer) for name, _, _, buffer in tensors.buffers]  # those not saved, too
    check_same(engine, [item.name for item in items], "tensors")
    made: list[Tensor] = []
    for row, (item, (same, dtype, shape, lacking)) in enumerate(zip(items, describe(engine, items), strict=True)):
        if same != row:
            made.append(made[same])
        elif row < num_params and not lacking:
            made.append(item.tensor)
        else:
            ranks = engine.plan.grid.ranks[engine.pp_rank_of(item.stage)][0]
            whole = collect(engine, item.tensor, item.shard, ranks=ranks, shape=shape, dtype=dtype, everywhere=True)
            assert whole is not None
            made.append(_refilled(item.tensor, whole, engine.device))
    for (_, module, key, _), tensor in zip(list(slots(engine.root)), made, strict=False):
        module._parameters[key] = tensor  # type: ignore[assignment]
    for (_, module, key, _), tensor in zip(tensors.buffers, made[num_params:], strict=True):
        module._buffers[key] = tensor
    unwrap(engine.root)
    return True


@torch.no_grad()
def _refilled(tensor: Tensor, whole: Tensor, device: torch.device) -> Tensor:
    """Return a parameter or buffer with the whole values: itself, or a new one in the place of one on meta."""
    if tensor.is_meta:
        whole = whole.to(device)
        if not isinstance(tensor, nn.Parameter):
            return whole
        new = nn.Parameter(whole, requires_grad=tensor.requires_grad)
        new.__dict__.update(tensor.__dict__)
        new.__dict__.pop(SHARD_ATTRIBUTE, None)
        return new
    if get_shard(tensor) is not None:
        tensor.grad = None
        delattr(tensor, SHARD_ATTRIBUTE)
    if tensor.shape == whole.shape:
        tensor.copy_(whole)
    else:
        tensor.data = whole.to(tensor.device)
    return tensor


def model_bytes(engine: Engine) -> int:
    """Return the size of the whole model's weights and saved buffers, tied ones counted once."""
    tensors = ModelTensors(engine)
    state = _local_state(engine)
    unique = {id(value): tensors.item(key, value) for key, value in state.items() if isinstance(value, Tensor)}
    return sum(math.prod(item.shape) * item.tensor.element_size() for item in unique.values())
