# SPDX-License-Identifier: Apache-2.0
"""What a lab looks like, as frozen values (`holmes_core.lab.spec_file` reads them from yaml)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from holmes_core.cluster.value import Value

__all__ = ["FAULTS", "LAB_KINDS", "PORT_RATES", "Fault", "FaultKind", "LabCluster", "LabHost", "LabKind", "LabSpec"]

LabKind = Literal["infiniband", "roce", "ethernet"]
FaultKind = Literal["nic-down", "nic-dead", "nic-slow", "loopback-name"]

LAB_KINDS: tuple[LabKind, ...] = get_args(LabKind)
#: What a port can claim to be: Gbit/s -> the text sysfs shows.
PORT_RATES = {
    10: "10 Gb/sec (4X SDR)",
    20: "20 Gb/sec (4X DDR)",
    40: "40 Gb/sec (4X QDR)",
    56: "56 Gb/sec (4X FDR)",
    100: "100 Gb/sec (4X EDR)",
    200: "200 Gb/sec (4X HDR)",
    400: "400 Gb/sec (4X NDR)",
}
FAULTS: dict[FaultKind, str] = {
    "nic-down": "the port and its interface are down",
    "nic-dead": "the port looks healthy, but nothing passes",
    "nic-slow": "the link runs at another rate",
    "loopback-name": "the host's own name resolves to 127.0.1.1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Value):
    """Something that is broken on one host.

    Args:
        fault: One of FAULTS.
        host: The host it happens to.
        nic: ``rdma`` or ``ethernet``; empty for ``loopback-name``.
        rate: The rate that is left, in bit/s; for ``nic-slow``.
    """

    fault: FaultKind
    host: str
    nic: str = ""
    rate: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabCluster(Value):
    """The hosts of one fabric.

    Args:
        name: Unique in the lab.
        kind: One of LAB_KINDS; hosts of an ``ethernet`` cluster have no RDMA port.
        hosts: Their names.
        ranks_per_host: Processes that a job has on each.
        rdma_rate: Rate of each RDMA link in bit/s; None does not limit it.
        ethernet_rate: Rate of each host's Ethernet link in bit/s; None does not limit it.
        uplink_rate: Rate in bit/s that all hosts of the cluster share towards other clusters; None has no such limit.
        cpu: Cores that each host may use; None does not limit it.
        rdma: Name of the RDMA port's network interface.
        ethernet: Name of the Ethernet interface.
        port_rate: What the RDMA port claims to be, in Gbit/s: a key of PORT_RATES. `rdma_rate` is what it can do.
        subnet_prefix: Upper 64 bits of the InfiniBand GIDs, as four colon groups; of its own per cluster if empty.
    """

    name: str
    kind: LabKind
    hosts: tuple[str, ...]
    ranks_per_host: int = 1
    rdma_rate: int | None = None
    ethernet_rate: int | None = None
    uplink_rate: int | None = None
    cpu: float | None = None
    rdma: str = "rdma0"
    ethernet: str = "eth0"
    port_rate: int = 100
    subnet_prefix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabHost:
    """One host with everything that follows from its place in the spec.

    Args:
        name: Its hostname.
        index: Position in the lab, from 0.
        cluster_index: Position of its cluster.
        cluster: Its cluster.
        first_rank: Global rank of its first process.
        ethernet_address: IPv4 address of its Ethernet interface, in a network that all hosts share (/24).
        rdma_address: IPv4 address of its RDMA interface, in a network of its cluster (/24); empty without one.
    """

    name: str
    index: int
    cluster_index: int
    cluster: LabCluster
    first_rank: int
    ethernet_address: str
    rdma_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSpec(Value):
    """A whole lab.

    Args:
        clusters: In the order of the ranks.
        faults: What is broken.
    """

    clusters: tuple[LabCluster, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def hosts(self) -> tuple[LabHost, ...]:
        """All hosts, cluster by cluster; ranks are numbered in this order."""
        found: list[LabHost] = []
        rank = 0
        for number, cluster in enumerate(self.clusters):
            for place, name in enumerate(cluster.hosts, start=1):
                found.append(
                    LabHost(
                        name=name,
                        index=len(found),
                        cluster_index=number,
                        cluster=cluster,
                        first_rank=rank,
                        ethernet_address=f"10.77.0.{len(found) + 1}",
                        rdma_address="" if cluster.kind == "ethernet" else f"10.{100 + number}.0.{place}",
                    )
                )
                rank += cluster.ranks_per_host
        return tuple(found)

    @property
    def world_size(self) -> int:
        """Ranks of a job that uses the whole lab."""
        return sum(len(cluster.hosts) * cluster.ranks_per_host for cluster in self.clusters)

    def faults_of(self, host: str, *kinds: FaultKind, nic: str = "") -> tuple[Fault, ...]:
        """Return a host's faults of some kinds, those of one NIC (``rdma`` or ``ethernet``) if it is given."""
        return tuple(
            fault
            for fault in self.faults
            if fault.host == host and fault.fault in kinds and (not nic or fault.nic == nic)
        )
