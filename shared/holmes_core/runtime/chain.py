# SPDX-License-Identifier: Apache-2.0
"""Find the chain of blocks along which a model can be cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from holmes_core.errors import HolmesError

__all__ = ["Chain", "find_chain"]

#: A second list of blocks with this share of the first one's parameters means two towers (encoder and decoder).
_SECOND_TOWER = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Blocks that are called one after another, each on what the one before returned.

    Attributes:
        path: Where they were found, e.g. ``model.model.layers``.
        names: Full name of each block within the root module.
        blocks: The modules.
        front_end: ``"block list"`` or ``"split points"``.
        starts: With split points: index of the first block of each stage.
    """

    path: str
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    front_end: str
    starts: tuple[int, ...] | None = None

    def sizes(self) -> tuple[int, ...] | None:
        """Blocks per stage, where split points fix them."""
        if self.starts is None:
            return None
        ends = (*self.starts[1:], len(self.blocks))
        return tuple(end - start for start, end in zip(self.starts, ends, strict=True))


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _within(path: str, other: str) -> bool:
    return not other or f"{path}.".startswith(f"{other}.")


def _items(container: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in container._modules.items() if module is not None]


def find_chain(root: nn.Module, split_points: Sequence[str] | None = None) -> Chain:
    """Find the blocks of ``root``.

    Args:
        root: The user's module: a model, or a LightningModule that holds one.
        split_points: Names of the modules with which the second, third, ... stage begin. They must be children of
            one module whose children are called in the order in which they were registered.

    Returns:
        The chain. Without split points it is the ModuleList (or Sequential) that holds most of the parameters.

    Raises:
        HolmesError: No such list, or two of them, or split points that name no sequence.
    """
    if split_points:
        return _chain_from_split_points(root, list(split_points))
    candidates = [
        (_numel(module), path, module)
        for path, module in root.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= 2
    ]
    candidates = [c for c in candidates if c[0] > 0]
    if not candidates:
        raise _no_blocks(root)
    best = max(candidates, key=lambda c: (c[0], -len(c[1])))
    while True:  # a list in one item of which most of the parameters sit is a wrapper around the real one
        inner = [c for c in candidates if c[1].startswith(f"{best[1]}." if best[1] else "") and c[2] is not best[2]]
        inner = [c for c in inner if c[0] > best[0] / 2 and len(c[2]) > 1]
        if not inner or _numel(max(best[2], key=_numel)) <= best[0] / 2:
            break
        best = max(inner, key=lambda c: c[0])
    rest = [c for c in candidates if not (_within(c[1], best[1]) or _within(best[1], c[1]))]
    if best[1] and rest:
        second = max(rest, key=lambda c: c[0])
        if second[0] > _SECOND_TOWER * best[0]:
            raise HolmesError(
                seen=f"{type(root).__name__} holds two lists of blocks: {best[1]!r} ({best[0]:,} parameters) and"
                f" {second[1]!r} ({second[0]:,} parameters)",
                means="a pipeline is one chain of blocks; encoder-decoder and two-tower models are not one",
                do="train it with pp=1, or name the stage borders inside one of them with split_points=[...]",
            )
    prefix = f"{best[1]}." if best[1] else ""
    items = _items(best[2])
    _refuse_repeats([(f"{prefix}{name}", module) for name, module in items])
    return Chain(
        path=best[1] or type(root).__name__,
        names=tuple(f"{prefix}{name}" for name, _ in items),
        blocks=tuple(module for _, module in items),
        front_end="block list",
    )


def _refuse_repeats(items: list[tuple[str, nn.Module]]) -> None:
    first: dict[int, str] = {}
    for name, module in items:
        if first.setdefault(id(module), name) != name:
            raise HolmesError(
                seen=f"{first[id(module)]!r} and {name!r} are the same module",
                means="a pipeline calls each block once, on one stage",
                do="make them separate modules (their parameters may be tied), or train with pp=1",
            )


def _no_blocks(root: nn.Module) -> HolmesError:
    return HolmesError(
        seen=f"no list of blocks in {type(root).__name__}: its children are"
        f" {', '.join(f'{n} ({type(m).__name__})' for n, m in root.named_children()) or 'none'}",
        where=f"class {type(root).__module__}.{type(root).__qualname__}",
        means="Holmes cuts a model between the items of its largest torch.nn.ModuleList or Sequential (two items or"
        " more, with parameters)",
        do='name the modules with which the later stages begin: split_points=["block3", "block6"]; or train with'
        " pp=1",
    )


def _chain_from_split_points(root: nn.Module, points: list[str]) -> Chain:
    modules = dict(root.named_modules())
    unknown = [name for name in points if name not in modules]
    parents = {name.rpartition(".")[0] for name in points}
    if unknown or len(parents) != 1:
        seen = (
            f"split points {unknown} name no module of {type(root).__name__}"
            if unknown
            else f"split points {points} belong to different parent modules ({sorted(parents)})"
        )
        raise HolmesError(
            seen=seen,
            where="split_points",
            means="stage borders must be children of one module, which calls its children one after another",
            do=f"choose among names such as {[n for n in modules if n][:8]}",
        )
    parent_path = parents.pop()
    parent = modules[parent_path]
    prefix = f"{parent_path}." if parent_path else ""
    items = _items(parent)
    if not isinstance(parent, (nn.ModuleList, nn.Sequential)):
        items = [(name, child) for name, child in items if _numel(child) > 0]
    names = [f"{prefix}{name}" for name, _ in items]
    missing = [name for name in points if name not in names]
    starts = [0, *(names.index(name) for name in points if name in names)]
    if missing or starts != sorted(set(starts)):
        raise HolmesError(
            seen=f"split points {points} are not in the order of {names}" if not missing else
            f"split points {missing} hold no parameters",
            where="split_points",
            means="each names the first module of a later stage, in the order in which the modules are called",
            do="list them in that order, each once, without the very first module",
        )
    return Chain(
        path=parent_path or type(root).__name__,
        names=tuple(names),
        blocks=tuple(module for _, module in items),
        front_end="split points",
        starts=tuple(starts),
    )
