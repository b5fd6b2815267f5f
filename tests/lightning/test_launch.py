# SPDX-License-Identifier: Apache-2.0
"""Every way to start the processes: the script itself, torchrun with unequal nodes, SLURM; and the other Lightning."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.lightning.compare import assert_same_training
from tests.lightning.farm import ROOT, Farm

BAD = "tests.lightning.scenarios:bad"
FIT = "tests.lightning.scenarios:fit"
PP2 = {"pp": 2, "num_microbatches": 2}
SCRIPT = """
import json, os, sys
from pathlib import Path
from tests.lightning import farm, scenarios

scenarios.bad(farm.Context(rank=0, world=2, out=Path(".")), **json.loads(sys.argv[1]))
"""


@pytest.fixture
def one(farm: Farm) -> float:
    return float(farm.run(BAD, world=1, config={"pp": 1}, how="").values[0]["loss"])


def test_slurm_tells_the_ranks(farm: Farm, one: float) -> None:
    common = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    common |= {"SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NODELIST": "127.0.0.1"}
    ranks = [common | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]
    run = farm.run(BAD, world=2, config=PP2, rank_env=ranks, how="")
    assert [value["rank"] for value in run.values] == [0, 1]
    assert [value["loss"] for value in run.values] == pytest.approx([one] * 2, rel=2e-5)


def test_nodes_with_unequal_numbers_of_processes(farm: Farm, one: float) -> None:
    """F3-28: the variables that torchrun gives to 1 process on one node and 2 on another."""
    ranks = []
    for rank, (node, local, size) in enumerate([(0, 0, 1), (1, 0, 2), (1, 1, 2)]):
        env = {"RANK": rank, "LOCAL_RANK": local, "GROUP_RANK": node, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": size}
        ranks.append({k: str(v) for k, v in env.items()} | {"TORCHELASTIC_RUN_ID": "none"})
    run = farm.run(BAD, world=3, config={"pp": 3, "num_microbatches": 4}, rank_env=ranks, how="", devices=1, nodes=2)
    assert [value["rank"] for value in run.values] == [0, 1, 2]
    assert [value["loss"] for value in run.values] == pytest.approx([one] * 3, rel=2e-5)


def test_the_script_starts_its_own_processes(run_script: Any, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "holmes.yaml").write_text("pp: 2\nnum_microbatches: 2\n")
    env = {"HOLMES_CONFIG": str(tmp_path / "holmes.yaml"), "PYTHONPATH": str(ROOT)}
    output = run_script([tmp_path / "train.py", '{"how": ""}'], env=env, timeout=280).check()
    assert sorted(re.findall(r"done on (\d) of 2", output)) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "failing"), [("own", 0), ("own", 1), ("torchrun", 0), ("torchrun", 1)])
def test_a_failing_rank_ends_the_job_of_every_launcher(
    run_script: Any, tmp_path: Path, launcher: str, failing: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "holmes.yaml").write_text("pp: 2\nnum_microbatches: 2\n")
    env = {"HOLMES_CONFIG": str(tmp_path / "holmes.yaml"), "PYTHONPATH": str(ROOT)}
    words = [tmp_path / "train.py", f'{{"how": "raise", "ranks": [{failing}]}}']
    run = run_script(words, env=env, timeout=200, nproc=2 if launcher == "torchrun" else None)
    end = time.time()
    assert run.returncode != 0
    assert "ValueError: the user's own mistake" in run.output
    left = [float(at) for at in re.findall(r"left at ([\d.]+)", run.output)]
    assert left
    assert end - min(left) < 30


@pytest.mark.slow
def test_two_torchrun_agents_with_one_and_two_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "holmes.yaml").write_text("pp: 3\nnum_microbatches: 4\n")
    env = {"HOLMES_CONFIG": str(tmp_path / "holmes.yaml"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= {"PATH": str(Path(sys.executable).parent) + ":/usr/bin:/bin"}
    agents = []
    for node, count in enumerate((1, 2)):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"]
        command += [f"--nproc-per-node={count}", "--master-addr=127.0.0.1", "--master-port=29731"]
        command += [str(tmp_path / "train.py"), '{"how": "", "devices": 1, "nodes": 2}']
        log = (tmp_path / f"agent{node}.log").open("w")
        agents.append(
            subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=tmp_path, start_new_session=True
            )
        )
        log.close()
    try:
        codes = [agent.wait(250) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # torchrun ends its workers on this
        for agent in agents:
            agent.wait(60)
    output = "".join((tmp_path / f"agent{node}.log").read_text() for node in (0, 1))
    assert codes == [0, 0], output[-5000:]
    assert sorted(re.findall(r"done on (\d) of 3", output)) == ["0", "1", "2"]


def test_the_other_lightning(farm: Farm) -> None:
    options = {"layers": 2, "rows": 16, "host": "pytorch_lightning", "after": ["validate"]}
    options["trainer"] = {"gradient_clip_val": 0.05, "inference_mode": False}
    (expected,) = farm.run(FIT, strategy="auto", **options).values
    for found in farm.run(FIT, world=2, config=PP2, **options).values:
        assert_same_training(found, expected)
