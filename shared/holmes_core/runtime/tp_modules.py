# SPDX-License-Identifier: Apache-2.0
"""What a module does besides its own forward when it is part of a tensor-parallel region.

Each wrapper replaces the ``forward`` of one module *instance* and calls the old one, so that module objects, classes,
hooks and parameter names stay what they are. Parameters are looked up at each call, so whoever swaps them for the
time of a forward (FSDP2 does) is served. Wrappers can be copied with their model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from holmes_core.runtime.tp_collectives import (
    RandomFork,
    TensorParallelContext,
    copy_to_region,
    gather_partial,
    gather_replicated,
    gather_sections,
    reduce_from_region,
    split_to_region,
)

__all__ = [
    "AttentionCall",
    "Column",
    "ColumnGather",
    "EdgeIn",
    "EdgeOut",
    "EmbeddingCall",
    "ExpertsCall",
    "HeadCall",
    "LoraDropout",
    "NormGather",
    "NormSum",
    "RegionCall",
    "RegionState",
    "Row",
    "RowSplit",
    "Wrapper",
]


class RegionState:
    """What the modules of one region share during one forward."""

    def __init__(self, module: nn.Module, context: TensorParallelContext) -> None:
        """Note where dropout may come from: what the region's module calls by a name with "drop"."""
        self.context = context
        self._module = module
        self._fork = RandomFork(context)
        self._copies: list[tuple[Tensor, int, Tensor]] = []
        self._rates = tuple(
            name
            for name, value in vars(module).items()
            if "drop" in name and type(value) in (int, float)  # also p = 0 now: it may be changed later
        )
        self._dropouts = tuple(child for child in module.children() if isinstance(child, nn.Dropout))

    def copy_in(self, tensor: Tensor) -> Tensor:
        """Enter the region; q, k and v take the same input, whose gradient is then summed over ranks only once."""
        for original, version, copied in self._copies:
            if original is tensor and tensor._version == version and copied.requires_grad == _tracks(tensor):
                return copied
        copied = copy_to_region(tensor, self.context)
        self._copies.append((tensor, tensor._version, copied))
        return copied

    def drops(self) -> bool:
        """Whether dropout may happen inside the region now."""
        if not self._module.training:
            return False
        return any(getattr(self._module, name) > 0 for name in self._rates) or any(d.p > 0 for d in self._dropouts)

    def fork(self, device: torch.device) -> None:
        """Let random numbers differ between ranks from here on."""
        self._fork.enter(device)

    def join(self) -> None:
        """Let random numbers be equal on all ranks from here on."""
        self._fork.leave()

    def close(self) -> None:
        """Forget everything: the region's forward is over, or was broken off."""
        self._fork.leave()
        self._copies.clear()


