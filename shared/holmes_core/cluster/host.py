# SPDX-License-Identifier: Apache-2.0
"""Host and Cluster, what a user declares about them, and the JSON form every Holmes value shares."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from holmes_core.errors import ConfigError, did_you_mean

__all__ = ["CLUSTER_KINDS", "Cluster", "ClusterSpec", "Host", "Value", "expand_hosts", "expand_ranks"]

CLUSTER_KINDS = ("infiniband", "roce", "iwarp", "omnipath", "efa", "slingshot", "ethernet", "unknown")

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(Value):
    """One machine (one network namespace) and the global ranks that run on it, ascending."""

    name: str
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse a host on which nothing runs."""
        if not self.ranks:
            raise ConfigError(
                seen=f"host {self.name!r} has no rank", where="Host.ranks", do="leave hosts without ranks out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Value):
    """The hosts of one fabric that take part in the job."""

    name: str
    kind: str
    hosts: tuple[Host, ...]

    def __post_init__(self) -> None:
        """Check the kind."""
        _check_kind(self.kind, where=f"cluster {self.name!r}, kind")

    @property
    def ranks(self) -> tuple[int, ...]:
        """All global ranks of the cluster, host by host."""
        return tuple(rank for host in self.hosts for rank in host.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(Value):
    """What a user says about one cluster: its hosts, or (several clusters on one machine) its ranks.

    Args:
        name: Name in plans and messages; empty means ``cluster0``, ``cluster1``, ... by position.
        kind: Network that joins the hosts, one of CLUSTER_KINDS.
        hosts: Host names, as the hosts call themselves.
        ranks: Global ranks, instead of hosts.
    """

    name: str = ""
    kind: str = "unknown"
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    @classmethod
    def parse(cls, data: object, *, where: str) -> ClusterSpec:
        """Read one entry of ``clusters:`` (patterns and ranges are expanded)."""
        if isinstance(data, ClusterSpec):
            return data
        example = "{name: a, kind: infiniband, hosts: [n1, n2]} or {name: a, ranks: [0, 1]}"
        if not isinstance(data, Mapping):
            raise ConfigError(seen=f"{data!r}", where=where, do=f"write each cluster like {example}")
        allowed = ("name", "kind", "hosts", "ranks")
        for key in data:
            if key not in allowed:
                hint = did_you_mean(str(key), allowed)
                raise ConfigError(seen=f"unknown key {key!r}{hint}", where=where, do=f"write {example}")
        for key in ("name", "kind"):
            if not isinstance(data.get(key) or "", str):
                raise ConfigError(seen=f"{key} {data[key]!r}", where=where, do=f"write the {key} as text, in quotes")
        kind = str(data.get("kind") or "unknown").lower()
        _check_kind(kind, where=f"{where}.kind")
        hosts = expand_hosts(data.get("hosts") or (), where=f"{where}.hosts")
        ranks_in = data.get("ranks")
        ranks = () if ranks_in is None else expand_ranks(ranks_in, where=f"{where}.ranks")
        if bool(hosts) == bool(ranks):
            seen = "both hosts and ranks" if hosts else "neither hosts nor ranks"
            raise ConfigError(seen=seen, where=where, do=f"give exactly one of them: {example}")
        return cls(name=data.get("name") or "", kind=kind, hosts=hosts, ranks=ranks)


def _check_kind(kind: str, *, where: str) -> None:
    if kind not in CLUSTER_KINDS:
        hint = did_you_mean(kind, CLUSTER_KINDS)
        raise ConfigError(seen=f"kind {kind!r}{hint}", where=where, do=f"use one of: {', '.join(CLUSTER_KINDS)}")


def expand_hosts(spec: object, *, where: str) -> tuple[str, ...]:
    """Expand host names and patterns: ``"node[1-3]"``, ``"n[01-02,7]"``, ``["a", "b[1-2]"]``."""
    if isinstance(spec, str):
        spec = [part for part in re.split(r",(?![^\[]*\])", spec) if part.strip()]
    if not isinstance(spec, Sequence):
        raise ConfigError(seen=f"{spec!r}", where=where, do="write a list of host names, like [n1, n2] or [node[1-4]]")
    names: list[str] = []
    for item in spec:
        if not isinstance(item, str) or not item.strip():
            do = "write host names as text; in yaml a pattern needs quotes: ['node[1-4]']"
            raise ConfigError(seen=f"{item!r}", where=where, do=do)
        names.extend(_expand_pattern(item.strip(), where=where))
    return tuple(names)


def _expand_pattern(text: str, *, where: str) -> list[str]:
    found = re.fullmatch(r"([^\[\]]*)\[([0-9,\s-]+)\](.*)", text)
    if found is None:
        if "[" in text or "]" in text:
            raise ConfigError(seen=f"{text!r}", where=where, do="write a pattern like node[1-4] or node[01-04,7]")
        return [text]
    head, body, tail = found.groups()
    names: list[str] = []
    for part in body.split(","):
        low, _, high = (piece.strip() for piece in part.partition("-"))
        high = high or low
        if not low.isdigit() or not high.isdigit() or int(low) > int(high):
            raise ConfigError(
                seen=f"range {part!r} in {text!r}", where=where, do="write a range like 1-4, low end first"
            )
        width = len(low) if low.startswith("0") else 0
        names.extend(f"{head}{number:0{width}d}" for number in range(int(low), int(high) + 1))
    return [full for name in names for full in _expand_pattern(f"{name}{tail}", where=where)]


def expand_ranks(spec: object, *, where: str) -> tuple[int, ...]:
    """Expand ranks and ranges: ``[0, 1]``, ``"0-3"``, ``"0-1,4"``, ``["0-3", 8]``."""
    items = spec.split(",") if isinstance(spec, str) else [spec] if isinstance(spec, int) else spec
    do = "write a list of global ranks like [0, 1], or a range like '0-3'"
    if not isinstance(items, Sequence):
        raise ConfigError(seen=f"{spec!r}", where=where, do=do)
    ranks: list[int] = []
    for item in items:
        if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            ranks.append(item)
            continue
        found = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+))?\s*", item) if isinstance(item, str) else None
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ConfigError(seen=f"{item!r}", where=where, do=do)
        ranks.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(ranks)
