# SPDX-License-Identifier: Apache-2.0
"""Hand out what one replica has stepped for all (ZeRO-1's second half), on request while the next forward pass runs.

A parameter that is still on its way must not be read by anybody, nor written. While it is, it has a class of its own
whose torch functions wait first (`_Arriving`): modules, scripts, callbacks and checkpoints find the values of the
finished step. Blocks wait for all of theirs before they run, and the last one for everything: compiled kernels may read
parameters past torch's functions. Where values could be seen past both (a tensor with the same memory that somebody
keeps, TorchScript modules, anything compiled), everything is waited for at once. What stays unseen is said in
docs/slow-link.md.
"""

from __future__ import annotations

import atexit
import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from holmes_core.runtime.data_parallel import Count, by_dtype, flatten, unflatten_into
from holmes_core.runtime.torch_compat import anything_compiled, plainly, storage_is_shared

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
        stream: Of a GPU, that all later work on the parameters follows.
        waiting: Context of a wait.
    """

    def __init__(
        self,
        work: Any,
        flat: Tensor | None,
        params: Sequence[nn.Parameter],
        stream: Any,
        waiting: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.params = params
        self._work, self._flat, self._stream, self._waiting = work, flat, stream, waiting
        self._lock = threading.RLock()  # a signal handler may look at parameters while this thread waits

    def mark(self) -> None:
        """Let whoever looks at the parameters wait."""
        with self._lock:
            for param in self.params:
                param._holmes_transfer = self  # type: ignore[attr-defined]
                param.__class__ = _Arriving
            if self._work is None:  # it has come already, perhaps to a signal handler in between
                self.give_up()

    def arrive(self, seconds: float | None = None) -> None:
        """Wait until the values are there.

        Args:
            seconds: At most; None: as long as the process group waits.

        Raises:
            RuntimeError: They will not come: the connection is lost, or the time is up.
        """
        if not self._lock.acquire(timeout=-1 if seconds is None else seconds):
            raise RuntimeError(f"another thread has waited for these parameters for more than {seconds:.0f} s")
        try:
            work, flat = self._work, self._flat
            if work is None:
                return
            with self._waiting(), torch.cuda.stream(self._stream):
                work.wait(*([] if seconds is None else [timedelta(seconds=seconds)]))
                if self._work is None:  # a signal handler of this thread was faster
                    return
                if flat is not None:
                    with plainly():  # whatever the reader does with tensors
                        unflatten_into(flat, [param.data for param in self.params])
            if self._stream is not None:
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self.give_up()
        finally:
            self._lock.release()

    def give_up(self) -> None:
        """Let nobody wait any more."""
        self._work = self._flat = None
        for param in self.params:
            _make_plain(param)


class _Arriving(nn.Parameter):
    """The class of a parameter whose values are on their way."""

    _holmes_transfer: _Transfer

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        return nn.Parameter(data, requires_grad)  # ``type(param)(values)``

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        found = False
        for param in _arriving_in((args, kwargs)):
            found = True
            _arrive(param)
        if found:
            return func(*args, **kwargs)
        for handed_out in list(_ALL):  # in something that is not looked into
            handed_out.end()
        with torch._C.DisableTorchFunctionSubclass():
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
    if getattr(param, "_holmes_transfer", None) in (None, transfer):  # not the next step's
        _make_plain(param)


def _make_plain(param: Any) -> None:
    if isinstance(param, _Arriving):
        param.__class__ = nn.Parameter  # type: ignore[assignment]
        param.__dict__.pop("_holmes_transfer", None)


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
        blocks: Those of its modules that wait for all of their parameters before they run (the last of them for all
            there are); others wait for their own.
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
        late: bool = False,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._params = list(params) if owner and self._size > 1 else []
        self._owner, self._group, self._count, self._waiting = owner, group, count, waiting
        self._root, self._late = root, late and bool(self._params)
        self._transfers: list[_Transfer] = []
        self._waits = self._who_waits(blocks) if self._late else []
        self._hooks: list[Any] = []
        if self._late:
            _ALL.add(self)
            atexit.register(_end, weakref.ref(self))

    def _who_waits(self, blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, _Wait]]:
        handed_out = set(self._params)
        inside: set[nn.Module] = set()
        found: list[tuple[nn.Module, list[nn.Parameter]]] = []
        for block in blocks:
            inside.update(block.modules())
            found.append((block, [p for p in block.parameters() if p in handed_out]))
        found = [(block, params) for block, params in found if params]
        if found:
            found[-1] = (found[-1][0], self._params)
        for module in self._root.modules():
            if module not in inside:
                found.append((module, [p for p in module.parameters(recurse=False) if p in handed_out]))
        return [(module, _Wait(params)) for module, params in found if params]

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
        # Looked up before anything is sent: what sends a parameter keeps a tensor with its memory, too.
        held = {p for p in self._params if late and (type(p) is not nn.Parameter or storage_is_shared(p))}
        transfers: list[_Transfer] = []
        with torch.no_grad():
            # Small ones first: the first block needs some of them. All are sent before any is waited for.
            for owner, params in small.items():
                for same in by_dtype(params):
                    transfers.append(self._send(flatten([p.data for p in same]), same, owner))
            for param in large:
                if param.data.is_contiguous():  # as it lies there: copies at both ends take as long as the way
                    transfers.append(self._send(param.data, [param], self._owner[param], in_place=True))
                else:
                    transfers.append(self._send(flatten([param.data]), [param], self._owner[param]))
        self._transfers = transfers
        if not late:
            self.end()
            return
        now = [transfer for transfer in transfers if not held.isdisjoint(transfer.params)]
        for transfer in transfers:
            if transfer not in now:
                transfer.mark()
        self._hooks = [module.register_forward_pre_hook(wait) for module, wait in self._waits]
        for transfer in now:
            transfer.arrive()

    def _send(self, flat: Tensor, params: Sequence[nn.Parameter], owner: int, *, in_place: bool = False) -> _Transfer:
        mine = owner == self._rank
        if mine:
            self._count(self._group, flat)
        stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        work = dist.broadcast(flat, group=self._group, group_src=owner, async_op=True)
        touched = [] if mine and not in_place else params  # a copy is sent: the owner has nothing to wait for
        return _Transfer(work, None if in_place or mine else flat, touched, stream, self._waiting)

    def _can_be_read_unseen(self) -> bool:
        return anything_compiled() or any(isinstance(one, torch.jit.ScriptModule) for one in self._root.modules())

    def end(self) -> None:
        """Wait for everything.

        Raises:
            RuntimeError: Some of it will not come.
        """
        transfers = self._transfers
        for transfer in transfers:  # kept until all are there: after an error they can be given up
            transfer.arrive()
        if self._transfers is transfers:  # other threads may end them, too
            self._forget()

    def flush(self) -> None:
        """Wait for everything that comes, whatever does not: who looks at that gets the error."""
        for transfer in self._transfers:
            with suppress(Exception):
                transfer.arrive()

    def give_up(self, seconds: float) -> None:
        """After a failure: wait for what still comes in some seconds. What does not is old, or half of it is."""
        end = time.monotonic() + seconds
        for transfer in self._transfers:
            with suppress(Exception):
                transfer.arrive(max(0.01, end - time.monotonic()))
            transfer.give_up()
        self._forget()

    def _forget(self) -> None:
        self._transfers = []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _end(ref: weakref.ref[HandOut]) -> None:
    """At the end of the process: others may still wait for what this rank sends."""
    handed_out = ref()
    if handed_out is not None:
        handed_out.flush()


def _end_all() -> None:
    """Before a fork: the child has no threads that could receive anything."""
    for handed_out in list(_ALL):
        handed_out.flush()


os.register_at_fork(before=_end_all)