def _tracks(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


class Wrapper:
    """Calls the module's old forward; subclasses add what tensor parallelism needs."""

    def __init__(self, module: nn.Module, state: RegionState) -> None:
        self.module = module
        self.state = state
        self.inner: Callable[..., Any] = module.forward

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The old forward: inspect.signature shows its parameters."""
        return self.inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward."""
        raise NotImplementedError


class Column(Wrapper):
    """Linear layer split by output: the whole input on every rank, a part of the output."""

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        tensor = self.state.copy_in(tensor)
        if isinstance(self.module, nn.Linear):
            return self.inner(tensor, *args, **kwargs)
        # Conv1D reshapes its output to an attribute that says the full width.
        weight, bias = self.module.weight, self.module.bias
        return functional.linear(tensor, weight.t(), bias)  # type: ignore[operator, arg-type]


class ColumnGather(Column):
    """Linear layer split by output whose output is joined at once: what follows is computed whole on every rank."""

    def __init__(self, module: nn.Module, state: RegionState, sections: tuple[int, ...]) -> None:
        super().__init__(module, state)
        self.sections = sections

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        try:
            return gather_sections(super().__call__(tensor, *args, **kwargs), self.sections, self.state.context)
        finally:
            self.state.close()


class Row(Wrapper):
    """Linear layer split by input: partial sums are added over the ranks, then the bias once."""

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        module = self.module
        bias = module._parameters.get("bias")
        if not isinstance(module, nn.Linear):
            partial = functional.linear(tensor, module.weight.t())  # type: ignore[operator]
        elif type(module).forward is nn.Linear.forward:
            partial = functional.linear(tensor, module.weight)
        else:
            module._parameters["bias"] = None
            try:
                partial = self.inner(tensor, *args, **kwargs)
            finally:
                module._parameters["bias"] = bias
        total = reduce_from_region(partial, self.state.context)
        return total if bias is None else total + bias.to(total.dtype)


class RowSplit(Row):
    """Linear layer split by input that is given the whole input."""

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        return super().__call__(split_to_region(tensor, -1, self.state.context), *args, **kwargs)


class EdgeIn(Wrapper):
    """Random numbers: equal on all ranks up to the end of a column-parallel layer (adapters included)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        self.state.join()
        output = self.inner(*args, **kwargs)
        if self.state.drops() and isinstance(output, Tensor):
            self.state.fork(output.device)
        return output


class EdgeOut(Wrapper):
    """Random numbers: equal on all ranks again from the row-parallel layer on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        self.state.join()
        output = self.inner(*args, **kwargs)
        self.state.close()
        return output


class LoraDropout(Wrapper):
    """Dropout on the input of a row-parallel layer's adapter, where each rank holds other features."""

    def __call__(self, tensor: Tensor) -> Any:
        """Call the old forward; the class says what else happens."""
        if not self.module.training or self.module.p == 0:
            return self.inner(tensor)
        self.state.fork(tensor.device)
        try:
            return self.inner(tensor)
        finally:
            self.state.join()


@contextmanager
def _summed_gradients(module: nn.Module, context: TensorParallelContext) -> Iterator[None]:
    """Let the parameters of a module pass through a copy whose gradient is summed over the ranks.

    In the graph and not as a hook on the parameter: the sum then also happens for parameters that FSDP2 swaps in,
    under zero-bubble schedules and when activation checkpointing computes the forward again.
    """
    swapped: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for part in module.modules():
            own = part._parameters
            swapped.append((part, own))
            part.__dict__["_parameters"] = {
                name: None if value is None else copy_to_region(value, context) for name, value in own.items()
            }
        yield
    finally:
        for part, own in swapped:
            part.__dict__["_parameters"] = own


class NormSum(Wrapper):
    """A norm over the features of one head: whole on every rank, used on that rank's heads only."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        with _summed_gradients(self.module, self.state.context):
            return self.inner(*args, **kwargs)


class NormGather(Wrapper):
    """A norm over all heads at once: the parts are joined, normalised and cut again."""

    def __init__(self, module: nn.Module, state: RegionState, dim: int, full: int) -> None:
        super().__init__(module, state)
        self.dim = dim
        self.full = full

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        context = self.state.context
        if tensor.shape[self.dim] == self.full:  # used outside the region, on a whole tensor
            return self.inner(tensor, *args, **kwargs)
        with _summed_gradients(self.module, context):
            whole = self.inner(gather_partial(tensor, self.dim, context), *args, **kwargs)
        length = tensor.shape[self.dim]
        return whole.narrow(self.dim, context.rank * length, length)


class ExpertsCall(Wrapper):
    """Stacked experts split by their inner width: tokens and routing weights go in whole, partial sums come out."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        context = self.state.context

        def enter(value: Any) -> Any:
            return copy_to_region(value, context) if isinstance(value, Tensor) and value.is_floating_point() else value

        output = self.inner(*map(enter, args), **{name: enter(value) for name, value in kwargs.items()})
        return reduce_from_region(output, context)


class RegionCall(Wrapper):
    """An attention module or MLP: cleans up after itself, also when its forward is broken off."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.state.close()


class AttentionCall(RegionCall):
    """An attention module: cuts what it is given per head (ALiBi, masks with a dimension of heads)."""

    def __init__(self, module: nn.Module, state: RegionState, heads: int) -> None:
        super().__init__(module, state)
        self.heads = heads
        self.names = tuple(inspect.signature(self.inner).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        own = tuple(
            self._cut(name, value) for name, value in zip(self.names, args[: len(self.names)], strict=False)
        ) + tuple(args[len(self.names) :])
        return super().__call__(*own, **{name: self._cut(name, value) for name, value in kwargs.items()})

    def _cut(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        heads, context = self.heads, self.state.context
        local = heads // context.size
        if name in ("alibi", "position_bias") and value.dim() >= 3 and value.shape[0] % heads == 0:
            by_head = torch.unflatten(self._enter(value), 0, (-1, heads))  # (batch, heads, ...): Bloom folds the two
            return by_head.narrow(1, context.rank * local, local).flatten(0, 1)
        if ("mask" in name or "bias" in name or name == "alibi") and value.dim() == 4 and value.shape[1] == heads:
            return self._enter(value).narrow(1, context.rank * local, local)
        return value

    def _enter(self, value: Tensor) -> Tensor:
        return copy_to_region(value, self.state.context) if value.requires_grad else value


class HeadCall(Wrapper):
    """Output head split by vocabulary; the caller sees the logits of all words, and none for padding rows."""

    def __init__(self, module: nn.Module, state: RegionState, words: int) -> None:
        super().__init__(module, state)
        self.words = words

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        context = self.state.context
        part = self.inner(copy_to_region(tensor, context), *args, **kwargs)  # (..., words per rank)
        return gather_replicated(part, -1, context).narrow(-1, 0, self.words)


class EmbeddingCall(Wrapper):
    """Token embedding split by vocabulary: each rank looks up its own words, the rest is zero, and all are added."""

    def __init__(self, module: nn.Module, state: RegionState, words: int) -> None:
        super().__init__(module, state)
        self.words = words
        length = -(-words // state.context.size)
        self.first = state.context.rank * length
        self.length = length

    def __call__(self, ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call the old forward; the class says what else happens."""
        module, length = self.module, self.length
        shifted = ids - self.first
        elsewhere = (shifted < 0) | (shifted >= length)
        # A word that does not exist must fail as it does on one process, not read as zero.
        wrong = (ids < 0) | (ids >= self.words)
        local = shifted.masked_fill(elsewhere, 0).masked_fill(wrong, length)
        padding = module.padding_idx
        inside = padding is not None and 0 <= padding - self.first < length  # type: ignore[operator]
        module.padding_idx = padding - self.first if inside else None  # type: ignore[operator, assignment]
        try:
            vectors = self.inner(local, *args, **kwargs)
        finally:
            module.padding_idx = padding
        vectors = vectors.masked_fill(elsewhere.unsqueeze(-1), 0)
        return reduce_from_region(vectors, self.state.context)
