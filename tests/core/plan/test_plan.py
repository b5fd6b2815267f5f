# SPDX-License-Identifier: Apache-2.0
"""Whole plans: invariants for any job, goldens for three jobs.

After a wanted change: HOLMES_WRITE_GOLDENS=1 pytest tests/core/plan/test_plan.py, and read the difference.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from holmes_core.cluster.topology import Topology
from holmes_core.errors import ConfigError
from holmes_core.plan.plan import AXES, Plan
from tests.core.plan.helpers import WHOLE_PLANS, jobs, plan_of, topology_of

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("name", WHOLE_PLANS)
def test_whole_plan_is_as_it_was(name: str) -> None:
    plan = WHOLE_PLANS[name]().to_json()
    path = GOLDENS / f"{name}.json"
    if os.environ.get("HOLMES_WRITE_GOLDENS"):
        groups = ",\n  ".join(json.dumps(group) for group in plan["groups"])
        rest = ",\n ".join(f'"{key}": {json.dumps(value)}' for key, value in plan.items() if key != "groups")
        path.write_text(f'{{{rest},\n "groups": [\n  {groups}\n ]}}\n')
    assert plan == json.loads(path.read_text())


@given(job=jobs())
@settings(max_examples=30, deadline=None)
def test_any_plan_keeps_the_invariants(job: tuple[Topology, dict[str, Any]]) -> None:
    topology, wishes = job
    plan = plan_of(topology, num_blocks=40, **wishes)
    everyone = list(range(topology.world_size))
    for axis in ("world", "tp", "dp", "pp", "replica"):
        members = sorted(rank for group in plan.groups if group.axis == axis for rank in group.ranks)
        assert members == everyone, f"each rank exactly once in axis {axis}"
    for group in plan.groups:
        assert len(set(group.ranks)) == len(group.ranks)
        if group.axis == "tp":
            assert len({topology.host_of(rank).name for rank in group.ranks}) == 1
        if group.axis == "dp":
            assert len({topology.cluster_index(rank) for rank in group.ranks}) == 1
            assert group.transport.kind in ("local", topology.cluster_of(group.ranks[0]).kind)
    assert len({group.name for group in plan.groups}) == len(plan.groups)
    assert sorted(plan.groups, key=lambda group: AXES.index(group.axis)) == list(plan.groups)
    assert sorted(stage for rank in plan.grid.pp_groups()[0] for stage in plan.stages_of(rank)) == list(
        range(plan.num_stages)
    )
    blocks = [block for stage in range(plan.num_stages) for block in plan.stage_blocks(stage)]
    assert blocks == list(range(40))
    if wishes["last_stage_on_rank_zero"]:
        place = plan.grid.coordinates(0)
        assert plan.holds_last_stage(0)
        assert (place.dp, place.tp) == (0, 0)


@given(job=jobs())
@settings(max_examples=20, deadline=None)
def test_every_stage_boundary_has_its_two_edges(job: tuple[Topology, dict[str, Any]]) -> None:
    topology, wishes = job
    plan = plan_of(topology, num_blocks=40, **wishes)
    used = set()
    for stage in range(plan.num_stages - 1):
        for dp in range(plan.layout.dp):
            for tp in range(plan.layout.tp):
                a, b = plan.rank_of(stage=stage, dp=dp, tp=tp), plan.rank_of(stage=stage + 1, dp=dp, tp=tp)
                forward, backward = plan.edge(a, b, "fwd"), plan.edge(b, a, "bwd")
                if a == b:
                    assert forward is None
                    assert backward is None
                    continue
                assert forward is not None
                assert backward is not None
                assert (forward.ranks, backward.ranks) == ((a, b), (b, a))
                used |= {forward.name, backward.name}
    assert used == {group.name for group in plan.groups if group.axis == "edge"}


@given(job=jobs())
@settings(max_examples=12, deadline=None)
def test_json_round_trip_and_determinism(job: tuple[Topology, dict[str, Any]]) -> None:
    topology, wishes = job
    plan = plan_of(topology, num_blocks=40, **wishes)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan_of(topology, num_blocks=40, **wishes) == plan


def test_interleaving_adds_the_edge_from_last_to_first() -> None:
    plan = plan_of(topology_of([4]), pp=4, schedule="interleaved_1f1b")
    pairs = [group.ranks for group in plan.groups if group.axis == "edge" and group.direction == "fwd"]
    order = plan.grid.pp_groups()[0]
    assert pairs == list(zip(order, (*order[1:], order[0]), strict=True))
    assert not any(g.ranks == (order[3], order[0]) for g in plan_of(topology_of([4]), pp=4).groups if g.axis == "edge")


def test_v_schedule_runs_first_and_last_stage_on_one_rank() -> None:
    plan = plan_of(topology_of([2], [2]), dp=1, schedule="zbv")
    assert plan.stages_of(0) == (0, 7)
    assert plan.holds_first_stage(0)
    assert plan.holds_last_stage(0)
    assert plan.embedding_group(0) is None


def test_embedding_group_joins_first_and_last_stage() -> None:
    plan = plan_of(topology_of([2], [2]), dp=1)
    group = plan.embedding_group(0)
    assert group is not None
    assert group.ranks == (plan.rank_of(stage=0, dp=0, tp=0), 0)
    assert group.transport.net == "Socket"


def test_control_groups_are_never_nccl() -> None:
    plan = plan_of(topology_of([2], [2]), device_type="cuda")
    backends = {axis: {group.transport.backend for group in plan.groups if group.axis == axis} for axis in AXES}
    assert backends["world"] == backends["pp"] == backends["replica"] == {"gloo"}
    assert backends["dp"] == backends["edge"] == backends["tp"] == {"nccl"}


def test_group_lookup_names_the_other_lookups() -> None:
    plan = plan_of(topology_of([4]), pp=4)
    assert plan.group("dp", 2).ranks == (2,)
    with pytest.raises(ConfigError, match=r"rank 2 is in 4 groups of axis 'edge'(?s:.)*edge\("):
        plan.group("edge", 2)


def test_split_points_leave_the_blocks_to_the_runtime() -> None:
    plan = plan_of(topology_of([2]), split_points=["body.3"], num_blocks=1)
    assert plan.layout.pp == 2
    assert plan.layers_per_stage == ()
    with pytest.raises(ConfigError, match="split_points"):
        plan.stage_blocks(0)


def test_layers_per_stage_decides_the_pipeline() -> None:
    plan = plan_of(topology_of([4]), layers_per_stage="5,3", num_blocks=8)
    assert (plan.layout.pp, plan.layout.dp) == (2, 2)
    assert plan.stage_blocks(1) == range(5, 8)


def test_a_damaged_plan_file_is_refused() -> None:
    data = plan_of(topology_of([2], [2])).to_json()
    data["grid"]["ranks"] = [[[0], [2]], [[1], [3]]]
    with pytest.raises(ConfigError, match=r"dp group \[0, 2\] spans clusters a, b"):
        Plan.from_json(data)
    data["grid"]["ranks"] = [[[0], [0]], [[1], [3]]]
    with pytest.raises(ConfigError, match=r"Grid\.ranks"):
        Plan.from_json(data)
    with pytest.raises(ConfigError, match=r"unknown key 'grids' \(did you mean 'grid'\?\)"):
        Plan.from_json({**data, "grids": 1})


@pytest.mark.parametrize(
    ("rule", "speeds", "by_cluster"),
    [
        ("auto", {}, (15, 15)),
        ("auto", {"a": 197, "b": 160}, (17, 13)),
        ("paper", {"a": 197, "b": 160}, (16, 14)),
        ("equal", {"a": 197, "b": 160}, (15, 15)),
        ("auto", {"a": 1, "b": 1}, (15, 15)),
    ],
)
@pytest.mark.parametrize("zero_last", [True, False])
def test_blocks_follow_the_speeds_of_clusters(
    rule: str, speeds: dict[str, float], by_cluster: tuple[int, int], zero_last: bool
) -> None:
    """Whichever cluster comes last: speeds belong to clusters, not to positions."""
    plan = plan_of(
        topology_of([2], [2]),
        num_blocks=30,
        partition=rule,
        cluster_speeds=speeds,
        last_stage_on_rank_zero=zero_last,
    )
    owners = [plan.topology.cluster_of(plan.rank_of(stage=s, dp=0, tp=0)).name for s in range(2)]
    assert owners == (["b", "a"] if zero_last else ["a", "b"])
    assert dict(zip(owners, plan.layers_per_stage, strict=True)) == dict(zip("ab", by_cluster, strict=True))


def test_speeds_that_do_not_belong_to_the_clusters() -> None:
    topology = topology_of([2], [2])
    for wishes, message in (
        ({"partition": "paper"}, "speeds of: no cluster"),
        ({"cluster_speeds": {"a": 1.0}}, r"give each a speed: cluster_speeds: \{a: 1.0, b: 1.0\}"),
        ({"cluster_speeds": {"a": 1.0, "c": 1.0}}, "speeds of: a, c"),
        ({"cluster_speeds": {"a": 0}}, "'a' has 0"),
        ({"partition": "papr"}, "partition is 'papr'"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_of(topology, **wishes)
