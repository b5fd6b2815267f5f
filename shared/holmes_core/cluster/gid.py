# SPDX-License-Identifier: Apache-2.0
"""GID tables: what an entry means, and which one RoCE has to use."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence

from holmes_core.cluster.nic import Gid

__all__ = ["choose_gid", "gid_ip", "gid_type", "subnet_prefix"]


def gid_type(text: str) -> str:
    """Return ``ib``, ``roce_v1``, ``roce_v2`` for what sysfs or show_gids writes; empty if it cannot be told."""
    word = text.lower().replace(" ", "")
    if "v2" in word:
        return "roce_v2"
    if "v1" in word:  # "IB/RoCE v1": which of the two follows from the link layer
        return "roce_v1"
    return "ib" if word == "ib" else ""


def gid_ip(address: str) -> str:
    """Return the IP address that a RoCE GID stands for (IPv4 if mapped); empty if it is no address."""
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return ""
    return str(found.ipv4_mapped or found)


def subnet_prefix(gids: Sequence[Gid]) -> str:
    """Return the upper half of the first GID; empty if there is none."""
    try:
        return ipaddress.IPv6Address(gids[0].address).exploded[:19] if gids else ""
    except ValueError:
        return ""


def choose_gid(
    gids: Sequence[Gid], addresses: Sequence[str] = (), local: Collection[str] = ()
) -> tuple[int | None, str]:
    """Choose the entry for RoCE: version 2, with an address that other hosts can route to, IPv4 before IPv6.

    A link-local entry is RoCE v2 too, and connections through it time out; the index that works differs from host to
    host, so no number is assumed.

    Args:
        gids: The table without empty entries.
        addresses: Global addresses of the port's interface with prefix length; their order decides between equals.
        local: All addresses of this network namespace, as far as they are known: a container that shares a card
            sees its host's entries too, and cannot use them.

    Returns:
        Index and an empty text; or None and why (an empty text if there is no table to choose from).

    Source:
        NCCL issue 769; NCCL src/transport/net_ib, ncclIbGetGidIndex.
    """
    routable = [gid for gid in gids if _routable(gid.address)]
    typed = [gid for gid in routable if gid.type]
    if not gids:
        return None, ""
    if not routable:
        return None, "its GIDs are link-local only: give its interface an IP address"
    if not typed:
        return None, ""  # a container may hide gid_attrs; NCCL then chooses for itself
    order = [address.split("/")[0] for address in addresses]

    def rank(gid: Gid) -> tuple[bool, bool, bool, int, int]:
        ip = gid_ip(gid.address)
        return (
            gid.type != "roce_v2",
            ip not in local,
            ":" in ip,
            order.index(ip) if ip in order else len(order),
            gid.index,
        )

    return min(typed, key=rank).index, ""


def _routable(address: str) -> bool:
    try:
        found = ipaddress.IPv6Address(address)
    except ValueError:
        return False
    real = found.ipv4_mapped or found
    return not (real.is_link_local or real.is_loopback or real.is_multicast or real.is_unspecified)
