# SPDX-License-Identifier: Apache-2.0
"""The network interfaces of a host, and which of them can carry a job: by type and address, never by name."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from holmes_core.cluster.facts import NetFacts
from holmes_core.cluster.files import entries, link_name, number, pci_address, read
from holmes_core.cluster.links import Link, global_addresses

__all__ = ["choose_ethernet", "net_verdict", "read_nets"]

# Hardware types of if_arp.h. 65534 (none) is a tun device or WireGuard.
_TUNNELS = {768, 769, 776, 777, 778, 823, 65534}
_LOOPBACK, _INFINIBAND = 772, 32
_IFF_UP, _IFF_LOOPBACK, _IFF_POINTOPOINT, _IFF_NOARP = 0x1, 0x8, 0x10, 0x80


def read_nets(sysfs: Path, links: Sequence[Link] | None) -> list[NetFacts]:
    """Read all interfaces from ``class/net`` and the operating system's list.

    Args:
        sysfs: What stands for /sys.
        links: The namespace's interfaces; None if ``sysfs`` is about another machine.

    Returns:
        One entry per name in either source.
    """
    known = {link.name: link for link in links or ()}
    root = sysfs / "class" / "net"
    names = [name for name in entries(root) if (root / name).is_dir()]
    found = []
    for name in dict.fromkeys([*names, *known]):
        net = _from_sysfs(root / name) if name in names else NetFacts(name=name)
        if links is not None:
            net.here = name in known
            _add_link(net, known.get(name))
        found.append(net)
        if not net.what and re.sub(r"\.\d+$", "", name) in {*names, *known} - {name}:
            net.what = "vlan"  # nothing but the name tells, where /sys cannot be read
    speeds = {net.name: net.speed for net in found}
    by_name = {net.name: net for net in found}
    for net in found:
        if net.what == "bridge" and any(_has_wire(by_name.get(member)) for member in net.members):
            net.what = "physical"  # the host's own card hangs below: the host's address is here
        if net.what == "bond" and net.members:
            below = [speed for member in net.members if (speed := speeds.get(member))]
            net.speed = min(below) if below else net.speed and net.speed / len(net.members)
        if net.what == "vlan" and net.speed is None:
            net.speed = next((speeds[parent] for parent in net.parents if speeds.get(parent)), None)
    return found


def _has_wire(net: NetFacts | None) -> bool:
    return net is not None and net.what in ("physical", "bond", "vlan")


def _from_sysfs(path: Path) -> NetFacts:
    kind, flags = number(path / "type"), number(path / "flags", 0) or 0
    devtype = re.search(r"^DEVTYPE=(\S+)", read(path / "uevent"), re.MULTILINE)
    net = NetFacts(name=path.name, what=_what(path, kind, flags, devtype[1] if devtype else ""))
    net.ipoib = kind == _INFINIBAND
    net.mtu = number(path / "mtu")
    speed = number(path / "speed")  # Mbit/s; -1, or EINVAL, where it is unknown
    net.speed = speed / 1000 if speed is not None and 0 < speed < 2**31 else None
    net.up = _is_up(path, flags)
    net.master = link_name(path / "master")
    slaves = read(path / "bonding" / "slaves").split() or [
        name.removeprefix("lower_") for name in entries(path) if name.startswith("lower_")
    ]
    if net.what == "bond":
        net.members = tuple(slaves)
        net.shares_load = not read(path / "bonding" / "mode").startswith(("active-backup", "broadcast"))
    elif net.what == "bridge":
        net.members = tuple(entries(path / "brif"))
    else:
        net.parents = tuple(slaves)
    device = path / "device"
    if device.exists():
        net.pci = pci_address(device)
        node = number(device / "numa_node")
        net.numa = node if node is not None and node >= 0 else None
        net.driver = link_name(device / "driver")
    return net


def _what(path: Path, kind: int | None, flags: int, devtype: str) -> str:
    if kind == _LOOPBACK or flags & _IFF_LOOPBACK:
        return "loopback"
    if kind in _TUNNELS or devtype in ("vxlan", "geneve", "wireguard", "gretap", "ppp"):
        return "tunnel"
    if (path / "tun_flags").exists() or (flags & _IFF_POINTOPOINT and kind != _INFINIBAND):
        return "tunnel"
    for name, word in (("bridge", "bridge"), ("bonding", "bond"), ("wireless", "wlan"), ("phy80211", "wlan")):
        if (path / name).exists() or devtype == word:
            return word
    if devtype == "vlan":
        return "vlan"
    if (path / "device").exists():
        return "physical"
    if flags & _IFF_NOARP and kind == 1:
        return "dummy"  # dummy, ifb, kube-ipvs: addresses without a network
    if "/virtual/" in os.path.realpath(path):
        if any(name.startswith("lower_") for name in entries(path)) and number(path / "ifindex") is not None:
            return "vlan"  # a VLAN, or a macvlan: on top of another interface
        return "virtual"
    return ""


def _is_up(path: Path, flags: int) -> bool | None:
    state, carrier = read(path / "operstate").lower(), read(path / "carrier")
    if state in ("down", "lowerlayerdown", "notpresent") or carrier == "0":
        return False
    if (path / "flags").exists() and not flags & _IFF_UP:
        return False
    return True if state == "up" or carrier == "1" or flags & _IFF_UP else None


def _add_link(net: NetFacts, link: Link | None) -> None:
    if link is None:
        return
    net.addresses = global_addresses(link.addresses)
    net.local_only = bool(link.addresses) and not net.addresses
    net.default_route = link.default_route
    if link.up is not None:
        net.up = link.up and net.up is not False
    net.mtu = link.mtu or net.mtu
    net.speed = net.speed or link.speed
    if not net.what and any(text.startswith(("127.", "::1/")) for text in link.addresses):
        net.what = "loopback"


def net_verdict(net: NetFacts) -> tuple[bool, str]:
    """Decide whether an interface can carry a job between hosts.

    Returns:
        Whether it can, and the reason if not (or what is not known).
    """
    if not net.here:
        return False, "not in this network namespace"
    if net.what == "loopback":
        return False, "loopback: no other host can be reached"
    if net.master and not net.addresses:
        return False, f"part of {net.master}"
    if net.what == "tunnel":
        return False, "tunnel"
    if net.what == "bridge":
        return False, "bridge of containers or virtual machines on this host: not reachable from others"
    if net.what == "dummy":
        return False, "dummy: no network behind it"
    if net.up is False:
        return False, "down, or no carrier"
    if net.addresses is None:
        known = net.what in ("physical", "bond", "vlan", "wlan", "") or net.ipoib
        return (True, "addresses not known") if known else (False, f"{net.what} interface, addresses not known")
    if not net.addresses:
        return False, "only a link-local address" if net.local_only else "no address"
    return True, ""


def choose_ethernet(nets: Sequence[NetFacts], *, rail_netdevs: Collection[str], rdma_netdevs: Collection[str]) -> str:
    """Choose the interface for traffic between clusters and for the rendezvous.

    Not a rail's interface while there is another; of those left, the one by which the default route leaves: what all
    peers can reach; then one that is no other RDMA port's (storage), then the one nearest to the wire (a bond before
    its VLAN), then the fastest.

    Args:
        nets: All interfaces.
        rail_netdevs: Interfaces of the rails.
        rdma_netdevs: Interfaces of all RDMA ports.

    Returns:
        Its name, or an empty string if none can carry a job.
    """
    usable = [(position, net) for position, net in enumerate(nets) if net_verdict(net)[0]]
    layers = {"physical": 0, "bond": 0, "virtual": 1, "": 1, "vlan": 2, "wlan": 3}

    def rank(item: tuple[int, NetFacts]) -> tuple[object, ...]:
        position, net = item
        return (
            net.name in rail_netdevs,
            not net.default_route,
            not net.addresses,
            net.name in rdma_netdevs,
            net.what in ("", "virtual") and _is_gateway(net),
            net.ipoib,
            layers.get(net.what, 1),
            -(net.speed or 0.0),
            position,
        )

    return min(usable, key=rank)[1].name if usable else ""


def _is_gateway(net: NetFacts) -> bool:
    """Whether an interface has the first address of its network: this host is the gateway of its own containers."""
    first = [ipaddress.ip_interface(text) for text in net.addresses or ()][:1]
    return any(int(one.ip) == int(one.network.network_address) + 1 and one.network.num_addresses > 4 for one in first)
