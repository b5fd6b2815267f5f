# SPDX-License-Identifier: Apache-2.0
"""One job from two launches that know nothing of each other but the meeting place (docs/two-schedulers.md)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holmes_core.lab.session import Lab

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("all_reduce.py")
JOIN = Path(__file__).resolve().parents[2] / "recipes" / "lab" / "join_allocations.sh"
JOB = [str(PROGRAM), json.dumps([[0, 1], [2, 3]]), "1000"]
# What srun would set in one allocation of two hosts with one task each: numbers start from 0 in every allocation.
SRUN = """
unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK
export SLURM_JOB_ID=$1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_NTASKS_PER_NODE=1 SLURM_LOCALID=0
case $(hostname) in *1) export SLURM_PROCID=0 SLURM_NODEID=0;; *) export SLURM_PROCID=1 SLURM_NODEID=1;; esac
export FIRST_RANK=$2 FIRST_NODE=$2 WORLD_SIZE=4
shift 2
exec sh "$@"
"""


def launch(lab: Lab, cluster: str, *command: str) -> subprocess.Popen[str]:
    """Start a command on the hosts of one cluster: what one scheduler does."""
    words = [sys.executable, "-m", "holmes_core.cli", "lab", "run", lab.name, "--timeout", "90", "--hosts", cluster]
    return subprocess.Popen(
        [*words, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def check(first: subprocess.Popen[str], second: subprocess.Popen[str]) -> None:
    texts = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), "\n".join(texts)
    results = [json.loads(line.partition("| ")[2]) for text in texts for line in text.splitlines() if '{"rank"' in line]
    assert sorted((r["rank"], r["sum"]) for r in results) == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 5.0)]


@pytest.mark.slow
def test_two_torchrun_launches(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    second = launch(lab, "b", "--torchrun", "--", *JOB)  # the one that does not serve the rendezvous comes first
    time.sleep(2)
    check(launch(lab, "a", "--torchrun", "--", *JOB), second)


def test_two_allocations(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    job = [str(JOIN), sys.executable, *JOB]
    second = launch(lab, "b", "--", "sh", "-c", SRUN, "srun", "812", "2", *job)
    time.sleep(1)
    check(launch(lab, "a", "--", "sh", "-c", SRUN, "srun", "77", "0", *job), second)
