# SPDX-License-Identifier: Apache-2.0
"""Parts of messages that several rules read: lists of interfaces and devices, addresses, error numbers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holmes_core.cluster.nic import Gid, Inventory
from holmes_core.doctor.logs.event import Event, Log

__all__ = [
    "Case",
    "Device",
    "Interface",
    "address_kind",
    "devices",
    "error_number",
    "interfaces",
    "is_container_name",
    "named",
]

_INTERFACE = re.compile(r"(?:\[(\d+)\])?([A-Za-z][\w.@-]*):([0-9A-Fa-f.:]+)(?:%[\w.@-]+)?<\d+>")
_DEVICE = re.compile(r"\[(\d+)\]([^\s:\[\]]+):\d+/(IB|RoCE)")
# Interfaces that a container engine or an overlay makes. Only where a log tells no more than a name is it judged by it.
_CONTAINER = re.compile(
    r"(?:docker|br-|virbr|veth|cni|flannel|cali|lxc|lxdbr|podman|vmnet|vboxnet|kube-|nodelocaldns)"
    r"|(?:tun|tap|wg|tailscale|zt|ip6tnl|sit|gre|vxlan)\w*\d*$"
)
_ERRORS = {
    "no route to host": 113,
    "connection refused": 111,
    "connection timed out": 110,
    "timed out": 110,
    "connection reset": 104,
    "software caused connection abort": 103,
    "network is unreachable": 101,
    "cannot assign requested address": 99,
    "no such device": 19,
    "invalid argument": 22,
    "cannot allocate memory": 12,
    "no pollout events": 110,
}


@dataclass(frozen=True, slots=True)
class Interface:
    """One interface of a list: position, name, address."""

    index: int
    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Device:
    """One RDMA device of a list: position, name without the Data Direct suffix, ``IB`` or ``RoCE``."""

    index: int
    name: str
    link: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A log, and what is known besides.

    Args:
        log: What was read.
        inventories: Host name -> its inventory, where there is one.
        gids: Device -> its GID table.
    """

    log: Log
    inventories: Mapping[str, Inventory] = field(default_factory=dict)
    gids: Mapping[str, Sequence[Gid]] = field(default_factory=dict)

    def networks(self) -> dict[str, list[str]]:
        """Return host -> the networks that its communicators use, in order of appearance."""
        found: dict[str, list[str]] = {}
        for event in self.log.of("net", "channel"):
            nets = found.setdefault(event.line.host, [])
            if event.get("net") not in nets:
                nets.append(event.get("net"))
        return found

    def has_common_network(self) -> bool:
        """Whether every host has a communicator on one and the same network, as a job over several fabrics has.

        Hosts that differ in their devices are then no fault: groups inside a fabric use them, groups across do not.
        """
        nets = [set(found) for found in self.networks().values()]
        return len(nets) > 1 and any(len(found) > 1 for found in nets) and bool(set.intersection(*nets))

    def variable(self, *names: str, host: str = "") -> tuple[str, Event] | None:
        """Return the value of the first variable that the log shows as set (on a host), and where."""
        for event in self.log.of("env"):
            if event.get("name") in names and (not host or event.line.host in ("", host)):
                return event.get("value"), event
        return None


def interfaces(text: str) -> list[Interface]:
    """Read ``[0]eth0:192.0.2.1<0> [1]veth1:fe80::1%veth1<0>``; a list without numbers counts from 0."""
    found = enumerate(_INTERFACE.findall(text))
    return [Interface(int(index or position), name, address) for position, (index, name, address) in found]


def devices(text: str) -> list[Device]:
    """Read ``[0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB ...``. ``_dma`` (Data Direct) is no part of a device's name."""
    return [Device(int(index), name.removesuffix("_dma"), link) for index, name, link in _DEVICE.findall(text)]


def is_container_name(name: str) -> bool:
    """Whether an interface's name is one that container engines, virtual machines or tunnels give."""
    return _CONTAINER.match(name) is not None


def named(host: str) -> str:
    """Return ``host n1`` for a sentence; ``a host`` where the log does not say which."""
    return f"host {host}" if host else "a host"


def address_kind(text: str) -> str:
    """Return ``loopback``, ``link-local``, ``docker`` (its default network), ``global``, or empty for no address."""
    try:
        address = ipaddress.ip_address(text.split("%")[0].strip("[]"))
    except ValueError:
        return "loopback" if text in ("localhost", "localhost.localdomain") else ""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    if address.is_loopback:
        return "loopback"
    if address.is_link_local:
        return "link-local"
    if address.version == 4 and address in ipaddress.ip_network("172.17.0.0/16"):
        return "docker"
    return "" if address.is_unspecified else "global"


def error_number(text: str) -> int:
    """Return the errno that a message names, as number or in words; 0 if none."""
    lower = text.rpartition("SO_ERROR:")[2].lower()  # "timed out connecting: SO_ERROR: Connection refused"
    # "returned 113(No route to host) errno 115(Operation now in progress)": the first one is the connection's.
    found = re.search(r"(?:returned|errno:|error:?|failed with) ?(\d{1,3})\b", lower)
    if found is not None and 0 < int(found[1]) < 134:
        return int(found[1])
    places = [(lower.find(words), number) for words, number in _ERRORS.items() if words in lower]
    return min(places)[1] if places else 0
