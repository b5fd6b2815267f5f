# SPDX-License-Identifier: Apache-2.0
"""Run the ranks of one job on the hosts of a lab: output with its origin, one end for all, an exit status."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holmes_core.lab.network import Traffic
from holmes_core.lab.session import MASTER_PORT, Lab
from holmes_core.lab.spec import LabHost

__all__ = ["Finished", "Interrupted", "run_job"]

_KILL_AFTER = 5.0  # seconds between asking a rank to end and killing it
_MARK = "HOLMES_LAB_JOB"


class Interrupted(BaseException):
    """Raised by a signal handler: end the job. Not an Exception, so that nothing on the way swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signal.Signals(signum)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """How a job ended.

    Args:
        returncode: 0, or the exit status of the rank that failed first (128 + signal if one ended it; 124 after the
            timeout).
        failed: ``host:rank`` of that rank; empty if none failed.
        seconds: From the start of the first rank to the end of the last.
        traffic: Host name -> interface -> bytes during the job.
    """

    returncode: int
    failed: str
    seconds: float
    traffic: Mapping[str, Mapping[str, Traffic]]


def run_job(
    lab: Lab,
    command: Sequence[str],
    *,
    hosts: Sequence[str] = (),
    torchrun: bool = False,
    env: Mapping[str, str] | None = None,
    grace: float = 5.0,
    timeout: float | None = None,
    write: Callable[[str], None] | None = None,
) -> Finished:
    """Start a command as every rank of a job, and wait for all of them.

    Args:
        lab: Where.
        command: Program and arguments, the same for all ranks. With `torchrun`: a script and its arguments.
        hosts: Start only the ranks of these hosts; others of the same job are started by another call.
        torchrun: Start one torchrun per host, which starts the ranks.
        env: More variables for all ranks.
        grace: Seconds that the other ranks have, after the first has failed, to end by themselves.
        timeout: Seconds after which the job is ended; None waits as long as it takes.
        write: Takes each line of output, with its origin and newline; None writes to stdout.

    Raises:
        ConfigError: There is no such host.
        Interrupted: A signal handler raised it; the ranks are ended before it goes on.
    """
    chosen = [lab.host(name) for name in hosts] or list(lab.spec.hosts)
    before = lab.counters()
    start = time.monotonic()
    job = _Job(lab, write or _to_stdout, grace)
    try:
        for host in chosen:
            for local_rank, label, words in _commands(lab, host, command, torchrun=torchrun):
                job.start(host.name, label, words, local_rank, env or {})
        job.wait(None if timeout is None else start + timeout)
    except Interrupted as interrupt:
        job.end(0.0, interrupt.signum)
        with suppress(Interrupted):  # the second one kills at once
            job.wait(None)
        raise
    finally:
        job.close()
    seconds = time.monotonic() - start
    after = lab.counters()
    traffic = {name: {nic: value - before[name][nic] for nic, value in nics.items()} for name, nics in after.items()}
    return Finished(returncode=job.returncode, failed=job.failed, seconds=seconds, traffic=traffic)


def _commands(
    lab: Lab, host: LabHost, command: Sequence[str], *, torchrun: bool
) -> list[tuple[int | None, str, list[str]]]:
    """Return (local rank, label, words) of each process to start on a host."""
    count = host.cluster.ranks_per_host
    if not torchrun:
        return [(i, f"{host.name}:{host.first_rank + i}", list(command)) for i in range(count)]
    words = [
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(len(lab.spec.hosts)), "--node-rank", str(host.index), "--nproc-per-node", str(count),
        "--master-addr", lab.spec.hosts[0].ethernet_address, "--master-port", str(MASTER_PORT),
    ]  # fmt: skip
    script = list(command)
    if Path(script[0]).name.startswith("python"):  # torchrun brings its own
        script = script[1:]
    elif not script[0].endswith(".py"):
        words.append("--no-python")
    return [(None, host.name, words + script)]


