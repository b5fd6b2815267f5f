# SPDX-License-Identifier: Apache-2.0
"""A process group bound to the RDMA interface moves its bytes there, and none elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holmes_core.lab.job import run_job
from holmes_core.lab.session import Lab

pytestmark = pytest.mark.lab

PROGRAM = Path(__file__).with_name("all_reduce.py")


@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_reduce_inside_clusters(make_lab: Callable[..., Lab], torchrun: bool) -> None:
    lines: list[str] = []
    numel = 500_000
    command = [sys.executable, str(PROGRAM), json.dumps([[0, 1], [2, 3]]), str(numel)]
    done = run_job(make_lab(), command, torchrun=torchrun, timeout=100, write=lines.append)
    assert done.returncode == 0, "".join(lines)
    results = [json.loads(line.partition("| ")[2]) for line in lines if '{"rank"' in line]
    assert sorted((r["rank"], r["sum"]) for r in results) == [(0, 1.0), (1, 1.0), (2, 5.0), (3, 5.0)]
    for result in results:
        assert result["moved"]["eth0"] <= (2_000 if torchrun else 0)  # torchrun's agents keep in touch
        # Each of two ranks sends its half and then the sum of the other: as many bytes as the tensor has.
        # (The last of them may still be in the shaper when the rank looks.)
        assert 0.8 * 4 * numel <= result["moved"]["rdma0"] < 1.1 * 4 * numel
    for host, traffic in done.traffic.items():
        assert traffic["rdma0"].tx > 4 * numel, host
        assert traffic["eth0"].tx < 100_000, host  # start-up and barriers
