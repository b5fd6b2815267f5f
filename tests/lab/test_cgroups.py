# SPDX-License-Identifier: Apache-2.0
"""CPU quotas, on directories that look like both kinds of cgroup hierarchies."""

from __future__ import annotations

from pathlib import Path

import pytest

from holmes_core.lab.cgroups import add_cpu_group, delete_cpu_group, find_cpu_hierarchy


def mounts(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mounts"
    path.write_text("".join(f"{line} 0 0\n" for line in ("proc /proc proc rw", *lines)))
    return path


def test_version_1_wins_where_it_has_the_controller(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    second = f"cgroup2 {tmp_path} cgroup2 rw"
    assert find_cpu_hierarchy(mounts(tmp_path, second)) == (2, tmp_path)
    first = "cgroup /cg/cpu cgroup rw,cpu,cpuacct"
    assert find_cpu_hierarchy(mounts(tmp_path, second, first)) == (1, Path("/cg/cpu"))


def test_a_hierarchy_without_the_controller_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("\n")
    odd = "cgroup"
    table = mounts(tmp_path, f"cgroup2 {tmp_path} cgroup2 rw", "cgroup /cg/x cgroup rw,cpuset", "cgroup /y cgroup2 rw")
    table.write_text(table.read_text() + odd)
    assert find_cpu_hierarchy(table) is None
    assert find_cpu_hierarchy(tmp_path / "nothing") is None
    with pytest.raises(OSError, match="no cgroup hierarchy"):
        add_cpu_group("x", 1.0, None)


def test_version_1(tmp_path: Path) -> None:
    group = add_cpu_group("lab.a1", 0.5, (1, tmp_path))
    assert (group / "cpu.cfs_period_us").read_text() == "20000"
    assert (group / "cpu.cfs_quota_us").read_text() == "10000"


def test_version_2(tmp_path: Path) -> None:
    control = tmp_path / "cgroup.subtree_control"
    control.write_text("memory\n")
    group = add_cpu_group("lab.a1", 1.5, (2, tmp_path))
    assert control.read_text() == "+cpu"
    assert (group / "cpu.max").read_text() == "30000 20000"


def test_the_smallest_quota_is_what_the_kernel_takes(tmp_path: Path) -> None:
    assert (add_cpu_group("x", 0.001, (1, tmp_path)) / "cpu.cfs_quota_us").read_text() == "1000"


def test_delete(tmp_path: Path) -> None:
    (tmp_path / "full" / "inside").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    assert delete_cpu_group(tmp_path / "empty")
    assert delete_cpu_group(tmp_path / "empty")
    assert not delete_cpu_group(tmp_path / "full")
