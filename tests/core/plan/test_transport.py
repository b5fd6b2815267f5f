# SPDX-License-Identifier: Apache-2.0
"""Which network each group gets, on hosts that were looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holmes_core.config import HolmesConfig
from holmes_core.plan.layout import ModelFacts
from holmes_core.plan.plan import Plan, make_plan
from holmes_core.plan.transport import Transport, choose_transport
from tests.core.plan.networks import ethernet, inventory, rail, topology, two_by_two


def interfaces(transport: Transport, *hosts: str) -> list[str | None]:
    return [transport.interface_on(host) for host in hosts]


@pytest.mark.parametrize(
    ("ranks", "device", "net", "kind", "hosts", "expected"),
    [
        ([0, 1], "cpu", "Socket", "infiniband", ("a1", "a2"), ["rdma0", "rdma0"]),
        ([2, 3], "cpu", "Socket", "roce", ("b1", "b2"), ["ens1", "rdma0"]),
        ([1, 2], "cpu", "Socket", "ethernet", ("a2", "b1"), ["eth0", "ens2"]),
        ([0, 1], "cuda", "IB", "infiniband", ("a1", "a2"), ["eth0", "eth0"]),  # bootstrap; data needs no interface
        ([2, 3], "cuda", "IB", "roce", ("b1", "b2"), ["ens2", "eth0"]),
        ([0, 1, 2, 3], "cuda", "Socket", "ethernet", ("a1", "b1"), ["eth0", "ens2"]),
        ([2], "cpu", "local", "local", ("b1",), ["lo"]),
    ],
)
def test_best_network_that_all_members_share(
    ranks: list[int], device: str, net: str, kind: str, hosts: tuple[str, ...], expected: list[str | None]
) -> None:
    found = choose_transport(two_by_two(), ranks, device)
    assert (found.net, found.kind, interfaces(found, *hosts)) == (net, kind, expected)
    assert found.backend == ("nccl" if device == "cuda" else "gloo")


def test_every_group_instance_gets_its_own_transport() -> None:
    config, model = HolmesConfig(pp=4), ModelFacts(num_blocks=8)
    plan = make_plan(config, two_by_two(), model, device_type="cuda")
    nets = {
        (plan.topology.cluster_of(a).name, plan.topology.cluster_of(b).name): group.transport.net
        for group in plan.groups
        if group.axis == "edge"
        for a, b in [group.ranks]
    }
    across = {pair: net for pair, net in nets.items() if pair[0] != pair[1]}
    assert set(across.values()) == {"Socket"}
    assert {net for pair, net in nets.items() if pair[0] == pair[1]} == {"IB"}
    assert len(across) == 2  # one edge, both directions
    assert Plan.from_json(plan.to_json()) == plan


def test_cluster_with_a_host_without_usable_port_talks_over_ethernet_and_says_which() -> None:
    good = inventory("n1", rail("mlx5_0", "r0", "10.0.0.1/24"), ethernet("eth0", "192.0.2.1/24"))
    down = replace(good, host="n2", rails=(), nics=(ethernet("eth0", "192.0.2.2/24"),))
    for device in ("cpu", "cuda"):
        found = choose_transport(topology(("roce", [good, down])), [0, 1], device)
        assert found.net == "Socket"
        assert found.interface == "eth0"
        assert "no usable roce port on n2" in found.reason


def test_infiniband_without_ip_is_ethernet_for_gloo_and_ib_for_nccl() -> None:
    hosts = [
        inventory(f"n{i}", rail("mlx5_0", "", kind="infiniband"), ethernet("eth0", f"192.0.2.{i}/24")) for i in (1, 2)
    ]
    job = topology(("infiniband", hosts))
    assert choose_transport(job, [0, 1], "cpu").interface == "eth0"
    assert "no IP" in choose_transport(job, [0, 1], "cpu").reason
    assert choose_transport(job, [0, 1], "cuda").net == "IB"


def test_rails_in_subnets_of_their_own_meet_on_a_subnet_both_have() -> None:
    one = inventory("n1", rail("m0", "r0", "10.0.0.1/24"), rail("m1", "r1", "10.0.1.1/24"), uses="")
    two = inventory("n2", rail("m0", "r0", "10.0.1.2/24"), rail("m1", "r1", "10.0.2.2/24"), uses="")
    assert interfaces(choose_transport(topology(("roce", [one, two])), [0, 1], "cpu"), "n1", "n2") == ["r1", "r0"]


def test_islands_whose_ethernets_are_not_joined_meet_on_the_network_they_share() -> None:
    # The host names resolve to Ethernet addresses; only the InfiniBand interface reaches the other island.
    a = inventory("a1", rail("m0", "ib0", "198.51.100.11/24", kind="infiniband"), ethernet("eth0", "192.0.2.11/24"))
    b = inventory("b1", rail("m0", "ib0", "198.51.100.12/24", kind="infiniband"), ethernet("eth0", "203.0.113.11/24"))
    job = topology(("infiniband", [a]), ("infiniband", [b]))
    assert choose_transport(job, [0, 1], "cpu").interface == "ib0"


def test_same_address_on_both_hosts_is_no_network_between_them() -> None:
    def host(name: str, number: int) -> object:
        bridge, wire = ethernet("br0", "172.17.0.1/16"), ethernet("eth0", f"192.0.2.{number}/24")
        return inventory(name, bridge, wire, uses="br0")

    job = topology(("ethernet", [host("n1", 1), host("n2", 2)]))  # type: ignore[list-item]
    assert choose_transport(job, [0, 1], "cpu").interface == "eth0"


def test_disjoint_networks_are_taken_as_routed() -> None:
    hosts = [inventory("n1", ethernet("eth0", "192.0.2.1/24")), inventory("n2", ethernet("eth0", "203.0.113.1/24"))]
    found = choose_transport(topology(("ethernet", hosts)), [0, 1], "cpu")
    assert found.interface == "eth0"
    assert "routed" in found.reason


def test_ipv6_only_hosts() -> None:
    hosts = [inventory(f"n{i}", ethernet("veth0", f"2001:db8::{i}/64"), uses="veth0") for i in (1, 2)]
    assert choose_transport(topology(("ethernet", hosts)), [0, 1], "cpu").interface == "veth0"


def test_ofi_kinds_use_the_plugin() -> None:
    for kind in ("efa", "slingshot", "omnipath"):
        hosts = [inventory(f"n{i}", rail("d0", "", kind=kind), ethernet("eth0", f"192.0.2.{i}/24")) for i in (1, 2)]
        assert choose_transport(topology((kind, hosts)), [0, 1], "cuda").net == "OFI"
