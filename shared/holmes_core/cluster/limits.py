# SPDX-License-Identifier: Apache-2.0
"""What the operating system grants this process: processor time and memory, control groups included (v1 and v2)."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory", "cpu_cores", "resident_bytes"]

#: Version 1 writes "no limit" as the largest multiple of a page below 2**63.
_UNLIMITED = 1 << 60


def cpu_cores(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the cores this process may use: its affinity, or less by the quota of a control group around it."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _groups("cpu", proc, cgroup):
        words = _read(folder / "cpu.max").split()  # version 2: "50000 100000" or "max 100000"
        if len(words) != 2:
            words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if all(word.isdecimal() for word in words) and int(words[1]):
            cores = min(cores, int(words[0]) / int(words[1]))
    return cores


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that new data may take: what is free on the host, or less by a limit of a control group."""
    free = [
        int(line.split()[1]) * 1024 for line in _read(proc / "meminfo").splitlines() if line.startswith("MemAvailable:")
    ] or [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _groups("memory", proc, cgroup):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            words = _read(folder / limit).strip(), _read(folder / used).strip()
            if all(word.isdecimal() for word in words) and int(words[0]) < _UNLIMITED:
                free.append(max(0, int(words[0]) - int(words[1])))
    return min(free)


def resident_bytes(proc: Path = Path("/proc")) -> int:
    """Return the memory that this process occupies now."""
    words = _read(proc / "self" / "statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if len(words) > 1 else 0


def _groups(controller: str, proc: Path, cgroup: Path) -> list[Path]:
    """Return the directories of this process's control group and of those around it, of both versions."""
    found: list[Path] = []
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        roots = [cgroup / controllers, cgroup / controller] if controllers else [cgroup, cgroup / "unified"]
        parts = [part for part in path.split("/") if part and part != ".."]
        for root in roots:
            found += [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return [folder for folder in dict.fromkeys(found) if folder.is_dir()]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
