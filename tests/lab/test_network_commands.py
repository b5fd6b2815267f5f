# SPDX-License-Identifier: Apache-2.0
"""The commands for iproute2: names Linux can take, each link limited in both directions, faults in their place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.lab.network import Traffic, forwarding_commands, host_commands, shaping_commands, switch_commands
from holmes_core.lab.spec import LAB_KINDS
from holmes_core.lab.spec_file import parse_spec

CLUSTERS = st.lists(
    st.fixed_dictionaries(
        {"kind": st.sampled_from(LAB_KINDS), "hosts": st.integers(1, 6)},
        optional={"uplink_rate": st.sampled_from(["100mbit", "1gbit"])},
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=30)
@given(CLUSTERS)
def test_names_are_unique_and_fit(clusters: list[dict[str, object]]) -> None:
    spec = parse_spec({"clusters": clusters})
    commands = switch_commands(spec, {host.name: f"ns-{host.name}" for host in spec.hosts})
    added = [line.split()[3] for line in commands if line.startswith("link add")]
    peers = [line.split("peer name ")[1].split()[0] for line in commands if "peer name v" in line]
    assert len(set(added + peers)) == len(added + peers)
    assert all(len(name) <= 15 for name in added + peers)
    set_up = {line.split()[2] for line in commands if line.startswith("link set") and line.endswith(" up")}
    assert set_up == set(added + peers)


def test_both_directions_of_each_link_are_limited() -> None:
    spec = parse_spec(
        {
            "clusters": [
                {"name": "a", "kind": "roce", "hosts": 1, "rdma_rate": "2gbit", "ethernet_rate": "unlimited"},
                {"name": "b", "kind": "ethernet", "hosts": 1, "uplink_rate": "10mbit"},
            ],
            "faults": [{"fault": "nic-slow", "host": "b1", "nic": "ethernet", "rate": "1mbit"}],
        }
    )
    on_switch, on_hosts = shaping_commands(spec)

    def rates(commands: list[str]) -> dict[str, str]:
        return {line.split()[3]: line.split("rate ")[1].split()[0] for line in commands}

    assert rates(on_switch) == {"r0": "2000000000bit", "e1": "1000000bit", "u1": "10000000bit", "v1": "10000000bit"}
    assert {host: rates(lines) for host, lines in on_hosts.items()} == {
        "a1": {"rdma0": "2000000000bit"},
        "b1": {"eth0": "1000000bit"},
    }


def test_a_dead_cable_is_not_plugged_in_and_a_port_that_is_down_not_set_up() -> None:
    clusters = [{"name": "a", "kind": "roce", "hosts": 2}]
    faults = [
        {"fault": "nic-dead", "host": "a1", "nic": "rdma"},
        {"fault": "nic-down", "host": "a2", "nic": "ethernet"},
    ]
    spec = parse_spec({"clusters": clusters, "faults": faults})
    on_switch = switch_commands(spec, {"a1": "x", "a2": "y"})
    assert "link set r0 up" in on_switch
    assert "link set r1 master rdma0 up" in on_switch
    a2 = host_commands(spec, spec.hosts[1])
    assert "link set eth0 up" not in a2
    assert "link set rdma0 up" in a2


def test_bridges_know_the_way_over_uplinks() -> None:
    clusters = [{"name": "a", "kind": "roce", "hosts": 1, "uplink_rate": "1gbit"}, {"name": "b", "kind": "ethernet"}]
    clusters[1]["hosts"] = 1
    commands = forwarding_commands(parse_spec({"clusters": clusters}))
    assert [line.removesuffix(" master static") for line in commands] == [
        "fdb replace 02:00:00:00:00:00 dev u0",
        "fdb replace 02:00:00:00:00:00 dev e0",
        "fdb replace 02:00:00:01:00:00 dev r0",
        "fdb replace 02:00:00:00:01:01 dev e1",
        "fdb replace 02:00:00:00:01:01 dev v0",
    ]


def test_hosts_know_whom_they_reach() -> None:
    """No address resolution, so idle interfaces count nothing; and no route out of the lab."""
    spec = parse_spec({"clusters": [{"kind": "roce", "hosts": 2}, {"kind": "roce", "hosts": 1}]})
    commands = host_commands(spec, spec.hosts[0])
    assert sum(line.startswith("neighbour") and "dev eth0" in line for line in commands) == 2
    assert sum(line.startswith("neighbour") and "dev rdma0" in line for line in commands) == 1
    assert not [line for line in commands if "route" in line]


def test_traffic_is_a_difference() -> None:
    assert Traffic(tx=5, rx=7) - Traffic(tx=2, rx=7) == Traffic(tx=3)
