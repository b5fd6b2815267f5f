# SPDX-License-Identifier: Apache-2.0
"""Decide which stage holds which parameter, and take the others out of this process.

The user's module stays the object it was: same classes, same parameter names, same order. Parameters of other
stages become empty ones on the meta device: they keep their place in ``parameters()``, so optimizers, parameter
groups and checkpoints look the same on every rank, and cost no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from holmes_core.errors import ConfigError, HolmesError
from holmes_core.runtime.chain import Chain

__all__ = ["ParamEntry", "decide_stages", "drop_absent", "find_entries", "output_head", "slots", "stage_of_blocks"]

#: A module outside the blocks with more than this share of all parameters lives on one stage only.
_BIG = 0.02


@dataclass(slots=True, kw_only=True)
class ParamEntry:
    """One parameter of the user's module.

    Attributes:
        name: Its first name.
        aliases: All its names; more than one where weights are tied.
        numel: Its number of elements, whole.
        stages: The pipeline stages that hold it.
        local: Whether this rank holds it.
        owners: Global ranks that hold a copy for this rank's (dp, tp) place, one per pipeline rank, in stage order.
    """

    name: str
    aliases: tuple[str, ...]
    numel: int
    stages: frozenset[int]
    local: bool
    owners: tuple[int, ...] = ()


def slots(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield every place that holds a parameter: full name, module, attribute, parameter. Tied ones come twice."""
    for path, module in root.named_modules(remove_duplicate=False):
        for key, param in module._parameters.items():
            if param is not None:
                yield (f"{path}.{key}" if path else key), module, key, param


def find_entries(
    root: nn.Module,
    stages: Mapping[str, frozenset[int]],
    local: Mapping[str, bool],
    owners: Callable[[frozenset[int]], tuple[int, ...]],
) -> list[ParamEntry]:
    """Return the parameters of a module, each once, in the order of their first names.

    Args:
        root: The user's module, whole.
        stages: Parameter name to the stages that hold it.
        local: Parameter name to whether this rank holds it.
        owners: Stages to the global ranks that hold a copy.
    """
    found: dict[int, ParamEntry] = {}
    for name, _, _, param in slots(root):
        if (entry := found.get(id(param))) is not None:
            entry.aliases += (name,)
            continue
        where = stages[name]
        found[id(param)] = ParamEntry(
            name=name, aliases=(name,), numel=param.numel(), stages=where, local=local[name], owners=owners(where)
        )
    return list(found.values())


def stage_of_blocks(sizes: Sequence[int]) -> list[int]:
    """Return the stage of each block, from the number of blocks per stage."""
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


def output_head(root: nn.Module) -> nn.Module | None:
    """The output head of a transformers model inside ``root``, found by its accessor; None for other models."""
    for module in root.modules():
        accessor = getattr(module, "get_output_embeddings", None)
        if accessor is not None and hasattr(module, "config"):
            try:
                head = accessor()
            except (AttributeError, NotImplementedError):
                continue
            if isinstance(head, nn.Module):
                return head
    return None


