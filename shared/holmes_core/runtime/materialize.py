# SPDX-License-Identifier: Apache-2.0
"""Fill this rank's part of a model that was built on the meta device.

Called after `Engine.split` and before `apply_tensor_parallel`: each tensor-parallel rank fills the whole stage first,
so the peak is the stage's full part plus one tensor, not a share of it. Parameter objects stay the objects they were
(optimizers built before keep working), and so do ties and ``requires_grad``.

What was loaded lazily is read from its checkpoint; everything else is initialised by the model's own code, with random
numbers that depend on the seed and the tensor's name only: one, two or four stages start from the same weights. Every
tensor is watched: one that no code wrote (non-persistent buffers above all) is an error, never left as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from holmes_core.runtime import rng
from holmes_core.runtime.initialise import DONE_MARK, initialise, mark_done, uninitialised
from holmes_core.runtime.lazy import SOURCE_ATTRIBUTE, WeightSource, read_source
from holmes_core.runtime.split import slots

__all__ = ["MaterializeReport", "materialize", "materialize_whole", "needs_materialize"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaterializeReport:
    """What `materialize` did on this rank."""

    sources: tuple[str, ...] = ()
    """Checkpoints that were read."""
    loaded: tuple[str, ...] = ()
    """Parameters and buffers that came from a checkpoint."""
    initialised: tuple[str, ...] = ()
    """Parameters and buffers that the model's own code initialised."""
    missing: tuple[str, ...] = ()
    """Those of `initialised` that are parameters a checkpoint should have held."""
    bytes: int = 0
    """Size of all of them."""

    def lines(self) -> list[str]:
        """Return the report as lines for a person."""
        origin = f"{len(self.loaded)} from {', '.join(self.sources)}, " if self.sources else ""
        lines = [f"filled {self.bytes / 1e6:.1f} MB: {origin}{len(self.initialised)} tensors initialised"]
        if self.missing:
            lines.append(f"  not in the checkpoint, newly initialised: {', '.join(self.missing)}")
        return lines


def needs_materialize(root: nn.Module) -> bool:
    """Whether a model that was not split yet holds parameters on the meta device."""
    return any(param.is_meta for param in root.parameters())


def materialize_whole(root: nn.Module, *, device: torch.device | None = None, seed: int = 0) -> MaterializeReport:
    """Fill a whole model, for use in one process."""
    local = {name: True for name, _, _, _ in slots(root)}
    return materialize(root, local=local, device=device or torch.device("cpu"), seed=seed)


def materialize(
    root: nn.Module, *, local: Mapping[str, bool], device: torch.device, seed: int
) -> MaterializeReport:
    """Fill the parameters that this rank holds, and the buffers they need, where they are on the meta device.

    Call it on every rank after `Engine.split` and before `apply_tensor_parallel`; with tensor parallelism the peak is
    therefore the stage's full part. Tensors that are real already stay as and where they are.

    Args:
        root: The user's module.
        local: Parameter name, every alias, to whether this rank holds it.
        device: Where the tensors go.
        seed: Seed of the run, equal on all ranks.

    Returns:
        What was done.

    Raises:
        HolmesError: A module has no code that initialises its parameters or buffers, or a checkpoint cannot be read.
    """
    part = _Part(device=device)
    part.collect(root, local)
    if not part.pending:
        return MaterializeReport()
    sources: list[str] = []
    for module in list(root.modules()):
        source = module.__dict__.get(SOURCE_ATTRIBUTE)
        if isinstance(source, WeightSource):
            read_source(module, source, wanted=part.wanted, put=part.put, device=device)
            sources.append(source.where)
            part.expected.update(
                id(value) for m, key in source.places.values() if (value := m._parameters.get(key)) is not None
            )
            del module.__dict__[SOURCE_ATTRIBUTE]
    loaded = tuple(part.filled)
    missing = tuple(name for key, name in part.pending.items() if key in part.expected)
    if missing:
        _log.warning("not in %s, newly initialised: %s", ", ".join(sources), ", ".join(missing))
    with torch.device("cpu"), rng.fork(device):
        _initialise(root, part, seed)
    return MaterializeReport(
        sources=tuple(sources),
        loaded=loaded,
        initialised=tuple(part.filled[len(loaded) :]),
        missing=missing,
        bytes=part.bytes,
    )


