# SPDX-License-Identifier: Apache-2.0
"""Read a lab spec from yaml: every mistake is named with its place, everything but the clusters has a default."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from holmes_core.cluster.host import expand_hosts
from holmes_core.errors import ConfigError, did_you_mean
from holmes_core.lab.spec import FAULTS, LAB_KINDS, PORT_RATES, Fault, LabCluster, LabSpec

__all__ = ["load_spec", "parse_rate", "parse_spec"]

#: May stand at the top (for all clusters) and in a cluster (for this one).
_SHARED: dict[str, Any] = {
    "ranks_per_host": 1,
    "rdma_rate": "5gbit",
    "ethernet_rate": "200mbit",
    "cpu": "auto",
    "interfaces": None,
    "port_rate": 100,
}
_RATES = ("rdma_rate", "ethernet_rate", "uplink_rate")
_OWN = ("name", "kind", "hosts", "uplink_rate", "subnet_prefix")
_EXAMPLE = "clusters: [{name: a, kind: infiniband, hosts: 2}, {name: b, kind: roce, hosts: [b1, b2]}]"
_FAULT_EXAMPLE = "{fault: nic-slow, host: a1, nic: rdma, rate: 100mbit}"
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_LIMITS = (100, 128)  # clusters, hosts: what the addresses leave room for
_HOST = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?", re.IGNORECASE)
_INTERFACE = re.compile(r"[a-z][a-z0-9_.-]{0,14}", re.IGNORECASE)
_PREFIX = re.compile(r"[0-9a-f]{4}(:[0-9a-f]{4}){3}")


def load_spec(path: str | Path) -> LabSpec:
    """Read a lab spec from a yaml file.

    Raises:
        ConfigError: The file cannot be read, or something in it is wrong.
    """
    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            seen=f"{path}: {error.strerror}", do="name a yaml file, for example recipes/lab/two-clusters.yaml"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(seen=str(error), where=str(path), do="correct the yaml") from error
    return parse_spec(data, where=str(path))


def parse_spec(data: object, *, where: str = "lab spec") -> LabSpec:
    """Check a lab spec and fill in its defaults.

    Args:
        data: What the yaml file holds.
        where: Named in errors.

    Raises:
        ConfigError: Something is missing, unknown, contradictory or of the wrong type.
    """
    top = _mapping(data, where, ("clusters", "faults", *_SHARED), example=_EXAMPLE)
    entries = _list(top.get("clusters"), f"{where}, clusters", example=_EXAMPLE)
    if not entries:
        raise ConfigError(seen="no clusters", where=where, do=f"write {_EXAMPLE}")
    shared = _SHARED | {key: top[key] for key in _SHARED if key in top}
    read = [_cluster(entry, f"{where}, clusters[{i}]", i, shared) for i, entry in enumerate(entries)]
    names = [name for cluster in read for name in cluster["hosts"]]
    _unique([cluster["name"] for cluster in read], "cluster", where)
    _unique(names, "host", where)
    if len(read) > _LIMITS[0] or len(names) > _LIMITS[1]:
        do = "use at most {} clusters and {} hosts".format(*_LIMITS)
        raise ConfigError(seen=f"{len(read)} clusters, {len(names)} hosts", where=where, do=do)
    for cluster in read:
        if cluster["cpu"] == "auto":  # together no more than the machine has: waiting hosts must not lend their cores
            cluster["cpu"] = max(0.05, math.floor(100 * (os.cpu_count() or 1) / len(names)) / 100)
    clusters = tuple(LabCluster(**cluster) for cluster in read)
    faults = _list(top.get("faults") or [], f"{where}, faults", example=_FAULT_EXAMPLE)
    return LabSpec(
        clusters=clusters,
        faults=tuple(_fault(fault, f"{where}, faults[{i}]", clusters) for i, fault in enumerate(faults)),
    )


def parse_rate(value: object, *, where: str) -> int | None:
    """Return a rate in bit/s: ``5gbit``, ``200mbit``, ``1.5 Gbit/s``; None for ``unlimited``.

    Raises:
        ConfigError: It is no rate.
    """
    text = str(value).strip().lower().removesuffix("/s")
    if value is None or text == "unlimited":
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)", text)
    rate = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    if not 10_000 <= rate <= 10**12:  # below, the shaper would send less than one packet a second
        do = "write a rate like 5gbit, 200mbit or 64kbit (at least 10kbit), or unlimited"
        raise ConfigError(seen=f"rate {value!r}", where=where, do=do)
    return rate


def _cluster(data: object, where: str, index: int, shared: Mapping[str, Any]) -> dict[str, Any]:
    given = _mapping(data, where, (*_OWN, *_SHARED), example=_EXAMPLE)
    values = {**shared, **given}
    name = values.get("name", f"c{index + 1}")
    if not isinstance(name, str) or not _HOST.fullmatch(name):
        raise ConfigError(seen=f"name {name!r}", where=where, do="use letters, digits and '-' (yaml: in quotes)")
    kind = str(values.get("kind", "")).lower()
    if kind not in LAB_KINDS:
        seen = f"kind {kind!r}{did_you_mean(kind, LAB_KINDS)}" if kind else "no kind"
        raise ConfigError(seen=seen, where=where, do=f"use one of: {', '.join(LAB_KINDS)}")
    if kind == "ethernet":
        for key in ("rdma_rate", "port_rate", "subnet_prefix"):
            if key in given:
                do = "leave it out, or make it an infiniband or roce cluster"
                raise ConfigError(seen=f"{key} in a cluster of kind ethernet", where=where, do=do)
    rdma, ethernet = _interfaces(values["interfaces"], f"{where}, interfaces")
    rates = {key: parse_rate(values.get(key), where=f"{where}, {key}") for key in _RATES}
    return {
        "name": name,
        "kind": kind,
        "hosts": _hosts(values.get("hosts"), name, f"{where}, hosts"),
        "ranks_per_host": _whole(values["ranks_per_host"], f"{where}, ranks_per_host", 1, 64),
        **rates,
        "cpu": _cpu(values["cpu"], f"{where}, cpu"),
        "rdma": rdma,
        "ethernet": ethernet,
        "port_rate": _port_rate(values["port_rate"], f"{where}, port_rate"),
        "subnet_prefix": _prefix(values.get("subnet_prefix", ""), f"{where}, subnet_prefix"),
    }


def _hosts(value: object, cluster: str, where: str) -> tuple[str, ...]:
    if isinstance(value, int) and not isinstance(value, bool):
        _whole(value, where, 1, _LIMITS[1])
        return tuple(f"{cluster}{number}" for number in range(1, value + 1))
    if value is None:
        raise ConfigError(seen="no hosts", where=where, do="write a number of hosts, or names like [n1, n2]")
    names = expand_hosts(value, where=where)
    for name in names:
        if not _HOST.fullmatch(name):
            raise ConfigError(seen=f"host name {name!r}", where=where, do="use letters, digits and '-', at most 42")
    if not names:
        raise ConfigError(seen="no hosts", where=where, do="write a number of hosts, or names like [n1, n2]")
    return names


def _interfaces(value: object, where: str) -> tuple[str, str]:
    names = {"rdma": "rdma0", "ethernet": "eth0"}
    example = "{rdma: ens1, ethernet: ens2}"
    if value is not None:
        names |= _mapping(value, where, tuple(names), example=example)
    for name in names.values():
        if not isinstance(name, str) or not _INTERFACE.fullmatch(name) or name == "lo":
            raise ConfigError(seen=f"interface {name!r}", where=where, do=f"write names of 1-15 letters: {example}")
    _unique(list(names.values()), "interface", where)
    return names["rdma"], names["ethernet"]


def _cpu(value: object, where: str) -> float | str | None:
    if value is None or value == "none" or value == "auto":
        return "auto" if value == "auto" else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.05 <= value <= 1024:
        do = "write cores per host (0.05 or more), auto (the machine's cores / hosts), or none"
        raise ConfigError(seen=f"cpu {value!r}", where=where, do=do)
    return float(value)


def _port_rate(value: object, where: str) -> int:
    rate = value if isinstance(value, int) else (parse_rate(value, where=where) or 0) // 10**9
    if isinstance(value, bool) or rate not in PORT_RATES:
        do = f"write one of {', '.join(map(str, PORT_RATES))} (Gbit/s, what the card claims)"
        raise ConfigError(seen=f"port_rate {value!r}", where=where, do=do)
    return rate


def _prefix(value: object, where: str) -> str:
    if value != "" and not (isinstance(value, str) and _PREFIX.fullmatch(value.lower())):
        do = "write four groups of four hex digits in quotes, like 'fe80:0000:0000:0001'"
        raise ConfigError(seen=f"subnet_prefix {value!r}", where=where, do=do)
    return str(value).lower()


def _fault(data: object, where: str, clusters: Sequence[LabCluster]) -> Fault:
    given = _mapping(data, where, ("fault", "host", "nic", "rate"), example=_FAULT_EXAMPLE)
    kind, host = str(given.get("fault")), str(given.get("host"))  # as text: a list cannot be looked up
    if kind not in FAULTS:
        hint = did_you_mean(kind, FAULTS)
        do = "use one of: " + "; ".join(f"{name} ({text})" for name, text in FAULTS.items())
        raise ConfigError(seen=f"fault {kind!r}{hint}", where=where, do=do)
    by_host = {name: cluster for cluster in clusters for name in cluster.hosts}
    if host not in by_host:
        hint = did_you_mean(host, by_host)
        raise ConfigError(seen=f"host {host!r}{hint}", where=where, do=f"name one of: {', '.join(by_host)}")
    nic = ""
    if kind != "loopback-name":
        nic = _nic(given.get("nic"), by_host[host], where)
    if (kind == "nic-slow") != ("rate" in given):
        seen = f"{kind} {'without a' if kind == 'nic-slow' else 'with a'} rate"
        raise ConfigError(seen=seen, where=where, do=f"write for example {_FAULT_EXAMPLE}")
    rate = parse_rate(given["rate"], where=f"{where}, rate") if "rate" in given else None
    return Fault(fault=kind, host=host, nic=nic, rate=rate)


def _nic(value: object, cluster: LabCluster, where: str) -> str:
    names = {"ethernet": "ethernet", cluster.ethernet: "ethernet"}
    if cluster.kind != "ethernet":
        names |= {"rdma": "rdma", cluster.rdma: "rdma"}
    if str(value) not in names:
        seen = f"nic {value!r}{did_you_mean(str(value), names)}"
        raise ConfigError(seen=seen, where=where, do=f"name one of this host's: {', '.join(names)}")
    return names[str(value)]


def _mapping(data: object, where: str, allowed: Sequence[str], *, example: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise ConfigError(seen=f"{data!r}", where=where, do=f"write {example}")
    for key in data:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed)
            raise ConfigError(seen=f"unknown key {key!r}{hint}", where=where, do=f"use only: {', '.join(allowed)}")
    return dict(data)


def _list(data: object, where: str, *, example: str) -> list[object]:
    if data is None:
        return []
    if not isinstance(data, list):
        raise ConfigError(seen=f"{data!r}", where=where, do=f"write a list, like {example}")
    return data


def _whole(value: object, where: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(seen=f"{value!r}", where=where, do=f"write a whole number from {low} to {high}")
    return value


def _unique(names: Sequence[str], what: str, where: str) -> None:
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(seen=f"{what} {twice[0]!r} twice", where=where, do=f"give each {what} a name of its own")
