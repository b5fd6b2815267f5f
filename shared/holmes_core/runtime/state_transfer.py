# SPDX-License-Identifier: Apache-2.0
"""Which tensors a model has, which stage's value of each counts, and how one of them gets to rank 0.

Tensors travel as bytes over the world group (gloo), on CPU copies: gloo knows few dtypes, and no GPU communicator spans
the whole job.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.shard import TensorShard, get_shard
from holmes_core.runtime.split import slots
from holmes_core.runtime.tensor_parallel import plan_tensor_parallel

__all__ = ["Item", "ModelTensors", "check_same", "collect", "describe", "few", "raise_together", "shards_of"]

_MAX_DIMS = 8
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # gloo knows few dtypes; bytes are bytes


def _send(tensor: Tensor, to: int, group: dist.ProcessGroup) -> None:
    if tensor.numel():
        dist.send(_bytes(tensor), dst=to, group=group)


def _receive(shape: Sequence[int], dtype: torch.dtype, source: int, group: dist.ProcessGroup) -> Tensor:
    tensor = torch.empty(tuple(shape), dtype=dtype)
    if tensor.numel():
        dist.recv(_bytes(tensor), src=source, group=group)
    return tensor


def _cpu_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)  # contiguous, and never the live tensor itself
    return copy.copy_(tensor.detach())


def collect(
    engine: Engine,
    local: Tensor | None,
    shard: TensorShard | None,
    *,
    ranks: Sequence[int],
    shape: Sequence[int],
    dtype: torch.dtype,
    everywhere: bool = False,
) -> Tensor | None:
    """Bring one whole tensor to rank 0 (or to every rank).

    Args:
        engine: The engine.
        local: This rank's tensor, where it is one of the holders.
        shard: How the holders share it; None where each holds it whole.
        ranks: The holders: the ranks of one tensor-parallel group. The first joins the parts.
        shape: Shape of the whole tensor.
        dtype: Its dtype.
        everywhere: To every rank.

    Returns:
        The tensor on the CPU, or None on a rank that does not get it.
    """
    source, rank, world = ranks[0], engine.rank, engine.groups.world
    whole: Tensor | None = None
    if local is not None and rank in ranks and (rank == source or shard is not None):
        whole = _cpu_copy(local)
        if shard is not None and rank == source:
            parts = [whole, *(_receive(whole.shape, dtype, other, world) for other in ranks[1:])]
            whole = shard.merge(parts)
        elif rank != source:
            _send(whole, source, world)
            whole = None
    if everywhere:
        if whole is None:
            whole = torch.empty(tuple(shape), dtype=dtype)
        if whole.numel():
            dist.broadcast(_bytes(whole), src=source, group=world)
        return whole
    if source == 0:
        return whole
    if rank == source:
        assert whole is not None
        _send(whole, 0, world)
        return None
    return _receive(shape, dtype, source, world) if rank == 0 else None


@dataclass(slots=True, kw_only=True)
class Item:
    """One tensor of the model: this rank's view of it, and the stage whose value counts."""

    name: str
    tensor: Tensor
    stage: int
    shard: TensorShard | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape) if self.shard is None else self.shard.full_shape


class ModelTensors:
    """Finds the stage and the layout of parameters and buffers."""

    def __init__(self, engine: Engine) -> None:
        self._last = engine.num_stages - 1
        self._stage: dict[int, int] = {}
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self.buffers: list[tuple[str, nn.Module, str, Tensor]] = []
        named: dict[str, Tensor] = {}
        stages = {alias: entry.stages for entry in engine.entries for alias in entry.aliases}
        for name, _, _, param in slots(engine.root):
            self._stage.setdefault(id(param), min(stages.get(name, {self._last})))
            self.parameters.append((name, param))
            named[name] = param
        for name, module, key, buffer, stage in _buffers(engine, stages):
            self._stage.setdefault(id(buffer), stage)
            self.buffers.append((name, module, key, buffer))
            named[name] = buffer
        self._named = named

    def item(self, name: str, tensor: Tensor) -> Item:
        """Describe a value of a state dict: by its object, or by its name where a hook made another tensor of it."""
        shard = get_shard(tensor)
        stage = self._stage.get(id(tensor))
        if stage is None:
            known = self._named.get(name)
            stage = self._last if known is None else self._stage[id(known)]
            if known is not None and known.shape == tensor.shape:
                shard = get_shard(known)
        return Item(name=name, tensor=tensor, stage=stage, shard=shard)


