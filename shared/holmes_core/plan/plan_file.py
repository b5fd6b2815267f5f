# SPDX-License-Identifier: Apache-2.0
"""plan.json: a plan written down by `holmes plan` (or by a job), and a job that follows it exactly or refuses.

Rank numbers mean nothing in a file: a launcher hands them out anew for every job. What must be the same is which hosts
form which cluster with how many ranks, the order of the clusters along the pipeline, the degrees, the blocks of each
stage, and the model's number of blocks.
"""

from __future__ import annotations

import json
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from holmes_core.cluster.host import ClusterSpec
from holmes_core.cluster.topology import Topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, HolmesError
from holmes_core.plan.plan import Plan

__all__ = ["check_followed", "check_topology", "config_of_plan", "differences", "read_plan", "write_plan"]

_FROM_PLAN = (
    "pp", "dp", "tp", "schedule", "virtual_stages", "num_microbatches", "micro_batch_size", "layers_per_stage",
    "split_points", "embedding", "recompute", "run_ahead", "defer_weights", "taper", "sharding",
    "clusters",
)  # fmt: skip


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as JSON."""
    Path(path).write_text(json.dumps(plan.to_json(), indent=1) + "\n", encoding="utf-8")


def read_plan(path: str | Path) -> Plan:
    """Read a plan.

    Raises:
        ConfigError: The file cannot be read, is no plan, or contradicts itself.
    """
    try:
        return Plan.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        if isinstance(error, HolmesError):
            where = f"file {path}, {error.where}"
            raise ConfigError(seen=error.seen, where=where, means=error.means, do=error.do) from None
        raise ConfigError(
            seen=f"no plan can be read: {error}",
            where=f"file {path}",
            do="write it with `holmes plan ... --json FILE`, readable on every host",
        ) from None


def config_of_plan(config: HolmesConfig, given: Set[str]) -> HolmesConfig:
    """Fill a configuration from the plan it names.

    Args:
        config: With ``plan``.
        given: Names of the fields that the user has given besides.

    Raises:
        ConfigError: The plan cannot be read, or a field says something else than the plan.
    """
    assert config.plan is not None
    plan = read_plan(config.plan)
    values = _settings(plan)
    for name in _FROM_PLAN:
        wanted, said = values[name], getattr(config, name)
        if name in given and not _same(name, said, wanted):
            raise ConfigError(
                seen=f"{name} {said!r}; the plan says {wanted!r}",
                where=f"HolmesConfig.{name} and file {config.plan}",
                do=f"leave {name} out, or make the plan again with it",
            )
    return replace(config, **values)  # type: ignore[arg-type]


def _same(name: str, said: object, wanted: object) -> bool:
    if name == "clusters" and isinstance(said, tuple) and isinstance(wanted, tuple):
        # In any order: the plan's is that of the pipeline.
        return {(c.name, c.hosts, c.ranks) for c in said} == {(c.name, c.hosts, c.ranks) for c in wanted}
    return said == wanted


def _settings(plan: Plan) -> dict[str, object]:
    layout = plan.layout
    return {
        "pp": layout.pp,
        "dp": layout.dp,
        "tp": layout.tp,
        "schedule": layout.schedule,
        "virtual_stages": layout.virtual_stages,
        "num_microbatches": layout.num_microbatches,
        "micro_batch_size": layout.micro_batch_size,
        "layers_per_stage": plan.layers_per_stage[layout.num_stages - layout.block_stages :] or None,
        "embedding": "last" if layout.embedding_on_last else "first",
        "split_points": plan.split_points or None,
        "recompute": plan.recompute or None,
        "run_ahead": layout.run_ahead,
        "defer_weights": layout.defer_weights,
        "taper": layout.taper,
        "sharding": layout.sharding,
        "clusters": tuple(_spec(plan, index) for index in range(len(plan.topology.clusters))),
    }


def _spec(plan: Plan, index: int) -> ClusterSpec:
    """A cluster as the job reads it: by hosts; parts of one machine by ranks."""
    cluster = plan.topology.clusters[index]
    part = any("/" in host.name for host in cluster.hosts)
    return ClusterSpec(
        name=cluster.name,
        kind=cluster.kind,
        hosts=() if part else tuple(host.name for host in cluster.hosts),
        ranks=cluster.ranks if part else (),
    )


def pipeline_order(plan: Plan) -> tuple[str, ...]:
    """Return the clusters' names in the order in which the stages lie in them."""
    owners = [plan.topology.cluster_of(stage[0][0]).name for stage in plan.grid.ranks]
    return tuple(dict.fromkeys(owners))


