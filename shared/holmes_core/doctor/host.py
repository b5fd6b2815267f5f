# SPDX-License-Identifier: Apache-2.0
"""Checks of one host: ports, limits, names, and the variables that NCCL and gloo read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from holmes_core.cluster.gid import gid_ip
from holmes_core.cluster.hca_list import exact_hcas, lint_hcas, lint_interfaces
from holmes_core.cluster.nic import RDMA_KINDS, Inventory, Nic
from holmes_core.doctor.finding import Finding

__all__ = ["host_findings"]

# Beginning or part of an inventory's warning -> name, likelihood, what to do.
_WARNINGS: tuple[tuple[str, str, int, str], ...] = (
    (
        "degraded:",
        "degraded-rails",
        85,
        "repair or replace what is named: INIT waits for a subnet manager (`sminfo`), a port that is down for its "
        "cable or switch; until then the plan counts the rails that are left",
    ),
    ("cannot be used", "rdma-unusable", 90, "correct what is named; RDMA is many times faster than what is used now"),
    (
        "unequal rails",
        "unequal-rails",
        75,
        "look at the slow port: `ibstat`, its cable and the switch port; a link that trained at a lower width or speed "
        "is a bad cable mostly",
    ),
    (
        "is a bond of",
        "bond-queue-pairs",
        60,
        "set NCCL_IB_QPS_PER_CONNECTION=2 or more, with NCCL_IB_SPLIT_DATA_ON_QPS=0",
    ),
    ("IPv6 addresses only", "ipv6-only", 60, "set NCCL_SOCKET_FAMILY=AF_INET6 (Holmes does)"),
    (
        "no interface can carry",
        "no-interface",
        92,
        "give an interface an address that other hosts reach, or start the container with the host's network",
    ),
    ("only way to other hosts", "shared-interface", 40, "nothing, if the host has no other network"),
    ("could not read", "device-broken", 80, "look at `dmesg` for the device; the other devices are not affected"),
)


def host_findings(inventory: Inventory, *, several_hosts: bool = True) -> Iterator[Finding]:
    """Check what a host found out about itself, and its variables.

    Args:
        inventory: The host.
        several_hosts: Whether the job has other hosts.
    """
    where = _where(inventory)
    for text in inventory.warnings:
        yield _warning(text, where)
    yield from _ports(inventory, where)
    yield from _mtu(inventory, where)
    yield from _kinds(inventory, where)
    yield from _rails(inventory, where)
    yield from _lists(inventory, where, several_hosts=several_hosts)
    yield from _gid(inventory, where)
    yield from _switches(inventory, where)


def _where(inventory: Inventory) -> tuple[str, ...]:
    return (f"host {inventory.host}",) if inventory.host != "?" else ()  # outputs of a host that nobody has named


def _warning(text: str, where: tuple[str, ...]) -> Finding:
    for words, name, likelihood, do in _WARNINGS:
        if words in text:
            return Finding(
                id=name,
                severity="warning",
                seen=text,
                means="a job gets less of this host than its hardware has, or needs a setting for it",
                do=do,
                where=where,
                likelihood=likelihood,
            )
    return Finding(
        id="host",
        severity="note",
        seen=text,
        means="found while reading the host's devices",
        do="see `holmes detect --all`",
        where=where,
        likelihood=30,
    )


def _ports(inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    """RDMA ports that are no missing rails, and still are not as they should be."""
    told = " ".join(inventory.warnings)
    for nic in inventory.nics:
        if (
            nic.kind not in RDMA_KINDS
            or nic.usable
            or nic.device in told
            or not nic.reason.startswith(("INIT", "ARMED"))
        ):
            continue
        yield Finding(
            id="port-not-active",
            severity="warning",
            seen=f"{nic.device} port {nic.port}: {nic.reason}",
            means="the cable is in and no subnet manager has brought the port up",
            do="start a subnet manager (opensm, or the switch's own); `sminfo` tells whether one answers",
            where=where,
            likelihood=70,
        )


def _mtu(inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    sizes: dict[int, list[str]] = {}
    for nic in inventory.rail_nics:
        if nic.kind == "roce" and nic.mtu:
            sizes.setdefault(nic.mtu, []).append(nic.netdev or nic.device)
    if len(sizes) > 1:
        yield Finding(
            id="mtu",
            severity="warning",
            seen="MTU of the rails differs: "
            + "; ".join(f"{size} on {', '.join(names)}" for size, names in sizes.items()),
            means="RoCE takes its packet size from the interface's MTU: unequal ends are slow or lose packets",
            do="set one MTU on all rails of all hosts and on the switches (`ip link set IFACE mtu 9000`)",
            where=where,
            likelihood=70,
        )


def _kinds(inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    usable = {nic.kind: nic.device for nic in inventory.nics if nic.usable and nic.kind in ("infiniband", "roce")}
    if len(usable) > 1 and not dict(inventory.environment).get("NCCL_IB_HCA"):
        yield Finding(
            id="two-link-types",
            severity="note",
            seen=f"InfiniBand ({usable['infiniband']}) and RoCE ({usable['roce']}) ports, and NCCL_IB_HCA is not set",
            means="NCCL by itself would use both, and they cannot meet",
            do=f"outside Holmes, which does it, set NCCL_IB_HCA='{exact_hcas(inventory)}'",
            where=where,
            likelihood=55,
        )


def _rails(inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    if not inventory.rails:
        return
    near: dict[str, list[str]] = {}
    for gpu in inventory.accelerators:
        if gpu.nearest:
            near.setdefault(gpu.nearest, []).append(f"GPU{gpu.index}")
    listed = ", ".join(name + (f" ({', '.join(near[name])})" if name in near else "") for name in inventory.rails)
    others = [nic for nic in inventory.nics if nic.usable and nic.reason.startswith("not a rail")]
    left = "; left out: " + ", ".join(f"{nic.device} ({nic.reason[12:90]})" for nic in others) if others else ""
    yield Finding(
        id="rails",
        severity="note",
        seen=f"{inventory.kind}: training rails are {listed}{left}",
        means="these devices carry the training traffic; others are for storage or management",
        do="to be sure of a fabric run `ib_write_bw` between each pair of rails; NCCL_CROSS_NIC=0 where every rail "
        "has its own switch, 1 where all rails are on one fabric",
        where=where,
        likelihood=20,
    )


def _lists(inventory: Inventory, where: tuple[str, ...], *, several_hosts: bool) -> Iterator[Finding]:
    variables = dict(inventory.environment)
    value = variables.get("NCCL_IB_HCA", "")
    if value:
        found = lint_hcas(value, inventory)
        yield from _lint("NCCL_IB_HCA", "hca-list", found.problems, found.suggestion, found.selected, where)
    value = variables.get("NCCL_SOCKET_IFNAME", "")
    if value:
        found = lint_interfaces(value, inventory, several_hosts=several_hosts)
        if found.selected and all(text.endswith("names no device") for text in found.problems):
            found = replace(found, problems=())  # a list for several hosts: the other names are theirs
        yield from _lint(
            "NCCL_SOCKET_IFNAME", "interface-list", found.problems, found.suggestion, found.selected, where
        )
    value = variables.get("GLOO_SOCKET_IFNAME", "")
    names = [nic.netdev for nic in inventory.nics if nic.netdev]
    wrong = [word for word in value.split(",") if word and word not in names]
    if value and names and (wrong or (several_hosts and value == "lo")):
        yield Finding(
            id="gloo-interface",
            severity="error",
            seen=f"GLOO_SOCKET_IFNAME={value}",
            means="no other host can be reached over the loopback interface"
            if not wrong
            else f"gloo takes exact names, and this host has no {', '.join(wrong)}",
            do=f"set GLOO_SOCKET_IFNAME={inventory.ethernet or 'the interface with the address that others reach'}",
            where=where,
            likelihood=90,
        )


def _lint(
    variable: str, name: str, problems: tuple[str, ...], better: str, selected: tuple[str, ...], where: tuple[str, ...]
) -> Iterator[Finding]:
    if not problems:
        return
    fatal = any(
        re.search(
            r"matches nothing|leaves nothing|cannot meet|no other host|none of the "
            r"rails",
            p,
        )
        for p in problems
    )
    yield Finding(
        id=name,
        severity="error" if fatal else "warning",
        seen="; ".join((problems[0], *(text.split(": ", 1)[-1] for text in problems[1:]))),
        means=f"it leaves in use: {', '.join(selected) or 'nothing'} ({len(selected)})",
        do=f"set {variable}='{better}'" if better else f"unset {variable}: Holmes chooses",
        where=where,
        likelihood=88 if fatal else 70,
    )


def _gid(inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    text = dict(inventory.environment).get("NCCL_IB_GID_INDEX", "")
    if not re.fullmatch(r"\d{1,4}", text) or inventory.kind != "roce":
        return
    wrong = [nic for nic in inventory.rail_nics if nic.gid_index is not None and nic.gid_index != int(text)]
    if wrong:
        nic = wrong[0]
        right = sorted({other.gid_index for other in inventory.rail_nics if other.gid_index is not None})
        yield Finding(
            id="gid-index",
            severity="error",
            seen=f"NCCL_IB_GID_INDEX={text}: on {nic.device} that is {_entry(nic, int(text))}",
            means=f"the RoCE v2 entry of its routable address is {nic.gid_index}; with another one connections time out"
            + ("" if len(right) == 1 else f". The rails need different indices ({right}): one value cannot suit them"),
            do=f"set NCCL_IB_GID_INDEX={right[0]} on this host (others may need another one), or unset it"
            if len(right) == 1
            else "unset NCCL_IB_GID_INDEX, so that NCCL (2.21 and newer) chooses per device",
            where=where,
            likelihood=92,
        )


def _entry(nic: Nic, index: int) -> str:
    gid = next((gid for gid in nic.gids if gid.index == index), None)
    if gid is None:
        return "an empty entry"
    return f"{gid.type.replace('_', ' ') or 'an entry'} of {gid_ip(gid.address)}"


def _switches(inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    variables = dict(inventory.environment)
    off = variables.get("NCCL_IB_DISABLE", "")
    net = variables.get("NCCL_NET", "")
    if off not in ("", "0") and inventory.kind in ("infiniband", "roce") and inventory.rails:
        yield Finding(
            id="ib-disabled",
            severity="warning",
            seen=f"NCCL_IB_DISABLE={off} on a host with {inventory.kind} rails ({', '.join(inventory.rails)})",
            means="NCCL will use sockets, many times slower; an external plugin (IBext) does not heed the variable",
            do="unset it; to force sockets on purpose use NCCL_NET=Socket",
            where=where,
            likelihood=80,
        )
    if net.lower() == "socket" and inventory.rails:
        yield Finding(
            id="socket-forced",
            severity="warning",
            seen=f"NCCL_NET={net} on a host with {inventory.kind} rails ({', '.join(inventory.rails)})",
            means="it overrides the network of every communicator: nothing will use RDMA, and Holmes refuses to start",
            do="unset NCCL_NET: each group then gets the network that its members share",
            where=where,
            likelihood=80,
        )
