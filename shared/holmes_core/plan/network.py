# SPDX-License-Identifier: Apache-2.0
"""Which interface each of several hosts uses to reach the others: decided by networks, never by names."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from holmes_core.cluster.host import Host
from holmes_core.cluster.nic import Inventory, Nic

__all__ = ["ethernet_interfaces", "rail_interfaces"]


def ethernet_interfaces(hosts: Sequence[Host]) -> tuple[dict[str, str], str]:
    """Choose each host's interface for ordinary sockets between the given hosts.

    The network of the interface that each host prefers, if all hosts have it; else any other network all of them are
    on (islands whose Ethernets are not joined, but whose RDMA network carries IP); else each host's preferred
    interface, which then has to be routed.

    Args:
        hosts: Hosts with inventories.

    Returns:
        Interface per host name (empty if a host has none, or nobody looked), and how it was chosen.
    """
    if any(host.inventory is None for host in hosts):
        return {}, ""
    inventories = [host.inventory for host in hosts if host.inventory is not None]
    return _choose(hosts, [_preferred_first(inventory) for inventory in inventories])


def rail_interfaces(hosts: Sequence[Host]) -> tuple[dict[str, str], str]:
    """Choose each host's interface on the fabric that joins the given hosts (IP over its RDMA ports).

    Args:
        hosts: Hosts of one cluster, with inventories.

    Returns:
        Interface per host name (empty if a host's rails carry no IP, or nobody looked), and how it was chosen.
    """
    if any(host.inventory is None for host in hosts):
        return {}, ""
    return _choose(hosts, [list(host.inventory.rail_nics) for host in hosts if host.inventory is not None])


def _preferred_first(inventory: Inventory) -> list[Nic]:
    rails = set(inventory.rails)
    order = {True: 0, False: 1}
    usable = [nic for nic in inventory.nics if nic.usable]
    return sorted(usable, key=lambda nic: (order[nic.netdev == inventory.ethernet], nic.device in rails))


def _choose(hosts: Sequence[Host], nics: Sequence[Sequence[Nic]]) -> tuple[dict[str, str], str]:
    networks = [_networks(found) for found in nics]
    if not all(networks):
        return {}, ""
    for network in networks[0]:
        members = [found.get(network) for found in networks]
        # The same address on two hosts is a bridge that every host has for itself, not a network between them.
        if all(members) and len({member[1] for member in members if member}) == len(members):
            return {h.name: m[0] for h, m in zip(hosts, members, strict=True) if m}, f"all on {network}"
    first = [next(iter(found.values()))[0] for found in networks]
    return dict(zip([host.name for host in hosts], first, strict=True)), "no network in common: routed"


def _networks(nics: Sequence[Nic]) -> dict[str, tuple[str, str]]:
    """Return network -> (interface, address) in order of preference; the first interface on a network counts."""
    found: dict[str, tuple[str, str]] = {}
    for nic in nics:
        for text in nic.addresses if nic.netdev else ():
            try:
                address = ipaddress.ip_interface(text)
            except ValueError:
                continue
            found.setdefault(str(address.network), (nic.netdev, str(address.ip)))
    return found
