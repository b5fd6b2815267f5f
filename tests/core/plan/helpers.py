# SPDX-License-Identifier: Apache-2.0
"""Topologies and random jobs for the planner's tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.topology import Topology, build_topology
from holmes_core.config import HolmesConfig
from holmes_core.plan.layout import ModelFacts
from holmes_core.plan.plan import Plan, make_plan

KINDS = ("infiniband", "roce", "ethernet", "efa", "unknown")


def topology_of(*clusters: list[int]) -> Topology:
    """Clusters as lists of host sizes, ranks by prefix sums."""
    start = 0
    found = []
    for c, sizes in enumerate(clusters):
        hosts = []
        for h, size in enumerate(sizes):
            hosts.append(Host(name=f"{'abcdefgh'[c]}{h}", ranks=tuple(range(start, start + size))))
            start += size
        found.append(Cluster(name="abcdefgh"[c], kind=KINDS[c % len(KINDS)], hosts=tuple(hosts)))
    return Topology(clusters=tuple(found))


def plan_of(topology: Topology, *, num_blocks: int = 32, device_type: str = "cpu", **wishes: Any) -> Plan:
    return make_plan(HolmesConfig(**wishes), topology, ModelFacts(num_blocks=num_blocks), device_type=device_type)


def two_clusters_of_two() -> Plan:
    config = HolmesConfig(clusters=[{"kind": "infiniband", "ranks": "0-1"}, {"kind": "roce", "ranks": [2, 3]}])
    return make_plan(config, build_topology(config, ["box"] * 4), ModelFacts(num_blocks=6))


def three_unequal_clusters() -> Plan:
    return plan_of(topology_of([4], [4, 4], [2, 2]), tp=2, schedule="interleaved_1f1b", num_blocks=17)


def three_and_five_hosts() -> Plan:
    return plan_of(topology_of([8] * 3, [8] * 5), device_type="cuda")


WHOLE_PLANS = {
    "two_clusters_of_two": two_clusters_of_two,
    "three_unequal_clusters": three_unequal_clusters,
    "three_and_five_hosts": three_and_five_hosts,
}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Topology, dict[str, Any]]:
    """A topology with shuffled ranks, and wishes that it can fulfil."""
    tp = draw(st.sampled_from([1, 1, 2, 4]))
    dp = draw(st.integers(1, 4))
    stages = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    world = sum(stages) * dp * tp
    ranks = draw(st.permutations(range(world)))
    clusters, at = [], 0
    for c, count in enumerate(stages):
        hosts, groups = [], count * dp
        while groups:
            size = draw(st.integers(1, groups))
            members = tuple(sorted(ranks[at : at + size * tp]))
            hosts.append(Host(name=f"{c}-{len(hosts)}", ranks=members))
            at, groups = at + size * tp, groups - size
        clusters.append(Cluster(name=f"c{c}", kind=draw(st.sampled_from(KINDS)), hosts=tuple(hosts)))
    schedule = draw(st.sampled_from(["1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "zbv", "dualpipev"]))
    wishes = {"dp": dp, "tp": tp, "schedule": schedule, "last_stage_on_rank_zero": draw(st.booleans())}
    return Topology(clusters=tuple(clusters)), wishes
