# SPDX-License-Identifier: Apache-2.0
"""The first seconds of a job, with real processes: who is there, who is not, what is refused before any group."""

from __future__ import annotations

import json
import socket
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holmes_core.runtime.start import tell_apart
from tests.core.plan.networks import ethernet, inventory

_RANK = """
import json, os, sys
from holmes_core.config import HolmesConfig
from holmes_core.runtime.start import join, meet
import torch.distributed as dist

rank, world, timeout = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), float(sys.argv[1])
config = HolmesConfig.load({"timeout": timeout})
meeting = meet(rank=rank, world_size=world, timeout=timeout)
topology = meeting.topology(config)
join(meeting, config=config, device_type="cpu")
dist.barrier()
if rank == 0:
    names = {cluster.name: [host.name for host in cluster.hosts] for cluster in topology.clusters}
    print("CLUSTERS", json.dumps(names))
    print("VARIABLE", os.environ.get("GLOO_SOCKET_IFNAME", "not set"))
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(run_script: Any, tmp_path: Path, ranks: list[dict[str, str]], *, world: int, timeout: float) -> list[Any]:
    """Start one process per entry; returns how each ended."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(_RANK))
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def one(rank: int) -> Any:
        env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **ranks[rank]}
        return run_script([script, str(timeout)], env=env, timeout=90)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def test_hosts_meet_and_agree_on_an_interface(run_script: Any, tmp_path: Path) -> None:
    found = start(run_script, tmp_path, [{"HOLMES_HOST": "n1"}, {"HOLMES_HOST": "n2"}], world=2, timeout=60)
    assert [run.returncode for run in found] == [0, 0], found
    hosts = json.loads(found[0].output.split("CLUSTERS ")[1].splitlines()[0])
    assert sorted(name for names in hosts.values() for name in names) == ["n1", "n2"]
    # For groups that others make: gloo would bind them to the address of the host's name.
    assert "VARIABLE not set" not in found[0].output


def test_ranks_of_one_host_leave_the_environment_alone(run_script: Any, tmp_path: Path) -> None:
    found = start(run_script, tmp_path, [{}, {}], world=2, timeout=60)
    assert "VARIABLE not set" in found[0].check()


def test_a_host_that_does_not_come_is_named_in_time(run_script: Any, tmp_path: Path) -> None:
    before = time.monotonic()
    found = start(run_script, tmp_path, [{"HOLMES_HOST": "n1"}, {"HOLMES_HOST": "n2"}], world=3, timeout=6)
    assert time.monotonic() - before < 60
    for run in found:
        assert run.returncode != 0
    assert any("rank 2" in run.output and "n1" in run.output for run in found), "\n\n".join(r.output for r in found)


def test_a_bad_interface_is_refused_before_any_group(run_script: Any, tmp_path: Path) -> None:
    ranks = [{"HOLMES_HOST": "n1"}, {"HOLMES_HOST": "n2", "GLOO_SOCKET_IFNAME": "nosuch0"}]
    for run in start(run_script, tmp_path, ranks, world=2, timeout=60):
        assert run.returncode != 0
        assert "GLOO_SOCKET_IFNAME=nosuch0 is set" in run.output
        assert "rank 1 on host n2" in run.output


def test_hosts_that_call_themselves_the_same_are_told_apart_by_address() -> None:
    one = inventory("localhost", ethernet("eth0", "192.0.2.1/24"))
    two = replace(one, nics=(ethernet("eth0", "192.0.2.2/24"),))
    assert [found.host for found in tell_apart([one, one, two])] == [
        "localhost@192.0.2.1",
        "localhost@192.0.2.1",
        "localhost@192.0.2.2",
    ]
    assert [found.host for found in tell_apart([one, one])] == ["localhost", "localhost"]


@pytest.mark.parametrize("environment", [(), (("NCCL_DEBUG", "INFO"),)])
def test_ranks_of_one_host_stay_together_whatever_else_differs(environment: Any) -> None:
    one = inventory("n1", ethernet("eth0", "192.0.2.1/24"))
    assert [found.host for found in tell_apart([one, replace(one, environment=environment)])] == ["n1", "n1"]


ENDS = """
import ctypes, os, sys, time
import torch
import torch.distributed as dist
from holmes_core.config import HolmesConfig
from holmes_core.runtime.start import join, meet

rank = int(os.environ["RANK"])
config = HolmesConfig(timeout=30)
join(meet(rank=rank, world_size=2, timeout=30), config=config, device_type="cpu")
if rank == 1:
    time.sleep(1)
tensor = torch.ones(8)
work = dist.all_reduce(tensor, async_op=True)
del tensor, work  # gloo's thread drops the tensor, and needs Python's lock for it
if rank == 0:
    sys.setswitchinterval(1000)
    ctypes.PyDLL(None).sleep(3)  # keeps the lock until the script ends
"""


def test_a_thread_that_waits_for_pythons_lock_at_the_end(run_script: Any, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    run = run_script(["ends.py"], nproc=2)
    assert run.returncode == 0, run.output
    assert "terminate called" not in run.output
