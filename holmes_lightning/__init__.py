# SPDX-License-Identifier: Apache-2.0
"""Holmes for PyTorch Lightning: `Trainer(strategy="holmes")`, or `Trainer(strategy=HolmesStrategy(pp=2))`.

Importing this package registers the name "holmes" with every Lightning that is imported, before or after: `lightning`
and `pytorch_lightning` are two full copies of the code that do not accept each other's strategies. It imports neither
torch nor Lightning itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holmes_core.autoload import activate

if TYPE_CHECKING:
    from typing import Any

    HolmesStrategy: type[Any]

__all__ = ["HolmesStrategy"]

activate()


def __getattr__(name: str) -> object:
    """Build `HolmesStrategy` when it is asked for, on the Lightning that the program uses."""
    if name != "HolmesStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holmes_lightning.registry import current_namespace, strategy_class

    return strategy_class(current_namespace())


def __dir__() -> list[str]:
    return sorted([*globals(), "HolmesStrategy"])
