# SPDX-License-Identifier: Apache-2.0
"""Which hosts share a fabric: from what each found out about itself to clusters, each with the reason."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holmes_core.cluster.host import ClusterSpec
from holmes_core.cluster.nic import RDMA_KINDS, Inventory, Nic
from holmes_core.errors import ConfigError

__all__ = ["DEFAULT_PREFIX", "FABRIC_VARIABLE", "fabric_warnings", "group_hosts", "job_warnings"]

#: What InfiniBand ports carry until somebody configures the subnet manager: equal on fabrics that are not joined.
DEFAULT_PREFIX = "fe80:0000:0000:0000"
#: A host's own word on which fabric it is on: hosts with different values are never in one cluster.
FABRIC_VARIABLE = "HOLMES_FABRIC"

_TITLES = {
    "infiniband": "InfiniBand",
    "roce": "RoCE",
    "omnipath": "Omni-Path",
    "efa": "EFA",
    "slingshot": "Slingshot",
    "ethernet": "Ethernet",
}


@dataclass(slots=True)
class _Group:
    """Hosts that reach each other; `nets` are the networks that all of them are on, empty where none can be told."""

    kind: str
    declared: str
    nets: dict[str, None]
    hosts: list[Inventory] = field(default_factory=list)
    addresses: set[str] = field(default_factory=set)


def group_hosts(
    inventories: Sequence[Inventory], *, fabrics: Mapping[str, str] | None = None
) -> tuple[ClusterSpec, ...]:
    """Group hosts by the RDMA network they share; hosts without one form an Ethernet cluster.

    InfiniBand and Omni-Path hosts share a fabric if they have a subnet prefix in common (the default prefix counts as
    one), RoCE hosts if their rails have an IP network in common, EFA and Slingshot hosts by their kind. Where nothing
    can be told (no GID, no address) the same kind counts as the same fabric. What a user says goes before all of it.

    Args:
        inventories: One per host, names unique. Clusters and the hosts in them come in this order.
        fabrics: Host -> name of its fabric, as a user knows it; goes before the hosts' own HOLMES_FABRIC. Hosts with
            the same name and kind are one cluster, hosts with different names never are.

    Returns:
        Clusters named by kind and number (``infiniband-0``), each with its hosts and the reason.

    Raises:
        ConfigError: Two inventories have the same host name, or ``fabrics`` names a host that is not there.
    """
    _check_names(inventories, fabrics or {})
    groups: list[_Group] = []
    for inventory in inventories:
        kind = inventory.kind if inventory.kind in RDMA_KINDS and inventory.rail_nics else "ethernet"
        declared = _declared(inventory, fabrics or {})
        nets = dict.fromkeys(_networks(inventory)) if kind != "ethernet" else {}
        group = _best([group for group in groups if (group.kind, group.declared) == (kind, declared)], inventory, nets)
        if group is None:
            group = _Group(kind=kind, declared=declared, nets=nets)
            groups.append(group)
        elif nets and group.nets:
            group.nets = _common(group.nets, nets) if not declared else group.nets
        elif nets and not group.nets:
            group.nets = nets
        group.hosts.append(inventory)
        group.addresses |= _rail_addresses(inventory)
    numbers: dict[str, int] = {}
    clusters = []
    for group in groups:
        number = numbers[group.kind] = numbers.get(group.kind, -1) + 1
        clusters.append(
            ClusterSpec(
                name=f"{group.kind}-{number}",
                kind=group.kind,
                hosts=tuple(inventory.host for inventory in group.hosts),
                reason=_reason(group),
            )
        )
    return tuple(clusters)


def fabric_warnings(inventories: Sequence[Inventory], clusters: Sequence[ClusterSpec]) -> tuple[str, ...]:
    """Say what a person should know about a grouping: lost rails, hosts that fell back, groups that may be one.

    Args:
        inventories: What was grouped.
        clusters: What ``group_hosts`` made of it, or what a user declared.

    Returns:
        One sentence each, most important first.
    """
    by_name = {inventory.host: inventory for inventory in inventories}
    found = []
    for cluster in clusters:
        members = [by_name[host] for host in cluster.hosts if host in by_name]
        for inventory in members:
            if cluster.kind == "ethernet" and inventory.kind != "ethernet":
                continue  # declared so on purpose
            found += _host_warnings(inventory, cluster, inventories)
        if cluster.kind in RDMA_KINDS:
            found += _unequal_rails(cluster, members)
            found += _partial_subnets(cluster, members)
    found += _apart(clusters, by_name)
    return tuple(dict.fromkeys(found))


def job_warnings(inventories: Sequence[Inventory], clusters: Sequence[ClusterSpec]) -> tuple[str, ...]:
    """Return ``fabric_warnings`` and what each host warns of for itself, without saying the same thing twice."""
    grouped = fabric_warnings(inventories, clusters)
    own = [
        f"{inventory.host}: {text}"
        for inventory in inventories
        for text in inventory.warnings
        if not (
            text.startswith(("degraded:", "RDMA hardware that cannot be used"))
            and any(line.startswith(f"{inventory.host} ") for line in grouped)
        )
    ]
    return (*grouped, *own)


def _check_names(inventories: Sequence[Inventory], fabrics: Mapping[str, str]) -> None:
    names = [inventory.host for inventory in inventories]
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(
                seen=f"two hosts are called {name!r}",
                where="group_hosts",
                do="give each host a name of its own (HOLMES_HOST), or pass one inventory per host",
            )
    for name in fabrics:
        if name not in names:
            raise ConfigError(seen=f"host {name!r} is not in the job", where="fabrics", do=f"use: {', '.join(names)}")


def _declared(inventory: Inventory, fabrics: Mapping[str, str]) -> str:
    return fabrics.get(inventory.host) or dict(inventory.environment).get(FABRIC_VARIABLE, "")


def _networks(inventory: Inventory) -> list[str]:
    """Return what tells a host's fabric from another of its kind, rail by rail; empty where nothing does."""
    nics = inventory.rail_nics
    if inventory.kind in ("infiniband", "omnipath"):
        return [nic.subnet_prefix for nic in nics if nic.subnet_prefix]
    if inventory.kind == "roce":
        return [str(address.network) for nic in nics for address in _addresses(nic)]
    return []


