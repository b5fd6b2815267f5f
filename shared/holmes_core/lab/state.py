# SPDX-License-Identifier: Apache-2.0
"""Which labs there are: one directory per lab with all that must be removed, so that any later command can do it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from holmes_core.cluster.value import Value
from holmes_core.errors import ConfigError
from holmes_core.lab.cgroups import delete_cpu_group
from holmes_core.lab.network import delete_namespace
from holmes_core.lab.spec import LabSpec

__all__ = ["LabState", "claim", "labs_directory", "list_labs", "processes_in", "remove", "remove_leftovers", "store"]

_NETNS = Path("/run/netns")
_ENDING_TIME = 10.0  # seconds in which killed processes must be gone


@dataclass(frozen=True, slots=True, kw_only=True)
class LabState(Value):
    """All there is to know about one lab.

    Args:
        name: Unique on the machine.
        spec: What it was made from.
        owner: Process that removes it; 0 for a lab that stays until it is taken down.
        owner_started: Start time of that process in clock ticks since boot: numbers of processes come again.
        boot: Identifies this run of the machine.
        created: Seconds since the epoch.
        groups: Host name -> directory of its cgroup.
    """

    name: str
    spec: LabSpec
    owner: int
    owner_started: int
    boot: str
    created: float
    groups: tuple[tuple[str, str], ...] = ()

    @property
    def directory(self) -> Path:
        """Files of the lab."""
        return labs_directory() / self.name

    @property
    def switch(self) -> str:
        """Network namespace of the bridges."""
        return f"holmes-{self.name}.switch"  # no host can be called so: names have no underscore, hosts no dot

    @property
    def namespaces(self) -> dict[str, str]:
        """Host name -> its network namespace."""
        return {host.name: f"holmes-{self.name}.host-{host.name}" for host in self.spec.hosts}

    @property
    def abandoned(self) -> bool:
        """Whether the owner is gone, or the machine was started anew."""
        if self.boot != _boot():
            return True
        return self.owner != 0 and _started(self.owner) != self.owner_started


def labs_directory() -> Path:
    """Return where labs are written down."""
    run = Path("/run")
    return (run if os.access(run, os.W_OK) else Path(tempfile.gettempdir())) / "holmes-lab"


def claim(name: str, spec: LabSpec, *, owned: bool) -> LabState:
    """Write a new lab down before anything of it exists.

    Args:
        name: Of the lab.
        spec: What it will be made from.
        owned: The lab ends with this process.

    Raises:
        ConfigError: A lab of this name exists.
    """
    owner = os.getpid() if owned else 0
    state = LabState(
        name=name, spec=spec, owner=owner, owner_started=_started(owner), boot=_boot(), created=time.time()
    )
    base = labs_directory()
    base.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".new-", dir=base))
    _write_state(draft, state)
    try:
        draft.rename(base / name)  # at once: another process sees the whole file or nothing
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise ConfigError(
            seen=f"a lab {name!r} exists already", do=f"choose another name, or `holmes lab down {name}`"
        ) from error
    return state


def store(state: LabState, *, groups: Iterable[tuple[str, str]]) -> LabState:
    """Write down which cgroups belong to the lab."""
    state = replace(state, groups=tuple(groups))
    _write_state(state.directory, state)
    return state


def list_labs() -> list[LabState]:
    """Return all labs of this machine by age; unreadable ones are left out."""
    found = []
    for path in labs_directory().glob("[!.]*/state.json"):
        with suppress(OSError, ValueError, TypeError, ConfigError):
            found.append(LabState.from_json(json.loads(path.read_text())))
    return sorted(found, key=lambda state: state.created)


def remove_leftovers() -> list[str]:
    """Remove labs whose owner is gone (killed before it could); return their names."""
    for draft in labs_directory().glob(".new-*"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > 60:
                shutil.rmtree(draft)
    leftovers = [state for state in list_labs() if state.abandoned]
    for state in leftovers:
        remove(state)
    return [state.name for state in leftovers]


def remove(state: LabState) -> None:
    """End a lab's processes and remove all that belongs to it. Safe to repeat, and on a lab that is half made."""
    names = [state.switch, *state.namespaces.values()]
    if state.boot == _boot():
        deadline = time.monotonic() + _ENDING_TIME
        while (left := [pid for name in names for pid in processes_in(name)]) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for name in names:
            if (_NETNS / name).exists():
                delete_namespace(name)
        for _, group in state.groups:
            while not delete_cpu_group(Path(group)) and time.monotonic() < deadline:
                time.sleep(0.02)
    shutil.rmtree(state.directory, ignore_errors=True)


def processes_in(namespace: str) -> list[int]:
    """Return the processes inside a network namespace: all of a lab host's, however they were started."""
    try:
        wanted = (_NETNS / namespace).stat().st_ino
    except OSError:
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        with suppress(OSError):  # it ended, or it is a zombie
            if path.stat().st_ino == wanted and int(path.parts[2]) != os.getpid():
                found.append(int(path.parts[2]))
    return found


def _write_state(directory: Path, state: LabState) -> None:
    draft = directory / "state.json.new"
    draft.write_text(json.dumps(state.to_json(), indent=1))
    draft.rename(directory / "state.json")


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if it is not there."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # the program's name may hold spaces and brackets
    return 0 if fields[0] in "ZX" else int(fields[19])
