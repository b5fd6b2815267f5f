# SPDX-License-Identifier: Apache-2.0
"""A job whose rank is killed goes on from its last checkpoint, under real launchers, to the losses of a run without."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
NEVER = 1000


def losses(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "losses.jsonl").read_text().splitlines()]


def settings(out: Path, **more: Any) -> dict[str, str]:
    out.mkdir()
    (out / "holmes.json").write_text(json.dumps({"num_microbatches": 2, "failure_timeout": 12, **more}))
    return {"HOLMES_CONFIG": str(out / "holmes.json")}


def check_resumed(out: Path, whole: list[dict[str, Any]], killed_at: int) -> None:
    found = losses(out)
    before, after = [line for line in found if line["first"]], [line for line in found if not line["first"]]
    assert [line["step"] for line in before] == list(range(1, killed_at + 1))
    saved = killed_at - killed_at % 2
    assert [line["step"] for line in after] == list(range(saved + 1, 11))
    by_step = {line["step"]: line["loss"] for line in whole}
    for line in found:
        assert line["loss"] == pytest.approx(by_step[line["step"]], rel=1e-6), line


@pytest.mark.parametrize("more", [{}, pytest.param({"resume": "auto"}, marks=pytest.mark.slow)])
def test_torchrun_restarts_a_lightning_job(run_script: Any, tmp_path: Path, more: dict[str, str]) -> None:
    """The script names its last checkpoint; or says nothing, and the setting does."""
    script = HERE / "restarted_lightning.py"
    for name, rank in (("whole", NEVER), ("killed", 1)):
        env = settings(tmp_path / name, pp=2, **more) | ({"SAYS_NOTHING": "1"} if more else {})
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
        run = run_script([*words, script, tmp_path / name, str(rank), "5"], env=env, timeout=200)
        output = run.check()
        if rank != NEVER:
            # torchrun ends the others at once, by SIGTERM; the reason is told all the same.
            assert len(re.findall(r"seen:  rank 1 \(.*\) was killed \(SIGKILL\)", output)) == 1, output[-5000:]
    check_resumed(tmp_path / "killed", losses(tmp_path / "whole"), 5)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "step"), [(0, 5), (1, 2), (2, 9), (3, 6)])
def test_any_rank_at_any_step(run_script: Any, tmp_path: Path, rank: int, step: int) -> None:
    for name, failing in (("whole", NEVER), ("killed", rank)):
        env = settings(tmp_path / name, pp=2)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "--max-restarts=1"]
        words += [HERE / "restarted_lightning.py", tmp_path / name, str(failing), str(step)]
        run_script(words, env=env, timeout=250).check()
    check_resumed(tmp_path / "killed", losses(tmp_path / "whole"), step)


@pytest.mark.slow
def test_accelerate_launch_restarts_a_job(run_script: Any, tmp_path: Path) -> None:
    for name, rank in (("whole", NEVER), ("killed", 0)):
        (tmp_path / name).mkdir()
        words = [
            "-m",
            "accelerate.commands.accelerate_cli",
            "launch",
            "--config",
            HERE / "two.yaml",
            "--max_restarts=1",
        ]
        words += [HERE / "restarted_accelerate.py", tmp_path / name, str(rank), "5"]
        run_script(words, timeout=200).check()
    check_resumed(tmp_path / "killed", losses(tmp_path / "whole"), 5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"resume": "auto"}])
def test_slurm_requeues_a_job(run_script: Any, tmp_path: Path, more: dict[str, str]) -> None:
    """What `sbatch --requeue` does: the whole job once more, with SLURM_RESTART_COUNT."""
    script = HERE / "restarted_lightning.py"
    for name, rank in (("whole", NEVER), ("killed", 1)):
        env = settings(tmp_path / name, pp=2, **more) | ({"SAYS_NOTHING": "1"} if more else {})
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words += [script, tmp_path / name, str(rank), "5"]
        run = run_script(words, env=env, timeout=200)
        if rank != NEVER:
            assert run.returncode != 0
            run_script(words, env={**env, "SLURM_RESTART_COUNT": "1"}, timeout=200).check()
    check_resumed(tmp_path / "killed", losses(tmp_path / "whole"), 5)


def agents(out: Path, endpoint: str) -> list[subprocess.Popen[bytes]]:
    """Two elastic torchrun agents of two ranks each, as on two hosts; one may stay away."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "HOLMES_CONFIG": str(out / "holmes.json")}
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=2"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=shrink"]
    script = [str(HERE / "restarted_lightning.py"), str(out), str(NEVER), "0", "0.3"]
    made = []
    for index in range(2):
        limits = "last_call_timeout=20,keep_alive_interval=1,keep_alive_max_attempt=5"
        command = [*words, f"--rdzv-conf={limits},is_host={1 - index}", *script]
        with (out / f"agent{index}.log").open("wb") as log:
            made.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=env | {"HOLMES_HOST": f"n{index}"}, cwd=out,
                    start_new_session=True,
                )
            )  # fmt: skip
    return made


def lose_a_host(out: Path) -> int:
    """Run on two hosts; kill everything on the second after some steps. Returns the first agent's exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = agents(out, f"127.0.0.1:{port}")
    try:
        until = time.monotonic() + 150
        while not (out / "losses.jsonl").exists() or len(losses(out)) < 3:
            assert time.monotonic() < until, (out / "agent0.log").read_text()[-5000:]
            assert both[0].poll() is None, (out / "agent0.log").read_text()[-5000:]
            time.sleep(0.1)
        for process in psutil.Process(both[1].pid).children(recursive=True):
            process.kill()
        both[1].kill()
        return both[0].wait(200)
    finally:
        for agent in both:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                for process in psutil.Process(agent.pid).children(recursive=True):
                    process.kill()
            agent.kill()
            agent.wait(20)


@pytest.mark.slow
def test_a_job_goes_on_with_the_hosts_that_are_left(run_script: Any, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    words = [HERE / "restarted_lightning.py", whole, str(NEVER), "0"]
    run_script(words, env=settings(whole, dp=2), nproc=2, timeout=200).check()
    settings(out, dp=2)  # two stages on two hosts, one on one
    status = lose_a_host(out)
    output = (out / "agent0.log").read_text()
    assert status == 0, output[-6000:]
    found = losses(out)
    assert {line["world"] for line in found} == {4, 2}
    assert found[-1]["step"] == 10
    after = [line["step"] for line in found if line["world"] == 2]
    assert after == list(range(after[0], 11))
    assert after[0] > 2  # from a checkpoint, not from the beginning
    by_step = {line["step"]: line["loss"] for line in losses(whole)}
    for line in found:
        assert line["loss"] == pytest.approx(by_step[line["step"]], rel=1e-5), line
    assert re.search(r"seen:  rank [23] \(.*host n1\)", output)


@pytest.mark.slow
def test_fixed_degrees_say_what_is_missing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings(out, pp=4)
    assert lose_a_host(out) != 0
    output = (out / "agent0.log").read_text()
    assert "pp 4 x dp 1 x tp 1 = 4 ranks, the job has 2" in output, output[-6000:]
