# SPDX-License-Identifier: Apache-2.0
"""How many bytes each process group has carried: payload only, counted where tensors are handed to a group."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from holmes_core.plan.plan import Plan
from holmes_core.plan.transport import choose_transport

__all__ = ["Traffic", "gather_traffic", "write_traffic"]


class Traffic:
    """Bytes this rank has handed to each of its groups.

    Counted are activations, gradients and parameters. Flags, shapes, norms, logs and batches are control traffic and
    are not: on a slow link they are what the interface has carried beyond these bytes.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self._groups: dict[int, tuple[str, tuple[int, ...]]] = {}

    def name(self, group: dist.ProcessGroup, name: str, ranks: tuple[int, ...]) -> None:
        """Introduce a group."""
        self._groups[id(group)] = (name, ranks)

    def add(self, group: dist.ProcessGroup, tensor: Tensor) -> None:
        """Count a tensor that this rank hands to a group."""
        name, _ = self._groups[id(group)]
        self.sent[name] += tensor.numel() * tensor.element_size()

    def rows(self) -> list[tuple[str, tuple[int, ...], int]]:
        """Return (group, ranks, bytes) of every group that carried something."""
        ranks = dict(self._groups.values())
        return [(name, ranks[name], sent) for name, sent in self.sent.items()]


def gather_traffic(traffic: Traffic, plan: Plan, device_type: str) -> list[dict[str, Any]]:
    """Add up what all ranks counted. Collective.

    Returns:
        One row per group, largest first: name, axis, ranks, hosts, clusters, transport, and payload bytes handed in
        by all its members. The same on every rank.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, traffic.rows())
    total: Counter[str] = Counter()
    members: dict[str, tuple[int, ...]] = {}
    for rows in everyone:
        for name, ranks, sent in rows:
            total[name] += sent
            members[name] = ranks
    known = {group.name: group for group in plan.groups}
    found = []
    for name, sent in total.most_common():
        ranks = members[name]
        transport = known[name].transport if name in known else choose_transport(plan.topology, ranks, device_type)
        found.append(
            {
                "group": name,
                "axis": known[name].axis if name in known else "shared",
                "ranks": list(ranks),
                "hosts": list(dict.fromkeys(plan.topology.host_of(rank).name for rank in ranks)),
                "clusters": list(dict.fromkeys(plan.topology.cluster_of(rank).name for rank in ranks)),
                "transport": transport.to_json(),
                "payload_bytes": sent,
            }
        )
    return found


def write_traffic(path: str, rows: list[dict[str, Any]]) -> None:
    """Write `gather_traffic`'s rows as JSON."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({"groups": rows}, indent=1) + "\n")
