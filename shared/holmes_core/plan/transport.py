# SPDX-License-Identifier: Apache-2.0
"""Transport: how the members of a process group talk, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_core.cluster.topology import Topology
from holmes_core.cluster.value import Value

__all__ = ["Transport", "choose_transport"]

# NCCL's net for each kind of cluster. InfiniBand and RoCE are both "IB" and still cannot meet in one communicator.
# iWARP is not usable by NCCL's IB transport; for kind "unknown" nothing better than sockets may be assumed.
_NCCL_NET = {"infiniband": "IB", "roce": "IB", "omnipath": "OFI", "efa": "OFI", "slingshot": "OFI"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport(Value):
    """How a group talks.

    Args:
        backend: ``nccl`` or ``gloo``.
        kind: Network that joins the members: ``local`` (one host) or a cluster kind.
        net: ``local``, ``IB``, ``OFI`` or ``Socket``.
        interface: Interface to bind to; None leaves it to the backend.
        reason: Why this one.
    """

    backend: str
    kind: str
    net: str
    interface: str | None = None
    reason: str


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
    hosts = dict.fromkeys(topology.host_of(rank).name for rank in ranks)
    if len(hosts) == 1:
        return Transport(backend=backend, kind="local", net="local", reason=f"inside host {next(iter(hosts))}")
    clusters = {topology.cluster_index(rank): topology.cluster_of(rank) for rank in ranks}
    if len(clusters) == 1:
        cluster = next(iter(clusters.values()))
        net = _NCCL_NET.get(cluster.kind, "Socket") if backend == "nccl" else "Socket"
        reason = f"inside {cluster.name} ({cluster.kind})"
        if cluster.kind == "iwarp":
            reason += "; NCCL cannot use it"
        return Transport(backend=backend, kind=cluster.kind, net=net, reason=reason)
    names = ", ".join(clusters[index].name for index in sorted(clusters))
    reason = f"across {names}: only Ethernet"
    return Transport(backend=backend, kind="ethernet", net="Socket", reason=reason)
