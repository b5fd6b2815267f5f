# SPDX-License-Identifier: Apache-2.0
"""Accelerators, distances, and which RDMA devices carry training traffic."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_core.cluster.links import Link
from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.pci import pci_distance
from holmes_core.cluster.rails import spread
from tests.core.cluster.trees import MAPPED, V2, Tree, only

GPU = {"class_": "0x030200", "vendor": "0x10de"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def switch(number: int) -> str:
    """A root port with one switch behind it, on root complex ``number``."""
    return f"pci0000:{number:x}0/0000:{number:x}0:01.0/0000:{number:x}1:00.0"


def slot(number: int, port: int) -> str:
    return f"{switch(number)}/0000:{number:x}2:{port:02x}.0"


def notes(inventory: Inventory) -> dict[str, str]:
    return {nic.device: nic.reason for nic in inventory.nics if nic.reason}


def test_distance_words() -> None:
    root, other = "pci0000:00", "pci0000:80"
    gpu = [root, "p", "s", "d1", "gpu"]
    assert pci_distance(gpu, [root, "p", "s", "d2", "nic"], (0, 0)) == "PIX"
    assert pci_distance(gpu, [root, "p", "s", "d1", "nic"], (0, 0)) == "PIX"
    assert pci_distance(gpu, [root, "p", "s2", "d", "nic"], (0, 0)) == "PXB"
    assert pci_distance(gpu, [root, "q", "nic"], (0, 0)) == "PHB"
    assert pci_distance(gpu, [other, "q", "nic"], (0, 0)) == "NODE"
    assert pci_distance(gpu, [other, "q", "nic"], (0, 1)) == "SYS"
    assert pci_distance(["a"], ["b"], (None, None)) == "NODE"


def test_gpus_in_order_each_with_the_card_behind_its_switch(tree: Tree) -> None:
    for number in (1, 2, 10, 11):
        tree.pci(slot(number, 1), f"0000:{number:x}3:00.0", numa_node=str(number // 8), **GPU)
        # Names run against the order of the slots.
        tree.card(f"ib{20 - number}", slot(number, 2), f"0000:{number:x}4:00.0", numa_node=str(number // 8))
    tree.pci("pci0000:00", "0000:00:02.0", class_="0x030000", vendor="0x1a03")  # the board's own display
    inventory = tree.detect()
    assert [gpu.pci for gpu in inventory.accelerators] == [f"0000:{n}3:00.0" for n in ("1", "2", "a", "b")]
    assert [gpu.numa for gpu in inventory.accelerators] == [0, 0, 1, 1]
    assert inventory.rails == ("ib19", "ib18", "ib10", "ib9")
    assert [gpu.nearest for gpu in inventory.accelerators] == list(inventory.rails)
    assert dict(inventory.accelerators[0].distances) == {"ib9": "SYS", "ib10": "SYS", "ib18": "NODE", "ib19": "PIX"}


def test_cards_next_to_no_gpu_are_storage(tree: Tree) -> None:
    for number in (1, 2):
        tree.pci(slot(number, 1), f"0000:{number}3:00.0", numa_node="0", **GPU)
        tree.card(f"mlx5_{number}", slot(number, 2), f"0000:{number}4:00.0", numa_node="0")
    tree.pci(slot(3, 1), "0000:33:00.0", numa_node="0", **GPU)  # has no card of its own: one of its socket will do
    tree.card("mlx5_0", "pci0000:00/0000:00:01.0", "0000:01:00.0", numa_node="0")
    inventory = tree.detect()
    assert inventory.rails == ("mlx5_1", "mlx5_2")
    assert "nearest to no GPU (NODE at best)" in notes(inventory)["mlx5_0"]
    assert only(inventory, "mlx5_0").usable
    assert inventory.accelerators[2].nearest == "mlx5_1"


def test_a_card_that_is_never_the_nearest_is_no_rail(tree: Tree) -> None:
    # Behind the GPU's own switch sits its rail; a second switch below the first has the storage card.
    tree.pci(slot(1, 1), "0000:13:00.0", numa_node="0", **GPU)
    tree.card("rail", slot(1, 2), "0000:14:00.0", numa_node="0")
    tree.card("storage", f"{slot(1, 3)}/0000:15:00.0/0000:16:01.0", "0000:17:00.0", numa_node="0")
    inventory = tree.detect()
    assert dict(inventory.accelerators[0].distances) == {"rail": "PIX", "storage": "PXB"}
    assert inventory.rails == ("rail",)


def test_the_only_card_of_a_socket_is_kept(tree: Tree) -> None:
    tree.pci(slot(1, 1), "0000:13:00.0", numa_node="0", **GPU)
    tree.card("near", slot(1, 2), "0000:14:00.0", numa_node="0")
    tree.pci(slot(9, 1), "0000:93:00.0", numa_node="1", **GPU)
    tree.card("far", "pci0000:80/0000:80:01.0", "0000:81:00.0", numa_node="1")
    inventory = tree.detect()
    assert inventory.rails == ("near", "far")
    assert [gpu.nearest for gpu in inventory.accelerators] == ["near", "far"]


@pytest.mark.parametrize(
    ("cards", "rails"),
    [
        # Four fast ones, storage at half their rate, management.
        ({"a": 400, "b": 200, "c": 400, "d": 25, "e": 400}, ("a", "c", "e")),
        ({"a": 100}, ("a",)),
        ({"a": 25, "b": 25}, ("a", "b")),
    ],
)
def test_slower_cards_are_no_rails(tree: Tree, cards: dict[str, int], rails: tuple[str, ...]) -> None:
    for name, rate in cards.items():
        tree.port(name, layer="Ethernet", rate=f"{rate} Gb/sec (4X EDR)")
    inventory = tree.detect()
    assert inventory.rails == rails
    assert all(notes(inventory)[name].startswith("not a rail: ") for name in cards if name not in rails)
    assert inventory.missing_rails == 0


def test_a_slow_link_next_to_a_gpu_is_a_slow_rail(tree: Tree) -> None:
    for number, rate in ((1, 400), (2, 200)):
        tree.pci(slot(number, 1), f"0000:{number}3:00.0", numa_node="0", **GPU)
        tree.card(f"mlx5_{number}", slot(number, 2), f"0000:{number}4:00.0", numa_node="0", rate=f"{rate} Gb/sec")
    inventory = tree.detect()
    assert inventory.rails == ("mlx5_1", "mlx5_2")
    assert any("slow rail: 200 Gbit/s, others have 400" in text for text in inventory.warnings)


def test_the_kind_with_the_bandwidth_wins(tree: Tree) -> None:
    for number in range(4):
        tree.port(f"mlx5_{number}", rate="100 Gb/sec")
    tree.port("mlx5_9", layer="Ethernet", rate="200 Gb/sec")
    inventory = tree.detect()
    assert (inventory.kind, len(inventory.rails)) == ("infiniband", 4)
    assert "the infiniband devices carry the training traffic" in notes(inventory)["mlx5_9"]
    for number in range(5, 9):
        tree.port(f"mlx5_{number}", layer="Ethernet", rate="200 Gb/sec")
    assert tree.detect().kind == "roce"


def test_infiniband_without_a_subnet_manager_does_not_make_storage_a_rail(tree: Tree) -> None:
    for number in range(4):
        tree.port(f"mlx5_{number}", state="2: INIT")
    tree.port("mlx5_9", layer="Ethernet")
    inventory = tree.detect()
    assert (inventory.kind, inventory.rails, inventory.missing_rails) == ("ethernet", (), 4)
    assert any("mlx5_0, mlx5_1, mlx5_2, mlx5_3: INIT" in text for text in inventory.warnings)


def test_lost_rails_are_counted_and_the_host_kept(tree: Tree) -> None:
    down = {"state": "1: DOWN", "phys_state": "2: Polling", "rate": "10 Gb/sec (4X SDR)"}
    for number in range(8):
        tree.port(f"mlx5_{number}", hca_type__="MT4129", **(down if number == 3 else {}))
    tree.port("mlx4_0", hca_type__="MT4103", **down)  # another model: a card that nobody cabled
    inventory = tree.detect()
    assert (len(inventory.rails), inventory.missing_rails) == (7, 1)
    assert any(text.startswith("degraded: 7 of 8 rails usable (mlx5_3: port is down") for text in inventory.warnings)


def test_the_second_port_of_a_card_is_not_missing(tree: Tree) -> None:
    path = "pci0000:00/0000:00:01.0"
    tree.card("mlx5_0", path, "0000:01:00.0").card("mlx5_1", path, "0000:01:00.1", state="1: DOWN")
    assert tree.detect().missing_rails == 0


def test_virtual_functions_share_the_wire_of_their_physical_one(tree: Tree) -> None:
    path = "pci0000:40/0000:40:01.0"
    tree.card("mlx5_0", path, "0000:41:00.0").card("mlx5_1", path, "0000:41:00.4")
    tree.link(f"devices/{path}/0000:41:00.4/physfn", tree.sysfs / "devices" / path / "0000:41:00.0")
    inventory = tree.detect()
    assert inventory.rails == ("mlx5_0",)
    assert notes(inventory)["mlx5_1"] == "not a rail: shares the wire of mlx5_0"
    # A container that was given the virtual function only.
    tree.uverbs("mlx5_0", "mlx5_1", present=[1])
    inventory = tree.detect(dev=True)
    assert (inventory.rails, inventory.missing_rails) == (("mlx5_1",), 0)
    assert only(inventory, "mlx5_1").physical_function == "0000:41:00.0"


@pytest.mark.parametrize("functions", [("0000:41:00.3", "0000:41:01.2"), ("0000:41:01.4", "0000:41:00.5")])
def test_planes_are_paired_by_physical_function_not_by_order_of_addresses(
    tree: Tree, functions: tuple[str, str]
) -> None:
    path = "pci0000:40/0000:40:01.0"
    for plane, function in enumerate(functions):
        parent = tree.pci(path, f"0000:41:00.{plane}")
        # The kernel numbers devices by address, so names follow the functions.
        name = f"mlx5_{sorted(functions).index(function)}"
        tree.card(name, path, function, layer="Ethernet", node_guid__=f"plane{plane}")
        tree.link(f"devices/{path}/{function}/physfn", parent)
    inventory = tree.detect()
    planes = [(tree.sysfs / f"class/infiniband/{name}/node_guid").read_text().strip() for name in inventory.rails]
    assert planes == ["plane0", "plane1"]
    assert [nic.rail for nic in inventory.rail_nics] == ["0000:41:00.0", "0000:41:00.1"]


def test_planes_are_paired_by_network_where_each_has_its_own(tree: Tree) -> None:
    for number, net in enumerate((9, 7)):
        tree.port(f"mlx5_{number}", layer="Ethernet")
        tree.gids(f"mlx5_{number}", (MAPPED.format(10, net, 0, 1), V2), netdev=f"e{number}").net(f"e{number}")
    inventory = tree.detect(*[Link(name=f"e{n}", addresses=(f"10.{net}.0.1/24",)) for n, net in enumerate((9, 7))])
    assert inventory.rails == ("mlx5_1", "mlx5_0")
    assert [nic.rail for nic in inventory.rail_nics] == ["10.7.0.0/24", "10.9.0.0/24"]


def test_rails_come_in_the_order_of_their_gpus_whatever_their_networks(tree: Tree) -> None:
    for number, net in ((1, 9), (2, 7)):
        tree.pci(slot(number, 1), f"0000:{number}3:00.0", **GPU)
        tree.card(f"mlx5_{number}", slot(number, 2), f"0000:{number}4:00.0", layer="Ethernet")
        tree.gids(f"mlx5_{number}", (MAPPED.format(10, net, 0, 1), V2), netdev=f"e{number}").net(f"e{number}")
    inventory = tree.detect(*[Link(name=f"e{n}", addresses=(f"10.{net}.0.1/24",)) for n, net in ((1, 9), (2, 7))])
    assert [(nic.device, nic.rail) for nic in inventory.rail_nics] == [
        ("mlx5_1", "10.9.0.0/24"),
        ("mlx5_2", "10.7.0.0/24"),
    ]


def test_a_card_with_an_infiniband_and_an_ethernet_port(tree: Tree) -> None:
    tree.port("mlx4_0", 1).port("mlx4_0", 2, layer="Ethernet", rate="40 Gb/sec")
    inventory = tree.detect()
    assert [nic.port for nic in inventory.rail_nics] == [1]


def test_ties_are_broken_evenly() -> None:
    rails = ("n0", "n1", "n2", "n3")
    near, far = dict.fromkeys(rails, "NODE"), dict.fromkeys(rails, "SYS")
    assert spread(rails, [near, near, far, far]) == ["n0", "n1", "n2", "n3"]
    assert spread(rails[:1], [near, far]) == ["n0", "n0"]
    assert spread((), [{}, {}]) == ["", ""]
    assert spread(rails, [{"n2": "PIX"}, {"n2": "PIX", "n0": "SYS"}]) == ["n2", "n2"]
