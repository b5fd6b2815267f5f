# SPDX-License-Identifier: Apache-2.0
"""Tables of hardware, and what a cluster file declares."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.hardware import find_gpu, load_hardware, nic_gbits, topology_of_specs

FILE = """
clusters:
  - {name: a, kind: infiniband, hosts: ["a[1-3]"], gpu: a100 80gb, gpus: 8, nics: 4, nic_rate: hdr, ethernet_rate: 25}
  - {name: b, kind: roce, hosts: [b1, b2], gpu: A100, gpus: [8, 4], speed: 160, nic_rate: 100gbit}
links:
  - {between: [a, b], rate: 10, latency: 0.002}
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_a_cluster_file_declares_hardware_and_the_job_reads_the_same_file(tmp_path: Path) -> None:
    path = written(tmp_path, FILE)
    specs, hardware = load_hardware(path)
    a, b = hardware.clusters
    assert (a.hosts, a.nics, a.nic_rate, a.gpu.tflops) == ((8, 8, 8), 4, 200, 312)
    assert (b.hosts, b.speed, b.nic_rate) == ((8, 4), 160, 100)
    assert hardware.link("b", "a").rate == 10
    assert hardware.ranks == 36
    assert hardware.assumptions == ("b: 25 Gbit/s Ethernet per host",)
    assert HolmesConfig.load({"cluster_file": path}).clusters == specs
    topology = topology_of_specs(specs, hardware)
    assert topology.host_of(31).name == "b1"
    assert topology.local_rank(33) == 1


def test_what_is_not_declared_is_assumed_and_said(tmp_path: Path) -> None:
    _, hardware = load_hardware(written(tmp_path, "clusters: [{name: a, kind: roce, hosts: [n1]}]"))
    assert hardware.assumptions == (
        "a: gpu A100-80GB (the cluster file names none)",
        "a: 8 gpus per host",
        "a: 25 Gbit/s Ethernet per host",
        "a: 1 x 200 Gbit/s roce per host",
    )


@pytest.mark.parametrize(
    ("name", "found"), [("H100", "H100-SXM"), ("NVIDIA A100-PCIe", "A100-PCIe"), ("rtx 4090", "RTX-4090")]
)
def test_gpus_by_any_spelling(name: str, found: str) -> None:
    assert find_gpu(name).name == found


@pytest.mark.parametrize(
    ("text", "gbits"), [("hdr", 200), (25, 25), ("200mbit", 0.2), ("1.5 Gbit/s", 1.5), ("400", 400)]
)
def test_rates(text: object, gbits: float) -> None:
    assert nic_gbits(text, where="x") == gbits


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clusters: [{name: a, hosts: [n1], gpu: A1000}]", r"'A1000'(?s:.)*cluster 'a'.gpu"),
        ("clusters: [{name: a, hosts: [n1, n2], gpus: [8]}]", "one for each of the 2 hosts"),
        ("clusters: [{name: a, hosts: [n1], nic_rate: fast}]", "write Gbit/s"),
        ("clusters: [{name: a, hosts: [n1], gpus: 0}]", "give gpus a positive number"),
        ("clusters: [{name: a, hosts: [n1]}]\nlinks: [{between: [a, z]}]", "name two of: a"),
        ("clusters: [{name: a, hosts: [n1]}]\nlinks: [{between: [a, a], speed: 1}]", "unknown key 'speed'"),
        ("clusters: [{name: a, hosts: [n1], gpux: A100}]", "unknown key 'gpux'"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hardware(written(tmp_path, text))
