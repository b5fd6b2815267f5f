# SPDX-License-Identifier: Apache-2.0
"""HolmesPlugin: the settings of Holmes as an object to hand to an Accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accelerate.utils import KwargsHandler

from holmes_core.config import HolmesConfig

__all__ = ["HolmesPlugin", "take_plugin"]


class HolmesPlugin(KwargsHandler):
    """What Holmes shall do; every keyword is a field of `holmes_core.config.HolmesConfig`.

    What is left out comes from the file in ``HOLMES_CONFIG``, else Holmes chooses.

    Raises:
        ConfigError: A key is unknown or a value is wrong.
    """

    def __init__(self, **settings: Any) -> None:
        self.config = HolmesConfig.load(kwargs=settings, env=os.environ)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings."""
        return dict(self.config.to_json())


def take_plugin(kwargs: Mapping[str, Any]) -> tuple[HolmesPlugin | None, dict[str, Any]]:
    """Take the plugin out of an Accelerator's keyword arguments (``holmes_plugin`` or among ``kwargs_handlers``)."""
    rest = dict(kwargs)
    plugin = rest.pop("holmes_plugin", None)
    handlers = list(rest.get("kwargs_handlers") or [])
    for handler in [h for h in handlers if isinstance(h, HolmesPlugin)]:
        plugin = plugin or handler
        handlers.remove(handler)
    if "kwargs_handlers" in rest:
        rest["kwargs_handlers"] = handlers or None
    return plugin, rest
