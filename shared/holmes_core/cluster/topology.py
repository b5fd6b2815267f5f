# SPDX-License-Identifier: Apache-2.0
"""Topology: which rank runs on which host of which cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from holmes_core.cluster.fabric import group_hosts
from holmes_core.cluster.host import Cluster, ClusterSpec, Host
from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.value import Value
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, did_you_mean

__all__ = ["Topology", "build_topology"]

_EXAMPLE = "clusters: [{name: a, kind: infiniband, hosts: [n1, n2]}, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology(Value):
    """All clusters of the job. Every global rank is on exactly one host of exactly one cluster."""

    clusters: tuple[Cluster, ...]
    _index: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the ranks are 0..n-1, each once, and that names are unique.

        Raises:
            ConfigError: With the rank or name that is wrong.
        """
        where: dict[int, tuple[int, int]] = {}
        for c, cluster in enumerate(self.clusters):
            for h, host in enumerate(cluster.hosts):
                for rank in host.ranks:
                    if rank in where:
                        first = self.clusters[where[rank][0]].name
                        raise ConfigError(
                            seen=f"rank {rank} is in two places: cluster {first!r} and cluster {cluster.name!r}",
                            where="clusters",
                            do="list every rank once",
                        )
                    where[rank] = (c, h)
        missing = [rank for rank in range(len(where)) if rank not in where]
        if missing or not where:
            raise ConfigError(
                seen=f"{len(where)} ranks, but rank {missing[0] if missing else 0} is in no cluster",
                where="clusters",
                do="number the ranks 0, 1, 2, ... without gaps and put each in one cluster",
            )
        _refuse_repeats([cluster.name for cluster in self.clusters], "cluster name")
        _refuse_repeats([host.name for cluster in self.clusters for host in cluster.hosts], "host")
        object.__setattr__(self, "_index", tuple(where[rank] for rank in range(len(where))))

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return len(self._index)

    def cluster_index(self, rank: int) -> int:
        """Return the position in ``clusters`` of the cluster a rank belongs to."""
        return self._place(rank)[0]

    def cluster_of(self, rank: int) -> Cluster:
        """Return the cluster a rank belongs to."""
        return self.clusters[self._place(rank)[0]]

    def host_of(self, rank: int) -> Host:
        """Return the host a rank runs on."""
        cluster, host = self._place(rank)
        return self.clusters[cluster].hosts[host]

    def local_rank(self, rank: int) -> int:
        """Return a rank's position on its host (right for hosts with unequal counts, too)."""
        return self.host_of(rank).ranks.index(rank)

    def _place(self, rank: int) -> tuple[int, int]:
        if not 0 <= rank < len(self._index):
            raise ConfigError(seen=f"rank {rank}", where="Topology", do=f"use a rank from 0 to {len(self._index) - 1}")
        return self._index[rank]


def build_topology(
    config: HolmesConfig, rank_hosts: Sequence[str], inventories: Sequence[Inventory] | None = None
) -> Topology:
    """Put every rank on its host and every host in its cluster.

    Args:
        config: What the user declared. Without ``clusters`` the hosts are grouped by fabric, or form one cluster of
            unknown kind where their inventories are not known.
        rank_hosts: Host name of each global rank.
        inventories: What each rank's host has, by global rank.

    Returns:
        The topology, clusters in the order in which they were declared.

    Raises:
        ConfigError: The declaration and the job's hosts do not fit together.
    """
    if not rank_hosts:
        raise ConfigError(seen="no ranks", where="build_topology", do="give the host name of every rank")
    if config.clusters is None:
        if config.cluster_file is not None:
            raise ConfigError(
                seen=f"cluster_file {config.cluster_file!r} was named but not read",
                where="HolmesConfig.cluster_file",
                do="build the config with HolmesConfig.load(...), which reads it",
            )
        if inventories is None or len(set(rank_hosts)) == 1:
            hosts = _hosts(range(len(rank_hosts)), rank_hosts, inventories)
            return Topology(clusters=(Cluster(name="all", kind="unknown", hosts=hosts),))
        specs = group_hosts(list({inventory.host: inventory for inventory in inventories}.values()))
    else:
        specs = config.clusters
    names = _names(specs)
    by_hosts = [bool(spec.hosts) for spec in specs]
    if any(by_hosts) and not all(by_hosts):
        raise ConfigError(
            seen=f"cluster {names[by_hosts.index(True)]!r} lists hosts, {names[by_hosts.index(False)]!r} lists ranks",
            where="clusters",
            do="describe all clusters by hosts, or all by ranks",
        )
    owner = _owners_by_host(specs, names, rank_hosts) if all(by_hosts) else _owners_by_rank(specs, names, rank_hosts)
    clusters_of_host: dict[str, set[int]] = {}
    for rank, host in enumerate(rank_hosts):
        clusters_of_host.setdefault(host, set()).add(owner[rank])
    clusters = []
    for c, spec in enumerate(specs):
        # A machine split into several clusters (a rehearsal) counts as one host per cluster.
        labels = [f"{host}/{names[c]}" if len(clusters_of_host[host]) > 1 else host for host in rank_hosts]
        ranks = [rank for rank in range(len(rank_hosts)) if owner[rank] == c]
        hosts = _hosts(ranks, labels, inventories)
        clusters.append(Cluster(name=names[c], kind=spec.kind, hosts=hosts, reason=spec.reason))
    return Topology(clusters=tuple(clusters))