def _addresses(nic: Nic) -> list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]:
    found = []
    for text in nic.addresses:
        try:
            found.append(ipaddress.ip_interface(text))
        except ValueError:
            continue
    return found


def _best(groups: Sequence[_Group], inventory: Inventory, nets: Mapping[str, None]) -> _Group | None:
    """Return the group with the most networks in common; the first of equals."""
    best, most = None, 0
    for group in groups:
        if group.declared or not nets or not group.nets:
            score = 1  # a user's word, or nothing that could tell them apart
        else:
            score = len(_common(group.nets, nets))
            # A host that has another's address is on a network of its own that only looks the same.
            if inventory.kind == "roce" and group.addresses & _rail_addresses(inventory):
                score = 0
        if score > most:
            best, most = group, score
    return best


def _common(one: Mapping[str, None], other: Mapping[str, None]) -> dict[str, None]:
    return dict.fromkeys(net for net in one if net in other)


def _rail_addresses(inventory: Inventory) -> set[str]:
    return {str(address.ip) for nic in inventory.rail_nics for address in _addresses(nic)}


def _reason(group: _Group) -> str:
    title = _TITLES[group.kind]
    if group.kind == "ethernet":
        fallen = [f"{i.host}: {why}" for i in group.hosts if (why := _why_no_rails(i))]
        text = "no RDMA network that a job could use"
        return text + (f" ({_few(fallen, separator='; ')})" if fallen else "")
    if group.declared:
        return f"{title}, declared as fabric {group.declared!r}"
    if len(group.hosts) == 1 and not group.nets:
        return title
    if not group.nets:
        return f"{title} on all hosts; nothing seen tells two fabrics of this kind apart"
    if group.kind in ("infiniband", "omnipath"):
        if set(group.nets) == {DEFAULT_PREFIX}:
            text = f"{title} with the default subnet prefix fe80::"
            return text + (", taken as one fabric" if len(group.hosts) > 1 else "")
        return f"{title}, subnet prefix {_few(list(group.nets))}"
    return f"{title}, {'all on' if len(group.hosts) > 1 else 'on'} {_few(list(group.nets))}"


