# SPDX-License-Identifier: Apache-2.0
"""Where the stages of a layout lie, and how fast the links between them are when all ranks of a stage send at once."""

from __future__ import annotations

from dataclasses import dataclass

from holmes_core.plan.hardware import RDMA_LATENCY, SOCKET_LATENCY, ClusterHardware, Hardware, Link

__all__ = ["LOCAL_EFFICIENCY", "RDMA_EFFICIENCY", "SOCKET_EFFICIENCY", "INSIDE_RANK", "Edge", "Network", "Place"]

#: Part of a link's nominal rate that large messages reach. RDMA and NVLink: what nccl-tests show on good days.
#: Sockets: one TCP connection does not fill a fast port (NVIDIA/nccl#278), and a second port is not used.
RDMA_EFFICIENCY, LOCAL_EFFICIENCY, SOCKET_EFFICIENCY = 0.85, 0.75, 0.6
_LOCAL_LATENCY = 5e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one stage lies.

    Args:
        cluster: Position in ``Hardware.clusters``.
        first_host: Position of its first host in the cluster.
        last_host: Of its last.
        per_host: Most of its ranks on one host.
    """

    cluster: int
    first_host: int
    last_host: int
    per_host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One way between two stages, as one of its ranks sees it while all others send, too.

    Args:
        kind: ``rank`` (the same rank), ``host``, ``fabric`` or ``across`` (another cluster).
        bandwidth: Bytes per second.
        latency: Seconds until the first byte arrives.
        label: The link in words, for tables.
        source: What the sender's host sends activations through; edges with equal sources share it. Empty: a wire
            of its own.
        target: What the receiver's host sends gradients back through.
    """

    kind: str
    bandwidth: float
    latency: float
    label: str
    source: str
    target: str


#: Between two stages of one rank.
INSIDE_RANK = Edge(kind="rank", bandwidth=1e18, latency=0.0, label="inside a rank", source="", target="")


class Network:
    """The links of a job; everything is worked out once per (cluster, width)."""

    def __init__(self, hardware: Hardware) -> None:
        self._clusters = hardware.clusters
        self._links = {
            (a, b): hardware.link(one.name, other.name)
            for a, one in enumerate(hardware.clusters)
            for b, other in enumerate(hardware.clusters)
            if a != b
        }
        self._edges: dict[tuple[int, ...], Edge] = {}
        self._places: dict[tuple[int, int], tuple[Place, ...]] = {}

    def places(self, cluster: int, width: int) -> tuple[Place, ...]:
        """Return where the stages of a cluster lie that is cut into stages of ``width`` ranks, host by host."""
        key = (cluster, width)
        if key not in self._places:
            self._places[key] = tuple(_cut(cluster, self._clusters[cluster].hosts, width))
        return self._places[key]

    def edge(self, a: Place, b: Place, width: int) -> Edge:
        """Return the way from one stage to the next."""
        key = (a.cluster, a.first_host, a.last_host, b.cluster, b.first_host, b.last_host, width)
        if key not in self._edges:
            self._edges[key] = self._edge(a, b, width)
        return self._edges[key]

    def _edge(self, a: Place, b: Place, width: int) -> Edge:
        one, other = self._clusters[a.cluster], self._clusters[b.cluster]
        source, target = f"{one.name}.{a.last_host}", f"{other.name}.{b.first_host}"
        lanes = max(a.per_host, b.per_host)
        if a.cluster == b.cluster:
            if a.first_host == b.last_host == a.last_host == b.first_host:
                local = one.measured.local if one.measured else None
                return Edge(
                    kind="host",
                    bandwidth=self.local_bandwidth(a.cluster),
                    latency=local.latency if local else _LOCAL_LATENCY,
                    label=f"inside hosts of {one.name}",
                    source="",
                    target="",
                )
            bandwidth, latency = self._fabric(one, lanes)
            port = one.kind if one.rdma else "ethernet"
            return Edge(
                kind="fabric",
                bandwidth=bandwidth,
                latency=latency,
                label=f"inside {one.name} ({one.kind})",
                source=f"{source}.{port}",
                target=f"{target}.{port}",
            )
        link = self._links[a.cluster, b.cluster]
        return Edge(
            kind="across",
            bandwidth=self._across(one, other, link, lanes, width),
            latency=link.latency,
            label=f"{one.name} -> {other.name} (ethernet)",
            source=f"{source}.ethernet",
            target=f"{target}.ethernet",
        )

    def ring_bandwidth(self, place: Place, dp: int) -> float:
        """Return bytes per second that all rings of a stage's replicas together move between hosts (or GPUs)."""
        cluster = self._clusters[place.cluster]
        if place.first_host == place.last_host or dp == 1:
            return 0.0
        if cluster.measured and cluster.measured.fabric and cluster.measured.fabric.rate:
            return cluster.measured.fabric.rate / 8 * 1e9
        if cluster.rdma:
            return cluster.nics * cluster.nic_rate / 8 * 1e9 * RDMA_EFFICIENCY
        return cluster.ethernet_rate / 8 * 1e9 * SOCKET_EFFICIENCY

    def local_bandwidth(self, cluster: int) -> float:
        """Return bytes per second from one GPU to another of its host."""
        measured = self._clusters[cluster].measured
        if measured and measured.local and measured.local.rate:
            return measured.local.rate / 8 * 1e9
        return self._clusters[cluster].gpu.link * 1e9 * LOCAL_EFFICIENCY

    @staticmethod
    def _fabric(cluster: ClusterHardware, lanes: int) -> tuple[float, float]:
        if cluster.measured and cluster.measured.fabric and cluster.measured.fabric.rate:
            return cluster.measured.fabric.rate / 8 * 1e9 / lanes, cluster.measured.fabric.latency
        if not cluster.rdma:
            return cluster.ethernet_rate / 8 * 1e9 * SOCKET_EFFICIENCY / lanes, SOCKET_LATENCY
        # A rank sends through one port; ranks of a host share its ports.
        rate = min(cluster.nic_rate, cluster.nics * cluster.nic_rate / lanes)
        return rate / 8 * 1e9 * RDMA_EFFICIENCY, RDMA_LATENCY

    @staticmethod
    def _across(one: ClusterHardware, other: ClusterHardware, link: Link, lanes: int, width: int) -> float:
        # One port of each host, however many it has: sockets between two hosts use one. What is declared of the link
        # was measured on it, and is taken as it is.
        usual = min(one.ethernet_rate, other.ethernet_rate) * SOCKET_EFFICIENCY
        per_lane = (usual if link.rate is None else link.rate) / lanes
        if link.total is not None:
            per_lane = min(per_lane, link.total / width)
        return per_lane / 8 * 1e9


def _cut(cluster: int, hosts: tuple[int, ...], width: int) -> list[Place]:
    places: list[Place] = []
    host, used = 0, 0
    for _ in range(sum(hosts) // width):
        left, first = width, host
        counts: list[int] = []
        while left:
            if used == hosts[host]:
                host, used = host + 1, 0
                if not counts:
                    first = host
                continue
            take = min(left, hosts[host] - used)
            counts.append(take)
            used, left = used + take, left - take
        places.append(Place(cluster=cluster, first_host=first, last_host=host, per_host=max(counts)))
    return places
