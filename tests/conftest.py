# SPDX-License-Identifier: Apache-2.0
"""What every test gets: a check for leaks, and `run_script` for processes that end for sure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

# Written by libraries for themselves when they are imported or used; no test can be blamed for them.
_MAY_CHANGE = {
    "PYTEST_CURRENT_TEST",
    "PL_GLOBAL_SEED",  # seed_everything
    "PL_SEED_WORKERS",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCHELASTIC_USE_AGENT_STORE",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "CRC32C_SW_MODE",
    "TOKENIZERS_PARALLELISM",
    "MPLBACKEND",
}
# What a launcher gives its workers: a script under test must not believe it is one of them.
_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MARK = "HOLMES_TEST_RUN"


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves an environment variable, a thread or a process group behind, and clean up after it."""
    environment = dict(os.environ)
    threads = set(threading.enumerate())
    yield
    leaks = _process_groups() + _environment(environment) + _threads(threads)
    assert not leaks, "this test leaves behind: " + "; ".join(leaks)


def _process_groups() -> list[str]:
    distributed = sys.modules.get("torch.distributed")  # never imported by us: most tests do without
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an initialised process group (call destroy_process_group)"]


def _environment(before: Mapping[str, str]) -> list[str]:
    changed = {
        name
        for name in before.keys() | os.environ.keys()
        if before.get(name) != os.environ.get(name) and name not in _MAY_CHANGE
    }
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    return [f"a changed environment variable {name} (use monkeypatch)" for name in sorted(changed)]


def _threads(before: set[threading.Thread]) -> list[str]:
    deadline = time.monotonic() + 2.0
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    while left and time.monotonic() < deadline:  # a thread that is just ending is no leak
        left[0].join(timeout=0.1)
        left = [t for t in left if t.is_alive()]
    return [f"a running thread {thread.name!r}" for thread in left]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A process that has ended: what it printed (stdout and stderr as they came) and how it ended."""

    returncode: int
    output: str
    seconds: float

    def check(self) -> str:
        """Return the output; fail the test where the process failed."""
        assert self.returncode == 0, f"exit status {self.returncode} after {self.seconds:.1f} s:\n{self.output[-8000:]}"
        return self.output


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., Finished]:
    """Return a function that runs Python with `args` to its end, or fails the test after `timeout` seconds.

    Usage: `run_script([path, "--steps", "3"], nproc=2, timeout=60, env={"NAME": "value", "GONE": None}).check()`.
    With `nproc` the processes are started by torchrun on this host. Nothing that was started outlives the call.
    """

    def run(
        args: Sequence[str | Path],
        *,
        nproc: int | None = None,
        timeout: float = 120.0,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        python: str = sys.executable,
    ) -> Finished:
        command = [python]
        if nproc is not None:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command += [str(word) for word in args]
        return _run_bounded(command, timeout=timeout, env=env or {}, cwd=cwd or tmp_path)

    return run


def _run_bounded(command: list[str], *, timeout: float, env: Mapping[str, str | None], cwd: Path) -> Finished:
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
    # Not PYTHONUNBUFFERED: with it print() writes its words one by one, and lines of several processes mix.
    environment.update({"OMP_NUM_THREADS": "1", _MARK: mark})
    for name, value in env.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    start = time.monotonic()
    # To a file: a pipe would stay open, and reading it would hang, as long as any grandchild lives.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, env=environment,
            start_new_session=True,
        )  # fmt: skip
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process, mark)
        output.seek(0)
        text = output.read().decode(errors="replace")
    seconds = time.monotonic() - start
    if timed_out:
        pytest.fail(f"still running after {timeout:.0f} s: {' '.join(command)}\n{text[-8000:]}", pytrace=False)
    return Finished(returncode=process.returncode, output=text, seconds=seconds)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the process, its group, and its descendants in other groups (torchrun gives each worker its own session)."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its workers on this
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
    process.wait(10)
