# SPDX-License-Identifier: Apache-2.0
"""Hand out what one replica has stepped for all, while the next forward pass already runs (ZeRO-1's second half).

A parameter that is still on its way must not be read by anybody, nor written. While it is, it has a class of its own
whose torch functions wait first (`_Arriving`): whatever looks at its values, module, script, callback or checkpoint,
finds those of the finished step. Blocks wait for all of theirs before they run: compiled kernels may read parameters
past torch's functions. Where values could be seen past both (a tensor with the same memory that somebody keeps,
TorchScript, compiled graphs), everything is waited for at once. What stays unseen: a CUDA graph of the whole model that
is replayed by hand.
"""

from __future__ import annotations

import atexit
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.runtime.data_parallel import Count, by_dtype, flatten, unflatten_into
from holmes_core.runtime.torch_compat import anything_compiled, storage_is_shared, without_torch_function

__all__ = ["HandOut"]

#: Bytes from which a parameter travels by itself.
_LARGE = 2**18
_PROPERTIES = ("grad", "requires_grad", "shape", "dtype", "device", "is_leaf", "grad_fn", "layout", "ndim", "nbytes",
               "itemsize", "is_cuda", "is_meta", "is_sparse", "_version")  # fmt: skip
_METHODS = ("size", "numel", "nelement", "dim", "stride", "element_size", "is_floating_point", "is_complex",
            "get_device", "is_contiguous", "register_hook", "register_post_accumulate_grad_hook")  # fmt: skip
#: What tells nothing of a parameter's values.
_HARMLESS = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(Tensor, name) for name in _METHODS]
    + [getattr(vars(torch._C.TensorBase)["grad"], name) for name in ("__set__", "__delete__")]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)


