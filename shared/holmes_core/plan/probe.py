# SPDX-License-Identifier: Apache-2.0
"""Who measures with whom, and what the planner makes of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import combinations

from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.nic import RDMA_KINDS
from holmes_core.cluster.probe import LinkRate, Pair, ProbeResult, RankSpeed
from holmes_core.cluster.topology import Topology
from holmes_core.errors import ConfigError
from holmes_core.plan.hardware import ClusterHardware, Gpu, Hardware, Link, Measured, find_gpu
from holmes_core.plan.transport import choose_transport

__all__ = ["hardware_of", "pairs_of", "slowest_links"]

#: Hosts that differ by less than this are alike: measuring is no more exact.
_ALIKE = 0.05
#: What is assumed where neither a table nor a measurement says: values of a processor, in Gpu's units.
_PROCESSOR = Gpu(name="cpu", memory=16, tflops=0.05, bandwidth=10, link=2)
_USUAL_GBITS = 10.0
_EFFICIENCY = 0.5


def pairs_of(topology: Topology, device_type: str) -> tuple[Pair, ...]:
    """Choose who measures: each host inside, each fabric around its hosts, each two clusters by pairs of hosts.

    What GPUs send over NVLink or RDMA is no matter of sockets and is left out: there the tables count.

    Args:
        topology: Where the ranks run; hosts with inventories.
        device_type: ``cuda`` or ``cpu``.

    Returns:
        The pairs, the same on every rank.
    """
    found: list[Pair] = []
    gpus = device_type == "cuda"
    for cluster in topology.clusters:
        hosts = [host for host in cluster.hosts if host.inventory is not None]
        if not gpus:
            found += [_pair("host", topology, host.ranks[0], host.ranks[1]) for host in hosts if len(host.ranks) > 1]
        if len(hosts) > 1 and not (gpus and cluster.kind in RDMA_KINDS):
            ring = list(zip(hosts, [*hosts[1:], hosts[0]], strict=True))[: len(hosts) if len(hosts) > 2 else 1]
            found += [_pair("fabric", topology, a.ranks[0], b.ranks[0]) for a, b in ring]
    for one, other in combinations(topology.clusters, 2):
        for a, b in zip(one.hosts, other.hosts, strict=False):
            if a.inventory is not None and b.inventory is not None:
                found.append(_pair("across", topology, a.ranks[0], b.ranks[0]))
    return tuple(found)


def _pair(kind: str, topology: Topology, sender: int, receiver: int) -> Pair:
    transport = choose_transport(topology, (sender, receiver), "cpu")
    hosts = [topology.host_of(sender), topology.host_of(receiver)]
    names = [transport.interface_on(host.name) or "" for host in hosts]
    clusters = tuple(dict.fromkeys(topology.cluster_of(rank).name for rank in (sender, receiver)))
    addresses = ("127.0.0.1", "127.0.0.1") if kind == "host" else _addresses(hosts, names)
    return Pair(
        kind=kind,
        clusters=clusters,
        sender=sender,
        receiver=receiver,
        hosts=tuple(host.name for host in hosts),
        interfaces=tuple(names),
        addresses=addresses,
    )


def _addresses(hosts: Sequence[Host], interfaces: Sequence[str]) -> tuple[str, ...]:
    """The interfaces' addresses, of one family."""
    found = []
    for host, name in zip(hosts, interfaces, strict=True):
        nics = host.inventory.nics if host.inventory is not None else ()
        found.append([a.split("/")[0] for nic in nics if nic.netdev == name for a in nic.addresses])
    for mine in found[0]:
        for theirs in found[1]:
            if (":" in mine) == (":" in theirs):
                return mine, theirs
    return tuple(next(iter(addresses), "") for addresses in found)


def slowest_links(result: ProbeResult) -> dict[tuple[str, tuple[str, ...]], LinkRate]:
    """Return, for each class of links (kind, clusters), the slowest pair that was measured."""
    found: dict[tuple[str, tuple[str, ...]], LinkRate] = {}
    for link in result.links:
        key = link.pair.kind, link.pair.clusters
        if not link.problem and (key not in found or link.gbits < found[key].gbits):
            found[key] = link
    return found


