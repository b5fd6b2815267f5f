# SPDX-License-Identifier: Apache-2.0
"""What the import hook does to Accelerate and transformers: nothing in a process that was not started for Holmes.

A process was started for Holmes where ``HOLMES_CONFIG`` is set (the launcher does that), or where the script asks for
`holmes_accelerate.HolmesPlugin` itself.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from types import ModuleType
from typing import Any

__all__ = [
    "patch",
    "patch_accelerator",
    "patch_launch",
    "patch_local_sgd",
    "patch_operations",
    "patch_state",
    "patch_trainer",
]

_DONE = "_holmes_patched"


def _asked() -> bool:
    return bool(os.environ.get("HOLMES_CONFIG"))


def _once(owner: Any) -> bool:
    if _DONE in vars(owner):
        return False
    setattr(owner, _DONE, True)
    return True


def patch() -> None:
    """Patch what is imported already, whatever the environment says."""
    for name, function in (
        ("accelerate.utils.operations", _operations),
        ("accelerate.accelerator", _accelerator),
        ("accelerate.local_sgd", _local_sgd),
        ("transformers.trainer", _trainer),
    ):
        module = importlib.import_module(name) if name == "accelerate.accelerator" else sys.modules.get(name)
        if module is not None:
            function(module)


def patch_accelerator(module: ModuleType) -> None:
    """`Accelerator()` makes a HolmesAccelerator."""
    if _asked():
        _accelerator(module)


def _accelerator(module: ModuleType) -> None:
    cls = module.Accelerator
    if not _once(cls):
        return

    def __new__(kind: type, *args: Any, **kwargs: Any) -> Any:
        if kind is cls:
            from holmes_accelerate.plugin import take_plugin

            if _asked() or take_plugin(kwargs)[0] is not None:
                from holmes_accelerate.accelerator import HolmesAccelerator

                kind = HolmesAccelerator
        return object.__new__(kind)

    # Names imported before (`from accelerate import Accelerator`) keep working: the class object is the same.
    cls.__new__ = __new__


def patch_state(module: ModuleType) -> None:
    """The first `PartialState` (TrainingArguments makes one) must find the job's own control group, not make NCCL's."""
    cls = module.PartialState
    if not _asked() or not _once(cls):
        return
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        import torch

        from holmes_accelerate.process import enter, on_cpu

        cpu = cpu or on_cpu()
        if not cls._shared_state and "RANK" in os.environ:  # a worker of a launcher
            enter(cpu=cpu)
        init(self, cpu, **kwargs)
        if cls._shared_state["device"].type == "cpu":  # moving to cpu:0 would copy a whole model
            self.device = torch.device("cpu")

    cls.__init__ = __init__


def patch_operations(module: ModuleType) -> None:
    """`accelerate.utils.gather` and its like count replicas, as the methods of the accelerator do."""
    if _asked():
        _operations(module)


def _operations(module: ModuleType) -> None:
    if not _once(module):
        return
    for name in ("gather", "gather_object", "pad_across_processes", "reduce"):
        original = getattr(module, name)
        replaced = _of_replicas(original)
        # Modules of Accelerate that have imported the function already; a script comes later.
        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "").startswith("accelerate") and vars(other).get(name) is original:
                setattr(other, name, replaced)


def _of_replicas(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        from holmes_accelerate.process import accelerator

        current = accelerator()
        if current is None:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()  # those of the function, not of the method
        method = "_gather_objects" if original.__name__ == "gather_object" else original.__name__
        return getattr(current, method)(*given.args, **given.kwargs)

    return function


def patch_local_sgd(module: ModuleType) -> None:
    """LocalSGD averages whole models: refused where the model is split."""
    if _asked():
        _local_sgd(module)


def _local_sgd(module: ModuleType) -> None:
    if not _once(module.LocalSGD):
        return
    init = module.LocalSGD.__init__

    @functools.wraps(init)
    def __init__(self: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        refuse = getattr(accelerator, "_refuse_local_sgd", None)
        if refuse is not None and (args[2] if len(args) > 2 else kwargs.get("enabled", True)):
            refuse()
        init(self, accelerator, *args, **kwargs)

    module.LocalSGD.__init__ = __init__


def patch_trainer(module: ModuleType) -> None:
    """The Trainer of transformers saves on one rank; a split model is saved by all."""
    if _asked():
        _trainer(module)


def _trainer(module: ModuleType) -> None:
    if _once(module.Trainer):
        from holmes_accelerate.trainer import patch_saving

        patch_saving(module)


def patch_launch(module: ModuleType) -> None:
    """``accelerate launch`` learns ``--config`` and the section ``holmes_config:``."""
    from holmes_accelerate.launcher import teach

    if _once(module):
        teach(module)