def _names(specs: Sequence[ClusterSpec]) -> list[str]:
    return [spec.name or f"cluster{index}" for index, spec in enumerate(specs)]


def _hosts(
    ranks: Sequence[int], rank_hosts: Sequence[str], inventories: Sequence[Inventory] | None
) -> tuple[Host, ...]:
    found: dict[str, list[int]] = {}
    for rank in ranks:
        found.setdefault(rank_hosts[rank], []).append(rank)
    return tuple(
        # A part of a machine has no network of its own: its inventory would claim that its parts are apart.
        Host(
            name=name,
            ranks=tuple(members),
            inventory=None if inventories is None or "/" in name else inventories[members[0]],
        )
        for name, members in found.items()
    )


def _refuse_repeats(names: Sequence[str], what: str) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ConfigError(seen=f"{what} {name!r} occurs {count} times", where="clusters", do="use each name once")


def _owners_by_host(specs: Sequence[ClusterSpec], names: Sequence[str], rank_hosts: Sequence[str]) -> list[int]:
    present = list(dict.fromkeys(rank_hosts))
    owner: dict[str, int] = {}
    for c, spec in enumerate(specs):
        for declared in spec.hosts:
            host = _match(declared, present)
            where = f"clusters, cluster {names[c]!r}, host {declared!r}"
            if host is None:
                shown = ", ".join(present[:8]) + (", ..." if len(present) > 8 else "")
                raise ConfigError(
                    seen=f"host {declared!r} has no rank in this job{did_you_mean(declared, present)}",
                    where=where,
                    means=f"the ranks run on: {shown}",
                    do="correct the name, start ranks on that host, or take it out of the cluster",
                )
            if host in owner:
                raise ConfigError(
                    seen=f"host {host!r} is in two clusters: {names[owner[host]]!r} and {names[c]!r}"
                    if owner[host] != c
                    else f"host {host!r} is listed twice in cluster {names[c]!r}",
                    where=where,
                    do="list every host once; to split one machine for a rehearsal give ranks instead of hosts",
                )
            owner[host] = c
    for rank, host in enumerate(rank_hosts):
        if host not in owner:
            declared_hosts = [name for spec in specs for name in spec.hosts]
            raise ConfigError(
                seen=f"rank {rank} runs on host {host!r}, which is in no cluster{did_you_mean(host, declared_hosts)}",
                where="clusters",
                do=f"add {host!r} to the cluster whose network it shares: {_EXAMPLE}",
            )
    return [owner[host] for host in rank_hosts]


def _match(declared: str, present: Sequence[str]) -> str | None:
    """Find a declared host among the job's hosts; ``n1`` also names ``n1.example.org`` if that is the only one."""
    if declared in present:
        return declared
    near = [host for host in present if "." in declared + host and host.split(".")[0] == declared.split(".")[0]]
    same_domain = [host for host in near if not ("." in host and "." in declared)]
    return same_domain[0] if len(same_domain) == 1 else None


def _owners_by_rank(specs: Sequence[ClusterSpec], names: Sequence[str], rank_hosts: Sequence[str]) -> list[int]:
    world = len(rank_hosts)
    owner: dict[int, int] = {}
    for c, spec in enumerate(specs):
        for rank in spec.ranks:
            if rank >= world:
                raise ConfigError(
                    seen=f"rank {rank} in cluster {names[c]!r}, but the job has {world} ranks (0 to {world - 1})",
                    where="clusters",
                    do="correct the ranks, or start more processes",
                )
            if rank in owner:
                other = names[owner[rank]]
                raise ConfigError(
                    seen=f"rank {rank} is listed twice: in cluster {other!r} and in cluster {names[c]!r}",
                    where="clusters",
                    do="list every rank once",
                )
            owner[rank] = c
    missing = [rank for rank in range(world) if rank not in owner]
    if missing:
        raise ConfigError(
            seen=f"rank {missing[0]} is in no cluster ({len(missing)} of {world} ranks are in none)",
            where="clusters",
            do="put every rank from 0 to " + str(world - 1) + " in one cluster, or start fewer processes",
        )
    return [owner[rank] for rank in range(world)]
