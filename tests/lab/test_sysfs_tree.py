# SPDX-License-Identifier: Apache-2.0
"""The synthetic /sys: what a kernel shows for such cards, links that lead somewhere, faults that show."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_core.lab.spec import LabSpec
from holmes_core.lab.spec_file import parse_spec
from holmes_core.lab.sysfs_tree import write_dev, write_sysfs

SPEC = {
    "clusters": [
        {"name": "a", "kind": "infiniband", "hosts": 2},
        {"name": "b", "kind": "roce", "hosts": 2, "interfaces": {"rdma": "ens2", "ethernet": "ens1"}, "port_rate": 200},
        {"name": "c", "kind": "ethernet", "hosts": 1, "ethernet_rate": "1gbit"},
    ]
}


def build(tmp_path: Path, host: str, **keys: object) -> Path:
    spec: LabSpec = parse_spec({**SPEC, **keys})
    place = next(h for h in spec.hosts if h.name == host)
    write_sysfs(tmp_path / host / "sys", spec, place)
    write_dev(tmp_path / host / "dev", place)
    return tmp_path / host / "sys"


def read(path: Path) -> str:
    return path.read_text().rstrip("\n")


def test_an_infiniband_host(tmp_path: Path) -> None:
    sysfs = build(tmp_path, "a2")
    device = sysfs / "class/infiniband/mlx5_0"
    port = device / "ports/1"
    assert read(device / "node_type") == "1: CA"
    assert read(port / "link_layer") == "InfiniBand"
    assert read(port / "rate") == "100 Gb/sec (4X EDR)"
    assert (read(port / "state"), read(port / "phys_state")) == ("4: ACTIVE", "5: LinkUp")
    assert read(port / "lid") == "0x2"
    assert read(port / "gids/0") == "fe80:0000:0000:0001:" + read(device / "node_guid")
    assert read(port / "gids/1") == ":".join(["0000"] * 8)
    assert not (port / "gid_attrs/types/1").exists()
    assert read(device / "device/vendor") == "0x15b3"
    assert (device / "device/driver").resolve().name == "mlx5_core"
    assert [path.name for path in (device / "device/net").iterdir()] == ["rdma0"]
    assert read(sysfs / "class/net/rdma0/type") == "32"
    assert read(sysfs / "class/net/rdma0/address").endswith("00:02")
    assert len(read(sysfs / "class/net/rdma0/address").split(":")) == 20
    assert read(sysfs / "class/infiniband_verbs/uverbs0/ibdev") == "mlx5_0"
    assert (tmp_path / "a2/dev/infiniband/uverbs0").exists()


def test_a_roce_host_with_names_that_mislead(tmp_path: Path) -> None:
    sysfs = build(tmp_path, "b1")
    port = sysfs / "class/infiniband/mlx5_0/ports/1"
    assert read(port / "link_layer") == "Ethernet"
    assert read(port / "rate") == "200 Gb/sec (4X HDR)"
    assert read(port / "gids/3") == "0000:0000:0000:0000:0000:ffff:0a65:0001"  # 10.101.0.1
    assert [read(port / f"gid_attrs/types/{i}") for i in range(4)] == ["IB/RoCE v1", "RoCE v2"] * 2
    assert read(port / "gid_attrs/ndevs/3") == "ens2"
    assert read(sysfs / "class/net/ens2/type") == "1"
    assert (sysfs / "class/net/ens2/device").resolve() == (sysfs / "class/infiniband/mlx5_0/device").resolve()
    assert (sysfs / "class/net/ens1/device/driver").resolve().name == "i40e"


def test_an_ethernet_host(tmp_path: Path) -> None:
    sysfs = build(tmp_path, "c1")
    assert not (sysfs / "class/infiniband").exists()
    assert read(sysfs / "class/net/eth0/speed") == "1000"
    assert sorted(path.name for path in (sysfs / "class/net").iterdir()) == ["eth0", "lo"]
    assert list((tmp_path / "c1/dev").iterdir()) == []


def test_each_infiniband_cluster_has_its_own_prefix_unless_given(tmp_path: Path) -> None:
    def prefix(host: str, **keys: object) -> str:
        home = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        home.mkdir()
        return read(build(home, host, **keys) / "class/infiniband/mlx5_0/ports/1/gids/0")[:19]

    own = [{"name": name, "kind": "infiniband", "hosts": 1} for name in "xy"]
    assert prefix("x1", clusters=own) != prefix("y1", clusters=own)
    same = [{**cluster, "subnet_prefix": "fe80:0000:0000:0000"} for cluster in own]
    assert prefix("x1", clusters=same) == prefix("y1", clusters=same) == "fe80:0000:0000:0000"


def test_a_port_that_is_down(tmp_path: Path) -> None:
    sysfs = build(tmp_path, "a1", faults=[{"fault": "nic-down", "host": "a1", "nic": "rdma"}])
    port = sysfs / "class/infiniband/mlx5_0/ports/1"
    assert (read(port / "state"), read(port / "phys_state")) == ("1: DOWN", "3: Disabled")
    assert read(sysfs / "class/net/rdma0/operstate") == "down"
    assert not (sysfs / "class/net/rdma0/carrier").exists()
    assert read(sysfs / "class/net/eth0/operstate") == "up"


@pytest.mark.parametrize("host", ["a1", "b2", "c1"])
def test_every_link_leads_somewhere(tmp_path: Path, host: str) -> None:
    sysfs = build(tmp_path, host)
    links = [path for path in sysfs.rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        assert link.exists(), link
        assert link.resolve().is_relative_to(sysfs.resolve())
