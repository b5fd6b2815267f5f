# SPDX-License-Identifier: Apache-2.0
"""Run a scenario on several ranks without paying for imports each time.

One process imports torch, Lightning and transformers once and forks the ranks of every run from itself. A rank is a
real process with a real exit; nothing outlives a run's time limit.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended: exit codes, output and what the scenario returned, by rank."""

    codes: list[int]
    logs: list[str]
    seconds: float
    ends: list[float]
    out: Path

    @property
    def values(self) -> list[dict[str, Any]]:
        """What the scenario returned on each rank; fails the test where a rank failed."""
        for rank, code in enumerate(self.codes):
            assert code == 0, f"rank {rank} of {self.codes} after {self.seconds:.1f} s:\n{self.logs[rank][-6000:]}"
        return [torch.load(self.out / f"rank{rank}.pt", weights_only=False) for rank in range(len(self.codes))]


class Farm:
    """Forks runs from one warm process. Close it, or leave its ``with`` block."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self._folder, self._count = folder, 0
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HOLMES_CONFIG")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        env |= {"TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=folder, start_new_session=True,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The warm process."""
        return self._process.pid

    def run(
        self,
        target: str,
        *,
        world: int = 1,
        config: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        rank_env: list[Mapping[str, str]] | None = None,
        timeout: float = 120.0,
        **arguments: Any,
    ) -> Run:
        """Call ``module:function`` with a `Context` and `arguments` on `world` ranks.

        Args:
            target: What to call.
            world: Number of ranks.
            config: What the file in HOLMES_CONFIG says.
            env: More environment variables.
            rank_env: Environment of each rank, instead of the one torchrun would give.
            timeout: Seconds after which everything is killed.
            **arguments: JSON values, passed on.
        """
        out = self._folder / f"run{self._count}"
        self._count += 1
        out.mkdir()
        given = dict(env or {})
        if config is not None:
            (out / "holmes.json").write_text(json.dumps(config))
            given["HOLMES_CONFIG"] = str(out / "holmes.json")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        ranks = []
        for rank in range(world):
            one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if rank_env is None:
                one |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
                one |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
            else:
                one |= rank_env[rank]
            ranks.append(given | one)
        job = {"target": target, "out": str(out), "ranks": ranks, "timeout": timeout, "arguments": arguments}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks the ranks has ended"
        reply = json.loads(line)
        logs = [(out / f"rank{rank}.log").read_text(errors="replace") for rank in range(world)]
        run = Run(codes=reply["codes"], logs=logs, seconds=reply["seconds"], ends=reply["ends"], out=out)
        assert not reply["timed_out"], f"{target} still running after {timeout} s, exits {run.codes}\n" + "\n".join(
            f"--- rank {rank}\n{log[-3000:]}" for rank, log in enumerate(logs)
        )
        return run

    def close(self) -> None:
        """End the process and whatever it runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(5)
        self._process.stdout.close()

    def __enter__(self) -> Farm:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a scenario knows of its run."""

    rank: int
    world: int
    out: Path


def _child(job: dict[str, Any], rank: int) -> int:
    """Run the scenario in this process, which is a rank now; returns the exit code."""
    out = Path(job["out"])
    log = os.open(out / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job["ranks"][rank])
    module, function = job["target"].split(":")
    try:
        context = Context(rank=rank, world=len(job["ranks"]), out=out)
        value = getattr(importlib.import_module(module), function)(context, **job["arguments"])
        torch.save(value, out / f"rank{rank}.pt")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _serve(job: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    running: dict[int, int] = {}
    for rank in range(len(job["ranks"])):
        pid = os.fork()
        if pid == 0:
            sys.exit(_child(job, rank))
        running[pid] = rank
    codes, ends = [-999] * len(running), [-1.0] * len(running)
    while running and time.monotonic() - start < job["timeout"]:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            codes[rank], ends[rank] = os.waitstatus_to_exitcode(status), time.time()
        elif pid == 0:
            time.sleep(0.02)
    timed_out = bool(running)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return {"codes": codes, "ends": ends, "seconds": time.monotonic() - start, "timed_out": timed_out}


def _main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        reply = _serve(json.loads(line))
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    _main()
