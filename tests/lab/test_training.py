# SPDX-License-Identifier: Apache-2.0
"""A Lightning script with `strategy="holmes"` in labs with healthy and with broken networks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holmes_core.lab.job import Finished, run_job
from holmes_core.lab.session import Lab

pytestmark = [pytest.mark.lab, pytest.mark.slow]

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "lightning" / "pretrain_gpt.py"


def train(lab: Lab, out: Path, *, hosts: int = 4) -> tuple[Finished, str, list[dict[str, Any]]]:
    """Run three steps; return how it ended, what was printed, and what each group carried."""
    (out / "holmes.yaml").write_text(f"traffic_file: {out / 'traffic.json'}\ntimeout: 60\n")
    words = [sys.executable, str(SCRIPT), "--accelerator", "cpu", "--devices", "1", "--num-nodes", str(hosts)]
    words += ["--size", "tiny", "--layers", "4", "--vocab-size", "300", "--seq-len", "32", "--max-bytes", "200000"]
    words += ["--max-steps", "3", "--val-every", "3", "--val-batches", "1", "--out", str(out / "out")]
    lines: list[str] = []
    done = run_job(lab, words, env={"HOLMES_CONFIG": str(out / "holmes.yaml")}, timeout=150, write=lines.append)
    groups = json.loads((out / "traffic.json").read_text())["groups"] if done.returncode == 0 else []
    return done, "".join(lines), groups


def interfaces(row: dict[str, Any]) -> set[str]:
    """Return host:interface of a group's members."""
    transport = row["transport"]
    return {f"{host}:{transport['interfaces'].get(host, transport['interface'])}" for host in row["hosts"]}


def check(groups: list[dict[str, Any]], data_parallel: list[set[str]], ethernet: dict[str, str]) -> None:
    """Data parallelism inside clusters, on these interfaces; everything else on Ethernet."""
    found = [interfaces(row) for row in groups if row["axis"] == "dp" and len(row["hosts"]) > 1]
    assert sorted(map(sorted, found)) == sorted(map(sorted, data_parallel))
    for row in groups:
        if row["axis"] == "dp":
            assert len(row["clusters"]) == 1
        elif len(row["clusters"]) > 1:
            assert interfaces(row) <= {f"{host}:{name}" for host, name in ethernet.items()}


def test_names_say_nothing(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """Interfaces are called the other way round in the second cluster."""
    lab = make_lab(
        clusters=[
            {"name": "a", "kind": "infiniband", "hosts": 2, "interfaces": {"rdma": "ens1", "ethernet": "ens2"}},
            {"name": "b", "kind": "roce", "hosts": 2, "interfaces": {"rdma": "ens2", "ethernet": "ens1"}},
        ]
    )
    done, text, groups = train(lab, tmp_path)
    assert done.returncode == 0, text
    ethernet = {"a1": "ens2", "a2": "ens2", "b1": "ens1", "b2": "ens1"}
    check(groups, [{"a1:ens1", "a2:ens1"}, {"b1:ens2", "b2:ens2"}], ethernet)
    payload = next(row["payload_bytes"] for row in groups if interfaces(row) == {"b1:ens2", "b2:ens2"})
    assert done.traffic["b1"]["ens2"].tx + done.traffic["b2"]["ens2"].tx > payload


def test_hosts_that_take_themselves_for_127_0_1_1(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    lab = make_lab(faults=[{"fault": "loopback-name", "host": "a1"}, {"fault": "loopback-name", "host": "b2"}])
    done, text, groups = train(lab, tmp_path)
    assert done.returncode == 0, text
    check(groups, [{"a1:rdma0", "a2:rdma0"}, {"b1:rdma0", "b2:rdma0"}], dict.fromkeys(("a1", "a2", "b1", "b2"), "eth0"))


def test_three_clusters(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    kinds = {"a": "infiniband", "b": "roce", "c": "ethernet"}
    clusters = [{"name": name, "kind": kind, "hosts": 1} for name, kind in kinds.items()]
    done, text, groups = train(make_lab(clusters=clusters), tmp_path, hosts=3)
    assert done.returncode == 0, text
    assert sum(row["axis"] == "edge" for row in groups) == 6  # a - b - c, and from c, where the tied embedding is, to a
    for host in ("a1", "b1"):
        assert done.traffic[host]["rdma0"].tx == 0  # alone in its cluster: nobody to talk to


def test_a_port_that_is_down(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """The job trains on what is left, or stops within half a minute and names host and port."""
    faults = [{"fault": "nic-down", "host": "a1", "nic": "rdma"}]
    done, text, groups = train(make_lab(faults=faults), tmp_path)
    if done.returncode:
        assert done.seconds < 60, text
        assert re.search(r"a1\b.*(mlx5_0|rdma0)|(mlx5_0|rdma0).*\ba1\b", text), text
    else:
        assert done.traffic["a1"]["rdma0"].tx == done.traffic["a2"]["rdma0"].tx == 0
        for row in groups:
            inside = set(row["hosts"]) <= {"b1", "b2"}
            wanted = "rdma0" if inside else "eth0"
            assert len(row["hosts"]) == 1 or interfaces(row) == {f"{host}:{wanted}" for host in row["hosts"]}
