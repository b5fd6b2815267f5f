# SPDX-License-Identifier: Apache-2.0
"""Transport: how the members of a process group talk, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from holmes_core.cluster.host import Host
from holmes_core.cluster.nic import RDMA_KINDS
from holmes_core.cluster.topology import Topology
from holmes_core.cluster.value import Value
from holmes_core.plan.network import ethernet_interfaces, rail_interfaces

__all__ = ["LOOPBACK", "Transport", "choose_transport"]

# NCCL's net for each kind of cluster. InfiniBand and RoCE are both "IB" and still cannot meet in one communicator.
# iWARP is not usable by NCCL's IB transport; for kind "unknown" nothing better than sockets may be assumed.
_NCCL_NET = {"infiniband": "IB", "roce": "IB", "omnipath": "OFI", "efa": "OFI", "slingshot": "OFI"}
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport(Value):
    """How a group talks.

    Args:
        backend: ``nccl`` or ``gloo``.
        kind: Network that joins the members: ``local`` (one host) or a cluster kind.
        net: ``local``, ``IB``, ``OFI`` or ``Socket``.
        interface: Interface that sockets bind to on every host; None where hosts differ or the backend chooses.
        interfaces: Host name -> interface, where hosts differ; else empty.
        reason: Why this one.
    """

    backend: str
    kind: str
    net: str
    interface: str | None = None
    interfaces: Mapping[str, str] = field(default_factory=dict, hash=False)
    reason: str

    def interface_on(self, host: str) -> str | None:
        """Return the interface that a host's sockets bind to; None leaves it to the backend."""
        return self.interfaces.get(host, self.interface)


def choose_transport(topology: Topology, ranks: Sequence[int], device_type: str) -> Transport:
    """Choose the best network that all members of a group share.

    Args:
        topology: Where each rank runs.
        ranks: Members of the group.
        device_type: ``cuda`` talks over NCCL, everything else over gloo.

    Returns:
        The transport with its reason.
    """
    backend = "nccl" if device_type == "cuda" else "gloo"
    hosts = list({host.name: host for host in map(topology.host_of, ranks)}.values())
    if len(hosts) == 1:
        looked = hosts[0].inventory is not None
        return _transport(
            backend, "local", "local", {hosts[0].name: LOOPBACK} if looked else {}, f"inside host {hosts[0].name}"
        )
    clusters = {topology.cluster_index(rank): topology.cluster_of(rank) for rank in ranks}
    if len(clusters) > 1:
        names = ", ".join(clusters[index].name for index in sorted(clusters))
        return _over_ethernet(backend, "ethernet", hosts, f"across {names}: only Ethernet")
    cluster = next(iter(clusters.values()))
    reason = f"inside {cluster.name} ({cluster.kind})"
    if cluster.kind not in RDMA_KINDS:
        return _over_ethernet(
            backend, cluster.kind, hosts, reason + ("; NCCL cannot use it" if cluster.kind == "iwarp" else "")
        )
    without = [host.name for host in hosts if host.inventory is not None and not host.inventory.rail_nics]
    if without:
        return _over_ethernet(
            backend, "ethernet", hosts, f"{reason}, but no usable {cluster.kind} port on {_few(without)}"
        )
    interfaces, how = rail_interfaces(hosts)
    if backend == "nccl":
        # NCCL connects its sockets (bootstrap) over Ethernet and moves data over the devices themselves.
        interfaces, how = ethernet_interfaces(hosts)
        return _transport(backend, cluster.kind, _NCCL_NET[cluster.kind], interfaces, reason)
    if not interfaces and hosts[0].inventory is not None:
        return _over_ethernet(backend, "ethernet", hosts, f"{reason}, but its ports carry no IP for sockets")
    return _transport(backend, cluster.kind, "Socket", interfaces, f"{reason}; {how}" if how else reason)


def _over_ethernet(backend: str, kind: str, hosts: Sequence[Host], reason: str) -> Transport:
    interfaces, how = ethernet_interfaces(hosts)
    return _transport(backend, kind, "Socket", interfaces, f"{reason}; {how}" if how else reason)


def _transport(backend: str, kind: str, net: str, interfaces: Mapping[str, str], reason: str) -> Transport:
    names = set(interfaces.values())
    if len(names) == 1:
        return Transport(backend=backend, kind=kind, net=net, interface=names.pop(), reason=reason)
    return Transport(backend=backend, kind=kind, net=net, interfaces=dict(interfaces), reason=reason)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
