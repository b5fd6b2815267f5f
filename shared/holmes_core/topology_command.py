# SPDX-License-Identifier: Apache-2.0
"""The `holmes topology` command: the clusters of a job, asked from all its hosts or read from files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holmes_core.cluster.fabric import group_hosts, job_warnings
from holmes_core.cluster.host import ClusterSpec, expand_hosts
from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.topology import Topology, build_topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, HolmesError

__all__ = ["leave_together", "main", "place_in_job"]

_LAUNCHERS = {"RANK": ("RANK", "SLURM_PROCID"), "WORLD_SIZE": ("WORLD_SIZE", "SLURM_NTASKS")}


def main(words: list[str]) -> int:
    """Run `holmes topology WORDS`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="holmes topology",
        description="Show the clusters of a job: which hosts share a fabric and why, the networks between them, and "
        "what is odd. Start it on every host like the job itself (torchrun --no-python holmes topology; srun holmes "
        "topology), or give it files on a laptop.",
    )
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="inventories from `holmes detect --json`, one per host; or tools' outputs, those of one host under one "
        "name (a1.ibstat.txt, a1.topo.txt); or a topology from --json",
    )
    parser.add_argument("--cluster", metavar="FILE", help="declared clusters (default: the file HOLMES_CLUSTER names)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw clusters, links and NICs (.png, .svg, .pdf)")
    parser.add_argument("--json", action="store_true", help="print the topology as JSON")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="longest wait for a rank (120)")
    given = parser.parse_args(words)
    try:
        found = _from_files(given) if given.files else _from_job(given)
        if found is not None:
            _show(given, *found)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _show(given: argparse.Namespace, topology: Topology, warnings: Sequence[str]) -> None:
    if given.picture is not None:
        from holmes_core.report.topology_picture import draw_topology

        draw_topology(topology, given.picture)
    if given.json:
        print(json.dumps(topology.to_json(), indent=2))
        return
    from holmes_core.report.detect_table import print_topology

    print_topology(topology, warnings)
    if given.picture is not None:
        print(f"\npicture: {given.picture}")


def _from_files(given: argparse.Namespace) -> tuple[Topology, tuple[str, ...]]:
    from holmes_core.cluster.sources import inventory_from_files

    if len(given.files) == 1 and (whole := _topology_file(given.files[0])) is not None:
        return whole, _warnings(whole)
    by_host: dict[str, list[Path]] = {}
    for path in given.files:
        by_host.setdefault(path.name.split(".")[0], []).append(path)
    inventories = [inventory_from_files(paths) for paths in by_host.values()]
    names = [inventory.host for inventory in inventories]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(seen=f"two files are about host {twice!r}", where="--from", do="give one inventory per host")
    # One rank per GPU is what a launcher would start; where there is none, one per host.
    topology = _topology(given, [one for one in inventories for _ in range(max(1, len(one.accelerators)))])
    return topology, _warnings(topology)


def _topology_file(path: Path) -> Topology | None:
    """Read a topology written by --json; None if the file is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Topology.from_json(data) if isinstance(data, Mapping) and "clusters" in data else None


def _from_job(given: argparse.Namespace) -> tuple[Topology, tuple[str, ...]] | None:
    """Ask every rank of the job; None on all ranks but the first."""
    place = place_in_job()
    if place is None:
        raise ConfigError(
            seen="no launcher: RANK and WORLD_SIZE (or SLURM_PROCID and SLURM_NTASKS) are not set",
            where="holmes topology",
            means="it asks every host of a job, so it has to be started on each",
            do="start it like the job: `torchrun --nnodes ... --no-python holmes topology`, or `srun "
            "--ntasks-per-node=1 holmes topology`; for files use --from, for this host alone `holmes detect`",
        )
    rank, world_size = place
    from holmes_core.runtime.start import meet

    meeting = meet(rank=rank, world_size=world_size, timeout=given.timeout)
    leave_together(meeting.store, rank, world_size)
    if rank != 0:
        return None
    topology = _topology(given, meeting.inventories)
    return topology, _warnings(topology)


def _set_meeting_place(env: Mapping[str, str]) -> None:
    """SLURM says which hosts there are, but not where to meet: on the first of them."""
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    if env.get("MASTER_ADDR") or not nodes:
        return
    from holmes_core.runtime.environment import set_missing

    # Jobs that share a host need different ports: torch's default and the job's number.
    port = 29500 + int(env.get("SLURM_JOB_ID", "0") or 0) % 1000
    set_missing({"MASTER_ADDR": expand_hosts(nodes, where="SLURM_JOB_NODELIST")[0], "MASTER_PORT": str(port)})


def place_in_job() -> tuple[int, int] | None:
    """Return rank and world size as the launcher gives them, and make the meeting place known; None without one."""
    env = os.environ
    numbers = {}
    for name, spellings in _LAUNCHERS.items():
        text = next((env[one] for one in spellings if env.get(one)), "")
        if text and not text.isdecimal():
            raise ConfigError(seen=f"{name} {text!r}", where="environment", do="start the job by torchrun or srun")
        numbers[name] = int(text) if text else None
    rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank is None or world_size is None:
        return None
    _set_meeting_place(env)
    return rank, world_size


def leave_together(store: object, rank: int, world_size: int) -> None:
    """Rank 0 may serve the store: it stays until all have read, or ten seconds."""
    from contextlib import suppress
    from datetime import timedelta

    with suppress(Exception):  # whoever has left has read all it needs
        store.set(f"holmes/topology/{rank}", "done")  # type: ignore[attr-defined]
        if rank == 0:
            keys = [f"holmes/topology/{other}" for other in range(world_size)]
            store.wait(keys, timedelta(seconds=10))  # type: ignore[attr-defined]


def _topology(given: argparse.Namespace, inventories: Sequence[Inventory]) -> Topology:
    """Group the hosts of all ranks; one host alone has a kind here, though a job on it needs no network."""
    config = HolmesConfig.load({"cluster_file": given.cluster} if given.cluster else {})
    topology = build_topology(config, [one.host for one in inventories], inventories)
    if config.clusters is None and len({one.host for one in inventories}) == 1:
        [spec] = group_hosts(inventories[:1])
        [cluster] = topology.clusters
        return replace(topology, clusters=(replace(cluster, name=spec.name, kind=spec.kind, reason=spec.reason),))
    return topology


def _warnings(topology: Topology) -> tuple[str, ...]:
    specs = [
        ClusterSpec(name=c.name, kind=c.kind, hosts=tuple(host.name for host in c.hosts), reason=c.reason)
        for c in topology.clusters
    ]
    inventories = [host.inventory for c in topology.clusters for host in c.hosts if host.inventory is not None]
    return job_warnings(inventories, specs)
