# SPDX-License-Identifier: Apache-2.0
"""An optimizer's state in and out of a split job, as if one process had stepped the whole model.

States live where parameters are stepped: on the stages that hold them, on one replica, in parts over tensor-parallel
ranks. Only names, shapes and single numbers are pickled; tensors travel as bytes, one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint import Reads
from holmes_core.runtime.checkpoint_parts import Part, has_placeholders, local_chunks, map_tree, part_of, placeholder
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.shard import TensorShard, get_shard
from holmes_core.runtime.split import slots
from holmes_core.runtime.state_transfer import check_same, collect, raise_together, shards_of

__all__ = ["full_optimizer_state", "load_optimizer_state", "sharded_optimizer_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Stands for a tensor in a message about an optimizer's state; `value` is its value where it has one element."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: Any = None


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to what is no dict, list or tuple inside an optimizer's state."""
    if isinstance(value, dict):
        return {key: _map(inner, change) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(inner, change) for inner in value)
    return change(value)


def _numbered(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> dict[Any, Tensor]:
    return {
        index: param
        for group, own in zip(groups, optimizer.param_groups, strict=True)
        for index, param in zip(group["params"], own["params"], strict=True)
    }


def _odd_shape(optimizer: torch.optim.Optimizer, tensor: Tensor, shard: TensorShard) -> HolmesError:
    return HolmesError(
        seen=f"{type(optimizer).__name__} keeps a state of shape {tuple(tensor.shape)} for a parameter of whole shape"
        f" {shard.full_shape} that is split over tensor-parallel ranks",
        means="only states of the parameter's own shape, and single numbers, can be split and joined like it",
        do="use an optimizer whose state has the parameter's shape (SGD, Adam, AdamW, Lion, ...), or tp=1",
    )


def _answers_for(engine: Engine) -> dict[int, bool]:
    """Return id of each parameter of the model -> whether this rank's state of it is the one that is saved."""
    assert engine.gradients is not None, "build() the engine first"
    lowest = {alias: engine.pp_rank_of(min(entry.stages)) for entry in engine.entries for alias in entry.aliases}
    owns = engine.gradients.data_parallel.owns
    return {
        id(param): lowest.get(name) == engine.place.pp and not param.is_meta and owns(param)
        for name, _, _, param in slots(engine.root)
    }


def _pack(state: Any, shape: tuple[int, ...], shard: TensorShard | None) -> tuple[Any, list[Tensor], Tensor | None]:
    """Take the tensors out of the state of a parameter of this shape; also the first that cannot be joined."""
    tensors: list[Tensor] = []
    odd: list[Tensor] = []

    def strip(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.numel() == 1 and tuple(value.shape) != shape:
            return _Slot(shape=tuple(value.shape), dtype=value.dtype, value=value.item())
        if shard is not None and tuple(value.shape) != shape:
            odd.append(value)
        tensors.append(value)
        return _Slot(shape=tuple(value.shape) if shard is None else shard.full_shape, dtype=value.dtype)

    return _map(state, strip), tensors, odd[0] if odd else None


def _unpack(
    engine: Engine, skeleton: Any, ranks: Sequence[int], tensors: Sequence[Tensor], shard: TensorShard | None
) -> Any:
    """Put whole tensors in the place of slots; `tensors` are this rank's, where it is one of the holders."""
    own = iter(tensors)

    def fetch(slot: Any) -> Any:
        if not isinstance(slot, _Slot):
            return slot
        if slot.value is not None:
            return torch.tensor(slot.value, dtype=slot.dtype).reshape(slot.shape)
        return collect(engine, next(own, None), shard, ranks=ranks, shape=slot.shape, dtype=slot.dtype)

    return _map(skeleton, fetch)


def full_optimizer_state(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's state for the whole model, as one process would have it. Collective over all ranks.

    Args:
        engine: The engine, after `build`.
        optimizer: This rank's optimizer; its groups hold all parameters, those of other stages included.

    Returns:
        On rank 0 what ``optimizer.state_dict()`` returns in one process, with copies on the CPU; elsewhere the same
        without states. States of parameters outside the model are rank 0's own.

    Raises:
        HolmesError: A state cannot be joined over tensor-parallel ranks.
    """
    packed, params, told, mine, outside = _gather(engine, optimizer)
    shards = shards_of(engine)
    whole: dict[Any, Any] = {}
    for index, param in params.items():
        if index in told:
            tensors = mine[index][1] if index in mine else []
            ranks, (_, skeleton) = told[index]
            whole[index] = _unpack(engine, skeleton, ranks, tensors, shards.get(id(param)))
    return {**packed, "state": {**whole, **outside} if engine.rank == 0 else {}}


def sharded_optimizer_state(engine: Engine, optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, Any]:
    """Return an optimizer's state for the whole model, with placeholders for tensors. Collective over all ranks.

    Args:
        engine: The engine, after `build`.
        optimizer: This rank's optimizer.
        prefix: Begins the tensors' names, which go on with the parameter's name and the state's.

    Returns:
        On rank 0 what ``optimizer.state_dict()`` returns in one process; elsewhere the states that this rank steps.

    Raises:
        HolmesError: A state cannot be cut over tensor-parallel ranks.
    """
    packed, params, told, mine, outside = _gather(engine, optimizer)
    shards, place, tp = shards_of(engine), engine.place, engine.plan.layout.tp
    found: dict[Any, Any] = {}
    for index, param in params.items():
        if index not in told or (engine.rank != 0 and index not in mine):
            continue
        own, shard = iter(mine[index][1] if index in mine else ()), shards.get(id(param))
        _, (name, skeleton) = told[index]

        def stand_in(slot: Any, path: tuple[str, ...]) -> Any:
            if not isinstance(slot, _Slot):
                return slot
            if slot.value is not None:
                return torch.tensor(slot.value, dtype=slot.dtype).reshape(slot.shape)
            part = Part(name="/".join((prefix, name, *path)), shape=slot.shape, dtype=slot.dtype)  # noqa: B023
            tensor = next(own, None)  # noqa: B023
            if tensor is not None and (shard is not None or place.tp == 0):  # noqa: B023
                part.tensor, part.chunks = tensor, local_chunks(slot.shape, shard, place.tp, tp)  # noqa: B023
            return placeholder(part)

        found[index] = map_tree(skeleton, stand_in)
    return {**packed, "state": {**found, **outside} if engine.rank == 0 else found}


_Told = dict[Any, tuple[Sequence[int], tuple[str, Any]]]
_Mine = dict[Any, tuple[Any, list[Tensor]]]


def _gather(
    engine: Engine, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[Any, Tensor], _Told, _Mine, dict[Any, Any]]:
    """Agree on the states that there are.

    Returns:
        What the optimizer packs; its parameters by number; on rank 0 (elsewhere only what is here) the holders of each
        state, its parameter's name and its form; this rank's states as form and tensors; rank 0's states of parameters
        outside the model.
    """
    packed = dict(optimizer.state_dict())
    params = _numbered(optimizer, packed["param_groups"])
    check_same(engine, [f"{index} {type(optimizer).__name__}" for index in params], "optimizer parameters")
    here, shards = _answers_for(engine), shards_of(engine)
    mine: dict[Any, tuple[Any, list[Tensor]]] = {}
    problem: HolmesError | None = None
    for index, param in params.items():
        if here.get(id(param)) and packed["state"].get(index):
            shard = shards.get(id(param))
            shape = tuple(param.shape) if shard is None else shard.local_shape(engine.plan.layout.tp)
            skeleton, tensors, odd = _pack(packed["state"][index], shape, shard)
            mine[index] = skeleton, tensors
            if odd is not None and shard is not None:
                problem = _odd_shape(optimizer, odd, shard)
    raise_together(problem, engine.groups.world)
    grid = engine.plan.grid
    holders = [grid.ranks[place.pp][place.dp] for place in map(grid.coordinates, range(grid.world_size))]
    messages: list[Any] = [{} for _ in holders]
    names: dict[int, str] = {}
    for name, _, _, slot_param in slots(engine.root):
        names.setdefault(id(slot_param), name)
    own = {index: (names[id(params[index])], skeleton) for index, (skeleton, _) in mine.items()}
    dist.gather_object(own, messages if engine.rank == 0 else None, dst=0, group=engine.groups.world)
    messages[engine.rank] = own
    told: _Told = {
        index: (holders[rank], skeleton)
        for rank in sorted(range(len(messages)), key=lambda r: r == holders[r][0])  # the joining ranks' word is last
        for index, skeleton in messages[rank].items()
    }
    outside = {i: state for i, state in packed["state"].items() if i not in params or id(params[i]) not in here}
    return packed, params, told, mine, outside


def load_optimizer_state(engine: Engine, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state that `full_optimizer_state` or one process made; this rank keeps what it steps.

    Not collective, except where the state comes from a sharded checkpoint (as in `state.load_state_dict`).

    Args:
        engine: The engine, after `build`.
        optimizer: This rank's optimizer.
        state: The whole state.

    Raises:
        HolmesError: The parameter groups do not fit, or a state cannot be split over tensor-parallel ranks.
    """
    assert engine.gradients is not None, "build() the engine first"
    groups = [{**group, "params": [_number(index) for index in group["params"]]} for group in state["param_groups"]]
    sizes = [[len(group["params"]) for group in both] for both in (groups, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise HolmesError(
            seen=f"the state has parameter groups of {sizes[0]} parameters, {type(optimizer).__name__} of {sizes[1]}",
            where="loading an optimizer's state",
            do="build the optimizer with the same parameters in the same groups as when the state was saved",
        )
    params = _numbered(optimizer, groups)
    in_model = {id(param): param for _, _, _, param in slots(engine.root)}
    kept: dict[Any, Any] = {}
    reads = Reads()
    for number, value in state["state"].items():
        index = _number(number)
        param = params.get(index)
        own = in_model.get(id(param))
        if own is None or (not own.is_meta and engine.gradients.steps(own)):
            kept[index] = _map(value, _cutter(engine, optimizer, param, reads))
    if has_placeholders(state["state"]):
        reads.run_together(engine.groups.world)
    optimizer.load_state_dict({**state, "state": kept, "param_groups": groups})


def _number(index: Any) -> Any:
    return int(index) if isinstance(index, str) and index.isdigit() else index


def _cutter(
    engine: Engine, optimizer: torch.optim.Optimizer, param: Tensor | None, reads: Reads
) -> Callable[[Any], Any]:
    shard = get_shard(param) if param is not None else None

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        part = part_of(value)
        fits = shard is not None and tuple(value.shape) == shard.full_shape
        if part is not None and (fits or shard is None or value.numel() == 1):
            return reads.want(part, shard if fits else None, engine.place.tp, engine.plan.layout.tp)
        if shard is not None and fits:
            return shard.take(value, engine.place.tp, engine.plan.layout.tp)
        if shard is not None and value.numel() != 1:
            raise _odd_shape(optimizer, value, shard)
        return value.clone()  # torch takes over what it is given, and the step would write into the caller's state

    return cut
