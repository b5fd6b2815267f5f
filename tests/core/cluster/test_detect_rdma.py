# SPDX-License-Identifier: Apache-2.0
"""RDMA ports: what they are, whether a job may use them, and why not; by properties, never by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_core.cluster.links import Link
from tests.core.cluster.trees import LINK_LOCAL, MAPPED, V1, V2, Tree, only, verdicts


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "infiniband"),
        ({"layer": "InfiniBand\n\n"}, "infiniband"),
        ({"layer": "Ethernet"}, "roce"),
        ({"node_type__": "1: CA", "layer": "Ethernet"}, "roce"),
        ({"board_id__": "100Gb OP101 Adapter with Intel Omni-Path"}, "omnipath"),
        ({"device__vendor": "0x8086", "device__device": "0x24f0"}, "omnipath"),
        ({"device__uevent": "DRIVER=hfi1\nPCI_SLOT_NAME=0000:01:00.0"}, "omnipath"),
        ({"node_type__": "7: unspecified", "layer": "Unknown"}, "efa"),
        ({"node_type__": "7: unspecified", "layer": "Unspecified"}, "efa"),
        ({"device__vendor": "0x1d0f", "device__device": "0xefa1", "layer": "Ethernet"}, "efa"),
        ({"node_type__": "4: RNIC", "device__vendor": "0x1ded", "layer": "Ethernet"}, "roce"),
        ({"node_type__": "4: RNIC", "layer": "Ethernet"}, "iwarp, iWARP: NCCL cannot use it"),
        ({"hca_type__": "I40IW"}, "iwarp, iWARP: NCCL cannot use it"),
        ({"layer": "", "device__class": "0x020700"}, "infiniband"),
        (
            {"node_type__": "5: usNIC", "layer": "Ethernet"},
            "unknown, no RDMA port that a job could use: link layer 'Ethernet', node type '5: usNIC'",
        ),
        ({"layer": ""}, "unknown, no RDMA port that a job could use: its link layer cannot be read"),
        ({"layer": "Unknown"}, "unknown, no RDMA port that a job could use: link layer 'Unknown'"),
        ({"state": "2: INIT"}, "infiniband, INIT: link up, no subnet manager yet"),
        ({"state": "3: ARMED"}, "infiniband, ARMED: the subnet manager has not activated it yet"),
        (
            {"state": "1: DOWN", "phys_state": "2: Polling"},
            "infiniband, port is down (Polling: no cable, or nothing at its other end)",
        ),
        ({"state": ""}, "infiniband, its state cannot be read"),
        ({"state": "9: HUH"}, "infiniband, its state cannot be read (got '9: HUH')"),
    ],
)
def test_kind_and_state(tree: Tree, files: dict[str, str], expected: str) -> None:
    assert verdicts(tree.port("net0", **files).detect()) == {"net0:1": expected}


def test_rates_names_and_odd_text(tree: Tree) -> None:
    tree.port("a", rate="10 Gb/sec (4X)", phys_state="4: ACTIVE")
    tree.port("b", rate="rubbish").port("c", rate="2.5 Gb/sec (1X SDR)", device__numa_node="1")
    inventory = tree.detect()
    assert [nic.rate for nic in inventory.nics] == [10.0, None, 2.5]
    assert [nic.numa for nic in inventory.nics] == [None, None, 1]
    assert only(inventory, "a").usable
    assert any("a port 1: odd physical state 'ACTIVE'" in text for text in inventory.warnings)


def test_a_broken_device_does_not_hide_the_others(tree: Tree) -> None:
    tree.port("mlx5_1").write({"class/infiniband/mlx5_0/node_type": "1: CA"})
    (tree.sysfs / "class/infiniband/mlx5_0/ports/1/gids/0").mkdir(parents=True)  # reading it fails
    (tree.sysfs / "class/infiniband/mlx5_2").mkdir()
    (tree.sysfs / "class/infiniband/mlx5_3").symlink_to("nowhere")
    inventory = tree.detect()
    assert inventory.rails == ("mlx5_1",)
    reasons = verdicts(inventory)
    assert reasons["mlx5_0:1"].startswith("unknown, ")
    assert reasons["mlx5_2:1"].startswith("unknown, ")
    assert any("mlx5_2: none of its ports can be read" in text for text in inventory.warnings)


@pytest.mark.parametrize(
    ("table", "index"),
    [
        ([(LINK_LOCAL, V1), (LINK_LOCAL, V2), (MAPPED.format(192, 0, 2, 6), V1), (MAPPED.format(192, 0, 2, 6), V2)], 3),
        ([(MAPPED.format(192, 0, 2, 6), V2), (LINK_LOCAL, V2)], 0),
        ([(LINK_LOCAL, V2), ("2001:0db8:0000:0000:0000:0000:0000:0001", V2)], 1),
        ([("2001:0db8:0000:0000:0000:0000:0000:0001", V2), (MAPPED.format(192, 0, 2, 6), V2)], 1),
        ([(MAPPED.format(169, 254, 2, 6), V2), (MAPPED.format(192, 0, 2, 6), V2)], 1),
        ([(MAPPED.format(192, 0, 2, 6), V1)], 0),
        # The interface's first address decides between several.
        ([(MAPPED.format(198, 51, 100, 6), V2), (MAPPED.format(192, 0, 2, 6), V2)], 1),
        ([(MAPPED.format(192, 0, 2, 6), "")], None),
        ([], None),
    ],
)
def test_gid_index(tree: Tree, table: list[tuple[str, str]], index: int | None) -> None:
    tree.port("mlx5_0", layer="Ethernet").gids("mlx5_0", *table, ("0" * 4 + ":0000" * 7, ""), netdev="rail0")
    link = Link(name="rail0", addresses=("192.0.2.6/24", "198.51.100.6/24", "fe80::1/64"), up=True)
    nic = only(tree.net("rail0").detect(link), "mlx5_0")
    assert (nic.gid_index, nic.usable) == (index, True)
    assert len(nic.gids) == len(table)


def test_a_container_that_shares_a_card_uses_its_own_entry(tree: Tree) -> None:
    # The first entry is the host's; its interface cannot be seen from here.
    tree.port("mlx5_0", layer="Ethernet")
    tree.gids("mlx5_0", (MAPPED.format(192, 0, 2, 6), V2), (MAPPED.format(192, 0, 2, 77), V2))
    tree.write({"class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1": "net1"}).net("net1")
    inventory = tree.detect(Link(name="net1", addresses=("192.0.2.77/24",), up=True))
    assert (only(inventory, "mlx5_0").gid_index, only(inventory, "mlx5_0").netdev) == (1, "net1")


def test_link_local_gids_only(tree: Tree) -> None:
    tree.port("mlx5_0", layer="Ethernet").gids("mlx5_0", (LINK_LOCAL, V1), (LINK_LOCAL, V2))
    inventory = tree.detect()
    assert "link-local only" in verdicts(inventory)["mlx5_0:1"]
    assert (inventory.rails, inventory.kind) == ((), "ethernet")


def test_the_gid_of_a_vlan_takes_its_interface_along(tree: Tree) -> None:
    tree.port("mlx5_0", layer="Ethernet").gids("mlx5_0", (LINK_LOCAL, V2), netdev="ens1")
    tree.write({"class/infiniband/mlx5_0/ports/1/gids/1": MAPPED.format(192, 0, 2, 6)})
    tree.write({"class/infiniband/mlx5_0/ports/1/gid_attrs/types/1": V2})
    tree.write({"class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/1": "ens1.7"})
    tree.net("ens1").net("ens1.7", uevent="DEVTYPE=vlan")
    nic = only(tree.detect(Link(name="ens1", up=True), Link(name="ens1.7", addresses=("192.0.2.6/24",))), "mlx5_0")
    assert (nic.netdev, nic.gid_index, nic.addresses) == ("ens1.7", 1, ("192.0.2.6/24",))


def test_subnet_prefix_and_ipoib_interface(tree: Tree) -> None:
    tree.port("mlx5_0").gids("mlx5_0", ("fec0:0000:0000:0007:0202:02ff:fe02:0202", ""))
    tree.net("rdma0", type="32", dev_port="0").link("class/infiniband/mlx5_0/device/net/rdma0", tree.sysfs / "x")
    tree.write({"x/dev_port": "0"})
    inventory = tree.detect(Link(name="rdma0", addresses=("198.51.100.1/24",)), Link(name="eth0"))
    nic = only(inventory, "mlx5_0")
    assert (nic.subnet_prefix, nic.netdev, nic.addresses) == ("fec0:0000:0000:0007", "rdma0", ("198.51.100.1/24",))
    assert [nic.device for nic in inventory.nics] == ["mlx5_0", "eth0"]


def test_every_port_is_enumerated_and_planes_are_usable(tree: Tree) -> None:
    for port in range(1, 7):
        up = port % 3 == 0
        state = {"state": "4: ACTIVE"} if up else {"state": "1: DOWN", "phys_state": "3: Disabled"}
        tree.port("card", port, layer="Ethernet", **state)
        if up:
            tree.write({f"class/infiniband/card/ports/{port}/gid_attrs/ndevs/0": f"plane{port}"})
    inventory = tree.detect()
    assert len(inventory.nics) == 6
    assert [(nic.port, nic.netdev) for nic in inventory.rail_nics] == [(3, "plane3"), (6, "plane6")]
    assert inventory.missing_rails == 0


def test_two_ports_of_one_function_find_their_interfaces(tree: Tree) -> None:
    for port in (1, 2):
        tree.port("mlx4_0", port, layer="Ethernet")
        tree.write({f"class/infiniband/mlx4_0/device/net/e{port}/dev_port": str(port - 1)})
    assert [nic.netdev for nic in tree.detect().nics] == ["e1", "e2"]


def test_the_interface_side_of_the_link_is_enough(tree: Tree) -> None:
    tree.port("mlx5_0", layer="Ethernet").write({"class/net/rdma0/device/infiniband/mlx5_0/node_type": "1: CA"})
    assert only(tree.net("rdma0").detect(), "mlx5_0").netdev == "rdma0"


def test_a_bond_is_one_rail_with_members(tree: Tree) -> None:
    tree.port("mlx5_bond_0", layer="Ethernet", rate="400 Gb/sec (4X NDR)")
    tree.gids("mlx5_bond_0", (MAPPED.format(192, 0, 2, 6), V2), netdev="bond0")
    for name in ("ens1", "ens2"):
        tree.net(name, speed="200000").link(f"class/net/{name}/master", tree.sysfs / "class/net/bond0")
    tree.net("bond0", speed="400000", bonding__slaves="ens1 ens2", bonding__mode="802.3ad 4")
    inventory = tree.detect(Link(name="bond0", addresses=("192.0.2.6/24",)), Link(name="ens1"), Link(name="ens2"))
    nic = only(inventory, "mlx5_bond_0")
    assert (nic.rate, nic.members, nic.usable) == (200.0, 2, True)
    assert any("NCCL_IB_QPS_PER_CONNECTION" in text for text in inventory.warnings)
    assert verdicts(inventory)["ens1:1"] == "ethernet, part of bond0"
    tree.write({"class/net/bond0/bonding/mode": "active-backup 1"})
    assert only(tree.detect(Link(name="bond0", addresses=("192.0.2.6/24",))), "mlx5_bond_0").members == 1


def test_device_files_decide_what_this_process_can_open(tree: Tree) -> None:
    # uverbs numbers have nothing to do with device numbers.
    for number in range(3):
        tree.port(f"mlx5_{number}")
    inventory = tree.detect(dev=True)
    assert (inventory.rails, inventory.kind, inventory.missing_rails) == ((), "ethernet", 3)
    assert "no /dev/infiniband/uverbs* in this container" in verdicts(inventory)["mlx5_0:1"]
    assert any("--device=/dev/infiniband" in text for text in inventory.warnings)
    tree.uverbs("mlx5_2", "mlx5_0", "mlx5_1", present=[0, 1])
    inventory = tree.detect(dev=True)
    assert inventory.rails == ("mlx5_0", "mlx5_2")
    assert "/dev/infiniband/uverbs2 is not in this container" in verdicts(inventory)["mlx5_1:1"]
    assert tree.detect().rails == ("mlx5_0", "mlx5_1", "mlx5_2")  # a tree of another machine: not judged


def test_device_files_without_the_verbs_class(tree: Tree) -> None:
    (tree.dev / "infiniband").mkdir(parents=True)
    (tree.dev / "infiniband" / "uverbs7").touch()
    assert tree.port("mlx5_0").detect(dev=True).rails == ("mlx5_0",)


def test_a_port_that_cannot_do_rdma_may_carry_sockets(tree: Tree) -> None:
    tree.port("mlx5_0", layer="Ethernet").gids("mlx5_0", (MAPPED.format(192, 0, 2, 6), V2), netdev="eth0").net("eth0")
    inventory = tree.detect(Link(name="eth0", addresses=("192.0.2.6/24",), up=True), dev=True)
    assert inventory.ethernet == "eth0"
    assert [(nic.device, nic.usable) for nic in inventory.nics] == [("mlx5_0", False), ("eth0", True)]
    found = inventory.nic("eth0")
    assert found is not None
    assert found.usable


def test_a_roce_interface_that_is_down(tree: Tree) -> None:
    tree.port("mlx5_0", layer="Ethernet").gids("mlx5_0", (MAPPED.format(192, 0, 2, 6), V2), netdev="rdma0")
    tree.net("rdma0").net("eth0")
    down = Link(name="rdma0", addresses=("192.0.2.6/24",), up=False)
    inventory = tree.detect(down, Link(name="eth0", addresses=("198.51.100.6/24",), up=True))
    assert verdicts(inventory)["mlx5_0:1"] == "roce, its interface rdma0 is down"
    assert (inventory.kind, inventory.ethernet, inventory.missing_rails) == ("ethernet", "eth0", 1)


def test_software_rdma_is_no_rail(tree: Tree) -> None:
    tree.port("soft", layer="Ethernet", device__uevent="DRIVER=rxe")
    inventory = tree.detect()
    assert "RDMA in software" in verdicts(inventory)["soft:1"]
    assert (inventory.rails, inventory.missing_rails) == ((), 0)


def test_slingshot(tree: Tree) -> None:
    for number in range(2):
        tree.write({f"class/cxi/cxi{number}/device/numa_node": str(number)}).net(f"hsn{number}", speed="200000")
    tree.net("eth0", speed="1000")
    links = [Link(name=f"hsn{n}", addresses=(f"192.0.2.{n + 1}/24",), up=True) for n in range(2)]
    inventory = tree.detect(*links, Link(name="eth0", addresses=("198.51.100.1/24",), up=True))
    assert inventory.rails == ("cxi0", "cxi1")
    assert (inventory.kind, inventory.ethernet) == ("slingshot", "eth0")
    assert [(nic.netdev, nic.rate) for nic in inventory.rail_nics] == [("hsn0", 200.0), ("hsn1", 200.0)]
    assert "no /dev/cxi0" in verdicts(tree.detect(dev=True))["cxi0:1"]


def test_hardware_without_a_registered_device(tree: Tree) -> None:
    tree.pci("pci0000:00", "0000:01:00.0", class_="0x020700", vendor="0x15b3", device="0x1021")
    (tree.sysfs / "class/infiniband").mkdir(parents=True)
    inventory = tree.detect()
    assert "RDMA hardware present, no device registered" in verdicts(inventory)["0000:01:00.0:1"]
    assert (inventory.kind, inventory.missing_rails) == ("ethernet", 1)
    assert any("no device registered" in text for text in inventory.warnings)


def test_nothing_there(tmp_path: Path) -> None:
    inventory = Tree(tmp_path).detect()
    assert (inventory.nics, inventory.rails, inventory.kind, inventory.ethernet) == ((), (), "ethernet", "")


def test_environment_stands_for_the_roots(tree: Tree) -> None:
    from holmes_core.cluster.detect import detect_host

    tree.port("mlx5_0").uverbs("mlx5_0")
    env = {"HOLMES_SYSFS": str(tree.sysfs), "HOLMES_DEV": str(tree.dev), "NCCL_DEBUG": "INFO", "PATH": "/bin"}
    inventory = detect_host(host="n1", env=env, addresses=lambda: None)
    assert inventory.rails == ("mlx5_0",)
    assert inventory.environment == (("NCCL_DEBUG", "INFO"),)
    (tree.dev / "infiniband/uverbs0").unlink()
    assert detect_host(host="n1", env=env, addresses=lambda: None).rails == ()
