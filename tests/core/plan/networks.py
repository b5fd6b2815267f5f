# SPDX-License-Identifier: Apache-2.0
"""Inventories and topologies of hosts that were looked at, for the tests of transports and environments."""

from __future__ import annotations

from typing import Any

from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.nic import Inventory, Nic
from holmes_core.cluster.topology import Topology


def ethernet(netdev: str, *addresses: str, **more: Any) -> Nic:
    return Nic(device=netdev, kind="ethernet", netdev=netdev, addresses=addresses, state="active", **more)


def rail(device: str, netdev: str, *addresses: str, kind: str = "roce", **more: Any) -> Nic:
    return Nic(device=device, kind=kind, netdev=netdev, addresses=addresses, state="active", rate=100.0, **more)


def inventory(host: str, *nics: Nic, uses: str = "eth0", env: dict[str, str] | None = None) -> Inventory:
    rails = tuple(dict.fromkeys(nic.device for nic in nics if nic.kind != "ethernet" and nic.usable))
    kind = next((nic.kind for nic in nics if nic.device in rails), "ethernet")
    return Inventory(
        host=host, nics=nics, rails=rails, kind=kind, ethernet=uses, environment=tuple(sorted((env or {}).items()))
    )


def topology(*clusters: tuple[str, list[Inventory]], ranks_per_host: int = 1) -> Topology:
    start, found = 0, []
    for kind, inventories in clusters:
        hosts = []
        for one in inventories:
            hosts.append(Host(name=one.host, ranks=tuple(range(start, start + ranks_per_host)), inventory=one))
            start += ranks_per_host
        found.append(Cluster(name=f"c{len(found)}", kind=kind, hosts=tuple(hosts)))
    return Topology(clusters=tuple(found))


def by_rank(job: Topology) -> list[Inventory]:
    return [job.host_of(rank).inventory for rank in range(job.world_size)]  # type: ignore[misc]


def two_by_two(**more: Any) -> Topology:
    """Two clusters of two hosts; each cluster's own network, one Ethernet for all; interface names differ."""

    def host(name: str, number: int, net: int, fast: str, slow: str, kind: str) -> Inventory:
        nics = [
            rail("mlx5_0", fast, f"10.{net}.0.{number}/24", kind=kind, gid_index=3 if kind == "roce" else None),
            ethernet(slow, f"192.0.2.{net * 10 + number}/24"),
        ]
        return inventory(name, *nics, uses=slow)

    a = [host("a1", 1, 1, "rdma0", "eth0", "infiniband"), host("a2", 2, 1, "rdma0", "eth0", "infiniband")]
    b = [host("b1", 1, 2, "ens1", "ens2", "roce"), host("b2", 2, 2, "rdma0", "eth0", "roce")]
    return topology(("infiniband", a), ("roce", b), **more)
