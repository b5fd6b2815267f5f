# SPDX-License-Identifier: Apache-2.0
"""One rank of a job fails in some way, at some place: all ranks end in time, and each names what failed first."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holmes_core.doctor.logs.diagnose import diagnose
from holmes_core.doctor.logs.parts import Case
from holmes_core.doctor.logs.read import read_lines
from tests.lightning.farm import Farm, Run

# What the others say. A status that the rank's parent has taken already can no longer be read.
WORDLESS = r"ended without a word"
WORDS = {
    "kill": rf"was killed \(SIGKILL\)|{WORDLESS}",
    "kill_group": r"no sign of life",
    "stop": r"has been stopped for \d+ s",
    "term": rf"was ended by SIGTERM|{WORDLESS}",
    "segv": rf"crashed \(SIGSEGV\)|{WORDLESS}",
    "exit": rf"ended by itself with exit status 7|{WORDLESS}",
    "exit0": rf"ended by itself with exit status 0 while others still train|{WORDLESS}",
    "memory": r"failed: MemoryError: the batch does not fit",
    "raise": r"failed: ValueError: the user's own mistake",
}


def run(farm: Farm, host: str = "lightning", *, world: int = 3, pp: int = 0, limit: float = 12.0, **how: Any) -> Run:
    config = {"pp": pp or world, "num_microbatches": world, "print_plan": False, "failure_timeout": limit}
    config["timeout"] = how.pop("timeout", 60)
    return farm.run(f"tests.failures.scenarios:{host}", world=world, config=config, timeout=120, **how)


def check(found: Run, *, how: str, rank: int) -> None:
    began = float(re.search(r"fails at ([\d.]+)", found.logs[rank])[1])  # type: ignore[index]
    if how in ("raise", "memory"):
        assert re.search("ValueError|MemoryError", found.logs[rank].splitlines()[-1]), found.logs[rank][-2000:]
    for other, log in enumerate(found.logs):
        assert found.ends[other] - began < 30
        if other == rank:
            continue
        assert found.codes[other] != 0, f"rank {other} of {found.codes}:\n{log[-3000:]}"
        assert re.search(rf"seen:  rank {rank} \([^)]*host [^)]*\) (\w.*)?({WORDS[how]})", log), log[-3000:]
        assert log.count("seen: ") == 1, log[-3000:]
        assert "Traceback" not in log
        assert re.search(r"where: (at|after) step \d|where: before its first batch", log)
    logs = [(f"rank{number}.log", log.splitlines()) for number, log in enumerate(found.logs)]
    first = diagnose(Case(log=read_lines(logs)))[0]  # what `holmes doctor` says first of all logs together
    assert first.id == "first-failure", first
    assert re.match(rf"rank {rank} \(", first.seen), first


@pytest.mark.parametrize(
    ("host", "how", "rank", "at", "place"),
    [
        ("lightning", "kill", 0, 2, "step"),
        ("lightning", "stop", 2, 1, "step"),
        ("accelerate", "raise", 1, 3, "loader"),
        ("lightning", "memory", 1, 2, "callback"),
        ("accelerate", "exit", 2, 0, "step"),
    ],
)
def test_all_name_the_rank_that_failed(farm: Farm, host: str, how: str, rank: int, at: int, place: str) -> None:
    check(run(farm, host, how=how, rank=rank, at=at, place=place), how=how, rank=rank)


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_data_loader_workers_end_with_their_ranks(farm: Farm, how: str) -> None:
    """conftest.py looks whether they do."""
    check(run(farm, world=2, how=how, rank=1, workers=2), how=how, rank=1)


def test_a_slow_rank_is_left_alone(farm: Farm) -> None:
    found = run(farm, world=2, limit=5.0, rank=0, slow=5.0)
    assert len(found.values) == 2


def test_a_rank_that_never_comes_is_named_when_the_others_give_up(farm: Farm) -> None:
    found = run(farm, world=2, limit=5.0, timeout=4.0, rank=0, slow=1000.0)
    for log in found.logs:
        assert re.search(r"seen:  rank 0 \(stage 1 of 2.*\) is furthest behind; rank 1 gave up: .*[Tt]imed out", log), (
            log
        )
        assert "no rank has ended; the others: rank 1: at step 2, waiting for another stage" in log


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 4])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("how", WORDS)
@pytest.mark.parametrize("host", ["lightning", "accelerate"])
def test_every_way_to_fail(farm: Farm, host: str, how: str, rank: int, at: int) -> None:
    if (host, how) == ("lightning", "term"):
        pytest.skip("Lightning takes SIGTERM as a wish to stop after the batch")
    check(run(farm, host, how=how, rank=rank, at=at), how=how, rank=rank)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "stop", "raise", "kill_group"])
@pytest.mark.parametrize("rank", range(4))
def test_two_replicas_of_two_stages(farm: Farm, how: str, rank: int) -> None:
    check(run(farm, world=4, pp=2, how=how, rank=rank), how=how, rank=rank)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["lightning", "accelerate"])
def test_the_default_time_is_enough(farm: Farm, host: str) -> None:
    check(run(farm, host, limit=30.0, how="kill_group", rank=0), how="kill_group", rank=0)
