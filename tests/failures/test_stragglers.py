# SPDX-License-Identifier: Apache-2.0
"""A rank or a link that has become slow is named while the job runs; nobody is blamed for what others do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from holmes_core.runtime.pulse import EDGES, Pulse
from holmes_core.runtime.stragglers import Watcher
from tests.lightning.farm import Farm


def pipeline(stages: int, dp: int = 1) -> dict[str, Any]:
    """As `watchdog` describes a plan; rank = stage * dp + replica, one host per stage."""
    ranks = {}
    for stage in range(stages):
        for replica in range(dp):
            edges: list[Any] = [None] * EDGES
            if stage:
                edges[0] = [stage, f"link {stage - 1} -> {stage}"]
            if stage < stages - 1:
                edges[1] = [stage, f"link {stage + 1} -> {stage}"]
            ranks[stage * dp + replica] = {"place": f"host h{stage}", "stages": [stage], "edges": edges}
    return {"stages": stages, "ranks": ranks}


class Job:
    """Ranks that train: every batch adds to their records what it takes."""

    def __init__(self, world: int, micro_batches: int = 8) -> None:
        self.records = {rank: Pulse().values() for rank in range(world)}
        self.micro_batches, self.now = micro_batches, 0.0

    def train(
        self, watcher: Watcher, batches: int, seconds: float, compute: Callable[[int], float],
        waits: Callable[[int], tuple[float, float]] = lambda rank: (0.0, 0.0),
    ) -> list[str]:  # fmt: skip
        said = []
        for _ in range(batches):
            self.now += seconds
            for rank, record in self.records.items():
                record[4] += 1
                record[5] += seconds
                record[6] += compute(rank)
                record[7] = self.micro_batches
                record[9] += waits(rank)[0]
                record[10] += waits(rank)[1]
            said += watcher.look({rank: list(record) for rank, record in self.records.items()}, self.now)
        return said


def test_the_record_of_a_pulse_is_what_the_job_above_writes() -> None:
    pulse = Pulse()
    with pulse.batch(step=3, micro_batches=8, train=True):
        with pulse.micro_batch(0, waits=True):
            pass
        with pulse.micro_batch(1, waits=True):
            pass
    batches, micro, seconds, compute, reduce, waits = Pulse.times(pulse.values())
    assert (batches, micro, reduce) == (1, 8, 0)
    assert seconds >= compute > 0
    assert min(waits[:2]) > 0
    assert not any(waits[2:])
    assert [pulse.values()[i] for i in (4, 5, 6, 7, 9, 10)] == [batches, seconds, compute, micro, *waits[:2]]


def test_an_even_pipeline_is_silent() -> None:
    job, watcher = Job(8), Watcher(pipeline(4, dp=2))
    assert job.train(watcher, 400, 0.5 * (1 + 3 / 8), lambda rank: 0.5, lambda rank: (0.1, 0.08)) == []


def test_a_rank_slower_than_the_others_of_its_stage() -> None:
    job, watcher = Job(8), Watcher(pipeline(4, dp=2))
    said = job.train(watcher, 100, 1.2, lambda rank: 0.9 if rank == 3 else 0.5, lambda rank: (0.4, 0.1))
    assert len(said) == 1
    assert said[0].startswith(
        "holmes: rank 3 (host h1) has become slow: it computes 0.9 s per batch; 0.5 s on the other"
    )


def test_a_rank_slower_than_before_is_named_again_after_a_minute_only() -> None:
    job, watcher = Job(2), Watcher(pipeline(2))
    assert job.train(watcher, 100, 0.6, lambda rank: 0.5) == []
    said = job.train(watcher, 90, 1.2, lambda rank: 1.0 if rank == 0 else 0.5)
    assert [line.split(":")[1] for line in said] == [" rank 0 (host h0) has become slow"] * 2
    assert "0.5 s before" in said[0]


def test_all_slower_together_blame_nobody() -> None:
    job, watcher = Job(8), Watcher(pipeline(4, dp=2))
    assert job.train(watcher, 100, 0.7, lambda rank: 0.5) == []
    assert job.train(watcher, 100, 2.8, lambda rank: 2.0) == []


def test_stages_of_unequal_work_blame_no_link() -> None:
    job, watcher = Job(2), Watcher(pipeline(2))
    compute = (1.0, 0.4)
    assert job.train(watcher, 100, 1.15, lambda rank: compute[rank], lambda rank: (0.7 * rank, 0.0)) == []


def test_a_slow_link_in_the_middle_is_named_not_the_stages_behind_it() -> None:
    job, watcher = Job(4), Watcher(pipeline(4))
    said = job.train(
        watcher, 100, 1.6, lambda rank: 0.5, lambda rank: (0.9 if rank >= 2 else 0.05, 0.9 if rank <= 1 else 0.05)
    )
    assert said[0] == "holmes: stage 2 waits 56 % of each step for link 1 -> 2"
    assert set(said) == {said[0]}


@pytest.mark.slow  # it looks at how long things take: on a busy machine everybody is slow
def test_a_rank_that_slows_down_is_named_while_the_job_runs(farm: Farm) -> None:
    config = {"pp": 2, "num_microbatches": 2, "print_plan": False}
    found = farm.run(
        "tests.failures.scenarios:slows_down", world=2, config=config, timeout=120, rank=1, after=110, steps=170
    )
    assert len(found.values) == 2
    said = [line for log in found.logs for line in log.splitlines() if line.startswith("holmes: ")]
    slow = [line for line in said if "has become slow" in line]
    assert len(slow) == 1, said
    assert re.match(r"holmes: rank 1 \(host \S+, stage 0, dp 0, tp 0\) has become slow: it computes .* before", slow[0])
    waits = r"holmes: stage 1 waits .* rank 1 -> 0\)"  # may come first: the window's first batches were still fast
    assert all(re.match(waits, line) for line in said if line not in slow), said
