# SPDX-License-Identifier: Apache-2.0
"""A job whose rank is killed goes on from its last checkpoint, under real launchers, to the losses of a run without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def test_torchrun_restarts_a_lightning_job(run_script: Any, tmp_path: Path) -> None:
    script = HERE / "restarted_lightning.py"
    for name, rank in (("whole", NEVER), ("killed", 1)):
        env = settings(tmp_path / name, pp=2)
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
def test_slurm_requeues_a_job(run_script: Any, tmp_path: Path) -> None:
    """What `sbatch --requeue` does: the whole job once more, with SLURM_RESTART_COUNT."""
    script = HERE / "restarted_lightning.py"
    for name, rank in (("whole", NEVER), ("killed", 1)):
        env = settings(tmp_path / name, pp=2)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words += [script, tmp_path / name, str(rank), "5"]
        run = run_script(words, env=env, timeout=200)
        if rank != NEVER:
            assert run.returncode != 0
            run_script(words, env={**env, "SLURM_RESTART_COUNT": "1"}, timeout=200).check()
    check_resumed(tmp_path / "killed", losses(tmp_path / "whole"), 5)
