# SPDX-License-Identifier: Apache-2.0
"""Public cases of real machines, where HOLMES_CASES names the folder that holds them.

One folder per case: ``sysfs.tsv`` (path, kind, content), or a tool's output, or words only, which are built here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holmes_core.cluster.detect import detect_host
from holmes_core.cluster.fabric import group_hosts
from holmes_core.cluster.hca_list import exact_hcas, exact_interface, lint_interfaces, lint_list
from holmes_core.cluster.links import Link
from holmes_core.cluster.nic import Inventory, Nic
from holmes_core.cluster.sources import inventory_from_files
from tests.core.cluster.trees import Tree, only, verdicts

_FOLDER = os.environ.get("HOLMES_CASES", "")
pytestmark = pytest.mark.skipif(not _FOLDER, reason="HOLMES_CASES does not name a folder of cases")

Check = Callable[[Path, Path], None]  # the case's folder, an empty folder
CHECKS: dict[str, Check] = {}


def case(name: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return keep


def detected(folder: Path, root: Path, *links: Link, dev: bool = False) -> Inventory:
    for line in (folder / "sysfs.tsv").read_text().splitlines():
        path, kind, content = ([*line.split("\t"), "", ""])[:3]
        place = root / path.lstrip("/")
        if kind == "absent" or not path:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            place.symlink_to(content)
        elif kind in ("dir", "unreadable"):  # reading a directory is an error, as root too
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.write_text(content.replace("\\n", "\n") + ("" if kind == "file-no-eol" else "\n"))
    return detect_host(
        host="n1", sysfs=root / "sys", dev=root / "dev" if dev else None, addresses=lambda: links or None, env={}
    )


def nearest(inventory: Inventory) -> list[str]:
    return [gpu.nearest for gpu in inventory.accelerators]


@case("F1-01")
def _(folder: Path, root: Path) -> None:
    inventory = detected(folder, root)
    assert [(nic.device, nic.port, nic.kind, nic.rate, nic.usable) for nic in inventory.nics] == [
        ("hfi1_0", 1, "omnipath", 100.0, True),
        ("mlx4_0", 1, "infiniband", 40.0, True),
        ("mlx4_0", 2, "infiniband", 40.0, True),
        ("mlx5_0", 1, "infiniband", 25.0, True),
    ]
    assert any("odd physical state 'ACTIVE'" in text for text in inventory.warnings)


@case("F1-03")
def _(folder: Path, root: Path) -> None:
    inventory = detected(folder, root)
    assert (only(inventory, "i40iw0").kind, only(inventory, "i40iw0").rate) == ("iwarp", 10.0)
    assert not only(inventory, "i40iw0").usable
    assert (inventory.rails, inventory.rail_nics[0].rate) == (("mlx4_0",), 40.0)


@case("F1-05")
def _(folder: Path, root: Path) -> None:
    inventory = detected(folder, root)
    assert exact_hcas(inventory) == "=" + ",".join(f"mlx5_{n}" for n in (0, 1, 4, 5, 6, 7, 8, 9))
    assert (inventory.kind, {nic.rate for nic in inventory.rail_nics}) == ("infiniband", {400.0})
    assert (only(inventory, "mlx5_bond_0").kind, only(inventory, "mlx5_bond_0").rate) == ("roce", 200.0)


@case("F1-07")
def _(folder: Path, root: Path) -> None:
    inventory = detected(folder, root)
    assert inventory.rails == tuple(f"mlx5_ib{n}" for n in range(1, 8))
    assert (inventory.kind, inventory.missing_rails) == ("infiniband", 1)
    assert only(inventory, "mlx5_ib0").reason == "INIT: link up, no subnet manager yet"
    assert only(inventory, "mlx5_an0").kind == "roce"


@case("F1-09")
def _(folder: Path, root: Path) -> None:
    inventory = inventory_from_files([folder / "topo.xml"])
    assert [gpu.numa for gpu in inventory.accelerators] == [1, 1, 0, 0, 3, 3, 2, 2]
    assert nearest(inventory) == [f"010{n}:00:00.0" for n in range(1, 9)]
    assert all(dict(gpu.distances)[gpu.nearest] in ("PIX", "PXB") for gpu in inventory.accelerators)
    assert len(inventory.rails) == 8


@case("F1-11")
def _(folder: Path, root: Path) -> None:
    inventory = inventory_from_files([folder / "topo.xml"])
    assert len(inventory.rails) == 1
    near = [dict(gpu.distances)[inventory.rails[0]] for gpu in inventory.accelerators]
    assert ("SYS" in near[:4], set(near[4:])) == (False, {"SYS"})


@case("F1-13")
def _(folder: Path, root: Path) -> None:
    inventory = inventory_from_files([folder / "topo.xml"])
    assert (inventory.kind, exact_hcas(inventory)) == ("efa", "")
    assert nearest(inventory) == [f"0000:{bus}:1b.0" for bus in ("10", "10", "20", "20", "90", "90", "a0", "a0")]


@case("F1-15")
def _(folder: Path, root: Path) -> None:
    inventory = detected(folder, root)
    assert (inventory.kind, len(inventory.rails), exact_hcas(inventory)) == ("efa", 4, "")
    assert (inventory.ethernet, only(inventory, "ens32").rate) == ("ens32", None)


@case("F1-17")
def _(folder: Path, root: Path) -> None:
    inventory = inventory_from_files([folder / "topo.xml"])
    assert nearest(inventory) == ["mlx5_0"] * 8
    assert (only(inventory, "mlx5_0").rate, only(inventory, "mlx5_0").numa) == (200.0, 2)
    assert (inventory.ethernet, only(inventory, "enp98s0f0").rate) == ("enp98s0f0", 1.0)


@case("F1-19")
def _(folder: Path, root: Path) -> None:
    nic = only(detected(folder, root), "mlx5_bond_0")
    assert (nic.gid_index, nic.netdev, len(nic.gids)) == (3, "bond0", 4)


@case("F1-21")
def _(folder: Path, root: Path) -> None:
    inventory = detected(folder, root)
    assert len(inventory.nics) == 12
    planes = [(nic.port, nic.netdev) for nic in inventory.rail_nics]
    assert planes == [(3, "eth_r0_p0"), (6, "eth_r0_p1"), (9, "eth_r0_p2"), (12, "eth_r0_p3")]


@case("F1-23")
def _(folder: Path, root: Path) -> None:
    tree = Tree(root).port("mlx5_bond_0", layer="Ethernet", gid_attrs__ndevs__0="x")
    tree.write({"class/infiniband/mlx5_bond_0/ports/1/gid_attrs/ndevs/0": "bond0"})
    tree.net("a", speed="200000").net("b", speed="200000").net("bond0", speed="400000", bonding__slaves="a b")
    inventory = tree.detect()
    assert (inventory.rail_nics[0].members, inventory.rail_nics[0].rate) == (2, 200.0)
    assert any("NCCL_IB_QPS_PER_CONNECTION" in text for text in inventory.warnings)


@case("F1-25")
def _(folder: Path, root: Path) -> None:
    tree = Tree(root)
    for number in range(6):
        tree.port(f"mlx5_{number}")
    assert len(tree.uverbs(*[f"mlx5_{5 - n}" for n in range(6)]).detect(dev=True).rails) == 6


@case("F1-26")
def _(folder: Path, root: Path) -> None:
    inventory = detected(folder, root, dev=True)
    assert (inventory.kind, inventory.rails) == ("ethernet", ())
    assert "no /dev/infiniband/uverbs* in this container" in only(inventory, "mlx5_bond_0").reason
    assert any("--device=/dev/infiniband" in text for text in inventory.warnings)


@case("F1-28")
def _(folder: Path, root: Path) -> None:
    tree = Tree(root).net("bond0", bonding__slaves="x y", mtu="8888")
    tree.net("bond0.2973", uevent="DEVTYPE=vlan").net("bond0.2973.1", uevent="DEVTYPE=vlan")
    links = [("bond0.2973", "198.51.100.189/16"), ("bond0.2973.1", "fe80::1/64"), ("bond0", "192.0.2.7/27")]
    inventory = tree.detect(*[Link(name=name, addresses=(address,)) for name, address in links])
    assert exact_interface(inventory) == "=bond0"
    assert not only(inventory, "bond0.2973.1").usable
    assert lint_interfaces("bond0", inventory).suggestion == "=bond0"


@case("F1-30")
def _(folder: Path, root: Path) -> None:
    tree = Tree(root).net("ip6tnl0", type="769").net("veth0").net("lo", type="772")
    links = [("ip6tnl0", "fe80::1/64"), ("veth0", "2001:db8:1::6/64"), ("lo", "::1/128")]
    inventory = tree.detect(*[Link(name=name, addresses=(address,)) for name, address in links])
    assert inventory.ethernet == "veth0"
    assert any("NCCL_SOCKET_FAMILY=AF_INET6" in text for text in inventory.warnings)


@case("F1-32")
def _(folder: Path, root: Path) -> None:
    tree = Tree(root)
    for number in range(4):
        tree.net(f"hsn{number}", speed="200000")
        (tree.sysfs / f"class/cxi/cxi{number}").mkdir(parents=True)
    inventory = tree.detect()
    assert (inventory.kind, exact_hcas(inventory)) == ("slingshot", "")
    assert [(nic.netdev, nic.rate) for nic in inventory.rail_nics] == [(f"hsn{n}", 200.0) for n in range(4)]


@case("F1-35")
def _(folder: Path, root: Path) -> None:
    inventory = inventory_from_files([folder / "ibstat.txt"])
    assert (inventory.rails, inventory.rail_nics[0].rate) == (("mlx5_7",), 200.0)
    assert "ibstat could not read it" in only(inventory, "mlx5_8").reason


@case("F1-36")
def _(folder: Path, root: Path) -> None:
    tree = Tree(root)
    tree.pci("pci0000:00", "0000:01:00.0", class_="0x020700", vendor="0x15b3")
    (tree.sysfs / "class/infiniband").mkdir(parents=True)
    inventory = tree.net("eth0").detect(Link(name="eth0", addresses=("192.0.2.1/24",)))
    assert (inventory.kind, inventory.ethernet) == ("ethernet", "eth0")
    assert any("RDMA hardware present, no device registered" in text for text in inventory.warnings)


@case("F1-38")
def _(folder: Path, root: Path) -> None:
    inventory = inventory_from_files([folder / "topo_m.txt"])
    assert sorted(nearest(inventory)) == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert [set(dict(gpu.distances).values()) for gpu in inventory.accelerators] == [{"NODE"}] * 2 + [{"SYS"}] * 2


@case("F1-42")
def _(folder: Path, root: Path) -> None:
    for pod, functions in (("a", ("0000:41:00.3", "0000:41:01.2")), ("b", ("0000:41:01.4", "0000:41:00.5"))):
        tree = Tree(root / pod)
        for plane, function in enumerate(functions):
            parent = tree.pci("pci0000:40", f"0000:41:00.{plane}")
            tree.card(f"plane{plane}", "pci0000:40", function, layer="Ethernet")
            tree.link(f"devices/pci0000:40/{function}/physfn", parent)
        assert tree.detect().rails == ("plane0", "plane1")


@case("F2-07")
def _(folder: Path, root: Path) -> None:
    for node, rails, storage, rest in (("a", (0, 3, 5, 8), 1, (2, 4, 6, 7)), ("b", (0, 1, 4, 5), 2, (3, 6, 7, 8))):
        tree = Tree(root / node)
        for number in range(9):
            rate = 400 if number in rails else 200 if number == storage else 25
            assert number in (*rails, storage, *rest)
            tree.port(f"mlx5_{number}", layer="Ethernet", rate=f"{rate} Gb/sec")
        assert exact_hcas(tree.detect()) == "=" + ",".join(f"mlx5_{number}" for number in rails)


@case("F2-13")
def _(folder: Path, root: Path) -> None:
    ports = [(f"mlx5_{number}", 1) for number in range(16)]
    found = lint_list("^=mlx5_8,^=mlx5_14", ports)
    assert (len(found.selected), found.suggestion) == (15, "^=mlx5_8,mlx5_14")
    assert len(lint_list(found.suggestion, ports).selected) == 14


@case("F2-15")
def _(folder: Path, root: Path) -> None:
    found = lint_list("^=mlx5_0,mlx5_5,mlxl5_7", [(f"mlx5_{number}", 1) for number in range(9)])
    assert found.selected == tuple(f"mlx5_{n}" for n in (1, 2, 3, 4, 6, 7, 8))
    assert "mlxl5_7 names no device (did you mean 'mlx5_7'?)" in found.problems[0]


@case("F2-17")
def _(folder: Path, root: Path) -> None:
    for name in ("eno1", "eth0"):
        loopback = Link(name="lo", addresses=("127.0.0.1/8",))
        inventory = Tree(root / name).detect(Link(name=name, addresses=("192.0.2.1/24",)), loopback)
        assert exact_interface(inventory) == f"={name}"
        assert lint_interfaces("eno1,eth0", inventory).selected == (name,)
        assert lint_interfaces("lo", inventory).problems


@case("F2-33")
def _(folder: Path, root: Path) -> None:
    inventory = inventory_from_files([folder / "topo_m.txt"])
    assert inventory.rails == ("NIC0", "NIC1", "NIC4", "NIC5")
    found = nearest(inventory)
    assert (found[0], found[2], found[4], found[6]) == ("NIC0", "NIC1", "NIC4", "NIC5")
    assert {found[1], found[3]} <= {"NIC0", "NIC1"}
    assert {found[5], found[7]} <= {"NIC4", "NIC5"}


@case("F2-39")
def _(folder: Path, root: Path) -> None:
    assert verdicts(inventory_from_files([folder / "ibstat.txt"])) == {"mlx5_0:1": "roce"}


@case("F2-01")
def _(folder: Path, root: Path) -> None:
    inventories = []
    for line in (folder / "inventory.tsv").read_text().splitlines()[1:]:
        host, _, rdma, _ = line.split("\t")
        kind = "infiniband" if rdma.startswith("IB") else "roce"
        nics = tuple(Nic(device=f"mlx5_{n}", kind=kind, rate=200.0) for n in range(8))
        inventories.append(Inventory(host=host, nics=nics, kind=kind, rails=tuple(nic.device for nic in nics)))
    assert [(c.kind, c.hosts) for c in group_hosts(inventories)] == [
        ("infiniband", ("node-a1", "node-a2")),
        ("roce", ("node-b1", "node-b2")),
    ]


@case("F2-41")
def _(folder: Path, root: Path) -> None:
    hosts = [
        Inventory(
            host=name, nics=(Nic(device="m", kind="roce", addresses=(f"192.0.2.{n}/24",)),), rails=("m",), kind="roce"
        )
        for n, name in enumerate(("node-a1", "node-a2", "node-b1", "node-b2"))
    ]
    clusters = group_hosts(hosts, fabrics={"node-a1": "1", "node-a2": "1", "node-b1": "2", "node-b2": "2"})
    assert [cluster.hosts for cluster in clusters] == [("node-a1", "node-a2"), ("node-b1", "node-b2")]


# Judged elsewhere: logs are read by the doctor, interfaces between hosts are chosen by the transports.
ELSEWHERE = {"F1-40", "F1-44"}


@pytest.mark.parametrize("name", CHECKS)
def test_case(name: str, tmp_path: Path) -> None:
    folder = Path(_FOLDER) / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    CHECKS[name](folder, tmp_path)


def test_every_inventory_case_has_a_check() -> None:
    found = {path.name for path in Path(_FOLDER).iterdir() if path.name.startswith("F1-")}
    assert found - set(CHECKS) - ELSEWHERE == set()
