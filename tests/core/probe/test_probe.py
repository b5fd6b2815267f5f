# SPDX-License-Identifier: Apache-2.0
"""Measuring links between threads of one process, rounds, bounded waits, and the cache."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

from holmes_core.cluster.limits import available_memory, cpu_cores, resident_bytes
from holmes_core.cluster.probe import (
    Pair,
    ProbeResult,
    RankSpeed,
    cache_path,
    gather,
    make_comparable,
    read_result,
    write_result,
)
from holmes_core.cluster.probe_links import listen, measure_links, rounds_of
from holmes_core.errors import HolmesError
from holmes_core.plan.probe import pairs_of, slowest_links
from holmes_core.runtime.probe_speed import StepHint, measure_speed
from tests.core.plan.networks import two_by_two


class MemoryStore:
    """A store between threads with the methods that the probe uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise RuntimeError("time is up")
            time.sleep(0.002)


def pair(sender: int, receiver: int, kind: str = "fabric", hosts: tuple[str, str] | None = None) -> Pair:
    return Pair(
        kind=kind,
        clusters=("a",),
        sender=sender,
        receiver=receiver,
        hosts=hosts or (f"h{sender}", f"h{receiver}"),
        interfaces=("lo", "lo"),
        addresses=("127.0.0.1", "127.0.0.1"),
    )


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.sampled_from(["host", "fabric", "across"]))))
@settings(max_examples=200, deadline=None)
def test_no_host_measures_twice_in_a_round(ways: list[tuple[int, int, str]]) -> None:
    pairs = [pair(a, b, kind) for a, b, kind in ways]
    rounds = rounds_of(pairs)
    assert sorted(index for members in rounds for index in members) == list(range(len(pairs)))
    for members in rounds:
        hosts = [host for index in members for host in set(pairs[index].hosts)]
        assert len(hosts) == len(set(hosts))
        assert len({pairs[index].kind for index in members}) == 1


def test_a_ring_of_many_hosts_takes_two_rounds() -> None:
    """What makes the time independent of the number of hosts."""
    assert len(rounds_of([pair(a, (a + 1) % 100) for a in range(100)])) == 2


def test_pairs_use_the_interfaces_of_the_plan() -> None:
    topology = two_by_two(ranks_per_host=2)
    found = {(one.kind, one.hosts): one for one in pairs_of(topology, "cpu")}
    assert found["fabric", ("b1", "b2")].interfaces == ("ens1", "rdma0")
    assert found["across", ("a1", "b1")].interfaces == ("eth0", "ens2")
    assert found["across", ("a1", "b1")].addresses == ("192.0.2.11", "192.0.2.21")
    assert found["host", ("a1", "a1")].addresses == ("127.0.0.1", "127.0.0.1")
    assert {one.kind for one in pairs_of(topology, "cuda")} == {"across"}, "RDMA and NVLink are no matter of sockets"


def measure(store: MemoryStore, pairs: list[Pair], ranks: list[int], timeout: float) -> list[object]:
    """Let every rank be a thread; each returns what it has measured, or its error."""
    servers = {rank: listen() for rank in ranks}
    ports = [servers[rank].getsockname()[1] if rank in servers else 1 for rank in range(max(ranks) + 2)]

    def one(rank: int) -> object:
        try:
            return measure_links(store, pairs, rank=rank, server=servers[rank], ports=ports, timeout=timeout)
        except HolmesError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(one, ranks))
    for server in servers.values():
        server.close()
    return found


def test_links_are_measured() -> None:
    pairs = [pair(0, 1), pair(2, 3), pair(1, 2)]
    found = measure(MemoryStore(), pairs, [0, 1, 2, 3], 20.0)
    links = {index: link for part in found if isinstance(part, dict) for index, link in part.items()}
    assert sorted(links) == [0, 1, 2]
    for link in links.values():
        assert not link.problem
        assert link.gbits > 0.01
        assert 0 < link.latency < 1
    result = ProbeResult(speeds=(), links=tuple(links[index] for index in sorted(links)))
    assert slowest_links(result)["fabric", ("a",)].gbits == min(link.gbits for link in links.values())


def test_a_rank_that_does_not_come_is_named() -> None:
    start = time.monotonic()
    found = measure(MemoryStore(), [pair(0, 1), pair(1, 2)], [0, 1], 1.0)
    assert time.monotonic() - start < 20
    assert all(isinstance(error, HolmesError) and "rank 2 on h2" in error.seen for error in found)


