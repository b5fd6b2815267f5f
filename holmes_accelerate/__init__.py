# SPDX-License-Identifier: Apache-2.0
"""Holmes for Hugging Face Accelerate: ``accelerate launch --config holmes.yaml train.py``, the script unchanged.

In code: ``HolmesAccelerator(holmes_plugin=HolmesPlugin(pp=2))``, or
``Accelerator(kwargs_handlers=[HolmesPlugin(pp=2)])`` with the plugin imported from here.
"""

from __future__ import annotations

from typing import Any

from holmes_core.autoload import activate

__all__ = ["HolmesAccelerator", "HolmesPlugin"]

activate()


def __getattr__(name: str) -> Any:
    """Import the classes, and Accelerate with them, when they are asked for."""
    if name == "HolmesAccelerator":
        from holmes_accelerate.accelerator import HolmesAccelerator

        return HolmesAccelerator
    if name == "HolmesPlugin":
        from holmes_accelerate.plugin import HolmesPlugin
        from holmes_accelerate.registry import patch

        patch()
        return HolmesPlugin
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