def _buffers(engine: Engine, stages: Mapping[str, frozenset[int]]) -> Iterator[tuple[str, nn.Module, str, Tensor, int]]:
    """Yield every buffer with the stage whose value counts.

    Blocks: their stage. Elsewhere: the last stage, which runs the user's whole step, except for modules that it does
    not hold, and for those registered before the blocks, whose input may exist on the first stage only.
    """
    in_block: dict[int, int] = {}
    for index, block in enumerate(engine.chain.blocks):
        stage = next(w.stage for w in engine.windows if w.start <= index < w.stop)
        for module in block.modules():
            in_block.setdefault(id(module), stage)
    parts = engine.chain.names[0].split(".")
    around = {".".join(parts[:depth]) for depth in range(len(parts))}  # modules that contain the blocks
    last = engine.num_stages - 1
    seen_chain = False
    for path, module in engine.root.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if id(module) in in_block:
            seen_chain, stage = True, in_block[id(module)]
        else:
            stage = last if seen_chain or path in around else 0
            held = [stages[name] for key in module._parameters if (name := f"{prefix}{key}") in stages]
            stage = next((min(where) for where in held if stage not in where), stage)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{prefix}{key}", module, key, buffer, stage


def shards_of(engine: Engine) -> dict[int, TensorShard]:
    """Return id of each split parameter -> its layout; also after `restore_whole`, when optimizers still hold parts."""
    named = [(name, param) for name, _, _, param in slots(engine.root)]
    found = {id(param): shard for _, param in named if (shard := get_shard(param)) is not None}
    if not found and engine.plan.layout.tp > 1:
        planned = plan_tensor_parallel(engine.root, engine.chain.blocks, engine.plan.layout.tp)
        found = {id(param): planned[name] for name, param in named if name in planned}
    return found


def check_same(engine: Engine, words: Sequence[str], what: str) -> None:
    """Stop all ranks where they are about to exchange different lists: they would wait for each other forever."""
    digest = int.from_bytes(hashlib.sha256("\n".join(words).encode()).digest()[:7], "big")
    ends = torch.tensor([digest, -digest])
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=engine.groups.world)
    if int(ends[0]) != -int(ends[1]):
        raise HolmesError(
            seen=f"ranks name different {what}; rank {engine.rank} has {len(words)}, beginning with {list(words[:4])}",
            where="saving whole state",
            do="build the same model and optimizers on every rank; names must not depend on the rank",
        )


def describe(engine: Engine, items: Sequence[Item]) -> list[tuple[int, torch.dtype, tuple[int, ...], int]]:
    """Agree on every tensor: the row of its first appearance, its dtype and whole shape, how many ranks lack it."""
    table = torch.zeros(len(items), 5 + _MAX_DIMS, dtype=torch.int64)
    first: dict[int, int] = {}
    for row, item in enumerate(items):
        same = first.setdefault(id(item.tensor), row)
        table[row, 0] = int(item.tensor.is_meta or item.shard is not None)
        place, mine = engine.place, engine.pp_rank_of(item.stage)
        if (place.pp, place.dp, place.tp) != (mine, 0, 0) or item.tensor.is_meta:
            continue
        if len(item.shape) > _MAX_DIMS or item.tensor.dtype not in _DTYPES:
            continue
        values = (1, same, _DTYPES.index(item.tensor.dtype), len(item.shape), *item.shape)
        table[row, 1 : 1 + len(values)] = torch.tensor(values)
    dist.all_reduce(table, group=engine.groups.world)
    known = table[:, 1].tolist()
    if not all(known):
        empty = [item.name for item, there in zip(items, known, strict=True) if not there]
        raise HolmesError(
            seen=f"{len(empty)} tensors of the model have no values that can be saved: {few(empty)}",
            means="the stage that runs them holds them on the meta device, or in a form Holmes does not know",
            do="load weights into the model, or initialise it, before its state is saved",
        )
    return [
        (same, _DTYPES[dtype], tuple(shape[:dims]), lacking) for lacking, _, same, dtype, dims, *shape in table.tolist()
    ]


def raise_together(problem: Exception | None, group: dist.ProcessGroup) -> None:
    """Raise the problem of the lowest rank that has one, on all ranks. Collective over the group (on the CPU)."""
    flag = torch.tensor([int(problem is not None)])
    dist.all_reduce(flag, group=group)
    if int(flag):
        problems: list[Exception | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        raise next(found for found in problems if found is not None)


def few(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names, and how many more there are."""
    return ", ".join(map(repr, names[:limit])) + (f" and {len(names) - limit} more" if len(names) > limit else "")
