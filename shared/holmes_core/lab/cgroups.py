# SPDX-License-Identifier: Apache-2.0
"""A CPU quota per host, with cgroup v1 (`cpu`) or v2.

Without quotas one host's waiting is filled by another's computing, and every overlap looks better than it is.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["add_cpu_group", "delete_cpu_group", "find_cpu_hierarchy"]

_PERIOD = 20_000  # microseconds: the kernel's 100 ms would add pauses longer than a training step's messages


def find_cpu_hierarchy(mounts: Path = Path("/proc/self/mounts")) -> tuple[int, Path] | None:
    """Return the version (1 or 2) and the mount point of the hierarchy that controls CPU time; None without one."""
    second: Path | None = None
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) < 4:
            continue
        root = Path(fields[1])
        if fields[2] == "cgroup" and "cpu" in fields[3].split(","):
            return 1, root
        if fields[2] == "cgroup2" and "cpu" in _read(root / "cgroup.controllers").split():
            second = root
    return None if second is None else (2, second)


def add_cpu_group(name: str, cores: float, hierarchy: tuple[int, Path] | None) -> Path:
    """Create a group of processes that together use at most `cores` cores.

    Args:
        name: Of the group; unique on the machine.
        cores: CPU time per time.
        hierarchy: From `find_cpu_hierarchy`.

    Returns:
        Its directory; a process joins by writing its number into ``cgroup.procs`` there.

    Raises:
        OSError: There is no such hierarchy, or it is not writable.
    """
    if hierarchy is None:
        raise OSError("no cgroup hierarchy with the cpu controller is mounted")
    version, root = hierarchy
    group = root / name
    quota = max(1000, round(cores * _PERIOD))  # the kernel takes no less than 1 ms
    if version == 2:
        control = root / "cgroup.subtree_control"
        if "cpu" not in _read(control).split():
            control.write_text("+cpu")
    group.mkdir()
    try:
        if version == 2:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    except OSError:
        delete_cpu_group(group)
        raise
    return group


def delete_cpu_group(group: Path) -> bool:
    """Remove a group that has no processes; return whether it is gone."""
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
