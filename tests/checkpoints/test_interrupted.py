# SPDX-License-Identifier: Apache-2.0
"""A save that is killed, or finds the disk full, leaves what was there before as it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holmes_core.runtime.checkpoint import check_checkpoint, latest_checkpoint
from tests.checkpoints.hosts import digest
from tests.lightning.farm import Farm

PP2 = {"pp": 2, "num_microbatches": 2}
SHARDED = {**PP2, "checkpoint": "sharded"}
KILLED = "tests.checkpoints.hosts:killed"
FULL = "tests.checkpoints.hosts:full"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("host", "config", "rank", "event", "word", "before"),
    [
        ("lightning", SHARDED, 1, "open", ".saving/rank-00001.safetensors", True),
        ("lightning", PP2, 0, "os.rename", ".a.ckpt.saving", True),
        ("fabric", PP2, 0, "os.rename", ".a.ckpt.saving", True),
        pytest.param("accelerate", SHARDED, 0, "open", ".saving/holmes_checkpoint.json", True, marks=slow),
        pytest.param(
            "lightning", {**SHARDED, "checkpoint_async": True}, 0, "shutil.rmtree", ".a.ckpt.saving", False, marks=slow
        ),
        pytest.param("lightning", SHARDED, 0, "open", ".saving/state.pt", True, marks=slow),
        pytest.param("lightning", SHARDED, 0, "open", ".saving/holmes_checkpoint.json", True, marks=slow),
        pytest.param("lightning", SHARDED, 0, "ctypes.dlsym", "renameat2", True, marks=slow),
        pytest.param("lightning", PP2, 0, "open", ".a.ckpt.saving", True, marks=slow),
        pytest.param("accelerate", PP2, 0, "open", ".saving/holmes_state.json", True, marks=slow),
        pytest.param("accelerate", PP2, 0, "open", ".saving/holmes_checkpoint.json", True, marks=slow),
        pytest.param("accelerate", SHARDED, 1, "open", ".saving/rank-00001.safetensors", True, marks=slow),
    ],
)
def test_a_kill_in_the_middle(
    farm: Farm, tmp_path: Path, capfd: Any, host: str, config: Any, rank: int, event: str, word: str, before: bool
) -> None:
    run = farm.run(
        KILLED, world=2, config=config, folder=str(tmp_path), host=host, rank=rank, event=event, word=word, timeout=60
    )
    assert run.codes[rank] == -9, run.logs[rank][-3000:]
    assert run.codes[1 - rank] != 0 or config.get("checkpoint_async")
    path = tmp_path / "a.ckpt"
    check_checkpoint(path)
    assert latest_checkpoint(tmp_path) == path
    if before:
        assert digest(path) == (tmp_path / "digest").read_text()
        if (event, word) != ("open", ".a.ckpt.saving"):  # Python reports before it opens
            assert (tmp_path / ".a.ckpt.saving").exists()
            assert "skipping checkpoint" in capfd.readouterr().err
    again = farm.run(
        f"tests.checkpoints.hosts:by_{host}", world=2, config=config, resume=str(path), steps=2, save=str(path)
    )
    assert again.values[0]["losses"]
    check_checkpoint(path)
    assert not list(tmp_path.glob(".*")), "the next save cleans up"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(
    ("host", "config", "word"),
    [
        ("lightning", SHARDED, None),
        pytest.param("lightning", PP2, None, marks=slow),
        pytest.param("lightning", SHARDED, ".saving/rank-00001", marks=slow),  # while it is written
        ("accelerate", PP2, ".saving/holmes_state.json"),
        pytest.param("accelerate", SHARDED, None, marks=slow),
        pytest.param("accelerate", SHARDED, ".saving/rank-00000", marks=slow),
        pytest.param("accelerate", PP2, None, marks=slow),
        pytest.param("lightning", PP2, ".b.ckpt.saving", marks=slow),
        ("fabric", PP2, ".b.ckpt.saving"),
        pytest.param("fabric", PP2, None, marks=slow),
    ],
)
def test_a_full_disk(farm: Farm, small_disk: Path, host: str, config: Any, word: str | None) -> None:
    run = farm.run(FULL, world=2, config=config, folder=str(small_disk), host=host, word=word, timeout=60)
    for value in run.values:
        assert "No space left" in value["told"], value["told"]
        assert "free space or remove old checkpoints" in value["told"]
        assert str(small_disk / "b.ckpt") in value["told"]
        assert f"host {os.uname().nodename}" in value["told"]
        assert "are free" in value["told"]
        assert "the ones before are intact" in value["told"]
        assert value["seconds"] < 60
    check_checkpoint(small_disk / "a.ckpt")
    assert {p.name for p in small_disk.iterdir()} == {"a.ckpt", "ballast"}, "nothing half-written is left"


@pytest.mark.parametrize("config", [SHARDED, pytest.param(PP2, marks=slow)])
def test_a_full_disk_in_the_background(farm: Farm, small_disk: Path, config: Any) -> None:
    """Training hears of it at its next step, its next save or its end."""
    config = {**config, "checkpoint_async": True}
    run = farm.run(
        FULL, world=2, config=config, folder=str(small_disk), host="lightning", word=None, during=True, timeout=60
    )
    for value, log in zip(run.values, run.logs, strict=True):
        assert "No space left" in value["told"], value["told"]
        assert str(small_disk / "b.ckpt") in value["told"]
        assert value["seconds"] < 60
        assert config.get("checkpoint") is None or "in the background failed: No space left" in log
    check_checkpoint(small_disk / "a.ckpt")
    assert {p.name for p in small_disk.iterdir()} == {"a.ckpt", "ballast"}
