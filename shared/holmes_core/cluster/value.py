# SPDX-License-Identifier: Apache-2.0
"""The JSON form every Holmes value shares."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from holmes_core.errors import ConfigError, did_you_mean

__all__ = ["Value"]

_V = TypeVar("_V", bound="Value")


class Value:
    """Base of the frozen dataclasses between rooms: to JSON-ready dicts and back."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists, numbers and strings, ready for ``json.dump``."""
        return {field.name: _encode(getattr(self, field.name)) for field in _init_fields(type(self))}

    @classmethod
    def from_json(cls: type[_V], data: Mapping[str, Any]) -> _V:
        """Build the value back from ``to_json`` output (or from a hand-written file).

        Raises:
            ConfigError: A key is unknown or missing, or a value has the wrong type.
        """
        if not isinstance(data, Mapping):
            raise ConfigError(
                seen=f"{data!r}", where=cls.__name__, do=f"write {cls.__name__} as a mapping of its fields"
            )
        fields = {field.name: field for field in _init_fields(cls)}
        for key in data:
            if key not in fields:
                hint = did_you_mean(str(key), fields)
                raise ConfigError(
                    seen=f"unknown key {key!r}{hint}", where=cls.__name__, do=f"use only: {', '.join(fields)}"
                )
        for name, field in fields.items():
            required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if required and name not in data:
                raise ConfigError(seen=f"no key {name!r}", where=cls.__name__, do=f"add {name!r}")
        hints = _hints(cast(Hashable, cls))
        return cls(**{key: _decode(hints[key], value, f"{cls.__name__}.{key}") for key, value in data.items()})


def _init_fields(cls: type[Value]) -> tuple[dataclasses.Field[Any], ...]:
    return tuple(field for field in dataclasses.fields(cls) if field.init)  # type: ignore[arg-type]


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)


def _encode(value: Any) -> Any:
    if isinstance(value, Value):
        return value.to_json()
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    return value


def _decode(hint: Any, value: Any, where: str) -> Any:
    """Turn JSON data into what a type hint says; the hints used here are few and closed."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        inner = [arg for arg in args if arg is not type(None)]
        return _decode(inner[0], value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_decode(args[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _decode(args[1], item, f"{where}[{key!r}]") for key, item in value.items()}
    if origin is Literal:
        if value in args:
            return value
    elif isinstance(hint, type) and issubclass(hint, Value):
        return hint.from_json(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    wanted = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise ConfigError(seen=f"{value!r} ({type(value).__name__})", where=where, do=f"write a value of type {wanted}")
