# SPDX-License-Identifier: Apache-2.0
"""Hosts are grouped by the network they share; the reason and what is odd are said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.cluster.fabric import DEFAULT_PREFIX, fabric_warnings, group_hosts
from holmes_core.cluster.nic import Inventory, Nic
from holmes_core.errors import ConfigError

NET_1, NET_2 = "fec0:0000:0000:0001", "fec0:0000:0000:0002"


def nic(device: str, kind: Any, **more: Any) -> Nic:
    return Nic(device=device, kind=kind, rate=100.0, state="active", **more)


def infiniband(host: str, *prefixes: str, **more: Any) -> Inventory:
    nics = tuple(nic(f"mlx5_{n}", "infiniband", subnet_prefix=prefix) for n, prefix in enumerate(prefixes))
    return Inventory(host=host, nics=nics, rails=tuple(one.device for one in nics), kind="infiniband", **more)


def roce(host: str, *addresses: str, **more: Any) -> Inventory:
    nics = tuple(nic(f"mlx5_{n}", "roce", addresses=(a,) if a else ()) for n, a in enumerate(addresses))
    return Inventory(host=host, nics=nics, rails=tuple(one.device for one in nics), kind="roce", **more)


def other(host: str, kind: Any) -> Inventory:
    return Inventory(host=host, nics=(nic("x0", kind),), rails=("x0",), kind=kind)


def ethernet(host: str, *lost: Nic, **more: Any) -> Inventory:
    return Inventory(host=host, nics=lost, **more)


def grouped(*inventories: Inventory, **more: Any) -> dict[str, tuple[str, ...]]:
    return {cluster.name: cluster.hosts for cluster in group_hosts(inventories, **more)}


@pytest.mark.parametrize(
    ("inventories", "expected"),
    [
        pytest.param(
            [infiniband(f"a{n}", DEFAULT_PREFIX) for n in range(3)]
            + [roce(f"b{n}", f"192.0.2.{n}/24") for n in range(5)],
            {"infiniband-0": ("a0", "a1", "a2"), "roce-0": ("b0", "b1", "b2", "b3", "b4")},
            id="3 infiniband and 5 roce",
        ),
        pytest.param(
            [infiniband("a1", NET_1), infiniband("b1", NET_2), infiniband("a2", NET_1)],
            {"infiniband-0": ("a1", "a2"), "infiniband-1": ("b1",)},
            id="two subnets",
        ),
        pytest.param(
            [infiniband("a1", NET_1, NET_2), infiniband("a2", NET_1, NET_2), infiniband("a3", NET_2)],
            {"infiniband-0": ("a1", "a2", "a3")},
            id="one subnet per rail, one rail lost",
        ),
        pytest.param(
            [infiniband("a1", NET_1), infiniband("a2", NET_1, NET_2), infiniband("a3", NET_2)],
            {"infiniband-0": ("a1", "a2"), "infiniband-1": ("a3",)},
            id="a cluster needs a subnet that all members are on",
        ),
        pytest.param(
            [infiniband("a1", NET_1, NET_2), infiniband("a2", NET_1), infiniband("a3", NET_2)],
            {"infiniband-0": ("a1", "a2"), "infiniband-1": ("a3",)},
            id="no chain through a host that is on both",
        ),
        pytest.param(
            [infiniband("a1", DEFAULT_PREFIX), infiniband("a2", NET_1)],
            {"infiniband-0": ("a1",), "infiniband-1": ("a2",)},
            id="configured and default prefix",
        ),
        pytest.param(
            [infiniband("a1", ""), infiniband("a2", NET_1), infiniband("a3", NET_2)],
            {"infiniband-0": ("a1", "a2"), "infiniband-1": ("a3",)},
            id="unknown prefix joins",
        ),
        pytest.param(
            [roce("a1", "192.0.2.1/25", "198.51.100.1/24"), roce("a2", "192.0.2.2/25", "198.51.100.2/24")],
            {"roce-0": ("a1", "a2")},
            id="one network per rail",
        ),
        pytest.param(
            [roce("a1", "192.0.2.1/31"), roce("a2", "192.0.2.3/31")],
            {"roce-0": ("a1",), "roce-1": ("a2",)},
            id="routed roce is the user's word",
        ),
        pytest.param(
            [roce("a1", "192.0.2.1/24"), roce("a2", "192.0.2.1/24")],
            {"roce-0": ("a1",), "roce-1": ("a2",)},
            id="the same address twice is not one network",
        ),
        pytest.param([roce("a1", ""), roce("a2", "")], {"roce-0": ("a1", "a2")}, id="no address known"),
        pytest.param([roce("a1", "2001:db8::1/64"), roce("a2", "2001:db8::2/64")], {"roce-0": ("a1", "a2")}, id="ipv6"),
        pytest.param(
            [
                other("n1", "slingshot"),
                other("n2", "efa"),
                other("n3", "omnipath"),
                other("n4", "iwarp"),
                other("n5", "efa"),
            ],
            {"slingshot-0": ("n1",), "efa-0": ("n2", "n5"), "omnipath-0": ("n3",), "ethernet-0": ("n4",)},
            id="kinds of their own",
        ),
    ],
)
def test_groups(inventories: list[Inventory], expected: dict[str, tuple[str, ...]]) -> None:
    assert grouped(*inventories) == expected


def test_a_declared_fabric_goes_before_what_was_seen() -> None:
    same = [roce(f"n{n}", f"192.0.2.{n}/24") for n in range(4)]
    split = grouped(*same, fabrics={"n0": "east", "n1": "east", "n2": "west", "n3": "west"})
    assert split == {"roce-0": ("n0", "n1"), "roce-1": ("n2", "n3")}
    routed = [roce(f"n{n}", f"192.0.2.{2 * n}/31", environment=(("HOLMES_FABRIC", "one"),)) for n in range(3)]
    assert grouped(*routed) == {"roce-0": ("n0", "n1", "n2")}
    assert "declared as fabric 'one'" in group_hosts(routed)[0].reason
    # Declaring does not make InfiniBand talk to RoCE.
    assert len(grouped(infiniband("a", NET_1), roce("b", "192.0.2.1/24"), fabrics={"a": "x", "b": "x"})) == 2


def test_names_are_checked() -> None:
    with pytest.raises(ConfigError, match="two hosts are called 'a'"):
        group_hosts([ethernet("a"), ethernet("a")])
    with pytest.raises(ConfigError, match="host 'z' is not in the job"):
        group_hosts([ethernet("a")], fabrics={"z": "x"})


def test_a_host_without_usable_rails_falls_to_ethernet_with_the_reason() -> None:
    lost = Nic(device="mlx5_0", kind="infiniband", state="init", usable=False, reason="no subnet manager yet")
    hosts = [infiniband("a1", NET_1), ethernet("a2", lost, missing_rails=1), ethernet("c1")]
    clusters = group_hosts(hosts)
    assert [cluster.hosts for cluster in clusters] == [("a1",), ("a2", "c1")]
    assert "a2: mlx5_0: no subnet manager yet" in clusters[1].reason
    [warning] = fabric_warnings(hosts, clusters)
    assert warning.startswith("a2 has RDMA hardware that it cannot use, unlike 1 of the other hosts")


def test_degraded_and_unequal_hosts_are_kept_and_reported() -> None:
    good = infiniband("a1", *[NET_1] * 8)
    broken = replace(good.nics[0], usable=False, state="init", reason="no subnet manager yet")
    bad = replace(good, host="a2", nics=(broken, *good.nics[1:]), rails=good.rails[1:], missing_rails=1)
    clusters = group_hosts([good, bad])
    assert clusters[0].hosts == ("a1", "a2")
    [warning] = fabric_warnings([good, bad], clusters)
    assert warning.startswith("a2 is degraded: 7 of 8 rails usable (mlx5_0: no subnet manager yet)")
    few = infiniband("a3", NET_1)
    warnings = fabric_warnings([good, few], group_hosts([good, few]))
    assert any("unequal numbers of rails (a1 8, a3 1)" in text for text in warnings)


def test_reasons_and_separate_roce_networks() -> None:
    [cluster] = group_hosts([infiniband("a1", DEFAULT_PREFIX), infiniband("a2", DEFAULT_PREFIX)])
    assert "default subnet prefix" in cluster.reason
    [cluster] = group_hosts([roce("a1", "192.0.2.1/24"), roce("a2", "192.0.2.2/24")])
    assert cluster.reason == "RoCE, all on 192.0.2.0/24"
    apart = [roce("a1", "192.0.2.1/31"), roce("a2", "192.0.2.3/31")]
    [warning] = fabric_warnings(apart, group_hosts(apart))
    assert "roce-0, roce-1 have no network in common" in warning
    assert "HOLMES_FABRIC" in warning


def test_a_rail_network_that_one_host_lacks_is_reported() -> None:
    hosts = [infiniband("a1", NET_1, NET_2), infiniband("a2", NET_1)]
    warnings = fabric_warnings(hosts, group_hosts(hosts))
    assert any(f"a1 has rails on {NET_2}" in text for text in warnings)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                infiniband("x", NET_1),
                infiniband("x", NET_2),
                infiniband("x", NET_1, NET_2),
                infiniband("x", ""),
                roce("x", "192.0.2.1/24"),
                roce("x", "198.51.100.1/24"),
                ethernet("x"),
                other("x", "efa"),
            ]
        ),
        min_size=1,
        max_size=12,
    )
)
def test_every_host_is_in_exactly_one_cluster_of_its_kind(drawn: list[Inventory]) -> None:
    hosts = [replace(one, host=f"n{number}") for number, one in enumerate(drawn)]
    clusters = group_hosts(hosts)
    assert sorted(name for cluster in clusters for name in cluster.hosts) == sorted(one.host for one in hosts)
    kinds = {one.host: one.kind for one in hosts}
    assert all(kinds[name] == cluster.kind for cluster in clusters for name in cluster.hosts)
    assert len({cluster.name for cluster in clusters}) == len(clusters)
    assert group_hosts(hosts) == clusters
    fabric_warnings(hosts, clusters)
