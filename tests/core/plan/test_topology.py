# SPDX-License-Identifier: Apache-2.0
"""From a user's cluster declaration and the ranks' host names to a Topology."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from holmes_core.cluster.host import Cluster, Host, expand_hosts, expand_ranks
from holmes_core.cluster.topology import Topology, build_topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError


def built(clusters: list[dict[str, Any]] | None, *hosts: str) -> Topology:
    return build_topology(HolmesConfig(clusters=clusters), hosts)


def shape(topology: Topology) -> dict[str, dict[str, tuple[int, ...]]]:
    return {cluster.name: {host.name: host.ranks for host in cluster.hosts} for cluster in topology.clusters}


def test_without_a_declaration_there_is_one_cluster() -> None:
    topology = built(None, "n1", "n1", "n2")
    assert shape(topology) == {"all": {"n1": (0, 1), "n2": (2,)}}
    assert topology.clusters[0].kind == "unknown"
    assert topology.world_size == 3
    assert (topology.host_of(2).name, topology.cluster_of(2).name, topology.local_rank(1)) == ("n2", "all", 1)


def test_hosts_patterns_and_short_names() -> None:
    spec = [{"name": "a", "kind": "InfiniBand", "hosts": ["n[1-2]"]}, {"name": "b", "kind": "roce", "hosts": "m"}]
    topology = built(spec, "m.example.org", "n1", "n2", "m.example.org")
    assert shape(topology) == {"a": {"n1": (1,), "n2": (2,)}, "b": {"m.example.org": (0, 3)}}


def test_ranks_split_one_machine() -> None:
    topology = built([{"ranks": "0-1"}, {"name": "far", "ranks": [2, 3]}], *["box"] * 4)
    assert shape(topology) == {"cluster0": {"box/cluster0": (0, 1)}, "far": {"box/far": (2, 3)}}
    whole = built([{"ranks": ["0-1"]}, {"ranks": [2]}], "x", "x", "y")
    assert shape(whole) == {"cluster0": {"x": (0, 1)}, "cluster1": {"y": (2,)}}


def test_json_and_pickle() -> None:
    topology = built([{"ranks": "0-1"}, {"ranks": "2"}], "x", "x", "y")
    assert Topology.from_json(topology.to_json()) == topology
    assert pickle.loads(pickle.dumps(topology)).cluster_of(2).name == "cluster1"


@pytest.mark.parametrize(
    ("clusters", "hosts", "message"),
    [
        (
            [{"name": "a", "hosts": "n1"}, {"name": "b", "hosts": "n1"}],
            ["n1"],
            "host 'n1' is in two clusters: 'a' and 'b'",
        ),
        ([{"hosts": "n1,n1"}], ["n1"], "host 'n1' is listed twice"),
        (
            [{"hosts": ["node1", "node7"]}],
            ["node1"],
            r"host 'node7' has no rank in this job \(did you mean 'node1'\?\)",
        ),
        ([{"hosts": ["n1"]}], ["n1", "n2"], r"rank 1 runs on host 'n2', which is in no cluster"),
        ([{"ranks": "0-4"}], ["x"] * 4, r"rank 4 in cluster 'cluster0', but the job has 4 ranks \(0 to 3\)"),
        ([{"ranks": "0-1"}, {"ranks": "1-3"}], ["x"] * 4, "rank 1 is listed twice: in cluster 'cluster0' and in"),
        ([{"ranks": "0-1"}, {"ranks": "3"}], ["x"] * 4, r"rank 2 is in no cluster \(1 of 4"),
        ([{"ranks": "0-1"}, {"hosts": "x"}], ["x"] * 4, "cluster 'cluster1' lists hosts, 'cluster0' lists ranks"),
        ([{"name": "a", "ranks": "0"}, {"name": "a", "ranks": "1"}], ["x"] * 2, "cluster name 'a' occurs 2 times"),
        ([{"hosts": "x", "kind": "infinband"}], ["x"], r"kind 'infinband' \(did you mean 'infiniband'\?\)"),
        ([{"host": "x"}], ["x"], r"unknown key 'host' \(did you mean 'hosts'\?\)"),
        ([{"name": "a"}], ["x"], "neither hosts nor ranks"),
        ([{"ranks": "0", "hosts": "x"}], ["x"], "both hosts and ranks"),
        (["n1"], ["n1"], r"clusters\[0\]"),
        ([{"hosts": "n[4-1]"}], ["n1"], "range '4-1'"),
        ([{"ranks": [True]}], ["n1"], r"clusters\[0\]\.ranks"),
        ([{"hosts": [3]}], ["n1"], r"clusters\[0\]\.hosts"),
    ],
)
def test_wrong_declarations(clusters: list[Any], hosts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        built(clusters, *hosts)
    assert "\ndo: " in str(caught.value)


def test_topology_checks_itself() -> None:
    with pytest.raises(ConfigError, match="rank 1 is in no cluster"):
        Topology(clusters=(Cluster(name="a", kind="roce", hosts=(Host(name="x", ranks=(0, 2)),)),))
    with pytest.raises(ConfigError, match="use a rank from 0 to 0"):
        built(None, "x").host_of(1)
    with pytest.raises(ConfigError, match="no rank"):
        Host(name="x", ranks=())
    with pytest.raises(ConfigError, match=r"HolmesConfig\.load"):
        build_topology(HolmesConfig(cluster_file="c.yaml"), ["x"])


def test_expansion() -> None:
    assert expand_hosts("a[08-10,12]-ib,b", where="") == ("a08-ib", "a09-ib", "a10-ib", "a12-ib", "b")
    assert expand_hosts(["r[1-2]n[1-2]"], where="") == ("r1n1", "r1n2", "r2n1", "r2n2")
    assert expand_ranks("0-2, 5", where="") == (0, 1, 2, 5)
    assert expand_ranks(["4-5", 0], where="") == (4, 5, 0)
    assert expand_ranks(3, where="") == (3,)