def _why_no_rails(inventory: Inventory) -> str:
    """Return why a host with RDMA hardware has no rails; empty where there is no such hardware."""
    lost = [nic for nic in inventory.nics if nic.kind in RDMA_KINDS and not nic.usable]
    if inventory.rails or not lost:
        return ""
    return f"{lost[0].device}: {lost[0].reason or 'not usable'}" + (f" (+{len(lost) - 1})" if len(lost) > 1 else "")


def _host_warnings(inventory: Inventory, cluster: ClusterSpec, everyone: Sequence[Inventory]) -> list[str]:
    name = inventory.host
    if inventory.rails and inventory.missing_rails:
        total = len(inventory.rails) + inventory.missing_rails
        lost = [
            f"{nic.device}: {nic.reason}" for nic in inventory.nics if nic.kind == inventory.kind and not nic.usable
        ]
        return [
            f"{name} is degraded: {len(inventory.rails)} of {total} rails usable"
            + (f" ({_few(lost, separator='; ')})" if lost else "")
            + f"; it stays in {cluster.name}, whose collectives run at its speed"
        ]
    if why := _why_no_rails(inventory):
        others = [i for i in everyone if i.host != name and i.rails]
        odd = f", unlike {len(others)} of the other hosts" if others else ""
        return [f"{name} has RDMA hardware that it cannot use{odd}, so it trains over Ethernet: {why}"]
    return []


def _unequal_rails(cluster: ClusterSpec, members: Sequence[Inventory]) -> list[str]:
    counts = {inventory.host: len(inventory.rails) + inventory.missing_rails for inventory in members}
    if len(set(counts.values())) <= 1:
        return []
    shown = [f"{host} {rails}" for host, rails in counts.items()]
    return [f"{cluster.name}: the hosts have unequal numbers of rails ({_few(shown)}); the fewest sets the speed"]


def _partial_subnets(cluster: ClusterSpec, members: Sequence[Inventory]) -> list[str]:
    networks = {inventory.host: set(_networks(inventory)) for inventory in members}
    known = [nets for nets in networks.values() if nets]
    everywhere = set.intersection(*known) if known else set()
    found = []
    for host, nets in networks.items():
        if everywhere and nets - everywhere:
            extra = _few(sorted(nets - everywhere))
            found.append(f"{cluster.name}: {host} has rails on {extra}, where not every host of the cluster is")
    return found


def _apart(clusters: Sequence[ClusterSpec], by_name: Mapping[str, Inventory]) -> list[str]:
    """Routed RoCE looks like separate fabrics: only the user knows."""
    found = []
    roce = [cluster for cluster in clusters if cluster.kind == "roce"]
    undeclared = [
        c for c in roce if not any(_declared(by_name[host], {}) for host in c.hosts if host in by_name) and c.reason
    ]
    if len(undeclared) > 1:
        names = ", ".join(cluster.name for cluster in undeclared)
        found.append(
            f"{names} have no network in common and count as separate fabrics; if the network routes RoCE between "
            f"them, set {FABRIC_VARIABLE} to one value on all their hosts, or declare `clusters:`"
        )
    return found


def _few(items: Sequence[str], *, keep: int = 3, separator: str = ", ") -> str:
    if len(items) <= keep:
        return separator.join(items)
    return f"{separator.join(items[: keep - 1])}{separator}... ({len(items)} in all)"
