# SPDX-License-Identifier: Apache-2.0
"""Initialise parts of a model by its own code, so that the result does not depend on which part it is.

The modules' own functions run (`_init_weights` of transformers models, ``reset_parameters`` elsewhere), on the tensors
that are here. `_Watch` stands beneath them: it gives every random draw into a tensor numbers of that tensor's own,
keeps tensors that have their values already from being written, and knows which ones nobody wrote.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from holmes_core.errors import HolmesError
from holmes_core.runtime import rng

__all__ = ["DONE_MARK", "initialise", "mark_done", "uninitialised"]

#: transformers' mark on tensors and modules whose values must not be initialised again.
DONE_MARK = "_is_hf_initialized"


def initialise(root: nn.Module, blank: Mapping[str, Tensor], *, seed: int) -> list[str]:
    """Run the model's own initialisation for tensors with no values yet.

    Args:
        root: The model; parts of it may be on the meta device.
        blank: Name to tensor, a real one registered in the model.
        seed: Seed of the run. Numbers depend on it and on the tensors' names.

    Returns:
        Names that no code wrote.

    Raises:
        HolmesError: An adapter's parameters can only be made together with the weights they adapt.
    """
    watch = _Watch(seed=seed)
    watch.pending = {_storage(tensor): name for name, tensor in blank.items()}
    ids = {id(tensor) for tensor in blank.values()}
    for module in root.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not tensor.is_meta and id(tensor) not in ids:
                watch.protected.add(_storage(tensor))
    beneath = _ancestors(root, ids)
    adapters = _adapter_configs(root)
    with torch.no_grad(), watch:
        for path, module, owner in _in_order(root, "", None, set()):
            if id(module) not in beneath:
                continue
            torch.manual_seed(rng.seed_of(seed, _number(path)))
            if owner is not None:
                owner._init_weights(module)
            if any(not watch.written(tensor) for tensor in _own(module, ids)):
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
            if _is_adapter_layer(module) and any(
                id(tensor) in ids
                for name, child in module.named_children()
                if name != "base_layer"
                for tensor in child.parameters()
            ):
                _reset_adapter(path, module, adapters)
    return [name for name, tensor in blank.items() if not watch.written(tensor)]


def uninitialised(root: nn.Module, names: list[str]) -> HolmesError:
    """Return the error for tensors that no code initialises."""
    modules = dict(root.named_modules(remove_duplicate=False))
    by_module: dict[str, list[str]] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        by_module.setdefault(path, []).append(attribute)
    text = [f"{p or 'the root module'} ({type(modules[p]).__name__}): {', '.join(k)}" for p, k in by_module.items()]
    more = f" and {len(text) - 5} more" if len(text) > 5 else ""
    return HolmesError(
        seen=f"no code initialises {'; '.join(text[:5])}{more}",
        where="filling of a model that was built on the meta device",
        means="on the meta device a constructor's values are lost: parameters and buffers must be written again by"
        " the module's reset_parameters() (in transformers models: the model's _init_weights(module))",
        do="give the module a reset_parameters() that writes them; or make them on a real device:"
        ' self.register_buffer("mask", torch.ones(n, device="cpu")); or build the model without the meta device',
    )


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every write: draws by tensor name, loaded tensors protected, and which tensors were written at all."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed = seed
        #: Storage to the name of the tensor in it.
        self.pending: dict[int, str] = {}
        self.protected: set[int] = set()
        self._writes: dict[int, int] = {}

    def written(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 or _storage(tensor) in self._writes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        schema = func._schema
        targets = [
            value
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(value := args[index] if index < len(args) else kwargs.get(argument.name), Tensor)
        ]
        if not targets:
            return func(*args, **kwargs)
        target = targets[0]
        key = _storage(target)
        if key in self.protected:
            return target
        if key in self.pending:
            count = self._writes[key] = self._writes.get(key, 0) + 1
            if (
                torch.Tag.nondeterministic_seeded in func.tags
                and any(argument.name == "generator" for argument in schema.arguments)
                and kwargs.get("generator") is None
            ):
                number = rng.seed_of(self.seed, _number(self.pending[key]), count)
                kwargs["generator"] = torch.Generator(target.device).manual_seed(number)
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _own(module: nn.Module, blank: set[int]) -> list[Tensor]:
    return [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None and id(t) in blank]


def _ancestors(root: nn.Module, blank: set[int]) -> set[int]:
    """Return ids of the modules with a tensor to be initialised anywhere beneath them."""
    found: set[int] = set()

    def visit(module: nn.Module) -> bool:
        hits = [visit(child) for child in module.children()]
        if any(hits) or _own(module, blank):
            found.add(id(module))
            return True
        return False

    visit(root)
    return found


def _is_transformers(module: nn.Module) -> bool:
    return hasattr(module, "config") and hasattr(module, "initialize_weights") and hasattr(module, "_init_weights")


def _in_order(
    module: nn.Module, path: str, owner: Any, seen: set[int]
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield (path, module, the transformers model it belongs to), children first, as transformers does."""
    if id(module) in seen:
        return
    seen.add(id(module))
    owner = module if _is_transformers(module) else owner
    adapter = _is_adapter_layer(module)
    for name, child in module.named_children():
        theirs = None if adapter and name != "base_layer" else owner
        yield from _in_order(child, f"{path}.{name}" if path else name, theirs, seen)
    yield path, module, owner


def mark_done(root: nn.Module) -> None:
    """Tell transformers that nothing is left to initialise, as after its own loading."""
    for _, module, owner in _in_order(root, "", None, set()):
        if owner is not None:
            setattr(module, DONE_MARK, True)


# ---- adapters (PEFT) -----------------------------------------------------------------------------------------------
def _is_adapter_layer(module: nn.Module) -> bool:
    return hasattr(module, "adapter_layer_names") and hasattr(module, "base_layer")


def _adapter_configs(root: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in root.modules():
        configs = module.__dict__.get("peft_config")
        if isinstance(configs, dict):
            found.update(configs)
    return found


def _reset_adapter(path: str, module: nn.Module, configs: Mapping[str, Any]) -> None:
    """Initialise the adapters of one layer; LoRA's ways that look at the base weights are refused."""
    reset: Any = getattr(module, "reset_lora_parameters", None)
    how = {name: getattr(config, "init_lora_weights", None) for name, config in configs.items()}
    unknown = {name: way for name, way in how.items() if way not in (True, False, "gaussian")}
    if reset is None or not how or unknown:
        raise HolmesError(
            seen=f"{path} ({type(module).__name__}) holds an adapter ({unknown or 'no LoRA'})"
            " that was added before the weights it adapts were read",
            where="filling of a model that was built on the meta device",
            means="only LoRA's plain initialisations (True, False, gaussian) do without those weights",
            do="load the base model outside of lazy_loading(), or use LoraConfig(init_lora_weights=True)",
        )
    for name, way in how.items():
        if way is not False:  # False: plain linear layers, which they are by now
            reset(name, way)
