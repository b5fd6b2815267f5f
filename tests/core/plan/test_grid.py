# SPDX-License-Identifier: Apache-2.0
"""Placement of ranks, transports of groups, and the plan as a table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.topology import Topology
from holmes_core.errors import ConfigError
from holmes_core.plan.grid import Coordinates, make_grid
from holmes_core.plan.layout import Layout
from holmes_core.plan.transport import choose_transport
from holmes_core.report.plan_table import print_plan, render_plan
from tests.core.plan.helpers import plan_of, three_and_five_hosts, topology_of, two_clusters_of_two


def test_rank_zero_gets_the_last_stage_of_the_last_cluster() -> None:
    topology = topology_of([2, 2], [2])
    layout = Layout(tp=1, dp=2, stages_per_cluster=(2, 1))
    assert make_grid(topology, layout).ranks == (((4,), (5,)), ((2,), (3,)), ((0,), (1,)))
    plain = make_grid(topology, layout, last_stage_on_rank_zero=False)
    assert plain.ranks == (((0,), (1,)), ((2,), (3,)), ((4,), (5,)))


def test_ranks_dealt_round_robin_over_hosts() -> None:
    hosts = tuple(Host(name=f"n{i}", ranks=(i, i + 2)) for i in range(2))
    topology = Topology(clusters=(Cluster(name="all", kind="roce", hosts=hosts),))
    grid = make_grid(topology, Layout(tp=2, dp=1, stages_per_cluster=(2,)))
    assert grid.ranks == (((1, 3),), ((0, 2),))
    assert grid.coordinates(2) == Coordinates(pp=1, dp=0, tp=1)


def test_rank_order_is_followed_or_refused() -> None:
    topology = topology_of([2], [2])
    layout = Layout(tp=1, dp=2, stages_per_cluster=(1, 1))
    assert make_grid(topology, layout, rank_order=(1, 0, 3, 2)).ranks == (((1,), (0,)), ((3,), (2,)))
    with pytest.raises(ConfigError, match=r"dp group \[0, 2\] spans clusters a, b(?s:.)*rank_order"):
        make_grid(topology, layout, rank_order=(0, 2, 1, 3))
    with pytest.raises(ConfigError, match=r"tp group \[0, 1\] spans hosts a0, a1"):
        make_grid(topology_of([1, 1]), Layout(tp=2, dp=1, stages_per_cluster=(1,)))
    with pytest.raises(ConfigError, match="rank_order has 2 ranks, the job has 4"):
        make_grid(topology, layout, rank_order=(1, 0))


@pytest.mark.parametrize(
    ("schedule", "style", "virtual"), [("1f1b", "loop", 1), ("looped_bfs", "loop", 3), ("zbv", "v", 2)]
)
def test_stages_map_to_ranks_as_torch_maps_them(schedule: str, style: str, virtual: int) -> None:
    layout = Layout(tp=1, dp=1, stages_per_cluster=(4,), schedule=schedule, virtual_stages=virtual)
    theirs = generate_stage_to_rank_mapping(4, 4 * virtual, style=style)
    assert {stage: layout.pp_rank_of(stage) for stage in theirs} == theirs
    ours = [layout.stages_of(rank) for rank in range(4)]
    assert ours == [tuple(stage for stage, at in theirs.items() if at == rank) for rank in range(4)]


def test_an_embedding_of_its_own_is_on_the_last_rank() -> None:
    layout = Layout(tp=1, dp=1, stages_per_cluster=(1, 2), embedding_on_last=True)
    assert (layout.num_stages, layout.block_stages) == (4, 3)
    assert [layout.stages_of(rank) for rank in range(3)] == [(1,), (2,), (0, 3)]
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    ("ranks", "device", "expected"),
    [
        ((0, 1), "cuda", ("nccl", "local", "local")),
        ((0, 2), "cuda", ("nccl", "infiniband", "IB")),
        ((0, 2), "cpu", ("gloo", "infiniband", "Socket")),
        ((0, 4), "cuda", ("nccl", "ethernet", "Socket")),
        ((4, 6), "cuda", ("nccl", "roce", "IB")),
    ],
)
def test_transport_is_what_all_members_share(ranks: tuple[int, ...], device: str, expected: tuple[str, ...]) -> None:
    found = choose_transport(topology_of([2, 2], [2, 2]), ranks, device)
    assert (found.backend, found.kind, found.net) == expected
    assert found.reason


@pytest.mark.parametrize("width", [80, 100])
def test_table_fits_and_says_it_all(width: int) -> None:
    out = io.StringIO()
    Console(file=out, width=width).print(render_plan(three_and_five_hosts()))
    text = out.getvalue()
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= width
    assert "64 ranks = pp 8 x dp 8 x tp 1" in text
    assert "0 | b (roce)       | b0    | 0-3    | 24-31" in text
    assert "7 | a (infiniband) | a0    | 28-31  | 0-7" in text
    assert "nccl Socket | across a, b: only Ethernet" in text


def test_table_shortens_long_lists() -> None:
    out = io.StringIO()
    print_plan(plan_of(topology_of([8] * 4, [8] * 4, [8] * 4), tp=2), file=out)
    text = out.getvalue()
    assert "b0 .. b3 (4)" in text
    assert "32-33 | 34-35 | ... | 62-63" in text
    assert max(map(len, text.splitlines())) <= 100
    print_plan(two_clusters_of_two(), file=out)
    assert "box/cluster1" in out.getvalue()
