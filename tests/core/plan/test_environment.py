# SPDX-License-Identifier: Apache-2.0
"""NCCL's and gloo's variables: what a rank needs, and what a user has set that cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holmes_core.cluster.nic import Inventory
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.environment import check_environment, check_plan_environment, environment_warnings, nccl_variables
from holmes_core.plan.layout import ModelFacts
from holmes_core.plan.plan import Plan, make_plan
from tests.core.plan.networks import by_rank, ethernet, inventory, rail, topology, two_by_two


def gpu_plan(**wishes: object) -> Plan:
    return make_plan(HolmesConfig(**wishes), two_by_two(), ModelFacts(num_blocks=8), device_type="cuda")  # type: ignore[arg-type]


def with_env(inventories: list[Inventory], **per_rank: dict[str, str]) -> list[Inventory]:
    found = list(inventories)
    for key, env in per_rank.items():
        rank = int(key.removeprefix("r"))
        found[rank] = replace(found[rank], environment=tuple(sorted(env.items())))
    return found


def test_each_host_gets_exact_values_of_its_own() -> None:
    plan = gpu_plan(pp=2)
    assert nccl_variables(plan, 0) == {"NCCL_IB_HCA": "=mlx5_0", "NCCL_SOCKET_IFNAME": "=eth0"}
    assert nccl_variables(plan, 2) == {
        "NCCL_IB_HCA": "=mlx5_0",
        "NCCL_IB_GID_INDEX": "3",
        "NCCL_SOCKET_IFNAME": "=ens2",
    }


def test_libfabric_kinds_load_the_plugin_and_leave_the_ib_variables_alone() -> None:
    hosts = [
        inventory(f"n{i}", rail("e0", "", kind="efa"), ethernet("ens5", f"192.0.2.{i}/24"), uses="ens5") for i in (1, 2)
    ]
    plan = make_plan(HolmesConfig(), topology(("efa", hosts)), ModelFacts(num_blocks=4), device_type="cuda")
    assert nccl_variables(plan, 0) == {"NCCL_NET_PLUGIN": "ofi", "NCCL_SOCKET_IFNAME": "=ens5"}


def test_ipv6_only_hosts_say_so() -> None:
    hosts = [inventory(f"n{i}", ethernet("veth0", f"2001:db8::{i}/64"), uses="veth0") for i in (1, 2)]
    plan = make_plan(HolmesConfig(), topology(("ethernet", hosts)), ModelFacts(num_blocks=4), device_type="cuda")
    assert nccl_variables(plan, 1)["NCCL_SOCKET_FAMILY"] == "AF_INET6"


def test_gloo_jobs_need_none() -> None:
    plan = make_plan(HolmesConfig(pp=2), two_by_two(), ModelFacts(num_blocks=8))
    assert nccl_variables(plan, 0) == {}


def test_one_network_name_for_all_communicators_is_refused() -> None:
    plan = gpu_plan(pp=2)
    with pytest.raises(ConfigError, match="NCCL_NET=IB is set") as caught:
        check_plan_environment(plan, with_env(by_rank(plan.topology), r2={"NCCL_NET": "IB"}))
    assert "rank 2 on host b1" in (caught.value.where or "")
    assert "unset NCCL_NET" in caught.value.do


def test_the_network_every_group_has_anyway_may_be_named() -> None:
    hosts = [inventory(f"n{i}", ethernet("eth0", f"192.0.2.{i}/24")) for i in (1, 2)]
    plan = make_plan(HolmesConfig(), topology(("ethernet", hosts)), ModelFacts(num_blocks=4), device_type="cuda")
    check_plan_environment(plan, with_env(hosts, r0={"NCCL_NET": "Socket"}, r1={"NCCL_NET": "Socket"}))


def test_infiniband_switched_off_under_a_plan_that_needs_it_is_refused() -> None:
    plan = gpu_plan(pp=2)
    with pytest.raises(ConfigError, match="NCCL_IB_DISABLE=1") as caught:
        check_plan_environment(plan, with_env(by_rank(plan.topology), r1={"NCCL_IB_DISABLE": "1"}))
    assert "kind: ethernet" in caught.value.do
    check_plan_environment(plan, with_env(by_rank(plan.topology), r1={"NCCL_IB_DISABLE": "0"}))


def test_values_that_differ_between_hosts_are_refused_with_who_has_what() -> None:
    job = by_rank(two_by_two())
    with pytest.raises(ConfigError, match="NCCL_IB_DISABLE is not set on a1, b1, b2; '1' on a2") as caught:
        check_environment(with_env(job, r1={"NCCL_IB_DISABLE": "1"}), device_type="cuda")
    assert "unset NCCL_IB_DISABLE everywhere" in caught.value.do
    check_environment(with_env(job, r1={"NCCL_IB_DISABLE": "1"}), device_type="cpu")


@pytest.mark.parametrize(
    ("value", "part"),
    [("lo", "loopback"), ("eth7", "no interface of this host matches"), ("docker0", "has no global address")],
)
def test_interface_that_cannot_be_is_refused_before_the_start(value: str, part: str) -> None:
    docker = ethernet("docker0", usable=False, reason="a container bridge")
    job = [
        inventory(f"n{i}", ethernet("eth0", f"192.0.2.{i}/24"), docker, env={"GLOO_SOCKET_IFNAME": value})
        for i in (1, 2)
    ]
    with pytest.raises(ConfigError, match=value) as caught:
        check_environment(job, device_type="cpu")
    assert part in (caught.value.means or "")
    assert "host n1" in (caught.value.where or "")
    assert "eth0" in caught.value.do


def test_loopback_is_fine_on_one_host() -> None:
    job = [inventory("n1", ethernet("eth0", "192.0.2.1/24"), env={"GLOO_SOCKET_IFNAME": "lo"})] * 2
    check_environment(job, device_type="cpu")


def test_interface_set_on_some_hosts_only() -> None:
    def host(i: int, **more: object) -> Inventory:
        return inventory(f"n{i}", ethernet("eth0", f"192.0.2.{i}/24"), ethernet("stor0", f"10.9.{i}.1/24"), **more)  # type: ignore[arg-type]

    check_environment([host(1, env={"NCCL_SOCKET_IFNAME": "eth0"}), host(2)], device_type="cuda")
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME=stor0") as caught:
        check_environment([host(1, env={"NCCL_SOCKET_IFNAME": "stor0"}), host(2)], device_type="cuda")
    assert "n2" in (caught.value.means or "")
    with pytest.raises(ConfigError, match="NCCL_SOCKET_IFNAME=eth0") as caught:
        check_environment([host(1, env={"NCCL_SOCKET_IFNAME": "eth0"}), host(1), host(2)], device_type="cuda")
    assert "same host" in (caught.value.means or "")


def test_list_of_devices_that_cannot_meet_or_that_leaves_none_is_refused_with_the_right_one() -> None:
    plan = gpu_plan(pp=2)
    job = by_rank(plan.topology)
    mixed = replace(job[0], nics=(*job[0].nics, rail("mlx5_1", "r1", "10.7.0.1/24", kind="roce")))
    for value, part in (("mlx5", "infiniband, roce"), ("=mlx5_9", "leaves no usable port")):
        with pytest.raises(ConfigError, match=f"NCCL_IB_HCA={value}") as caught:
            check_plan_environment(plan, with_env([mixed, *job[1:]], r0={"NCCL_IB_HCA": value}))
        assert part in (caught.value.means or "")
        assert "=mlx5_0" in caught.value.do
    check_plan_environment(plan, with_env([mixed, *job[1:]], r0={"NCCL_IB_HCA": "=mlx5_0"}))


def test_odd_lists_are_said_and_not_refused() -> None:
    job = [inventory("n1", rail("m0", "r0"), rail("m1", "r1"), ethernet("eth0", "192.0.2.1/24"))] * 2
    (text,) = environment_warnings(with_env(job, r0={"NCCL_IB_HCA": "=m0"}))
    assert "leaves out 1 of 2 rails: m1" in text
    assert "better: =m0,m1" in text
    assert environment_warnings(job) == ()
