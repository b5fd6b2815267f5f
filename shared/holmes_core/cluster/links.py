# SPDX-License-Identifier: Apache-2.0
"""What the operating system says about the interfaces of this network namespace: addresses, state, default route."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Link", "default_interface", "global_addresses", "is_global", "system_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One interface as the operating system shows it.

    Args:
        name: Its name.
        addresses: All addresses with prefix length (``192.0.2.7/24``).
        up: Whether it is up; None if unknown.
        mtu: Bytes; None if unknown.
        speed: Gbit/s; None if unknown.
        default_route: Whether the default route leaves by it.
    """

    name: str
    addresses: tuple[str, ...] = ()
    up: bool | None = None
    mtu: int | None = None
    speed: float | None = None
    default_route: bool = False


def system_links() -> tuple[Link, ...]:
    """Return the interfaces of this process's network namespace, whatever /sys shows."""
    import psutil  # type: ignore[import-untyped,unused-ignore]

    addresses, states = psutil.net_if_addrs(), psutil.net_if_stats()
    route = default_interface(Path("/proc/net"))
    found = []
    for name in dict.fromkeys([*addresses, *states]):
        texts = []
        for one in addresses.get(name, ()):
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            # psutil writes a scope (fe80::1%eth0), and an IPv6 netmask as an address.
            bits = _prefix_length(one.netmask, 32 if one.family == socket.AF_INET else 128)
            texts.append(f"{one.address.split('%')[0]}/{bits}")
        state = states.get(name)
        found.append(
            Link(
                name=name,
                addresses=tuple(texts),
                up=state.isup if state else None,
                mtu=(state.mtu or None) if state else None,
                speed=(state.speed / 1000 or None) if state else None,
                default_route=name == route,
            )
        )
    return tuple(found)


def default_interface(proc_net: Path) -> str:
    """Return the interface of the best default route, IPv4 before IPv6; empty if there is none."""
    best: tuple[int, str] | None = None
    for line in _lines(proc_net / "route")[1:]:
        words = line.split()
        # Interface, destination, gateway, flags, reference count, use, metric, mask, ...; numbers in hexadecimal.
        if len(words) >= 8 and words[1] == "00000000" and words[7] == "00000000" and int(words[3], 16) & 0x1:
            best = min(best or (1 << 40, ""), (int(words[6]), words[0]))
    if best is None:
        for line in _lines(proc_net / "ipv6_route"):
            words = line.split()
            # A reject route (flag 0x200) on lo stands in every table.
            if len(words) >= 10 and words[0] == "0" * 32 and words[1] == "00" and not int(words[8], 16) & 0x200:
                best = min(best or (1 << 40, ""), (int(words[5], 16), words[9]))
    return best[1] if best and best[1] != "lo" else ""


def is_global(text: str) -> bool:
    """Whether an address (with or without prefix length) can be reached from another host: not link-local or lo."""
    try:
        address = ipaddress.ip_interface(text).ip
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return not (address.is_link_local or address.is_loopback or address.is_multicast or address.is_unspecified)


def global_addresses(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the global ones, IPv4 first, as a canonical text."""
    found = [ipaddress.ip_interface(text) for text in texts if is_global(text)]
    return tuple(str(one) for one in sorted(found, key=lambda one: one.version))


def _prefix_length(netmask: str | None, full: int) -> int:
    if not netmask:
        return full
    try:
        return f"{int(ipaddress.ip_address(netmask)):b}".count("1")
    except ValueError:
        return full


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
