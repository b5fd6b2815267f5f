# SPDX-License-Identifier: Apache-2.0
"""Freed memory stays for the next step."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from holmes_core.runtime.memory import keep_freed_memory

_STEPS = """
import ctypes, resource, sys
from holmes_core.runtime.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
size, faults = 28_000_000, []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    taken = [ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size))) for _ in range(4)]
    for block in taken:
        ctypes.memset(block, 1, size)
    for block in reversed(taken):
        libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(faults[-1])
"""


def _faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _STEPS, how], capture_output=True, text=True, timeout=120, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told to keep what is freed")
def test_a_step_finds_the_memory_of_the_one_before_mapped() -> None:
    pages = 4 * 28_000_000 // 4096
    assert _faults("as it is") > pages // 2  # else this test would show nothing
    assert _faults("keep") < pages // 20


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES"])
def test_a_malloc_that_the_user_tunes_is_left_alone(name: str) -> None:
    calls: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda *option: calls.append(option) or 1)
    assert not keep_freed_memory({name: "1"}, libc)
    assert not calls
    assert keep_freed_memory({"PATH": "/bin"}, libc)
    assert len(calls) == 2


def test_a_c_library_without_such_options_and_one_that_refuses_them() -> None:
    assert not keep_freed_memory({}, SimpleNamespace())
    assert not keep_freed_memory({}, SimpleNamespace(mallopt=lambda *option: 0))
