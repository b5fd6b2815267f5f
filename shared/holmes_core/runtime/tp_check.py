# SPDX-License-Identifier: Apache-2.0
"""Proof that a split block computes what the whole block computes, before a step is trained on it.

Names and shapes say how a block is split, and they can mislead: a fused projection of another layout trains without an
error, wrongly. So one block of each kind is built twice, whole and split, with the same random weights (real ones may
be zero or tiny and hide a mistake), and outputs and all gradients are compared. Only meta tensors are kept until then.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.shard import TensorShard, get_shard
from holmes_core.runtime.tp_collectives import TensorParallelContext
from holmes_core.runtime.tp_regions import Region
from holmes_core.runtime.tp_split import can_gather, split_region

__all__ = ["BlockCheck", "example_arguments", "meta_copy"]

_TOLERANCE = 2e-3  # float32, relative to the norm of what is compared; a wrong layout differs by about 1
_TOLERANCE_LOW = 8e-2  # 16 bit, outputs only
_FLOOR = 1e-3  # a gradient this much smaller than the largest is rounding (a key's bias: softmax does not see it)


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module whose parameters and buffers are on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for part in module.modules():
        if (config := vars(part).get("config")) is not None:
            memo[id(config)] = config
    result: nn.Module = copy.deepcopy(module, memo)
    return result.eval()


@contextmanager
def _quiet(device: torch.device) -> Iterator[None]:
    """Leave random state, autocast and hooks on saved tensors (offload, checkpointing) out of the check."""
    devices = [device] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        torch.enable_grad(),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """What one forward and backward gave."""

    output: Tensor
    input_grad: Tensor | None
    grads: dict[str, Tensor]


class BlockCheck:
    """The comparison for one kind of block: keeps a skeleton on the meta device and leaves the block as it is."""

    def __init__(
        self,
        *,
        name: str,
        block: nn.Module,
        context: TensorParallelContext,
        read: Callable[[nn.Module, str], list[Region]],
    ) -> None:
        """Keep the skeleton of the whole block; call before the block is split.

        Args:
            name: The block's name in the model.
            block: The block.
            context: The tensor-parallel group.
            read: Returns the regions of a copy of the block.
        """
        self.name = name
        self.kind = type(block).__name__
        self.failure: Exception | None = None
        self._block = block
        self._context = context
        self._read = read
        self._whole = meta_copy(block)

    def settle(self, args: Sequence[Any], kwargs: dict[str, Any], *, fixed: bool = False) -> frozenset[str] | None:
        """Find out how the block can be split so that it computes what the whole block computes.

        Args:
            args: Arguments of the block's forward; values of floating-point inputs do not matter, their shapes do.
            kwargs: The same by name.
            fixed: The block is split already, as it is by default.

        Returns:
            The kinds of regions whose inside must be computed whole (none, mostly); None where the whole block cannot
            be called with these arguments.

        Raises:
            HolmesError: No way of splitting gives the same.
        """
        device = next(tensor.device for tensor in _tensors((args, kwargs)))
        with _quiet(device):
            for dtype in (torch.float32, None):
                whole = self._run(self._fill(self._whole, {}, device, dtype), args, kwargs, dtype)
                if whole is not None:
                    break
            else:
                return None
            first = ""
            for gathered in ((),) if fixed else ((), ("attention",), ("mlp",), ("attention", "mlp")):
                skeleton, shards = self._split(frozenset(gathered))
                if skeleton is None:
                    continue
                split = self._run(self._fill(skeleton, shards, device, dtype), args, kwargs, dtype)
                reason = self._difference(whole, split, shards, low=dtype is None)
                if reason is None:
                    return frozenset(gathered)
                first = first or reason
        raise self._error(first)

    def _split(self, gathered: frozenset[str]) -> tuple[nn.Module | None, dict[str, TensorShard]]:
        """Return a split skeleton and the layouts of its parameters and buffers."""
        skeleton = copy.deepcopy(self._whole)
        regions = self._read(skeleton, self.name)
        if not gathered <= {region.kind for region in regions if can_gather(region)}:
            return None, {}
        names = {id(module): name for name, module in skeleton.named_modules()}
        shards: dict[str, TensorShard] = {}
        for region in regions:
            for owner, name, shard in region.shards:
                path = names[id(owner)]
                shards[f"{path}.{name}" if path else name] = shard
            split_region(region, self._context, gathered=region.kind in gathered)
        return skeleton, shards

    def _fill(
        self, skeleton: nn.Module, shards: dict[str, TensorShard], device: torch.device, dtype: torch.dtype | None
    ) -> nn.Module:
        """Return the block with random weights, equal on all ranks before they are cut, and its real buffers."""
        module = copy.deepcopy(skeleton)
        rank, size = self._context.rank, self._context.size
        shapes = {name: tuple(parameter.shape) for name, parameter in self._whole.named_parameters()}
        generator = torch.Generator(device).manual_seed(20220)
        for name, parameter in list(module.named_parameters()):
            shape = shapes[name]
            full = torch.randn(shape, generator=generator, device=device)
            full = full * shape[-1] ** -0.5 if len(shape) > 1 else full * 0.3 + 0.7
            if name in shards:
                full = shards[name].take(full, rank, size)
            _put(module, name, nn.Parameter(full.to(dtype or parameter.dtype)))
        for name, buffer in self._block.named_buffers(remove_duplicate=False):
            known = get_shard(buffer)
            full = buffer if known is None else known.merge(self._context.all_gather(buffer))
            if name in shards:
                full = shards[name].take(full, rank, size)
            _put(module, name, full.detach().clone().to(device))
        return module

    def _run(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype | None
    ) -> _Result | None:
        """Run forward and (float32 only) backward; None when the call fails."""
        args, kwargs = _map((args, kwargs), lambda tensor: _fresh(tensor, dtype))
        try:
            output = next(t for t in _tensors(module.forward(*args, **kwargs)) if t.is_floating_point())
        except Exception as error:  # any: the class is unknown, and its failure is an answer
            self.failure = error
            return None
        hidden = next((t for t in _tensors((args, kwargs)) if t.requires_grad), None)
        if dtype is None or hidden is None or not output.requires_grad:
            return _Result(output=output.detach(), input_grad=None, grads={})
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        torch.autograd.backward((output * weights).sum(), inputs=[hidden, *module.parameters()])
        grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        return _Result(output=output.detach(), input_grad=hidden.grad, grads=grads)

    def _difference(
        self, whole: _Result, split: _Result | None, shards: dict[str, TensorShard], *, low: bool
    ) -> str | None:
        """Say what differs, on all ranks alike."""
        reason = "its forward fails once it is split" if split is None else _compare(whole, split, low=low)
        failed = torch.tensor([0.0 if reason is None else 1.0], device=whole.output.device)
        if split is not None and reason is None:
            reason = self._compare_weights(whole, split, shards)
            failed[0] = 0.0 if reason is None else 1.0
        elif split is not None:  # the other ranks may be gathering in _compare_weights
            self._compare_weights(whole, split, shards)
        if float(self._context.all_reduce(failed)) == 0.0:
            return None
        return reason or "another rank of the group sees a difference"

    def _compare_weights(self, whole: _Result, split: _Result, shards: dict[str, TensorShard]) -> str | None:
        """Compare the gradients of all parameters; every rank takes part in every gathering."""
        largest = max((float(grad.norm()) for grad in whole.grads.values()), default=0.0)
        first = None
        for name, expected in whole.grads.items():
            grad = split.grads.get(name)
            if name in shards:
                shape = shards[name].local_shape(self._context.size)
                grad = grad if grad is not None else expected.new_zeros(shape)
                grad = shards[name].merge(self._context.all_gather(grad))
            distance = float("inf") if grad is None else _distance(grad, expected, _FLOOR * largest)
            if distance > _TOLERANCE and first is None:
                first = f"the gradient of {name} differs by {distance:.1e} of its size"
        return first

    def _error(self, what: str) -> HolmesError:
        error = HolmesError(
            seen=what,
            where=f"block {self.name} ({self.kind}) over {self._context.size} tensor-parallel ranks",
            means="this class splits or joins its heads in a way that tensor parallelism does not know",
            do="use tensor_parallel: 1 for this model, and report the class",
        )
        error.__cause__ = self.failure
        return error


def _compare(whole: _Result, split: _Result, *, low: bool) -> str | None:
    tolerance = _TOLERANCE_LOW if low else _TOLERANCE
    if (off := _distance(split.output, whole.output)) > tolerance:
        return f"its output differs by {off:.1e} of its size"
    if whole.input_grad is None:
        return None
    if split.input_grad is None or (off := _distance(split.input_grad, whole.input_grad)) > tolerance:
        return "the gradient of its input differs"
    return None


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, short = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(value, nn.Parameter):
        owner._parameters[short] = value
    else:
        owner._buffers[short] = value


def _fresh(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    tensor = tensor.detach().clone()
    if not tensor.is_floating_point():
        return tensor
    tensor = tensor.to(dtype or tensor.dtype)
    # Additive masks hold -inf or the smallest number: no gradient of interest, and autograd would make NaN of it.
    return tensor.requires_grad_(tensor.dim() == 3)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(item, function) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _distance(value: Tensor, reference: Tensor, floor: float = 0.0) -> float:
    if value.shape != reference.shape:
        return float("inf")
    size = max(float(reference.detach().float().norm()), floor, 1e-30)
    off = float((value.detach().float() - reference.detach().float()).norm()) / size
    return off if off == off else float("inf")  # NaN is a difference


def example_arguments(
    model: nn.Module, block: nn.Module, width: int, heads: int
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Propose arguments for a block's forward, from the names of its parameters.

    Args:
        model: The root module; its rotary embedding is asked for the position embeddings.
        block: The block.
        width: Hidden size.
        heads: Number of query heads.
    """
    parameter = next(block.parameters())
    hidden = torch.randn(1, 8, width, generator=torch.Generator().manual_seed(2)).to(parameter.device)
    positions = torch.arange(8, device=hidden.device).unsqueeze(0)
    names = list(inspect.signature(block.forward).parameters.values())[1:]
    kwargs: dict[str, Any] = {}
    for item in names:
        if item.kind in (item.VAR_KEYWORD, item.VAR_POSITIONAL):
            continue
        if item.name == "position_ids":
            kwargs[item.name] = positions
        elif item.name == "position_embeddings":
            kwargs[item.name] = _rotary(model, hidden, positions, _layer_type(block))
        elif item.default is item.empty:
            kwargs[item.name] = None
    yield (hidden,), kwargs
    bias = torch.randn(heads, 1, 8, generator=torch.Generator().manual_seed(3)).to(hidden.device)
    biases = {name: bias for name in ("alibi", "position_bias") if name in kwargs}
    if biases:
        yield (hidden,), kwargs | biases
        mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool, device=hidden.device)
        yield (hidden,), kwargs | biases | {"attention_mask": mask}


def _layer_type(block: nn.Module) -> Any:
    """Return what models with two rotary embeddings (Gemma 3) call the block's kind of attention."""
    for module in block.modules():
        for name in ("layer_type", "attention_type"):
            if isinstance(getattr(module, name, None), str):
                return getattr(module, name)
    return None


def _rotary(model: nn.Module, hidden: Tensor, positions: Tensor, kind: Any) -> Any:
    for module in model.modules():
        if "rotary" not in type(module).__name__.lower() or any(b.is_meta for b in module.buffers()):
            continue
        for extra in ({}, {"layer_type": kind}):
            try:
                with torch.no_grad():
                    return module(hidden, position_ids=positions, **extra)
            except Exception:  # another signature: the block is compared at its first call instead
                continue
    return None
