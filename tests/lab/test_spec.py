# SPDX-License-Identifier: Apache-2.0
"""Lab specs: defaults, and every mistake with its place and remedy."""

from __future__ import annotations

import ipaddress
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.errors import ConfigError
from holmes_core.lab.spec import LAB_KINDS, LabSpec
from holmes_core.lab.spec_file import load_spec, parse_rate, parse_spec

A = {"name": "a", "kind": "infiniband", "hosts": 2}
ROOT = Path(__file__).resolve().parents[2]


def test_everything_but_the_clusters_has_a_default() -> None:
    spec = parse_spec({"clusters": [{"kind": "infiniband", "hosts": 2}, {"kind": "ethernet", "hosts": ["x", "y"]}]})
    first, second = spec.clusters
    assert (first.name, first.hosts, second.name, second.hosts) == ("c1", ("c11", "c12"), "c2", ("x", "y"))
    assert (first.rdma_rate, first.ethernet_rate, first.uplink_rate) == (5 * 10**9, 200 * 10**6, None)
    assert (first.ranks_per_host, first.rdma, first.ethernet, first.port_rate) == (1, "rdma0", "eth0", 100)
    assert spec.faults == ()


def test_what_a_cluster_says_wins() -> None:
    spec = parse_spec(
        {
            "clusters": [A, {**A, "name": "b", "ranks_per_host": 2, "cpu": 0.25, "rdma_rate": "1gbit"}],
            "ranks_per_host": 4,
            "cpu": "none",
            "interfaces": {"rdma": "ens1"},
        }
    )
    a, b = spec.clusters
    assert (a.ranks_per_host, a.cpu, a.rdma_rate, a.rdma, a.ethernet) == (4, None, 5 * 10**9, "ens1", "eth0")
    assert (b.ranks_per_host, b.cpu, b.rdma_rate) == (2, 0.25, 10**9)
    assert [host.first_rank for host in spec.hosts] == [0, 4, 8, 10]
    assert spec.world_size == 12


def test_cpu_auto_never_gives_more_than_the_machine_has() -> None:
    for hosts in (1, 3, 7):
        spec = parse_spec({"clusters": [{**A, "hosts": hosts}]})
        shares = [host.cluster.cpu for host in spec.hosts]
        assert 0 < sum(shares) <= os.cpu_count()
        assert sum(shares) > 0.9 * os.cpu_count() or hosts > 2 * os.cpu_count()


@pytest.mark.parametrize("name", ["two-clusters.yaml", "three-clusters.yaml"])
def test_the_specs_that_ship_are_right(name: str) -> None:
    spec = load_spec(ROOT / "recipes" / "lab" / name)
    assert LabSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


