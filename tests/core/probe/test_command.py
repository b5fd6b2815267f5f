# SPDX-License-Identifier: Apache-2.0
"""`holmes probe` as a job of real processes, alone, from the cache, and with a rank that dies."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from holmes_core.cluster.probe import read_result

GPT = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 32, "vocab_size": 300,
       "bos_token_id": None, "eos_token_id": None}  # fmt: skip


def probe(
    run_script: Any, tmp_path: Path, *words: str, ranks: int = 2, dead: int | None = None, env: Mapping[str, str] = {}
) -> list[Any]:
    """Start `holmes probe` on ranks that call themselves different hosts; `dead` ends before it has measured."""
    (tmp_path / "config.json").write_text(json.dumps(GPT))
    (tmp_path / "rank.py").write_text(
        "import os, sys\n"
        "import holmes_core.runtime.probe as probe\n"
        "from holmes_core.cli import main\n"
        "if sys.argv[1] == 'dies':\n"
        "    probe.measure_speed = lambda *a, **k: os._exit(3)\n"
        "raise SystemExit(main(['probe', *sys.argv[2:]]))\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--model", str(tmp_path / "config.json"), "--micro-batch-size", "2", *words]
    common = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}

    def one(rank: int) -> Any:
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "HOLMES_HOST": f"h{rank}"}
        how = "dies" if rank == dead else "lives"
        return run_script([tmp_path / "rank.py", how, *options], env={**common, **place}, timeout=240)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def test_a_job_is_measured_once(run_script: Any, tmp_path: Path) -> None:
    out = tmp_path / "probe.json"
    first = probe(run_script, tmp_path, "-o", str(out))
    assert [run.returncode for run in first] == [0, 0], first[0].output + first[1].output
    assert "Holmes probe: GPT2Block" in first[0].output
    assert "Holmes probe" not in first[1].output
    result = read_result(out)
    assert result is not None
    assert [speed.host for speed in result.speeds] == ["h0", "h1"]
    assert all(speed.forward > 0 and speed.backward > 0 and speed.optimizer > 0 for speed in result.speeds)
    assert all(speed.head_forward > 0 and speed.around >= 0 and speed.copied > 0 for speed in result.speeds)
    assert len(list((tmp_path / "cache/holmes/probe").iterdir())) == 1
    second = probe(run_script, tmp_path, "-o", str(out))
    assert [run.returncode for run in second] == [0, 0], second[0].output
    assert read_result(out) == result, "taken from the cache"
    third = probe(run_script, tmp_path, "-o", str(out), "--fresh")
    assert third[0].returncode == 0
    assert read_result(out) != result


def test_a_rank_that_dies_is_named(run_script: Any, tmp_path: Path) -> None:
    found = probe(run_script, tmp_path, "--timeout", "8", dead=1)
    assert found[1].returncode == 3
    assert found[0].returncode == 1, found[0].output
    assert "rank 1 (last said: host h1: computing a block of the model)" in " ".join(found[0].output.split())
    assert found[0].seconds < 60


def test_alone(run_script: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT))
    run = run_script(
        ["-m", "holmes_core.cli", "probe", "--model", tmp_path / "config.json", "--json"],
        env={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert run.returncode == 0, run.output
    assert '"forward_fixed"' in run.output