def decide_stages(
    root: nn.Module, chain: Chain, sizes: Sequence[int], placement: Mapping[str, str] | None = None
) -> dict[str, frozenset[int]]:
    """Decide on which stages each parameter lives.

    Blocks live on their stage. Outside the blocks: embeddings on the first stage (small frozen ones, such as tables
    of positions, on all); the output head on the last; big modules (over 2 % of all parameters) on the first or the
    last, by the order of registration; everything else is small and lives on all stages, its gradients summed over
    them, which is right wherever it is used. So do the own parameters of modules around the blocks, and parameter
    lists, which are read without a call. Tied parameters live on the stages of all their names.

    Args:
        root: The user's module.
        chain: Its blocks.
        sizes: Blocks per stage.
        placement: Module name to ``"first"``, ``"last"``, ``"ends"`` or ``"all"``: the user's word on modules
            outside the blocks.

    Returns:
        Parameter name (every alias) to its stages.

    Raises:
        ConfigError: `placement` names no module.
        HolmesError: The model's loss needs something of every block.
    """
    if len(sizes) > 1:
        _refuse_router_loss(root)
    last = len(sizes) - 1
    everywhere = frozenset(range(len(sizes)))
    meaning = {"first": frozenset({0}), "last": frozenset({last}), "ends": frozenset({0, last}), "all": everywhere}
    placement = dict(placement or {})
    modules = dict(root.named_modules(remove_duplicate=False))
    unknown = [name for name in placement if name not in modules]
    if unknown:
        raise ConfigError(
            seen=f"placement names {unknown}, no module of {type(root).__name__}",
            where="placement",
            do=f"use full module names, such as {[n for n in modules if n][:6]}",
        )
    of_block = stage_of_blocks(sizes)
    in_block: dict[int, set[int]] = {}  # blocks may share modules
    for index, block in enumerate(chain.blocks):
        for module in block.modules():
            in_block.setdefault(id(module), set()).add(of_block[index])
    steps = chain.names[0].split(".")
    around = {".".join(steps[:i]) for i in range(len(steps))}  # modules that contain the blocks
    head = output_head(root)
    in_head = _whole_head(modules, head, around)
    total = max(1, sum(p.numel() for p in root.parameters()))
    seen_chain = False
    wanted: dict[int, set[int]] = {}
    for path, module in modules.items():
        if id(module) in in_block:
            seen_chain = True
            stages = frozenset(in_block[id(module)])
        else:
            params = [p for p in module._parameters.values() if p is not None]
            own = sum(p.numel() for p in params)
            frozen = not any(p.requires_grad for p in params)
            called = path not in around and not isinstance(module, (nn.ParameterList, nn.ParameterDict))
            if isinstance(module, nn.Embedding):
                stages = everywhere if frozen and own <= _BIG * total else meaning["first"]
            elif id(module) in in_head:
                stages = meaning["last"]
            elif called and own > _BIG * total:
                stages = meaning["last" if seen_chain else "first"]
            else:
                stages = everywhere
            for name, where in placement.items():
                if path == name or path.startswith(f"{name}."):
                    stages = meaning[where]
        for param in module._parameters.values():
            if param is not None:
                wanted.setdefault(id(param), set()).update(stages)
    return {name: frozenset(wanted[id(param)]) for name, _, _, param in slots(root)}


def _whole_head(modules: Mapping[str, nn.Module], head: nn.Module | None, around: set[str]) -> set[int]:
    """The modules of the head: the outermost module that holds the output layer and does not hold the blocks."""
    for path, module in modules.items():  # parents come before their children
        if head is not None and path not in around and any(child is head for child in module.modules()):
            return {id(child) for child in module.modules() if not isinstance(child, nn.Embedding)}
    return set()


def _refuse_router_loss(root: nn.Module) -> None:
    for path, module in root.named_modules():
        if getattr(getattr(module, "config", None), "output_router_logits", False) is True:
            raise HolmesError(
                seen=f"{path or type(module).__name__}.config.output_router_logits is True: the loss has an auxiliary"
                " part over the router logits of every block",
                means="each pipeline stage runs some of the blocks only, so the last one cannot compute that loss",
                do="set output_router_logits to False in the model's config, or train with pp=1",
            )


def drop_absent(root: nn.Module, chain: Chain, local: Mapping[str, bool]) -> list[tuple[str, nn.Module]]:
    """Replace parameters that this rank does not hold by empty ones on the meta device.

    Args:
        root: The user's module, changed in place.
        chain: Its blocks; buffers of blocks with no local parameter go, too.
        local: Parameter name to whether this rank holds it.

    Returns:
        Modules outside the chain that lost a parameter (name, module): they must not be called here.
    """
    replaced: dict[int, nn.Parameter] = {}
    in_chain = {id(module) for block in chain.blocks for module in block.modules()}
    lost: dict[str, nn.Module] = {}
    for name, module, key, param in list(slots(root)):
        if local[name]:
            continue
        if id(param) not in replaced:
            empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            empty.__dict__.update(param.__dict__)
            replaced[id(param)] = empty
        module._parameters[key] = replaced[id(param)]
        if id(module) not in in_chain:
            lost[name.rpartition(".")[0]] = module
    absent_blocks = [b for b in chain.blocks if (p := list(b.parameters())) and all(x.is_meta for x in p)]
    for block in absent_blocks:
        for module in block.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = torch.empty_like(buffer, device="meta")
    return list(lost.items())
