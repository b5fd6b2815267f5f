# SPDX-License-Identifier: Apache-2.0
"""The import hook by which the hosts (Lightning, Accelerate) find Holmes without an import in the user's script.

`activate` puts one finder on `sys.meta_path`. As soon as one of the modules in `_HOOKS` is imported, the function
named beside it is called with that module: it adds "holmes" to Lightning's strategy registry, for example. Nothing of
a host is imported from here, and nothing of Holmes beyond this file until a host is there.

Called by torch's autoload (through `_holmes_autoload`), by `import holmes_lightning` and by `holmes run`; calling it
again does nothing.

Two traps, both met in real hosts:
- torch is imported from *inside* the host, so when torch calls us a module we wait for may be half imported: it is
  in `sys.modules` without its registry, and no finder will be asked for it again. Such modules are looked at again at
  every later import.
- Several import hooks may wrap each other (editable installs, tracers). The finder asks the other finders for the
  real spec and guards against being asked back.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["ImportHook", "activate"]

# Module to wait for: (attribute that shows it is ready, "module:function" called with it).
_HOOKS: dict[str, tuple[str, str]] = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "holmes_lightning.registry:register"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "holmes_lightning.registry:register"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "holmes_lightning.registry:register"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "holmes_lightning.registry:register"),
    "accelerate.commands.launch": ("launch_command", "holmes_accelerate.registry:patch_launch"),
    "accelerate.state": ("AcceleratorState", "holmes_accelerate.registry:patch_state"),
    "accelerate.utils.operations": ("find_device", "holmes_accelerate.registry:patch_operations"),
    "accelerate.accelerator": ("Accelerator", "holmes_accelerate.registry:patch_accelerator"),
    "accelerate.local_sgd": ("LocalSGD", "holmes_accelerate.registry:patch_local_sgd"),
    "transformers.trainer": ("Trainer", "holmes_accelerate.registry:patch_trainer"),
}


class ImportHook:
    """A finder that finds nothing itself: it calls Holmes when a host's module has been imported."""

    def __init__(self) -> None:
        self._half_imported: set[str] = set()
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the real spec of a module in `_HOOKS`, with its loader calling us at the end; else None."""
        if self._half_imported:
            self.check_imported(list(self._half_imported))
        if fullname not in _HOOKS or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = self._real_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                self._call_after_exec(spec)
            return spec
        except Exception as error:
            _warn(fullname, error)
            return None  # the import goes on as if we were not there
        finally:
            self._searching.discard(fullname)

    def check_imported(self, names: Sequence[str] | None = None) -> None:
        """Serve those of these modules (all, if None) that are imported; remember those that are imported by half."""
        for name in list(_HOOKS) if names is None else names:
            ready, module = _HOOKS[name][0], sys.modules.get(name)
            if module is None:
                continue
            if ready in vars(module):
                # First out of the set, then the call: the call itself imports and comes back here.
                self._half_imported.discard(name)
                _call(name, module)
            else:
                self._half_imported.add(name)

    def _real_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                return spec
        return None

    def _call_after_exec(self, spec: ModuleSpec) -> None:
        # Shadow the method on this module's own loader instead of wrapping the loader: its type and its other
        # methods (get_source, get_code, resource readers) stay what the rest of Python expects.
        loader = spec.loader
        assert loader is not None
        exec_module = loader.exec_module

        def exec_module_then_call(module: ModuleType) -> None:
            exec_module(module)
            self._half_imported.discard(spec.name)
            _call(spec.name, module)

        loader.exec_module = exec_module_then_call  # type: ignore[method-assign]


def activate() -> None:
    """Install the import hook once, and serve the hosts that are imported already."""
    if not any(isinstance(finder, ImportHook) for finder in sys.meta_path):
        hook = ImportHook()
        sys.meta_path.insert(0, hook)
        hook.check_imported()


def _call(name: str, module: ModuleType) -> None:
    """Call the hook of `name`; a failure is a warning, because the host's own import must succeed without us."""
    try:
        target, _, function = _HOOKS[name][1].partition(":")
        getattr(importlib.import_module(target), function)(module)
    except Exception as error:
        _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    with contextlib.suppress(Warning):  # -W error: still no reason to break the host
        target = _HOOKS[name][1].partition(":")[0]
        warnings.warn(
            f"Holmes could not add itself to {name}: {type(error).__name__}: {error}. The import goes on without it. "
            f"`python -c 'import {target}'` shows whether that file is broken; HOLMES_AUTOLOAD=0 turns this off.",
            RuntimeWarning,
            stacklevel=3,
        )
