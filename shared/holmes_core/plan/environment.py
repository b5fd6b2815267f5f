# SPDX-License-Identifier: Apache-2.0
"""The variables that NCCL and gloo read: what a rank needs, and what a user has set that contradicts the plan.

NCCL reads most of them once per process, so they are one value per process and must suit all its groups; only the
network's name is an option of each communicator. (NCCL user guide, "Environment Variables".)
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence

from holmes_core.cluster.hca_list import NameList, exact_hcas, lint_hcas, lint_interfaces
from holmes_core.cluster.nic import RDMA_KINDS, Inventory
from holmes_core.errors import ConfigError
from holmes_core.plan.plan import Plan

__all__ = ["check_environment", "check_plan_environment", "environment_warnings", "nccl_variables"]

# Every member of a communicator must agree on these.
_SAME_EVERYWHERE = ("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_NET_PLUGIN", "NCCL_SOCKET_FAMILY", "NCCL_PROTO", "NCCL_ALGO")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def nccl_variables(plan: Plan, rank: int) -> dict[str, str]:
    """Return the NCCL variables that a rank's process needs for all its groups.

    Args:
        plan: A plan of a GPU job.
        rank: The rank.

    Returns:
        Variable -> value; empty where nobody looked at the host, or no group uses NCCL.
    """
    host = plan.topology.host_of(rank)
    groups = [group for group in plan.groups_of(rank) if group.transport.backend == "nccl"]
    if host.inventory is None or not groups:
        return {}
    inventory = host.inventory
    nets = {group.transport.net for group in groups}
    found: dict[str, str] = {}
    # With IB in none of its groups a process may still probe the devices; what it must not do is mix link types.
    if inventory.kind in ("infiniband", "roce") and (devices := exact_hcas(inventory)):
        found["NCCL_IB_HCA"] = devices
        indices = {nic.gid_index for nic in inventory.rail_nics}
        if inventory.kind == "roce" and len(indices) == 1 and None not in indices:
            found["NCCL_IB_GID_INDEX"] = str(indices.pop())
    if "OFI" in nets:
        found["NCCL_NET_PLUGIN"] = "ofi"
    # Bootstrap and Socket groups alike: every interface this rank's groups were given, local ones aside.
    wanted = {group.transport.interface_on(host.name) for group in groups if group.transport.kind != "local"}
    names = sorted(name for name in wanted if name)
    if names:
        found["NCCL_SOCKET_IFNAME"] = "=" + ",".join(names)
        nics = [nic for nic in inventory.nics if nic.netdev in names]
        if nics and all(":" in address for nic in nics for address in nic.addresses):
            found["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    return found


def check_environment(inventories: Sequence[Inventory], *, device_type: str) -> None:
    """Refuse variables that contradict each other or the hosts. Before any process group exists.

    Args:
        inventories: What each rank saw, its variables included, by global rank.
        device_type: ``cuda`` or ``cpu``; on the CPU only gloo's variables matter.

    Raises:
        ConfigError: Names the variable, the hosts and ranks, and the fix.
    """
    variables = [dict(inventory.environment) for inventory in inventories]
    several_hosts = len({inventory.host for inventory in inventories}) > 1
    for name in _INTERFACES if device_type == "cuda" else _INTERFACES[:1]:
        for rank, (inventory, seen) in enumerate(zip(inventories, variables, strict=True)):
            if seen.get(name):
                _check_interface(name, seen[name], rank, inventory, several_hosts=several_hosts)
        _check_partly_set(name, inventories, variables)
    if device_type != "cuda":
        return
    for name in _SAME_EVERYWHERE:
        values = {seen.get(name, "") for seen in variables}
        if len(values) > 1:
            raise ConfigError(
                seen=f"{name} is {_by_value(name, inventories, variables)}",
                where=f"environment, {name}",
                means="all members of a communicator must agree on it; where they do not, NCCL fails or hangs",
                do=f"unset {name} everywhere (Holmes chooses per group), or set it to one value on every host",
            )


def check_plan_environment(plan: Plan, inventories: Sequence[Inventory]) -> None:
    """Refuse variables that would override the networks a GPU plan has chosen per group.

    Raises:
        ConfigError: Names the variable, its value, a group that needs something else, and the fix.
    """
    for group in plan.groups:
        transport = group.transport
        if transport.backend != "nccl" or transport.net == "local":
            continue
        for rank in group.ranks:
            seen = dict(inventories[rank].environment)
            net = seen.get("NCCL_NET", "")
            if net and net.lower() != transport.net.lower() and transport.net != "OFI":
                _refuse(
                    "NCCL_NET",
                    net,
                    rank,
                    inventories[rank],
                    f"group {group.name} was to use {transport.net} "
                    f"({transport.reason}), and NCCL_NET overrides the network of every communicator",
                    "unset NCCL_NET: each group then gets the network that its members share",
                )
            if transport.net == "IB" and seen.get("NCCL_IB_HCA"):
                _check_hcas(seen["NCCL_IB_HCA"], rank, inventories[rank], group.name)
            disabled = seen.get("NCCL_IB_DISABLE", "")
            if disabled not in ("", "0") and transport.net == "IB":
                _refuse(
                    "NCCL_IB_DISABLE",
                    disabled,
                    rank,
                    inventories[rank],
                    f"group {group.name} was to use "
                    f"{transport.kind} ({transport.reason}); the variable turns InfiniBand and RoCE off in the process",
                    "unset NCCL_IB_DISABLE; to train over Ethernet on purpose declare the cluster with kind: ethernet",
                )


def _check_hcas(value: str, rank: int, inventory: Inventory, group: str) -> None:
    parsed = NameList.parse(value)
    chosen = [nic for nic in inventory.nics if nic.kind in RDMA_KINDS and parsed.selects(nic.device, nic.port)]
    kinds = sorted({nic.kind for nic in chosen if nic.usable})
    if len(kinds) == 1 or not inventory.rails:
        return
    means = (
        f"it selects ports of kinds {', '.join(kinds)}, which cannot meet in one communicator"
        if kinds
        else f"it leaves no usable port, and group {group} was to use one"
    )
    right = exact_hcas(inventory)
    do = "unset NCCL_IB_HCA: each host then gets the exact list of its rails" + (f", here {right}" if right else "")
    _refuse("NCCL_IB_HCA", value, rank, inventory, means, do)


def environment_warnings(inventories: Sequence[Inventory]) -> tuple[str, ...]:
    """Say what is odd, but not impossible, about lists of devices and interfaces that a user has set for NCCL."""
    found: dict[str, None] = {}
    several = len({inventory.host for inventory in inventories}) > 1
    for inventory in inventories:
        seen = dict(inventory.environment)
        lints = []
        if seen.get("NCCL_IB_HCA"):
            lints.append(lint_hcas(seen["NCCL_IB_HCA"], inventory))
        if seen.get("NCCL_SOCKET_IFNAME"):
            lints.append(lint_interfaces(seen["NCCL_SOCKET_IFNAME"], inventory, several_hosts=several))
        for lint in lints:
            for problem in lint.problems:
                better = f" (better: {lint.suggestion})" if lint.suggestion else ""
                found[f"{inventory.host}: {problem}{better}"] = None
    return tuple(found)


def _refuse(name: str, value: str, rank: int, inventory: Inventory, means: str, do: str) -> None:
    raise ConfigError(
        seen=f"{name}={value} is set", where=f"environment of rank {rank} on host {inventory.host}", means=means, do=do
    )


def _check_interface(name: str, value: str, rank: int, inventory: Inventory, *, several_hosts: bool) -> None:
    exact = name.startswith("GLOO")
    chosen = [
        nic
        for nic in inventory.nics
        if nic.netdev and (nic.netdev in value.split(",") if exact else NameList.parse(value).selects(nic.netdev))
    ]
    good = [nic.netdev for nic in inventory.nics if nic.usable and nic.netdev and nic.addresses]
    fix = f"unset {name} (Holmes then uses {inventory.ethernet or 'what the hosts share'}), or name one of: " + (
        ", ".join(dict.fromkeys(good)) or "(none of this host's interfaces can carry a job)"
    )
    loopback = value.strip("^=").split(",")[0] == "lo" and not value.startswith("^")
    if loopback and several_hosts:
        means = "no other host can be reached over the loopback interface"
        _refuse(name, value, rank, inventory, means, fix)
    if not loopback and inventory.nics and not chosen:
        means = "no interface of this host matches" + (
            "; gloo takes exact names" if exact else "; without '=' NCCL matches the beginning of a name"
        )
        _refuse(name, value, rank, inventory, means, fix)
    if several_hosts and chosen and not any(nic.addresses for nic in chosen):
        names = ", ".join(nic.netdev for nic in chosen)
        means = f"{names} has no global address" + "".join(f" ({nic.reason})" for nic in chosen[:1] if nic.reason)
        _refuse(name, value, rank, inventory, means, fix)


def _check_partly_set(name: str, inventories: Sequence[Inventory], variables: Sequence[Mapping[str, str]]) -> None:
    """Set on some hosts only is fine as long as the interface is on the network the others will use."""
    with_it = [rank for rank, seen in enumerate(variables) if seen.get(name)]
    if not with_it or len(with_it) == len(variables):
        return
    without = {inventories[rank].host: inventories[rank] for rank in range(len(variables)) if rank not in with_it}
    networks = set(_networks(without.values()))
    for rank in with_it:
        inventory, value = inventories[rank], variables[rank][name]
        if inventory.host in without:
            others = [r for r, other in enumerate(inventories) if other.host == inventory.host and r not in with_it]
            _refuse(
                name,
                value,
                rank,
                inventory,
                f"ranks {others} of the same host do not have it",
                f"set {name} for all ranks of the host, or for none",
            )
        mine = [
            nic
            for nic in inventory.nics
            if nic.netdev and nic.addresses and NameList.parse("=" + value.lstrip("=")).selects(nic.netdev)
        ]
        if mine and networks and not set(_networks([inventory], {nic.netdev for nic in mine})) & networks:
            names = ", ".join(list(without)[:4])
            _refuse(
                name,
                value,
                rank,
                inventory,
                f"hosts without the variable ({names}) have no interface in the network of {mine[0].netdev}",
                f"unset {name} everywhere, or set it on every host to an interface of one common network",
            )


def _networks(inventories: Iterable[Inventory], only: set[str] | None = None) -> list[str]:
    found = []
    for inventory in inventories:
        for nic in inventory.nics:
            if nic.usable and (only is None or nic.netdev in only):
                for text in nic.addresses:
                    found.append(str(ipaddress.ip_interface(text).network))
    return found


def _by_value(name: str, inventories: Sequence[Inventory], variables: Sequence[Mapping[str, str]]) -> str:
    hosts: dict[str, dict[str, None]] = {}
    for inventory, seen in zip(inventories, variables, strict=True):
        hosts.setdefault(repr(seen[name]) if name in seen else "not set", {})[inventory.host] = None
    return "; ".join(f"{value} on {', '.join(list(found)[:4])}" for value, found in hosts.items())
