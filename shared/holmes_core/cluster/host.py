# SPDX-License-Identifier: Apache-2.0
"""Host and Cluster, and what a user declares about them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.value import Value
from holmes_core.errors import ConfigError, did_you_mean

__all__ = ["CLUSTER_KINDS", "Cluster", "ClusterSpec", "Host", "expand_hosts", "expand_ranks"]

CLUSTER_KINDS = ("infiniband", "roce", "iwarp", "omnipath", "efa", "slingshot", "ethernet", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(Value):
    """One machine (one network namespace).

    Args:
        name: Unique in the job.
        ranks: The global ranks that run on it, ascending.
        inventory: What it found out about itself; None where nobody looked (a plan made from a declaration).
    """

    name: str
    ranks: tuple[int, ...]
    inventory: Inventory | None = None

    def __post_init__(self) -> None:
        """Refuse a host on which nothing runs."""
        if not self.ranks:
            raise ConfigError(
                seen=f"host {self.name!r} has no rank", where="Host.ranks", do="leave hosts without ranks out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Value):
    """The hosts of one fabric that take part in the job.

    Args:
        name: Unique in the job.
        kind: The network that joins the hosts, one of CLUSTER_KINDS.
        hosts: Its hosts.
        reason: Why they are one cluster; empty where the user has said so.
    """

    name: str
    kind: str
    hosts: tuple[Host, ...]
    reason: str = ""

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
        reason: Why these hosts are one cluster, where that was found out; empty for what a user declares.
    """

    name: str = ""
    kind: str = "unknown"
    hosts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    reason: str = ""

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