def hardware_of(
    topology: Topology,
    result: ProbeResult | None,
    *,
    block_flops: float,
    memory: Mapping[int, int],
    declared: Mapping[str, float] | None = None,
) -> Hardware:
    """Describe a job's hosts for the cost model.

    Args:
        topology: Where the ranks run.
        result: What was measured; None: all ranks count as equally fast, but for `declared`.
        block_flops: Forward FLOPs of the model's block, one sample.
        memory: Rank -> bytes it may use.
        declared: Cluster -> speed in any unit; replaces what was measured of the clusters' speeds.

    Returns:
        The hardware, clusters in the topology's order.
    """
    speeds = {speed.rank: speed for speed in result.speeds} if result else {}
    links = slowest_links(result) if result else {}
    fastest = max(declared.values()) if declared else 0.0
    clusters = []
    for cluster in topology.clusters:
        gpu = _gpu(cluster)
        measured = _measured(cluster, speeds, links, block_flops, gpu)
        if declared:
            base = _measured(topology.clusters[0], speeds, links, block_flops, _gpu(topology.clusters[0]))
            measured = _scaled(base, measured, fastest / declared[cluster.name])
        nics = [nic for host in cluster.hosts if host.inventory for nic in host.inventory.rail_nics]
        ethernet = [
            nic.rate
            for host in cluster.hosts
            if host.inventory and (nic := host.inventory.nic(host.inventory.ethernet)) is not None and nic.rate
        ]
        rates = [nic.rate for nic in nics if nic.rate]
        rails = [len(host.inventory.rail_nics) for host in cluster.hosts if host.inventory]
        clusters.append(
            ClusterHardware(
                name=cluster.name,
                kind=cluster.kind,
                hosts=tuple(len(host.ranks) for host in cluster.hosts),
                gpu=gpu,
                speed=gpu.tflops * _EFFICIENCY * declared[cluster.name] / fastest if declared and not speeds else None,
                nics=max(1, min(rails, default=1)),
                nic_rate=min(rates, default=_USUAL_GBITS),
                ethernet_rate=min(ethernet, default=_USUAL_GBITS),
                measured=measured,
                usable=min(memory[rank] for rank in cluster.ranks),
            )
        )
    between = tuple(
        Link(between=names, rate=link.gbits, latency=link.latency)
        for (kind, names), link in links.items()
        if kind == "across"
    )
    return Hardware(clusters=tuple(clusters), links=between)


def _gpu(cluster: Cluster) -> Gpu:
    names = {one.name for host in cluster.hosts if host.inventory for one in host.inventory.accelerators if one.name}
    for name in sorted(names):
        try:
            return find_gpu(name)
        except ConfigError:
            continue
    return _PROCESSOR


def _measured(
    cluster: Cluster,
    speeds: Mapping[int, RankSpeed],
    links: Mapping[tuple[str, tuple[str, ...]], LinkRate],
    block_flops: float,
    gpu: Gpu,
) -> Measured | None:
    if not speeds:
        return None
    # The slowest rank of a host holds its stage back; a host in the middle stands for the cluster.
    slowest = [max((speeds[rank] for rank in host.ranks), key=lambda one: one.block) for host in cluster.hosts]
    usual = statistics.median_low([one.block for one in slowest])
    base = next(one for one in slowest if one.block == usual)
    factors = [one.block / usual for one in slowest]
    alike = all(abs(factor - 1) < _ALIKE for factor in factors)
    ways = {kind: links.get((kind, (cluster.name,))) for kind in ("host", "fabric")}
    found = {kind: Link(rate=way.gbits, latency=way.latency) if way else None for kind, way in ways.items()}
    return Measured(
        block_flops=block_flops,
        forward=base.forward,
        backward=base.backward,
        forward_fixed=base.forward_fixed,
        backward_fixed=base.backward_fixed,
        head_forward=base.head_forward,
        head_backward=base.head_backward,
        head_fixed=base.head_fixed,
        around=base.around,
        operation=base.operation,
        optimizer=base.optimizer,
        copied=base.copied,
        host_factors=() if alike else tuple(factors),
        local=found["host"],
        fabric=found["fabric"],
    )


def _scaled(base: Measured | None, measured: Measured | None, factor: float) -> Measured | None:
    """The first cluster's times, as many times as long as the declared speeds say."""
    if base is None or measured is None:
        return None
    same = ("block_flops", "host_factors", "local", "fabric")
    times = [entry.name for entry in fields(Measured) if entry.name not in same]
    return replace(measured, host_factors=(), **{name: getattr(base, name) * factor for name in times})
