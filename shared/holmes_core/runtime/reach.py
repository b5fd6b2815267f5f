# SPDX-License-Identifier: Apache-2.0
"""Before any group is made: does every host reach its neighbours over the interfaces that the plan gives them?

A port that is up and passes nothing shows itself only as a time-out somewhere in gloo or NCCL, on ranks that may have
nothing to do with it. One TCP handshake per neighbour and interface finds it, and both ends are named on all ranks.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from holmes_core.cluster.host import Host
from holmes_core.errors import HolmesError
from holmes_core.plan.plan import Plan

__all__ = ["HANDSHAKE_TIMEOUT", "Link", "check_links", "links_of"]

#: Seconds for one TCP handshake between two hosts: it takes milliseconds, and a lost packet a second or three.
HANDSHAKE_TIMEOUT = 8.0
_SHOWN = 6


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way from this rank to another host."""

    group: str
    own: str  # interface here
    own_address: str
    peer: int  # rank
    peer_host: str
    peer_interface: str
    peer_address: str


def links_of(plan: Plan, rank: int) -> list[Link]:
    """Return the ways that a rank checks: in each group the next member on another host, each way once."""
    me = plan.topology.host_of(rank)
    found: dict[tuple[str, str, str], Link] = {}
    for group in plan.groups_of(rank):
        if group.transport.kind == "local":
            continue
        at = group.ranks.index(rank)
        others = [*group.ranks[at + 1 :], *group.ranks[:at]]
        peer = next((other for other in others if plan.topology.host_of(other).name != me.name), None)
        if peer is None:
            continue
        host = plan.topology.host_of(peer)
        own, theirs = group.transport.interface_on(me.name) or "", group.transport.interface_on(host.name) or ""
        here, there = _address(me, own), _address(host, theirs, like=_address(me, own))
        if here and there:
            found.setdefault(
                (own, host.name, theirs),
                Link(
                    group=group.name,
                    own=own,
                    own_address=here,
                    peer=peer,
                    peer_host=host.name,
                    peer_interface=theirs,
                    peer_address=there,
                ),
            )
    return list(found.values())


def _address(host: Host, interface: str, like: str = "") -> str:
    """Return the address of an interface, of the same family as another address where it has one."""
    nics = host.inventory.nics if host.inventory is not None else ()
    found = [address.split("/")[0] for nic in nics if nic.netdev == interface for address in nic.addresses]
    same = [address for address in found if (":" in address) == (":" in like)]
    return next(iter(same or found), "")


def check_links(plan: Plan, rank: int, *, timeout: float = HANDSHAKE_TIMEOUT) -> None:
    """Shake hands with the neighbours of every group of this rank. Collective.

    Args:
        plan: The plan.
        rank: This rank.
        timeout: Longest wait for one handshake, in seconds.

    Raises:
        HolmesError: On all ranks alike, if two hosts do not reach each other; names hosts, interfaces and addresses.
    """
    if len({host.name for cluster in plan.topology.clusters for host in cluster.hosts}) == 1:
        return
    # The kernel completes handshakes with a listening socket: nobody has to accept.
    with _listener() as listener:
        ports: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ports, listener.getsockname()[1])
        failed = _shake(links_of(plan, rank), dict(enumerate(ports)), timeout)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, failed)
    me = {r: plan.topology.host_of(r).name for r in range(dist.get_world_size())}
    lines = [
        f"{me[r]}:{link.own} ({link.own_address}) -> "
        f"{link.peer_host}:{link.peer_interface} ({link.peer_address}): {why}"
        for r, found in enumerate(everyone)
        for link, why in found
    ]
    if not lines:
        return
    lines = list(dict.fromkeys(lines))
    ends = [end for r, found in enumerate(everyone) for link, _ in found for end in _ends(me[r], link)]
    suspects = sorted({end for end in ends if ends.count(end) == max(ends.count(one) for one in ends)})
    raise HolmesError(
        seen="hosts do not reach each other over the interfaces of their groups:\n"
        + "\n".join(lines[:_SHOWN] + ([f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])),
        where=f"rank {rank} on host {me[rank]}; most often in it: {', '.join(suspects[:_SHOWN])}",
        means="the ports look healthy and nothing passes: a cable, a switch port, a VLAN, a route or a firewall that "
        "admits only some ports (groups use any port)",
        do="ping between these addresses and mend the way; to train without a port, take its interface down on that "
        "host (`ip link set ... down`): the host then joins over Ethernet",
    )


def _ends(host: str, link: Link) -> tuple[str, str]:
    return f"{host}:{link.own}", f"{link.peer_host}:{link.peer_interface}"


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def _shake(links: list[Link], ports: Mapping[int, int], timeout: float) -> list[tuple[Link, str]]:
    def one(link: Link) -> tuple[Link, str] | None:
        try:
            with socket.create_connection(
                (link.peer_address, ports[link.peer]), timeout=timeout, source_address=(link.own_address, 0)
            ):
                return None
        except OSError as error:
            return link, "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))

    if not links:
        return []
    with ThreadPoolExecutor(min(len(links), 32)) as pool:
        return [found for found in pool.map(one, links) if found is not None]