FAULT = {"fault": "nic-down", "host": "a1", "nic": "rdma"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, ["None", "lab spec", "clusters: ["]),
        ({}, ["no clusters"]),
        ({"clusters": "a"}, ["'a'", "clusters", "write a list"]),
        ({"clusters": [A], "fault": []}, ["unknown key 'fault' (did you mean 'faults'?)"]),
        ({"clusters": [A, {**A, "name": "b", "hosts": ["a1"]}]}, ["host 'a1' twice"]),
        ({"clusters": [A, A]}, ["cluster 'a' twice"]),
        ({"clusters": [{**A, "kind": "infinband"}]}, ["did you mean 'infiniband'?", "clusters[0]"]),
        ({"clusters": [{"name": "a", "hosts": 2}]}, ["no kind", "infiniband, roce, ethernet"]),
        ({"clusters": [{"name": "a", "kind": "roce"}]}, ["no hosts", "clusters[0], hosts"]),
        ({"clusters": [{**A, "hosts": 0}]}, ["0", "from 1 to 128"]),
        ({"clusters": [{**A, "hosts": []}]}, ["no hosts"]),
        ({"clusters": [{**A, "hosts": ["node_1"]}]}, ["host name 'node_1'"]),
        ({"clusters": [{**A, "hosts": 100}, {**A, "name": "b", "hosts": 100}]}, ["200 hosts"]),
        ({"clusters": [{**A, "name": "a/b"}]}, ["name 'a/b'"]),
        ({"clusters": [{**A, "rdma_rate": "fast"}]}, ["rate 'fast'", "clusters[0], rdma_rate", "5gbit"]),
        ({"clusters": [{**A, "ethernet_rate": "5 bit"}]}, ["rate '5 bit'", "at least 10kbit"]),
        ({"clusters": [{**A, "kind": "ethernet", "rdma_rate": "1gbit"}]}, ["rdma_rate in a cluster of kind ethernet"]),
        ({"clusters": [{**A, "ranks_per_host": "2"}]}, ["'2'", "ranks_per_host", "whole number"]),
        ({"clusters": [{**A, "cpu": True}]}, ["cpu True", "auto"]),
        ({"clusters": [{**A, "cpu": 0}]}, ["cpu 0"]),
        ({"clusters": [{**A, "port_rate": 99}]}, ["port_rate 99", "100"]),
        ({"clusters": [{**A, "subnet_prefix": "fe80::"}]}, ["subnet_prefix 'fe80::'", "four groups"]),
        ({"clusters": [{**A, "interfaces": {"rdma": "a-name-too-long-for-linux"}}]}, ["interface 'a-name-too"]),
        ({"clusters": [{**A, "interfaces": {"rdma": "eth0"}}]}, ["interface 'eth0' twice"]),
        ({"clusters": [{**A, "interfaces": ["eth0"]}]}, ["['eth0']", "{rdma: ens1"]),
        ({"clusters": [A], "faults": FAULT}, ["faults", "write a list"]),
        ({"clusters": [A], "faults": [{**FAULT, "fault": "nic-donw"}]}, ["did you mean 'nic-down'?", "nic-slow ("]),
        ({"clusters": [A], "faults": [{"fault": ["nic-down"]}]}, ["fault \"['nic-down']\""]),
        ({"clusters": [A], "faults": [{**FAULT, "host": ["a1"]}]}, ["host"]),
        ({"clusters": [A], "faults": [{**FAULT, "nic": ["rdma"]}]}, ["nic ['rdma']"]),
        ({"clusters": [A], "faults": [{**FAULT, "host": "a3"}]}, ["host 'a3'", "a1, a2"]),
        ({"clusters": [A], "faults": [{**FAULT, "nic": "rdma1"}]}, ["nic 'rdma1' (did you mean", "faults[0]"]),
        ({"clusters": [A], "faults": [{**FAULT, "fault": "nic-slow"}]}, ["nic-slow without a rate"]),
        ({"clusters": [A], "faults": [{**FAULT, "rate": "1mbit"}]}, ["nic-down with a rate"]),
        ({"clusters": [{**A, "kind": "ethernet"}], "faults": [FAULT]}, ["nic 'rdma'", "ethernet, eth0"]),
    ],
)
def test_mistakes(data: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_spec(data)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [(None, ["No such file", "recipes/lab/two-clusters.yaml"]), ("a: [", ["correct the yaml"]), ("- 1", ["[1]"])],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | None, words: list[str]) -> None:
    path = tmp_path / "lab.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_spec(path)
    for word in [*words, str(path)]:
        assert word in str(caught.value)


def test_interfaces_are_named_by_role_or_by_name() -> None:
    cluster = {**A, "interfaces": {"rdma": "ens2", "ethernet": "ens1"}}
    spec = parse_spec({"clusters": [cluster], "faults": [{**FAULT, "nic": "ens2"}, {**FAULT, "nic": "ethernet"}]})
    assert [fault.nic for fault in spec.faults] == ["rdma", "ethernet"]


@given(st.integers(10_000, 10**12))
def test_rates_in_any_unit(rate: int) -> None:
    for unit, size in (("bit", 1), ("kbit", 10**3), ("Mbit", 10**6), ("gbit/s", 10**9)):
        # Ten digits after the point and a rounded product: off by less than one part in a million.
        assert parse_rate(f"{rate / size:.10f} {unit}", where="x") == pytest.approx(rate, rel=1e-6)
    assert parse_rate("unlimited", where="x") is None


CLUSTERS = st.lists(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(LAB_KINDS), "hosts": st.integers(1, 5), "ranks_per_host": st.integers(1, 4)},
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=50)
@given(CLUSTERS)
def test_places_are_unique_and_networks_apart(clusters: list[dict[str, object]]) -> None:
    spec = parse_spec({"clusters": clusters})
    hosts = spec.hosts
    addresses = [a for h in hosts for a in (h.ethernet_address, h.rdma_address) if a]
    assert len(set(addresses)) == len(addresses)
    assert len({host.name for host in hosts}) == len(hosts)
    networks: dict[str, set[int]] = {}
    for host in hosts:
        assert bool(host.rdma_address) == (host.cluster.kind != "ethernet")
        if host.rdma_address:
            network = ipaddress.ip_interface(f"{host.rdma_address}/24").network
            networks.setdefault(str(network), set()).add(host.cluster_index)
    assert all(len(found) == 1 for found in networks.values())
    ranks = [host.first_rank + i for host in hosts for i in range(host.cluster.ranks_per_host)]
    assert ranks == list(range(spec.world_size))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["a", "roce", 2]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["clusters", "name", "kind", "hosts", "cpu", "faults", "fault", "host", "interfaces", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(JUNK)
def test_odd_specs_are_refused_and_never_crash(data: object) -> None:
    with suppress(ConfigError):
        parse_spec(data)
