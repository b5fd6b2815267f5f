# SPDX-License-Identifier: Apache-2.0
"""Which interface carries traffic to other hosts: by type, flags, addresses and routes, never by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_core.cluster.links import Link, default_interface, is_global, system_links
from tests.core.cluster.trees import MAPPED, V2, Tree, only, verdicts


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def link(name: str, *addresses: str, up: bool = True, route: bool = False) -> Link:
    return Link(name=name, addresses=addresses, up=up, default_route=route)


def test_what_cannot_carry_a_job(tree: Tree) -> None:
    tree.net("eno1").net("lo", type="772", flags="0x9")
    tree.net("br-0a1b", speed="", bridge__bridge_id="8000", brif__veth1__state="3")
    tree.net("virbr0", operstate="down", carrier="0", bridge__bridge_id="8000")
    tree.net("ip6tnl0", type="769").net("wg0", type="65534", flags="0x10d1").net("tap3", tun_flags="0x1002")
    tree.net("flannel.1", uevent="DEVTYPE=vxlan").net("kube", flags="0x83").net("eno2", operstate="down", carrier="0")
    tree.net("usb0").net("veth1")
    links = [link("lo", "127.0.0.1/8", "::1/128"), link("eno1", "192.0.2.5/24"), link("usb0", "169.254.3.1/16")]
    for number, name in enumerate(["br-0a1b", "virbr0", "ip6tnl0", "wg0", "tap3", "flannel.1", "kube"]):
        links.append(link(name, f"198.51.100.{10 * number + 1}/29"))
    links += [link("eno2", "192.0.2.9/24"), link("veth1", "fe80::5/64")]
    inventory = tree.detect(*links)
    assert inventory.ethernet == "eno1"
    reasons = {name.partition(":")[0]: text.removeprefix("ethernet") for name, text in verdicts(inventory).items()}
    bridge = ", bridge of containers or virtual machines on this host: not reachable from others"
    assert reasons == {
        "eno1": "",
        "lo": ", loopback: no other host can be reached",
        "br-0a1b": bridge,
        "virbr0": bridge,
        "ip6tnl0": ", tunnel",
        "wg0": ", tunnel",
        "tap3": ", tunnel",
        "flannel.1": ", tunnel",
        "kube": ", dummy: no network behind it",
        "eno2": ", down, or no carrier",
        "usb0": ", only a link-local address",
        "veth1": ", only a link-local address",
    }


@pytest.mark.parametrize("name", ["veth0", "eth0", "docker0", "tunl0"])
def test_a_containers_own_interface_is_the_network_whatever_its_name(tree: Tree, name: str) -> None:
    tree.net("ip6tnl0", type="769").net("lo", type="772")
    tree.net(name, iflink="7", ifindex="2", speed="10000")
    inventory = tree.detect(
        link("lo", "::1/128"), link("ip6tnl0", "fe80::1/64"), link(name, "2001:db8:1::6/64", "fe80::2/64")
    )
    assert inventory.ethernet == name
    assert only(inventory, name).addresses == ("2001:db8:1::6/64",)
    assert any("NCCL_SOCKET_FAMILY=AF_INET6" in text for text in inventory.warnings)


def test_a_bridge_over_the_hosts_own_card_is_the_network(tree: Tree) -> None:
    tree.net("eno1", device__vendor="0x8086").net("vmbr0", bridge__bridge_id="8000", brif__eno1__state="3")
    tree.link("class/net/eno1/master", tree.sysfs / "class/net/vmbr0")
    inventory = tree.detect(link("eno1"), link("vmbr0", "192.0.2.5/24"))
    assert inventory.ethernet == "vmbr0"
    assert verdicts(inventory)["eno1:1"] == "ethernet, part of vmbr0"


def test_a_bond_before_its_vlans(tree: Tree) -> None:
    tree.net("bond0.30", uevent="DEVTYPE=vlan", lower_bond0__x="1")
    tree.net("bond0.30.1", uevent="DEVTYPE=vlan", lower_bond0="x")
    tree.net("bond0", bonding__slaves="e1 e2", bonding__mode="802.3ad 4", speed="50000")
    inventory = tree.detect(
        link("bond0.30", "198.51.100.189/16"), link("bond0.30.1", "fe80::1/64"), link("bond0", "192.0.2.7/27")
    )
    assert inventory.ethernet == "bond0"
    assert (only(inventory, "bond0").rate, only(inventory, "bond0").members) == (25.0, 2)
    assert verdicts(inventory)["bond0.30.1:1"] == "ethernet, only a link-local address"


def test_without_sysfs_the_name_tells_a_vlan_and_the_address_a_local_bridge(tree: Tree) -> None:
    links = [link("x0", "172.17.0.1/16"), link("b.5", "198.51.100.9/24"), link("b", "192.0.2.7/27")]
    assert tree.detect(*links).ethernet == "b"
    assert tree.detect(*links[:2]).ethernet == "b.5"


def test_the_default_route_decides(tree: Tree) -> None:
    tree.net("a", speed="100000").net("b", speed="1000")
    assert tree.detect(link("a", "192.0.2.1/24"), link("b", "198.51.100.1/24")).ethernet == "a"
    assert tree.detect(link("a", "192.0.2.1/24"), link("b", "198.51.100.1/24", route=True)).ethernet == "b"
    # ... unless its interface cannot carry a job.
    assert tree.detect(link("a", "192.0.2.1/24"), link("b", "169.254.1.1/16", route=True)).ethernet == "a"


def test_a_rails_interface_only_where_there_is_no_other(tree: Tree) -> None:
    tree.port("mlx5_0", layer="Ethernet").gids("mlx5_0", (MAPPED.format(192, 0, 2, 6), V2), netdev="rdma0")
    tree.net("rdma0", speed="100000").net("eth0", speed="1000")
    rail = link("rdma0", "192.0.2.6/24", route=True)
    assert tree.detect(rail, link("eth0", "198.51.100.6/24")).ethernet == "eth0"
    alone = tree.detect(rail, link("eth0", "fe80::6/64"))
    assert alone.ethernet == "rdma0"
    assert any("rdma0 is the only way to other hosts and belongs to mlx5_0" in text for text in alone.warnings)
    # The interface of a storage card that is no rail is an interface like any other.
    tree.port("mlx5_1", rate="400 Gb/sec (4X NDR)")
    assert tree.detect(rail, link("eth0", "198.51.100.6/24")).ethernet == "rdma0"


def test_no_interface_at_all(tree: Tree) -> None:
    inventory = tree.net("lo", type="772").detect(link("lo", "127.0.0.1/8"))
    assert inventory.ethernet == ""
    assert any("no interface can carry traffic" in text for text in inventory.warnings)


def test_speed_that_cannot_be_read(tree: Tree) -> None:
    (tree.sysfs / "class/net/ens5/speed").mkdir(parents=True)
    tree.net("ens5", speed="").net("ens6", speed="-1").net("ens7", speed="10000")
    assert [nic.rate for nic in tree.detect().nics] == [None, None, 10.0]


def test_an_interface_of_another_namespace(tree: Tree) -> None:
    inventory = tree.net("eth7").detect(link("eth0", "192.0.2.1/24"))
    assert verdicts(inventory) == {"eth7:1": "ethernet, not in this network namespace", "eth0:1": "ethernet"}


def test_default_route_files(tmp_path: Path) -> None:
    assert default_interface(tmp_path) == ""
    six = "0" * 32
    lines = [f"{six} 00 {six} 00 {six} ffffffff 00000001 00000000 00200200       lo"]
    lines.append(f"{six} 00 {six} 00 fe80{'0' * 27}1 00000400 00000001 00000000 00000003     eth6")
    (tmp_path / "ipv6_route").write_text("\n".join(lines) + "\n")
    assert default_interface(tmp_path) == "eth6"
    header = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT"
    rows = [
        "eth1 00000000 010200C0 0003 0 0 200 00000000 0 0 0",
        "eth2 00000000 010200C0 0003 0 0 100 00000000 0 0 0",
        "eth3 000200C0 00000000 0001 0 0 0 00FFFFFF 0 0 0",
        "odd",
    ]
    (tmp_path / "route").write_text("\n".join([header, *rows]) + "\n")
    assert default_interface(tmp_path) == "eth2"


def test_addresses() -> None:
    good = ["192.0.2.1/24", "10.0.0.1", "2001:db8::1/64", "fd00::1"]
    bad = ["169.254.0.1/16", "fe80::1/64", "127.0.1.1", "::1", "0.0.0.0", "ff02::1", "nonsense", ""]
    assert [is_global(text) for text in good + bad] == [True] * len(good) + [False] * len(bad)


def test_this_machine() -> None:
    found = {one.name: one for one in system_links()}
    assert "127.0.0.1/8" in found["lo"].addresses
