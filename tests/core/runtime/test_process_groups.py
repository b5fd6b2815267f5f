# SPDX-License-Identifier: Apache-2.0
"""Process groups as planned: order, networks, options of communicators; what a dead link says."""

from __future__ import annotations

import os
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holmes_core.config import HolmesConfig
from holmes_core.errors import HolmesError
from holmes_core.plan.layout import ModelFacts
from holmes_core.plan.plan import make_plan
from holmes_core.plan.transport import Transport
from holmes_core.runtime import process_groups
from holmes_core.runtime.environment import gloo_interface, require_ofi_plugin, set_missing
from holmes_core.runtime.process_groups import ProcessGroups, nccl_options
from tests.core.plan.networks import two_by_two


class FakeOptions:
    """Has what torch's options have: a config with a net_name that is None until it is set."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(net_name=None)


@pytest.mark.parametrize(("net", "name"), [("IB", "IB"), ("Socket", "Socket"), ("OFI", None), ("local", None)])
def test_net_name_of_a_communicator(net: str, name: str | None) -> None:
    transport = Transport(backend="nccl", kind="x", net=net, reason="")
    assert nccl_options(transport, FakeOptions).config.net_name == name


class FakeGroups:
    """Stands in for torch.distributed where no NCCL exists: records what is asked for, in order."""

    def __init__(self, rank: int) -> None:
        self.rank, self.asked = rank, []
        self.group = SimpleNamespace(WORLD="world")

    def barrier(self, group: Any) -> None:
        self.asked.append(("barrier",))

    def new_group(self, ranks: list[int], *, backend: str, timeout: Any, pg_options: Any, sort_ranks: bool) -> Any:
        net = pg_options.config.net_name if pg_options is not None else os.environ.get("GLOO_SOCKET_IFNAME")
        self.asked.append((tuple(ranks), backend, net))
        assert not sort_ranks
        return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(set_timeout=lambda timeout: None))

    def all_reduce(self, tensor: Any, group: Any) -> None:
        self.asked.append(("connected",))


def asked_by(rank: int, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    plan = make_plan(HolmesConfig(pp=2), two_by_two(), ModelFacts(num_blocks=8), device_type="cuda")
    fake = FakeGroups(rank)
    monkeypatch.setattr(process_groups, "dist", fake)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    ProcessGroups(
        plan,
        rank=rank,
        device=torch.device("cuda"),
        timeout=60,
        make_nccl_options=lambda transport: nccl_options(transport, FakeOptions),
    )
    return fake.asked


def test_gpu_groups_get_their_network_and_are_connected_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_by(0, monkeypatch)
    plan = make_plan(HolmesConfig(pp=2), two_by_two(), ModelFacts(num_blocks=8), device_type="cuda")
    for group in plan.groups:
        if group.axis == "dp":
            assert (group.ranks, "nccl", "IB") in asked
        if group.axis == "edge":
            assert (group.ranks, "nccl", "Socket") in asked
        if group.axis in ("pp", "replica"):
            assert (group.ranks, "gloo", "eth0") in asked
    mine = [i for i, call in enumerate(asked) if len(call) == 3 and call[1] == "nccl" and 0 in call[0]]
    assert mine
    assert all(asked[i + 1] == ("connected",) for i in mine)
    assert asked[0] == ("barrier",)  # all ranks stand at the same place before a short wait begins


def test_all_ranks_make_the_same_groups_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [[call[:2] for call in asked_by(rank, monkeypatch) if len(call) == 3] for rank in range(4)]
    assert orders[0] == orders[1] == orders[2] == orders[3]


def test_interface_is_set_for_the_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with gloo_interface("rdma0"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "rdma0"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    with pytest.raises(KeyError), gloo_interface("rdma0"):
        raise KeyError
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"
    with gloo_interface(None):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth9"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "=mine")
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    try:
        assert set_missing({"NCCL_IB_HCA": "=ours", "NCCL_NET_PLUGIN": "ofi"}) == {"NCCL_NET_PLUGIN": "ofi"}
        assert os.environ["NCCL_IB_HCA"] == "=mine"
    finally:
        del os.environ["NCCL_NET_PLUGIN"]


def test_missing_libfabric_plugin_is_an_error_and_not_a_slow_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    tried: list[str] = []

    def nothing_there(name: str) -> None:
        tried.append(name)
        raise OSError(f"{name}: cannot open")

    with pytest.raises(HolmesError, match="cannot open") as caught:
        require_ofi_plugin("n1", nothing_there)
    assert "LD_LIBRARY_PATH" in caught.value.do
    assert tried == ["libnccl-net-ofi.so", "libnccl-net.so"]
    require_ofi_plugin("n1", lambda name: None)
    monkeypatch.setenv("NCCL_NET_PLUGIN", "/opt/mine/libx.so")
    with pytest.raises(HolmesError):
        require_ofi_plugin("n1", nothing_there)
    assert tried[2:] == ["/opt/mine/libx.so"]


@contextmanager
def one_process() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_group_that_cannot_connect_names_itself_its_hosts_and_interfaces() -> None:
    from dataclasses import replace

    from holmes_core.cluster.host import Cluster, Host
    from holmes_core.cluster.topology import Topology
    from tests.core.plan.networks import ethernet, inventory

    host = Host(name="n1", ranks=(0,), inventory=inventory("n1", ethernet("nosuch0", "192.0.2.1/24"), uses="nosuch0"))
    job = Topology(clusters=(Cluster(name="c", kind="ethernet", hosts=(host,)),))
    plan = make_plan(HolmesConfig(), job, ModelFacts(num_blocks=2))
    broken = replace(plan.groups[1], transport=replace(plan.groups[1].transport, interface="nosuch0"))
    plan = replace(plan, groups=(plan.groups[0], broken, *plan.groups[2:]))
    with one_process(), pytest.raises(HolmesError) as caught:
        ProcessGroups(plan, rank=0, device=torch.device("cpu"), timeout=5)
    text = str(caught.value)
    assert broken.name in text
    assert "n1:nosuch0" in text
    assert "holmes detect" in text