class _Transfer:
    """One broadcast on its way: a large parameter as it lies there, or small ones together.

    Args:
        work: The broadcast.
        flat: What it fills, if not the parameter itself, and this rank does not send it.
        params: The parameters that come with it.
        waiting: Context of a wait.
    """

    def __init__(
        self,
        work: Any,
        flat: Tensor | None,
        params: Sequence[nn.Parameter],
        waiting: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.params = params
        self._work, self._flat, self._waiting = work, flat, waiting
        self._lock = threading.Lock()

    def mark(self) -> None:
        """Let whoever looks at the parameters wait."""
        for param in self.params:
            param._holmes_transfer = self  # type: ignore[attr-defined]
            param.__class__ = _Arriving

    def arrive(self) -> None:
        """Wait until the values are there.

        Raises:
            RuntimeError: They will not come: the connection is lost, or the time is up.
        """
        with self._lock:
            if self._work is None:
                return
            with self._waiting():
                self._work.wait()
            with torch.no_grad(), without_torch_function():
                if self._flat is not None:
                    unflatten_into(self._flat, [param.data for param in self.params])
            self.give_up()

    def give_up(self) -> None:
        """Let nobody wait any more."""
        self._work = self._flat = None
        for param in self.params:
            if isinstance(param, _Arriving):
                param.__class__ = nn.Parameter  # type: ignore[assignment]
                del param._holmes_transfer


class _Arriving(nn.Parameter):
    """The class of a parameter whose values are on their way."""

    _holmes_transfer: _Transfer

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with without_torch_function():
                return func(*args, **kwargs)
        found = False
        for param in _arriving_in((args, kwargs)):
            found = True
            _arrive(param)
        if found:
            return func(*args, **kwargs)
        for handed_out in list(_ALL):  # in something that is not looked into
            handed_out.end()
        with without_torch_function():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _arrive(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _arrive(self)
        return self.__reduce_ex__(protocol)


def _arrive(param: Any) -> None:
    transfer = getattr(param, "_holmes_transfer", None)  # another thread may have waited in the meantime
    if transfer is not None:
        transfer.arrive()


def _arriving_in(value: Any) -> Iterator[_Arriving]:
    if type(value) is _Arriving:
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _arriving_in(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _arriving_in(one)


class _Wait:
    """A hook before a module's forward. An object that can be copied and pickled: so can a module that has it."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = params

    def __call__(self, *_: Any) -> None:
        for param in self._params:
            if type(param) is _Arriving:
                _arrive(param)


_ALL: weakref.WeakSet[HandOut] = weakref.WeakSet()


class HandOut:
    """Broadcasts of what this rank's replicas stepped for each other. All ranks of the group make the same calls.

    Args:
        params: The trainable parameters of this rank, in the order of the forward pass, the same on all ranks.
        owner: The rank of the group that steps each; empty: every rank steps all, nothing is handed out.
        group: The group.
        count: Told what is sent.
        root: The user's model.
        blocks: Those of its modules that wait for all of their parameters before they run; others wait for their own.
        late: Whether parameters may still be on their way when `begin` returns.
        waiting: Context of a wait.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        *,
        owner: Mapping[nn.Parameter, int],
        group: dist.ProcessGroup,
        count: Count,
        root: nn.Module,
        blocks: Iterable[nn.Module] = (),
        late: bool = True,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._params = list(params) if owner and self._size > 1 else []
        self._owner, self._group, self._count, self._waiting = owner, group, count, waiting
        self._root, self._late = root, late
        self._transfers: list[_Transfer] = []
        self._hooks: list[Any] = []
        if self._params and late:
            self._let_wait(blocks)
            _ALL.add(self)
            atexit.register(_end, weakref.ref(self))

    def _let_wait(self, blocks: Iterable[nn.Module]) -> None:
        handed_out = set(self._params)
        inside: set[nn.Module] = set()
        for block in blocks:
            inside.update(block.modules())
            self._add_hook(block, [p for p in block.parameters() if p in handed_out])
        for module in self._root.modules():
            if module not in inside:
                self._add_hook(module, [p for p in module.parameters(recurse=False) if p in handed_out])

    def _add_hook(self, module: nn.Module, params: list[nn.Parameter]) -> None:
        if params:
            self._hooks.append(module.register_forward_pre_hook(_Wait(params)))

    def begin(self) -> None:
        """Send what this rank has stepped, and let the rest come. Once per optimizer step."""
        self.end()
        if not self._params:
            return
        small: dict[int, list[nn.Parameter]] = {owner: [] for owner in range(self._size)}
        large: list[nn.Parameter] = []
        for param in self._params:
            if param.data.nbytes < _LARGE:
                small[self._owner[param]].append(param)
            else:
                large.append(param)
        late = self._late and not self._can_be_read_unseen()
        held = {
            param for param in self._params if not late or type(param) is not nn.Parameter or storage_is_shared(param)
        }
        with torch.no_grad():
            # Small ones first: the first block needs some of them. All are sent before any is waited for.
            for owner, params in small.items():
                for same in by_dtype(params):
                    self._send(flatten([p.data for p in same]), same, owner)
            for param in large:
                if param.data.is_contiguous():  # as it lies there: copies at both ends take as long as the way
                    self._send(param.data, [param], self._owner[param], in_place=True)
                else:
                    self._send(flatten([param.data]), [param], self._owner[param])
        for transfer in self._transfers:
            if held.isdisjoint(transfer.params):
                transfer.mark()
            else:
                transfer.arrive()

    def _send(self, flat: Tensor, params: Sequence[nn.Parameter], owner: int, *, in_place: bool = False) -> None:
        if owner == self._rank:
            self._count(self._group, flat)
        work = dist.broadcast(flat, group=self._group, group_src=owner, async_op=True)
        fills = None if in_place or owner == self._rank else flat
        self._transfers.append(_Transfer(work, fills, params, self._waiting))

    def _can_be_read_unseen(self) -> bool:
        return anything_compiled() or any(isinstance(one, torch.jit.ScriptModule) for one in self._root.modules())

    def end(self, *, wait: bool = True) -> None:
        """Nothing is on its way any more.

        Args:
            wait: Until it is there; otherwise, as after the failure of a rank, parameters stay what they are.
        """
        transfers = self._transfers
        for transfer in transfers:  # kept until all are there: after an error they can be given up
            if wait:
                transfer.arrive()
            else:
                transfer.give_up()
        if self._transfers is transfers:  # other threads may end them, too
            self._transfers = []

    def close(self) -> None:
        """Let no module wait any more."""
        self.end()
        for hook in self._hooks:
            hook.remove()


def _end(ref: weakref.ref[HandOut]) -> None:
    """At the end of the process: others may still wait for what this rank sends."""
    handed_out = ref()
    if handed_out is not None:
        with suppress(Exception):
            handed_out.end()