@dataclass(slots=True, kw_only=True)
class _Part:
    """The tensors that are to become real on this rank."""

    device: torch.device
    #: id of a meta tensor to its name; an entry goes once the tensor is filled.
    pending: dict[int, str] = field(default_factory=dict)
    #: id of a tensor to everywhere it is registered.
    places: dict[int, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    #: ids of buffers that may stay on the meta device: their module is not called here.
    optional: set[int] = field(default_factory=set)
    #: ids of parameters that a checkpoint should hold.
    expected: set[int] = field(default_factory=set)
    filled: list[str] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)
    bytes: int = 0

    def collect(self, root: nn.Module, local: Mapping[str, bool]) -> None:
        """Note the local parameters on the meta device and all buffers but those of absent blocks."""
        for name, module, key, param in slots(root):
            self.places.setdefault(id(param), []).append((module, key))
            if local[name] and param.is_meta:
                self.pending.setdefault(id(param), name)
        absent = _absent(root, local)
        for path, module in root.named_modules(remove_duplicate=False):
            how = absent.get(path, "")
            for key, buffer in module._buffers.items():
                if buffer is None or not buffer.is_meta or how == "block":
                    continue
                self.keep.append(buffer)
                self.places.setdefault(id(buffer), []).append((module, key))
                self.pending.setdefault(id(buffer), f"{path}.{key}" if path else key)
                if how:
                    self.optional.add(id(buffer))

    def wanted(self, module: nn.Module, key: str) -> bool:
        """Whether the tensor at this place is still to be filled."""
        return id(self.at(module, key)) in self.pending

    def put(self, module: nn.Module, key: str, value: Tensor) -> None:
        """Fill the tensor at this place, if it is wanted."""
        old = self.at(module, key)
        name = self.pending.pop(id(old), None) if old is not None else None
        if name is None or old is None:
            return
        self.filled.append(name)
        self.bytes += value.numel() * value.element_size()
        self.replace(old, value, done=True)

    def replace(self, old: Tensor, value: Tensor, *, done: bool) -> None:
        """Put a real tensor wherever ``old`` is registered; a parameter stays the same object if torch can do that."""
        places = self.places.pop(id(old))
        if isinstance(old, nn.Parameter):
            new: Tensor = torch.Tensor._make_subclass(type(old), value, old.requires_grad)
            new.__dict__.update(old.__dict__)
            try:
                torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
                new = old
            except RuntimeError:  # something in C++, or a weak reference, holds it
                self.keep.append(old)  # its id must not be given away
                for module, key in places:
                    module._parameters[key] = cast(nn.Parameter, new)
        else:
            new = value
            for module, key in places:
                module._buffers[key] = new
        new.__dict__.pop(DONE_MARK, None)
        if done:
            setattr(new, DONE_MARK, True)
        self.places[id(new)] = places

    @staticmethod
    def at(module: nn.Module, key: str) -> Tensor | None:
        """Return the parameter or buffer at a place."""
        param = module._parameters.get(key)
        return param if param is not None else module._buffers.get(key)


def _absent(root: nn.Module, local: Mapping[str, bool]) -> dict[str, str]:
    """Return the modules all of whose parameters are elsewhere: path to ``"block"`` (in a list) or ``"single"``."""
    held: dict[str, bool] = {}
    for name, here in local.items():
        path = name.rpartition(".")[0]
        while path:
            held[path] = held.get(path, False) or here
            path = path.rpartition(".")[0]
    found: dict[str, str] = {}
    lists: set[str] = set()
    for path, module in root.named_modules(remove_duplicate=False):
        parent = path.rpartition(".")[0]
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            lists.add(path)
        if parent in found:
            found[path] = "block" if parent in lists or found[parent] == "block" else "single"
        elif path and held.get(path) is False:
            found[path] = "block" if parent in lists else "single"
    return found


def _initialise(root: nn.Module, part: _Part, seed: int) -> None:
    """Run the model's own initialisation for what is still pending."""
    blank: dict[str, Tensor] = {}
    optional: set[str] = set()
    for key, name in part.pending.items():
        place = part.places[key][0]
        old = cast(Tensor, part.at(*place))
        part.replace(old, torch.empty_like(old, device=part.device), done=False)
        blank[name] = cast(Tensor, part.at(*place))
        if key in part.optional:
            optional.add(name)
    forgotten = set(initialise(root, blank, seed=seed)) if blank else set()
    for name, tensor in blank.items():
        place = part.places[id(tensor)][0]
        if name in forgotten and part.at(*place) is not tensor:  # the module made a new one
            forgotten.discard(name)
        if name in forgotten & optional:
            part.replace(tensor, torch.empty_like(tensor, device="meta"), done=False)
            forgotten.discard(name)
            continue
        part.filled.append(name)
        part.bytes += tensor.numel() * tensor.element_size()
    if forgotten:
        raise uninitialised(root, [name for name in blank if name in forgotten])
    part.pending.clear()
    mark_done(root)