def differences(planned: Plan, made: Plan) -> list[str]:
    """Say in what a job's plan differs from the one it was to follow, one sentence each."""
    found = topology_differences(planned, made.topology)
    order, here = pipeline_order(planned), pipeline_order(made)
    if order != here and set(order) == set(here):
        zero = f"{made.topology.host_of(0).name} of {made.topology.cluster_of(0).name}"
        found.append(
            f"clusters along the pipeline: planned {' -> '.join(order)}, here {' -> '.join(here)}: global rank 0 runs "
            f"on {zero}, the plan has it in {planned.topology.cluster_of(0).name}"
        )
    if planned.model is not None and made.model is not None:
        for name in ("num_blocks", "num_heads", "num_kv_heads", "vocab_size", "tied"):
            a, b = getattr(planned.model, name), getattr(made.model, name)
            if a != b and None not in (a, b):
                found.append(f"the model's {name}: planned {a}, here {b}")
    for name in ("pp", "dp", "tp", "schedule", "virtual_stages", "embedding_on_last"):
        a, b = getattr(planned.layout, name), getattr(made.layout, name)
        if a != b:
            found.append(f"{name}: planned {a}, here {b}")
    if planned.layers_per_stage != made.layers_per_stage:
        found.append(f"blocks per stage: planned {planned.layers_per_stage}, here {made.layers_per_stage}")
    return found


def topology_differences(planned: Plan, topology: Topology) -> list[str]:
    """Say in what a job's hosts differ from a plan's: hosts, clusters, ranks on each."""
    found = []
    there = _hosts(planned.topology)
    here = _hosts(topology)
    for name, (cluster, ranks) in there.items():
        if name not in here:
            found.append(f"host {name} of cluster {cluster} has no rank here")
        elif here[name][0] != cluster:
            found.append(f"host {name}: planned in cluster {cluster}, here in {here[name][0]}")
        elif here[name][1] != ranks:
            found.append(f"host {name} of cluster {cluster}: planned {ranks} ranks, here {here[name][1]}")
    found += [f"host {name} of cluster {here[name][0]} is not in the plan" for name in here if name not in there]
    return found


def _hosts(topology: Topology) -> dict[str, tuple[str, int]]:
    """Host -> its cluster and how many ranks it has; a part of a machine counts by its cluster alone."""
    return {
        cluster.name if "/" in host.name else host.name: (cluster.name, len(host.ranks))
        for cluster in topology.clusters
        for host in cluster.hosts
    }


def check_topology(config: HolmesConfig, topology: Topology) -> None:
    """Refuse a job on other hosts than those of the plan it names, before any process group exists.

    Raises:
        ConfigError: With the difference.
    """
    if config.plan is None:
        return
    planned = read_plan(config.plan)
    found = topology_differences(planned, topology)
    order = pipeline_order(planned)
    zero, wanted = topology.cluster_of(0).name, planned.topology.cluster_of(0).name
    if not found and zero != wanted and config.last_stage_on_rank_zero:
        hosts = ", ".join(host.name for c in topology.clusters if c.name == wanted for host in c.hosts[:4])
        found.append(
            f"global rank 0 runs on {topology.host_of(0).name} of cluster {zero}; the plan's pipeline is "
            f"{' -> '.join(order)}, and rank 0 belongs to {wanted}: start it on one of {hosts}"
        )
    _refuse(config.plan, found)


def check_followed(config: HolmesConfig, made: Plan) -> None:
    """Refuse a job whose own plan is not the one it names.

    Raises:
        ConfigError: With the difference.
    """
    if config.plan is not None:
        _refuse(config.plan, differences(read_plan(config.plan), made))


def _refuse(path: str, found: list[str]) -> None:
    if not found:
        return
    shown = "\n".join(found[:8] + ([f"and {len(found) - 8} more differences"] if len(found) > 8 else []))
    raise ConfigError(
        seen=f"the job is not the one that was planned:\n{shown}",
        where=f"HolmesConfig.plan, file {path}",
        means="a plan is followed exactly or not at all: another one may be slower, or may not fit the memory",
        do="start the job as planned, or plan again for these hosts and this model (`holmes plan`), or leave it out",
    )
