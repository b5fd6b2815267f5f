# SPDX-License-Identifier: Apache-2.0
"""Why a job that does not fit the memory is refused, and what would fit."""

from __future__ import annotations

from dataclasses import replace

from holmes_core.cluster.topology import Topology
from holmes_core.errors import ConfigError
from holmes_core.plan.cost import Choice, CostModel
from holmes_core.plan.search import Candidate, Limits, candidates

__all__ = ["gib", "too_large"]

_SHOWN = 4


def too_large(model: CostModel, topology: Topology, limits: Limits, chosen: Candidate) -> ConfigError:
    """Return the error that names the layout, who misses how much, and the nearest layouts that fit.

    Args:
        model: The job's costs.
        topology: Where it runs.
        limits: What the user has fixed.
        chosen: The layout that does not fit.
    """
    p, choice = chosen.prediction, chosen.choice
    costs = model.stage_costs(choice)
    places = model.places(choice)
    lines = []
    for rank, (need, have) in enumerate(zip(p.memory_bytes, p.limit_bytes, strict=True)):
        if need > have:
            cluster = topology.clusters[places[rank].cluster]
            host = cluster.hosts[places[rank].first_host].name
            lines.append(
                f"pipeline rank {rank} ({cluster.name}, host {host}): needs {gib(need)}, may use {gib(have)}: "
                f"{gib(need - have)} ({need - have:,} bytes) are missing; weights, gradients, optimizer and runtime "
                f"take {gib(costs.static_bytes[rank])}"
            )
    more = f"\nand {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    near = _nearest(model, limits, choice)
    do = (
        "use the nearest that fits:\n" + "\n".join(f"- {line}" for line in near)
        if near
        else "use more ranks, shorter sequences or a lower precision: no layout of these ranks fits"
    )
    return ConfigError(
        seen=f"{choice.describe()} does not fit the memory, as predicted:\n" + "\n".join(lines[:_SHOWN]) + more,
        where="the layout, before training",
        means="the ranks would run out of memory (predicted with AdamW's two states; memory_limit: 0 starts anyway)",
        do=do,
    )


def _nearest(model: CostModel, fixed: Limits, chosen: Choice) -> list[str]:
    found: list[tuple[tuple[int, float], str]] = []
    sizes: list[int | None] = [fixed.micro_batch_size] if fixed.num_microbatches is None else [None]
    if chosen.micro_batch_size > 1:
        sizes.append(1)
    for size in sizes:
        loose = replace(
            fixed, pp=None, dp=None, tp=None, recompute=None, micro_batch_size=size,
            num_microbatches=fixed.num_microbatches if size is None else None, partition="auto",
        )  # fmt: skip
        for one in candidates(model, loose, [chosen.order]):
            choice = one.choice
            if not one.prediction.fits:
                continue
            changes = [
                f"{name}: {getattr(choice, name)}"
                for name in ("pp", "dp", "tp")
                if getattr(choice, name) != getattr(chosen, name)
            ]
            if choice.recompute and not chosen.recompute:
                changes.append("recompute: true")
            if size == 1 and choice.micro_batch_size != chosen.micro_batch_size:
                changes.append("micro_batch_size: 1")
            if choice.layers_per_stage != chosen.layers_per_stage and len(choice.layers_per_stage) == len(
                chosen.layers_per_stage
            ):
                changes.append(f"layers_per_stage: {list(choice.layers_per_stage)}")
            most = max(one.prediction.memory_bytes)
            text = f"{', '.join(changes)}: {choice.describe()}, {gib(most)} on the fullest rank"
            found.append(((len(changes), -one.prediction.tokens_per_second), text))
    return list(dict.fromkeys(text for _, text in sorted(found)))[:3]


def gib(count: float) -> str:
    """Write bytes for people."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.1f} MiB"
