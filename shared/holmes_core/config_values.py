# SPDX-License-Identifier: Apache-2.0
"""Read the values of single fields of a HolmesConfig, and refuse what they cannot be.

All of these raise a ConfigError that names the field, what was seen and what is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from holmes_core.cluster.host import ClusterSpec, expand_ranks
from holmes_core.errors import ConfigError, did_you_mean

__all__ = [
    "HARDWARE_KEYS",
    "check_int",
    "one_of",
    "read_clusters",
    "read_ints",
    "read_names",
    "read_placement",
    "read_rank_order",
    "read_seconds",
    "read_speeds",
    "refuse",
]

#: What a cluster may say of its hardware. `holmes plan` reads it (plan/hardware.py); a job finds out for itself.
HARDWARE_KEYS = (
    "gpu", "gpus", "memory", "tflops", "speed", "link", "bandwidth", "nics", "nic_rate", "ethernet_rate",
)  # fmt: skip

_PLACES = ("first", "last", "ends", "all")


def one_of(choices: Sequence[str]) -> str:
    """Return the choices in words."""
    return "one of: " + ", ".join(choices)


def refuse(name: str, value: object, allowed: str, *, options: Iterable[str] = (), word: str | None = None) -> NoReturn:
    """Raise a ConfigError that names a field, its value, what is allowed and what may have been meant.

    Args:
        name: The field.
        value: What was given.
        allowed: What may be given, in words.
        options: Words among which one may have been meant.
        word: The value as it is compared with them; None takes the value.

    Raises:
        ConfigError: Always.
    """
    hint = did_you_mean(word or value, options) if isinstance(value, str) else ""
    if isinstance(value, str) and (value.strip().isdigit() or value.lower() in ("true", "false", "none", "null")):
        hint = hint or f"; in yaml write {value.strip()} without quotes"
    raise ConfigError(
        seen=f"{name} is {value!r} ({type(value).__name__}){hint}",
        where=f"HolmesConfig.{name}",
        do=f"give {name} {allowed}",
    )


def check_int(name: str, value: object, *, at_least: int, of: object = None) -> None:
    """Refuse what is not a whole number of at least `at_least`; `of` is the sequence that it stands in."""
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        what = "a whole number" if of is None else "whole numbers like 4,4,3, each"
        refuse(name, value if of is None else of, f"{what}, {at_least} or more")


def read_seconds(name: str, value: object) -> float:
    """Return a positive, finite number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        refuse(name, value, "a positive number of seconds")
    return float(value)


def _sequence(name: str, value: object, example: str) -> list[Any] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return [part.strip() for part in value.strip("[]() ").split(",") if part.strip()]
    if not isinstance(value, Sequence) or not value:
        refuse(name, value, f"a list like {example}")
    return list(value)


def read_ints(name: str, value: object) -> tuple[int, ...] | None:
    """Return whole numbers, from a list or from words with commas."""
    items = _sequence(name, value, "[4, 4, 3]")
    if items is None:
        return None
    numbers = [int(item) if isinstance(value, str) and item.isdigit() else item for item in items]
    for number in numbers:
        check_int(name, number, at_least=0, of=value)
    if not numbers:
        refuse(name, value, "a list like [4, 4, 3]")
    return tuple(numbers)


def read_rank_order(value: object) -> tuple[int, ...] | None:
    """Return each rank once, from a list or from a word like 0-3,8-11."""
    order = None if value is None else expand_ranks(value, where="HolmesConfig.rank_order")
    if order is not None and (not order or sorted(order) != list(range(len(order)))):
        refuse("rank_order", value, "each rank from 0 to world size - 1, once")
    return order


def read_names(name: str, value: object) -> tuple[str, ...] | None:
    """Return different module names, from a list or from words with commas."""
    items = _sequence(name, value, "[model.layers.4, model.layers.8]")
    if items is None:
        return None
    if not items or not all(isinstance(item, str) and item for item in items) or len(set(items)) != len(items):
        refuse(name, value, "a list of different module names like [model.layers.4, model.layers.8]")
    return tuple(items)


def read_placement(value: object) -> dict[str, str]:
    """Return the place of each module."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) and key for key in value):
        refuse("placement", value, "a mapping like {model.rotary_emb: all}")
    for module, place in value.items():
        if place not in _PLACES:
            hint = did_you_mean(place, _PLACES) if isinstance(place, str) else ""
            raise ConfigError(
                seen=f"{module!r} is placed on {place!r}{hint}",
                where=f"HolmesConfig.placement[{module!r}]",
                do=f"place it on {one_of(_PLACES)}",
            )
    return dict(value)


def read_speeds(value: object) -> dict[str, float]:
    """Return a positive speed for each cluster."""
    if not isinstance(value, Mapping):
        refuse("cluster_speeds", value, "a mapping like {a: 197, b: 160}")
    for name, speed in value.items():
        if isinstance(speed, bool) or not isinstance(speed, (int, float)) or not 0 < speed < math.inf:
            refuse("cluster_speeds", value, f"a positive number for each cluster; {name!r} has {speed!r}")
    return {str(name): float(speed) for name, speed in value.items()}


def read_clusters(value: object) -> tuple[ClusterSpec, ...] | None:
    """Return clusters; what they say of their hardware is not a job's."""
    specs = _sequence("clusters", value, "[{name: a, kind: infiniband, hosts: [n1, n2]}]")
    if specs is None:
        return None
    plain = [
        {key: part for key, part in spec.items() if key not in HARDWARE_KEYS} if isinstance(spec, Mapping) else spec
        for spec in specs
    ]
    return tuple(ClusterSpec.parse(spec, where=f"HolmesConfig.clusters[{index}]") for index, spec in enumerate(plain))