def test_a_sender_that_does_not_come_is_a_link_without_a_number() -> None:
    [found] = measure(MemoryStore(), [pair(0, 1)], [1], 1.0)
    assert isinstance(found, dict)
    assert found[0].problem == "no answer"
    assert not slowest_links(ProbeResult(speeds=(), links=(found[0],)))


def test_gather_names_who_is_absent_and_what_it_said() -> None:
    store = MemoryStore()
    store.set("said/2", "host h2: computing")
    store.set("speed/1", "one")
    with pytest.raises(HolmesError, match="2 of 4 ranks") as caught:
        gather(store, "speed", "zero", rank=0, world_size=4, timeout=0.1, doing="computing")
    assert "rank 2 (last said: host h2: computing), rank 3" in caught.value.seen


def test_ranks_are_compared_by_their_fastest_moments() -> None:
    """A neighbour on the machine of one rank while it was measured gives nobody fewer blocks; a slow host does."""
    quiet = RankSpeed(rank=0, host="a", samples=2, forward=1.0, backward=2.0, forward_fixed=0.5, backward_fixed=0.5,
                      head_forward=1.0, fastest=3.0)  # fmt: skip
    disturbed = replace(
        quiet, rank=1, forward=1.5, backward=3.0, forward_fixed=0.75, backward_fixed=0.75, head_forward=1.5
    )
    slow = replace(quiet, rank=2, forward=2.0, backward=4.0, forward_fixed=1.0, backward_fixed=1.0, fastest=6.0)
    found = make_comparable([quiet, disturbed, slow, replace(quiet, rank=3)])
    assert [speed.rank for speed in found] == [0, 1, 2, 3]
    assert [speed.block for speed in found] == pytest.approx([3.5, 3.5, 7.0, 3.5])
    assert found[1].head_forward == pytest.approx(1.0)
    assert found[0] == quiet, "usual times stay usual"
    # All are disturbed: that is how training will be.
    assert [speed.block for speed in make_comparable([disturbed, replace(disturbed, rank=0)])] == [5.25, 5.25]
    before = [replace(quiet, fastest=0.0), disturbed]
    assert make_comparable(before) == tuple(before), "measured by an earlier release"
    assert make_comparable([]) == ()


@pytest.mark.parametrize("language_model", [True, False])
def test_a_rank_knows_its_fastest_moment(language_model: bool) -> None:
    config = GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    blocks = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    model = GPT2LMHeadModel(config) if language_model else blocks
    found = measure_speed(model, device=torch.device("cpu"), hint=StepHint(), samples=2, seq=8)
    assert found.fastest > 0
    if not language_model:  # else `block` is on a line through the usual passes of one sample and of both
        assert found.fastest <= found.block * 1.0001
    else:
        assert found.fastest < 3 * found.block


def test_the_cache(tmp_path: Path) -> None:
    path = cache_path("f" * 64, {"XDG_CACHE_HOME": str(tmp_path)})
    assert path.is_relative_to(tmp_path / "holmes")
    assert read_result(path) is None
    result = ProbeResult(speeds=(RankSpeed(rank=0, host="h", forward=1.0, backward=2.0),), seconds=3.0, key="f" * 64)
    write_result(path, result)
    assert read_result(path) == result
    path.write_text("{}")
    assert read_result(path) is None


def test_limits_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 4000000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/job\n3:cpu,cpuacct:/job\n0::/new\n")
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == 4_000_000 * 1024
    for folder, files in {
        "memory/job": {"memory.limit_in_bytes": 2 << 30, "memory.usage_in_bytes": 1 << 30},
        "cpu,cpuacct/job": {"cpu.cfs_quota_us": 15000, "cpu.cfs_period_us": 20000},
        "new": {"memory.max": "max", "cpu.max": "max 100000"},
    }.items():
        (tmp_path / "cgroup" / folder).mkdir(parents=True)
        for name, value in files.items():
            (tmp_path / "cgroup" / folder / name).write_text(f"{value}\n")
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == 1 << 30
    assert cpu_cores(tmp_path / "proc", tmp_path / "cgroup") == 0.75
    (tmp_path / "cgroup/new/memory.max").write_text("1000\n")
    (tmp_path / "cgroup/new/memory.current").write_text("400\n")
    assert available_memory(tmp_path / "proc", tmp_path / "cgroup") == 600
    assert resident_bytes() > 1 << 20
