# SPDX-License-Identifier: Apache-2.0
"""Checks of hosts: what an inventory, its variables and its surroundings tell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holmes_core.cluster.nic import Accelerator, Gid, Inventory, Nic
from holmes_core.doctor.compare import compare_hosts
from holmes_core.doctor.finding import Finding, exit_status
from holmes_core.doctor.host import host_findings
from holmes_core.doctor.process import surroundings_findings
from holmes_core.doctor.surroundings import Surroundings, look_around

LOCAL, ROUTABLE = "fe80:0000:0000:0000:0000:00ff:fe00:0001", "0000:0000:0000:0000:0000:ffff:c633:6407"


def ethernet(name: str = "eno1", address: str = "192.0.2.11/24", **more) -> Nic:
    return Nic(
        device=name, netdev=name, kind="ethernet", addresses=(address,) if address else (), state="active", **more
    )


def roce(name: str, *, index: int = 3, **more) -> Nic:
    gids = (Gid(index=1, address=LOCAL, type="roce_v2"), Gid(index=index, address=ROUTABLE, type="roce_v2"))
    return Nic(device=name, kind="roce", state="active", gids=gids, gid_index=index, rate=200.0, **more)


def infiniband(name: str, **more) -> Nic:
    return Nic(device=name, kind="infiniband", state="active", rate=200.0, **more)


def host(*nics: Nic, name: str = "n1", kind: str = "ethernet", env: dict[str, str] | None = None, **more) -> Inventory:
    rails = tuple(nic.device for nic in nics if nic.kind == kind and kind != "ethernet" and nic.usable)
    lan = next((nic.netdev for nic in nics if nic.kind == "ethernet" and nic.addresses), "")
    environment = tuple(sorted((env or {}).items()))
    return Inventory(host=name, nics=nics, kind=kind, rails=rails, ethernet=lan, environment=environment, **more)


def of(found, name: str) -> Finding:
    found = list(found)
    matching = [one for one in found if one.id == name]
    assert len(matching) == 1, [one.id for one in found]
    return matching[0]


def faults(found) -> list[str]:
    return [one.id for one in found if one.severity != "note"]


def test_a_healthy_host_has_no_faults() -> None:
    inventory = host(infiniband("mlx5_0"), infiniband("mlx5_1"), ethernet(), kind="infiniband")
    around = Surroundings(hostname="n1", own_addresses=("192.0.2.11",), memlock=-1, versions=(("torch", "2.13"),))
    assert exit_status([*host_findings(inventory), *surroundings_findings(around, inventory)]) == 0


@pytest.mark.parametrize(
    ("warning", "name"),
    [
        ("degraded: 7 of 8 rails usable (mlx5_3: INIT: link up, no subnet manager yet)", "degraded-rails"),
        (
            "RDMA hardware that cannot be used, traffic goes over Ethernet: m: no /dev/infiniband/uverbs*",
            "rdma-unusable",
        ),
        ("unequal rails: mlx5_2 (slow rail: 100 Gbit/s, others 200)", "unequal-rails"),
        ("mlx5_bond_0 is a bond of 2: one queue pair uses one member", "bond-queue-pairs"),
    ],
)
def test_warnings_of_the_inventory_get_an_advice(warning: str, name: str) -> None:
    found = of(host_findings(host(ethernet(), warnings=(warning,))), name)
    assert found.severity == "warning"
    assert found.do


def test_later_modifiers_and_typos_in_the_hca_list() -> None:
    nics = [infiniband(f"mlx5_{number}") for number in range(6)]
    inventory = host(*nics, ethernet(), kind="infiniband", env={"NCCL_IB_HCA": "^=mlx5_1,^=mlx5_4"})
    found = of(host_findings(inventory), "hca-list")
    assert "once, at the beginning" in found.seen
    assert "NCCL_IB_HCA='^=mlx5_1,mlx5_4'" in found.do
    assert "(5)" in found.means
    found = of(host_findings(replace(inventory, environment=(("NCCL_IB_HCA", "^=mlx5_0,mlxl5_3"),))), "hca-list")
    assert "did you mean 'mlx5_3'" in found.seen


def test_one_hca_of_several_rails_is_warned_about() -> None:
    nics = [infiniband(f"mlx5_{number}") for number in range(4)]
    inventory = host(*nics, ethernet(), kind="infiniband", env={"NCCL_IB_HCA": "=mlx5_0"})
    assert "leaves out 3 of 4 rails" in of(host_findings(inventory), "hca-list").seen


def test_interface_lists() -> None:
    lan = (ethernet("bond0", "192.0.2.7/24"), ethernet("bond0.5", "198.51.100.1/24"), ethernet("lo", "", usable=False))
    found = of(host_findings(host(*lan, env={"NCCL_SOCKET_IFNAME": "bond0"})), "interface-list")
    assert "NCCL_SOCKET_IFNAME='=bond0'" in found.do
    assert of(host_findings(host(*lan, env={"NCCL_SOCKET_IFNAME": "lo"})), "interface-list").severity == "error"
    assert faults(host_findings(host(*lan, env={"NCCL_SOCKET_IFNAME": "lo"}), several_hosts=False)) == []
    assert of(host_findings(host(*lan, env={"GLOO_SOCKET_IFNAME": "eth9"})), "gloo-interface").severity == "error"
    assert faults(host_findings(host(ethernet("eno1"), env={"NCCL_SOCKET_IFNAME": "eno1,eth0"}))) == []


def test_gid_index() -> None:
    inventory = host(roce("mlx5_0", index=5), ethernet(), kind="roce", env={"NCCL_IB_GID_INDEX": "1"})
    found = of(host_findings(inventory), "gid-index")
    assert "roce v2 of fe80::" in found.seen
    assert "NCCL_IB_GID_INDEX=5" in found.do
    right = replace(inventory, environment=(("NCCL_IB_GID_INDEX", "5"),))
    assert faults(host_findings(right)) == []
    two = host(roce("a", index=5), roce("b", index=3), ethernet(), kind="roce", env={"NCCL_IB_GID_INDEX": "5"})
    assert "unset NCCL_IB_GID_INDEX" in of(host_findings(two), "gid-index").do


def test_switches_that_leave_rdma_unused() -> None:
    inventory = host(
        infiniband("mlx5_0"), ethernet(), kind="infiniband", env={"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket"}
    )
    assert faults(host_findings(inventory)) == ["ib-disabled", "socket-forced"]


def test_mtu_of_rails() -> None:
    inventory = host(roce("a", mtu=9000, netdev="e0"), roce("b", mtu=1500, netdev="e1"), ethernet(), kind="roce")
    assert "1500 on e1" in of(host_findings(inventory), "mtu").seen


def test_rails_and_their_gpus_are_told() -> None:
    gpus = tuple(Accelerator(index=index, nearest="mlx5_0") for index in range(2))
    spare = infiniband("mlx5_1", reason="not a rail: next to no GPU")
    inventory = replace(host(infiniband("mlx5_0"), spare, kind="infiniband", accelerators=gpus), rails=("mlx5_0",))
    found = of(host_findings(inventory), "rails")
    assert "mlx5_0 (GPU0, GPU1)" in found.seen
    assert "left out: mlx5_1" in found.seen


LAN = host(ethernet("ens1", "198.51.100.12/24"), ethernet("eno1", "192.0.2.12/24"), env={"NCCL_SOCKET_IFNAME": "ens1"})
AROUND = Surroundings(hostname="n1", own_addresses=("192.0.2.11",), memlock=-1, several_hosts=True)


@pytest.mark.parametrize(
    ("change", "name", "severity", "words"),
    [
        (
            {"own_addresses": ("127.0.1.1",)},
            "name-is-loopback",
            "warning",
            ["127.0.1.1", "198.51.100.12", "/etc/hosts"],
        ),
        ({"own_addresses": ("::1",)}, "name-is-loopback", "warning", ["::1"]),
        ({"own_addresses": ()}, "name-resolution", "warning", ["does not resolve"]),
        ({"hostname": "localhost"}, "host-named-localhost", "error", ["hostnamectl"]),
        (
            {"master": "n0", "master_addresses": ("192.0.2.12",)},
            "master-subnet",
            "warning",
            ["192.0.2.12", "ens1", "rp_filter"],
        ),
        ({"master": "localhost", "master_addresses": ("127.0.0.1",)}, "master-is-loopback", "error", ["MASTER_ADDR"]),
        (
            {"versions": (("nvidia-nccl-cu12", "2.27"), ("nvidia-nccl-cu13", "2.28"))},
            "nccl-versions",
            "warning",
            ["both installed"],
        ),
    ],
)
def test_surroundings(change: dict, name: str, severity: str, words: list[str]) -> None:
    found = of(surroundings_findings(replace(AROUND, **change), LAN), name)
    assert found.severity == severity
    text = f"{found.seen} {found.means} {found.do} {found.where}"
    assert [word for word in words if word not in text] == []


def test_memlock_matters_where_there_is_rdma() -> None:
    low = replace(AROUND, memlock=8192 * 1024)
    assert faults(surroundings_findings(low, LAN)) == []
    assert faults(surroundings_findings(low, host(infiniband("m"), kind="infiniband"))) == ["memlock"]
    assert faults(surroundings_findings(AROUND, host(infiniband("m"), kind="infiniband"))) == []


def test_fabrics_that_need_a_plugin() -> None:
    efa = host(Nic(device="rdmap0", kind="efa"), kind="efa")
    assert faults(surroundings_findings(AROUND, efa)) == ["ofi-plugin-missing"]
    assert faults(surroundings_findings(replace(AROUND, plugin="/opt/x/libnccl-net.so"), efa)) == []


def test_small_shared_memory_matters_to_gpus() -> None:
    small = replace(AROUND, shared_memory=64 << 20)
    assert faults(surroundings_findings(small, LAN)) == []
    assert faults(surroundings_findings(small, replace(LAN, accelerators=(Accelerator(index=0),)))) == ["shared-memory"]


def test_looking_around_is_quick_and_complete(monkeypatch) -> None:
    found = look_around({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert found.hostname
    assert found.master_addresses == ("127.0.0.1",)
    assert found.several_hosts
    assert dict(found.versions)["torch"]
    assert not look_around({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}).several_hosts


def test_one_list_for_hosts_with_other_names() -> None:
    env = {"NCCL_IB_HCA": "=mlx5_0,mlx5_3"}
    storage = [replace(roce(name), rate=25.0, reason="not a rail: slower") for name in ("mlx5_1", "mlx5_3")]
    one = host(roce("mlx5_0"), roce("mlx5_3"), ethernet(), kind="roce", env=env, name="a1")
    two = host(roce("mlx5_0"), roce("mlx5_1"), storage[1], ethernet(), kind="roce", env=env, name="b1")
    two = replace(two, rails=("mlx5_0", "mlx5_1"))
    found = of(compare_hosts([one, two]), "hca-list-per-host")
    assert found.severity == "error"
    assert "a1: NCCL_IB_HCA='=mlx5_0,mlx5_3'; b1: NCCL_IB_HCA='=mlx5_0,mlx5_1'" in found.do
    unset = [replace(each, environment=()) for each in (one, two)]
    assert of(compare_hosts(unset), "hca-list-per-host").severity == "note"


def test_hosts_that_differ() -> None:
    one = host(infiniband("m0"), infiniband("m1"), ethernet(mtu=9000), kind="infiniband", name="a1")
    two = host(infiniband("m0"), ethernet(mtu=1500), kind="infiniband", name="a2")
    found = list(compare_hosts([one, two]))
    assert "1500 on a2" in of(found, "mtu").seen
    assert any(one.id == "fabric" and "a2" in one.seen for one in found)


def test_variables_that_differ() -> None:
    one = host(ethernet(), name="a1", env={"NCCL_NET": "Socket"})
    two = host(ethernet(address="192.0.2.12/24"), name="a2")
    assert "NCCL_NET" in of(compare_hosts([one, two]), "environment").seen


def test_clusters_are_told() -> None:
    one = host(infiniband("m0"), ethernet(), kind="infiniband", name="a1")
    two = host(roce("m0"), ethernet(address="192.0.2.12/24"), kind="roce", name="b1")
    found = of(compare_hosts([one, two]), "clusters")
    assert (found.severity, "a1" in found.seen, "b1" in found.seen) == ("note", True, True)
