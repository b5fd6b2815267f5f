# SPDX-License-Identifier: Apache-2.0
"""Adds the name "holmes" to Lightning's strategy registries.

There are four that do not know each other: the Trainer's and Fabric's, in `lightning` and in the stand-alone packages
`pytorch_lightning` and `lightning_fabric`. What is registered is a small factory: the strategy, and with it
torch.distributed, is imported only when somebody asks for it.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

__all__ = ["current_namespace", "register", "strategy_class"]

_NAME = "holmes"
_DESCRIPTION = "Pipeline, data and tensor parallel training across clusters with unequal networks (Holmes)."
# The preferred one first; the package whose presence is asked is the part before the dot.
_TRAINER_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def register(strategies: ModuleType) -> None:
    """Register "holmes" in one of Lightning's strategy registries; a second call changes nothing.

    Args:
        strategies: `lightning.pytorch.strategies`, `pytorch_lightning.strategies`, `lightning.fabric.strategies` or
            `lightning_fabric.strategies`, imported.
    """
    namespace = strategies.__name__.removesuffix(".strategies")
    if namespace in _TRAINER_NAMESPACES:
        registry, factory = strategies.StrategyRegistry, partial(_make_strategy, namespace)
    else:
        registry, factory = strategies.STRATEGY_REGISTRY, partial(_make_fabric_strategy, namespace)
    if _NAME not in registry:
        registry.register(_NAME, factory, description=_DESCRIPTION)


def current_namespace() -> str:
    """Return the Lightning namespace that this program uses: the one imported, else the one installed."""
    for namespace in _TRAINER_NAMESPACES:
        if namespace in sys.modules:
            return namespace
    for namespace in _TRAINER_NAMESPACES:
        if importlib.util.find_spec(namespace.partition(".")[0]) is not None:
            return namespace
    return _TRAINER_NAMESPACES[0]  # none installed: the import error names the package to install


def strategy_class(namespace: str) -> type[Any]:
    """Return HolmesStrategy built on `namespace` ("lightning.pytorch" or "pytorch_lightning")."""
    from holmes_lightning.strategy import make_strategy_class

    return make_strategy_class(namespace)


def _make_strategy(namespace: str, **kwargs: Any) -> Any:
    return strategy_class(namespace)(**kwargs)


def _make_fabric_strategy(namespace: str, **kwargs: Any) -> Any:
    from holmes_lightning.fabric import make_fabric_strategy_class

    return make_fabric_strategy_class(namespace)(**kwargs)
