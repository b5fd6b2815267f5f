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
from typing import Any

import torch
from torch import Tensor, nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.shard import TensorShard
from holmes_core.runtime.tp_collectives import TensorParallelContext

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


class BlockCheck:
    """The comparison for one block. ``run`` raises on a mismatch and can be called once weights are there."""

    def __init__(self, *, name: str, block: nn.Module, context: TensorParallelContext) -> None:
        """Keep the skeleton of the whole block; call before the block is split."""
        self.name = name
        self.kind = type(block).__name__
        self.context = context
        self.block = block
        self.whole = meta_copy(block)
        self.split: nn.Module | None = None
        self.shards: dict[str, TensorShard] = {}

    def after_split(self, shards: dict[str, TensorShard]) -> None:
        """Keep the skeleton of the split block.

        Args:
            shards: Layouts by parameter name inside the block.
        """
        self.split = meta_copy(self.block)
        self.shards = shards

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Compare on the given arguments (the values of floating-point inputs do not matter, their shapes do).

        Returns:
            False where the whole block cannot be called this way (the caller tries again with real arguments).

        Raises:
            HolmesError: The two blocks differ.
        """
        device = next(tensor.device for tensor in _tensors((args, kwargs)))
        with _quiet(device):
            for dtype in (torch.float32, None):
                if (whole := self._call(self._build(self.whole, device, dtype), args, kwargs, dtype)) is not None:
                    break
            else:
                return False
            assert self.split is not None
            split = self._call(self._build(self.split, device, dtype, split=True), args, kwargs, dtype)
            if split is None:
                raise self._error("its forward fails once it is split (the error is above)")
            self._compare(whole, split, backward=dtype is not None)
        return True

    def _build(
        self, skeleton: nn.Module, device: torch.device, dtype: torch.dtype | None, *, split: bool = False
    ) -> nn.Module:
        """Fill a skeleton with random weights, equal on all ranks before they are cut."""
        module = copy.deepcopy(skeleton)
        live = dict(self.block.named_buffers(remove_duplicate=False))
        full_shapes = {name: tuple(tensor.shape) for name, tensor in self.whole.named_parameters()}
        generator = torch.Generator(device).manual_seed(20220)
        for name, parameter in list(module.named_parameters()):
            wanted = dtype or parameter.dtype
            shape = full_shapes[name]
            full = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            full = full * shape[-1] ** -0.5 if len(shape) > 1 else full * 0.3 + 0.7
            if split and name in self.shards:
                full = self.shards[name].take(full, self.context.rank, self.context.size)
            owner, _, short = name.rpartition(".")
            module.get_submodule(owner)._parameters[short] = nn.Parameter(full.to(wanted))
        for name, buffer in live.items():
            owner, _, short = name.rpartition(".")
            value = buffer.detach().clone().to(device)
            module.get_submodule(owner)._buffers[short] = value
        return module

    def _call(
        self, module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype | None
    ) -> tuple[Tensor, Tensor, nn.Module] | None:
        """Return (hidden input, output, module), or None when the call fails."""
        args, kwargs = _map((args, kwargs), lambda tensor: _fresh(tensor, dtype))
        try:
            output = module.forward(*args, **kwargs)
        except Exception as error:
            self.failure: Exception = error
            return None
        leaves = [t for t in _tensors(output) if t.is_floating_point()]
        hidden = next((t for t in _tensors((args, kwargs)) if t.is_floating_point() and t.requires_grad), None)
        return None if hidden is None or not leaves else (hidden, leaves[0], module)

    def _compare(
        self, whole: tuple[Tensor, Tensor, nn.Module], split: tuple[Tensor, Tensor, nn.Module], *, backward: bool
    ) -> None:
        tolerance = _TOLERANCE if backward else _TOLERANCE_LOW
        if (off := _distance(split[1], whole[1])) > tolerance:
            raise self._error(f"output differs by {off:.1e} of its size")
        if not backward or not whole[1].requires_grad:
            return
        weights = torch.randn(whole[1].shape, generator=torch.Generator().manual_seed(1)).to(whole[1])
        for hidden, output, module in (whole, split):
            torch.autograd.backward((output * weights).sum(), inputs=[hidden, *module.parameters()])
        assert whole[0].grad is not None and split[0].grad is not None
        if (off := _distance(split[0].grad, whole[0].grad)) > tolerance:
            raise self._error(f"gradient of its input differs by {off:.1e} of its size")
        expected = {name: p.grad for name, p in whole[2].named_parameters() if p.grad is not None}
        largest = max((float(grad.norm()) for grad in expected.values()), default=0.0)
        for name, parameter in split[2].named_parameters():
            if name not in expected or parameter.grad is None:
                continue
            grad = parameter.grad
            if name in self.shards:
                grad = self.shards[name].merge(self.context.all_gather(grad))
            floor = _FLOOR * largest
            if (off := _distance(grad, expected[name], floor)) > tolerance:
                raise self._error(f"gradient of {name} differs by {off:.1e} of its size")

    def _error(self, what: str) -> HolmesError:
        error = HolmesError(
            seen=what,
            where=f"block {self.name} ({self.kind}) over {self.context.size} tensor-parallel ranks",
            means="this class splits or joins its heads in a way that tensor parallelism does not know yet",
            do="use tensor_parallel: 1 for this model, and report the class",
        )
        error.__cause__ = getattr(self, "failure", None)
        return error


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
            kwargs[item.name] = _rotary(model, hidden, positions)
        elif item.default is item.empty:
            kwargs[item.name] = None
    yield (hidden,), kwargs
    bias = torch.randn(heads, 1, 8, generator=torch.Generator().manual_seed(3)).to(hidden.device)
    biases = {name: bias for name in ("alibi", "position_bias") if name in kwargs}
    if biases:
        yield (hidden,), kwargs | biases
        mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool, device=hidden.device)
        yield (hidden,), kwargs | biases | {"attention_mask": mask}


def _rotary(model: nn.Module, hidden: Tensor, positions: Tensor) -> Any:
    for module in model.modules():
        if "rotary" not in type(module).__name__.lower() or any(b.is_meta for b in module.buffers()):
            continue
        try:
            with torch.no_grad():
                return module(hidden, position_ids=positions)
        except Exception:
            continue
    return None
