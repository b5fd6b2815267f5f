# SPDX-License-Identifier: Apache-2.0
"""An unchanged script in a lab trains to the losses of one process; what cannot be stops in time and is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from holmes_core.lab.job import Finished, run_job
from holmes_core.lab.session import Lab

pytestmark = [pytest.mark.lab, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "output_loss.py"
A = {"name": "a", "kind": "infiniband", "hosts": 2}
B = {"name": "b", "kind": "roce", "hosts": 2, "interfaces": {"rdma": "ens1", "ethernet": "ens2"}}


class Job:
    """A finished training run: how it ended, what it printed, what its groups carried, its record per rank."""

    def __init__(self, folder: Path, lab: Lab, *, env: dict[str, str] | None = None) -> None:
        self.folder, lines = folder, []
        settings = {"timeout": 60, "traffic_file": str(folder / "traffic.json")}
        (folder / "holmes.yaml").write_text(yaml.safe_dump(settings))
        command = [sys.executable, str(SCRIPT), "--strategy", "holmes", "--out", str(folder / "run")]
        command += ["--max-steps", "4", "--batch-size", "4", "--trainer", '{"num_nodes": 4, "limit_val_batches": 0}']
        env = {"HOLMES_CONFIG": str(folder / "holmes.yaml"), "OMP_NUM_THREADS": "1", **(env or {})}
        self.finished: Finished = run_job(lab, command, torchrun=True, env=env, timeout=150, write=lines.append)
        self.text = "".join(lines)

    def check(self) -> Job:
        assert self.finished.returncode == 0, self.text[-8000:]
        return self

    @property
    def groups(self) -> list[dict[str, Any]]:
        return json.loads((self.folder / "traffic.json").read_text())["groups"]

    @property
    def record(self) -> dict[str, Any]:
        return json.loads((self.folder / "run.rank0.json").read_text())


def test_two_clusters_train_to_the_losses_of_one_process(
    make_lab: Callable[..., Lab], tmp_path: Path, run_script: Any
) -> None:
    job = Job(tmp_path, make_lab(clusters=[A, B])).check()
    # The interfaces have other names in the second cluster; nobody has typed any of them.
    for group in job.groups:
        transport = group["transport"]
        assert len(group["clusters"]) == (1 if group["axis"] == "dp" else 2)
        if group["axis"] == "dp":
            assert transport["interface"] == {"a1": "rdma0", "b1": "ens1"}[group["hosts"][0]]
        else:
            assert set(transport["interfaces"].values()) == {"eth0", "ens2"}
    payload = {axis: sum(g["payload_bytes"] for g in job.groups if g["axis"] == axis) for axis in ("dp", "edge")}
    fast = sum(job.finished.traffic[host][nic].tx for host, nic in (("a1", "rdma0"), ("b1", "ens1")))
    assert payload["dp"] > 0
    assert fast > payload["dp"] / 4  # of two members, one sends what both hand in
    args = ["--strategy", "auto", "--out", tmp_path / "one", "--max-steps", "4", "--batch-size", "8", "--like-replicas"]
    run_script([SCRIPT, *args, "--trainer", '{"limit_val_batches": 0}']).check()
    expected = json.loads((tmp_path / "one.rank0.json").read_text())
    assert job.record["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert job.record["norms"] == pytest.approx(expected["norms"], rel=1e-5)


def test_port_that_is_up_and_dead_is_named_on_every_rank_in_time(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    job = Job(tmp_path, make_lab(clusters=[A, B], faults=[{"fault": "nic-dead", "host": "a2", "nic": "rdma"}]))
    assert job.finished.returncode != 0
    assert job.finished.seconds < 75  # start-up of four processes, one handshake, torchrun's own goodbye
    for rank in range(4):
        assert f"[rank{rank}]: holmes_core.errors.HolmesError: seen:  hosts do not reach each other" in job.text
    assert "a1:rdma0 (10.100.0.1) -> a2:rdma0 (10.100.0.2): no answer" in job.text


@pytest.mark.slow
def test_two_infiniband_fabrics_are_two_clusters(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    job = Job(tmp_path, make_lab(clusters=[A, {**A, "name": "b"}])).check()
    assert "infiniband-1" in job.text
    for group in job.groups:
        if group["axis"] == "dp":
            assert len(group["clusters"]) == 1


@pytest.mark.slow
def test_interface_that_only_some_hosts_have_is_refused_before_the_start(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    job = Job(tmp_path, make_lab(clusters=[A, B]), env={"GLOO_SOCKET_IFNAME": "eth0"})  # b's is called ens2
    assert job.finished.returncode != 0
    assert "GLOO_SOCKET_IFNAME=eth0 is set" in job.text
    assert "rank 2 on host b1" in job.text
    assert "ens2" in job.text