class _Job:
    """The processes of a job. No threads: a killed parent takes those with it that its first thread has started."""

    def __init__(self, lab: Lab, write: Callable[[str], None], grace: float) -> None:
        self.returncode = 0
        self.failed = ""
        self._lab, self._write, self._grace = lab, write, grace
        self._mark = secrets.token_hex(8)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._parts: dict[str, bytes] = {}  # label -> the beginning of a line
        self._hosts: set[str] = set()
        self._selector = selectors.DefaultSelector()
        self._steps: list[tuple[float, signal.Signals]] = []  # when which signal goes to all that still run

    def start(
        self, host: str, label: str, words: Sequence[str], local_rank: int | None, env: Mapping[str, str]
    ) -> None:
        process = self._lab.start(
            host, words, local_rank=local_rank, env={**env, _MARK: self._mark}, output=subprocess.PIPE
        )
        self._running[label] = process
        self._hosts.add(host)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, label)

    def wait(self, deadline: float | None) -> None:
        """Pass output on until all processes have ended; the first failure ends the others."""
        while self._running:
            for key, _ in self._selector.select(0.1):
                if not self._read(key.fd, key.data):
                    self._selector.unregister(key.fileobj)
            for label, process in list(self._running.items()):
                if process.poll() is not None:
                    self._ended(label, process)
            now = time.monotonic()
            if deadline is not None and now > deadline and self._running:
                deadline = None
                self._write(f"holmes lab: time is up; ending {', '.join(self._running)}\n")
                self.returncode = self.returncode or 124
                self.end(0.0, signal.SIGTERM)
            while self._steps and self._steps[0][0] <= now:
                self._send(self._steps.pop(0)[1])

    def end(self, wait: float, signum: signal.Signals) -> None:
        """Plan the end of what still runs: a signal after some seconds, and the last one later."""
        if not self._steps:
            now = time.monotonic()
            self._steps = [(now + wait, signum), (now + wait + _KILL_AFTER, signal.SIGKILL)]

    def close(self) -> None:
        """Kill what is left, also what ranks have started and left behind."""
        self._send(signal.SIGKILL)
        for label, process in list(self._running.items()):
            process.wait()
            self._last_words(label, process)
        wanted = f"{_MARK}={self._mark}".encode()
        for host in self._hosts:
            for pid in self._lab.processes(host):
                with suppress(OSError):
                    if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)
        self._selector.close()

    def _ended(self, label: str, process: subprocess.Popen[bytes]) -> None:
        self._last_words(label, process)
        code = process.returncode
        if code == 0 or self.returncode or self._steps:
            return
        self.failed, self.returncode = label, code if code > 0 else 128 - code
        how = f"exit status {code}" if code > 0 else signal.Signals(-code).name
        others = f"; the others have {self._grace:g} s to end" if self._running else ""
        self._write(f"holmes lab: {label} failed ({how}){others}\n")
        self.end(self._grace, signal.SIGTERM)

    def _last_words(self, label: str, process: subprocess.Popen[bytes]) -> None:
        """Pass on the rest of an ended process's output: its pipe stays open as long as any child of it lives."""
        del self._running[label]
        assert process.stdout is not None
        self._read(process.stdout.fileno(), label)
        if self._parts.get(label):
            self._write(f"{label}| {self._parts.pop(label).decode(errors='replace')}\n")
        with suppress(KeyError):
            self._selector.unregister(process.stdout)
        process.stdout.close()

    def _read(self, fd: int, label: str) -> bool:
        """Pass on what a process has written; False at the end of its output."""
        while True:
            try:
                data = os.read(fd, 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            # A carriage return redraws a progress bar: each state becomes a line.
            *lines, self._parts[label] = (self._parts.get(label, b"") + data).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                if line.strip():
                    self._write(f"{label}| {line.decode(errors='replace')}\n")
            if not data:
                return False

    def _send(self, signum: signal.Signals) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                # The group, not only its first process: a shell does not pass signals on.
                os.killpg(process.pid, signum)


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
