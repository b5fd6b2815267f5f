# SPDX-License-Identifier: Apache-2.0
"""One warm process per session, from which the ranks of all runs are forked; and a check that nothing is left."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lightning.farm import Farm

_MARK = "HOLMES_TEST_FAILURES"
_SHARED = Path("/dev/shm")
_warm: set[int] = set()  # the process that ranks are forked from lives as long as the session


@pytest.fixture(scope="session")
def _mark() -> str:
    """All processes that these tests start, at any remove, have a mark in their environment."""
    return uuid.uuid4().hex


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory, _mark: str) -> Iterator[Farm]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_MARK, _mark)
        farm = Farm(tmp_path_factory.mktemp("failures"), "tests.failures.scenarios", "holmes_lightning.hooks")
    with farm:
        _warm.add(farm.pid)
        yield farm
        _warm.clear()


@pytest.fixture(autouse=True)
def _nothing_is_left(_mark: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever failed: no process lives on (with none, no port is held), and no shared memory has a name."""
    names = _shared()
    monkeypatch.setenv(_MARK, _mark)  # for as long as the test runs: other folders' warm processes have none
    yield
    until = time.monotonic() + 15
    while (left := {**_marked(f"{_MARK}={_mark}"), **_orphaned(names)}) and time.monotonic() < until:
        time.sleep(0.2)
    assert not left, f"left behind: {left}"


def _marked(mark: str) -> dict[str, str]:
    """Processes with the mark, except the warm one."""
    found = {}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes().split(b"\0") and int(environ.parent.name) not in _warm:
                command = (environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[f"process {environ.parent.name}"] = command[:200]
        except OSError:  # it has ended, or is another user's
            continue
    return found


def _shared() -> set[str]:
    return {path.name for path in _SHARED.glob("torch_*")}


def _orphaned(before: set[str]) -> dict[str, str]:
    """Shared memory of torch (torch_PID_...) that is new and whose process has ended."""
    return {
        str(_SHARED / name): "shared memory of a process that has ended"
        for name in _shared() - before
        if (pid := name.split("_")[1]).isdigit() and not Path("/proc", pid).exists()
    }
