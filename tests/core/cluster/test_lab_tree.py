# SPDX-License-Identifier: Apache-2.0
"""The lab's trees are laid out like the kernel's: detection and grouping read them as they would a real host's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holmes_core.cluster.detect import detect_host
from holmes_core.cluster.fabric import group_hosts
from holmes_core.cluster.links import Link
from holmes_core.cluster.nic import Inventory
from holmes_core.lab.spec_file import parse_spec
from holmes_core.lab.sysfs_tree import write_dev, write_sysfs

SPEC: dict[str, Any] = {
    "clusters": [
        {"name": "a", "kind": "infiniband", "hosts": 2, "interfaces": {"rdma": "eth0", "ethernet": "rdma0"}},
        {"name": "b", "kind": "roce", "hosts": 2},
        {"name": "c", "kind": "ethernet", "hosts": 1},
    ],
    "faults": [{"fault": "nic-down", "host": "b2", "nic": "rdma"}],
}


def look(root: Path) -> dict[str, Inventory]:
    spec = parse_spec(SPEC, where="spec")
    found = {}
    for host in spec.hosts:
        write_sysfs(root / host.name / "sys", spec, host)
        write_dev(root / host.name / "dev", host)
        links = [Link(name=host.cluster.ethernet, addresses=(f"{host.ethernet_address}/24",), up=True)]
        if host.rdma_address:
            links.append(Link(name=host.cluster.rdma, addresses=(f"{host.rdma_address}/24",), up=host.name != "b2"))
        env = {"HOLMES_SYSFS": str(root / host.name / "sys"), "HOLMES_DEV": str(root / host.name / "dev")}
        found[host.name] = detect_host(host=host.name, env=env, addresses=lambda links=tuple(links): links)
    return found


def test_a_lab_is_found_as_it_was_described(tmp_path: Path) -> None:
    hosts = look(tmp_path)
    clusters = {cluster.name: cluster.hosts for cluster in group_hosts(list(hosts.values()))}
    assert clusters == {"infiniband-0": ("a1", "a2"), "roce-0": ("b1",), "ethernet-0": ("b2", "c1")}
    # Names are swapped in cluster a, and nothing depends on them.
    assert {name: one.ethernet for name, one in hosts.items()} == {
        "a1": "rdma0",
        "a2": "rdma0",
        "b1": "eth0",
        "b2": "eth0",
        "c1": "eth0",
    }
    assert [nic.netdev for nic in hosts["a1"].rail_nics] == ["eth0"]
    assert hosts["b1"].rail_nics[0].gid_index == 3
    assert hosts["b2"].missing_rails == 1
