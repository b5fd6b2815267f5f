# SPDX-License-Identifier: Apache-2.0
"""What a job decides for itself: from measured numbers, within each rank's memory, and only where it is clear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.probe import LinkRate, Pair, ProbeResult, RankSpeed
from holmes_core.cluster.topology import Topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.decide import Decision, Step, decide
from holmes_core.plan.profile_config import profile_of_config

GPT = {"model_type": "gpt2", "n_embd": 512, "n_layer": 8, "n_head": 8, "n_positions": 128, "vocab_size": 4096}
PROFILE = profile_of_config({**GPT, "tie_word_embeddings": False}, seq=128, value_bytes=4)
MIB = 2**20


def topology(*clusters: tuple[int, ...]) -> Topology:
    """Clusters of hosts with so many ranks each."""
    found, at = [], 0
    for index, sizes in enumerate(clusters):
        hosts = []
        for number, size in enumerate(sizes):
            name = f"{'abcdef'[index]}{number}"
            hosts.append(Host(name=name, ranks=tuple(range(at, at + size)), inventory=Inventory(host=name)))
            at += size
        found.append(Cluster(name="abcdef"[index], kind="ethernet", hosts=tuple(hosts)))
    return Topology(clusters=tuple(found))


def probe(where: Topology, *, slow: dict[str, float] | None = None, gbits: float = 10.0) -> ProbeResult:
    """Every rank takes 30 ms for a block; hosts in `slow` take so many times as long."""
    speeds = []
    for rank in range(where.world_size):
        host = where.host_of(rank).name
        factor = (slow or {}).get(host, 1.0)
        speeds.append(
            RankSpeed(
                rank=rank, host=host, forward=0.01 * factor, backward=0.02 * factor, head_forward=0.005 * factor,
                head_backward=0.01 * factor, optimizer=1e-9,
            )
        )  # fmt: skip
    names = [cluster.name for cluster in where.clusters]
    kinds = [("fabric", (name,)) for name in names]
    kinds += [("across", (a, b)) for i, a in enumerate(names) for b in names[i + 1 :]]
    links = tuple(
        LinkRate(
            pair=Pair(kind=kind, clusters=pair, sender=0, receiver=1, hosts=("x", "y"), interfaces=(), addresses=()),
            gbits=gbits,
            latency=1e-4,
        )
        for kind, pair in kinds
    )
    return ProbeResult(speeds=tuple(speeds), links=links)


def step(where: Topology, *, memory: float = 64 * 1024, batch: int | None = 8, **more: Any) -> Step:
    """Steps of a small GPT; memory in MiB."""
    limits = {rank: int(memory * MIB) for rank in range(where.world_size)}
    return Step(profile=PROFILE, precision="32-true", batch=batch, memory=limits, runtime_bytes=0, **more)


def decided(where: Topology, config: dict[str, Any], work: Step, measured: ProbeResult | None) -> Decision:
    return decide(HolmesConfig(**config), where, work, measured)


def test_equal_hosts_keep_the_usual_layout_and_an_even_split() -> None:
    where = topology((1, 1), (1, 1))
    found = decided(where, {"num_microbatches": 8}, step(where), probe(where))
    assert found.config.pp is None, "the rule of choose_layout decides"
    assert found.prediction is not None
    assert found.prediction.step_seconds > 0


def test_a_slow_cluster_gets_fewer_blocks() -> None:
    where = topology((1, 1), (1, 1))
    slow = {"b0": 2.0, "b1": 2.0}
    found = decided(where, {"pp": 2, "num_microbatches": 8}, step(where), probe(where, slow=slow))
    assert found.config.layers_per_stage is not None
    first, last = found.config.layers_per_stage  # rank 0 is in a, so a is last
    assert first < last
    assert first + last == 8
    even = decided(where, {"pp": 2, "num_microbatches": 8, "partition": "equal"}, step(where), probe(where, slow=slow))
    assert even.config.layers_per_stage is None
    assert found.prediction.step_seconds < 0.9 * even.prediction.step_seconds


def test_one_slow_host_inside_a_cluster_slows_its_stage_only() -> None:
    where = topology((1, 1, 1, 1))
    found = decided(where, {"pp": 4, "num_microbatches": 8}, step(where), probe(where, slow={"a2": 3.0}))
    # Rank 0 is the last stage, so the stages are a1, a2, a3, a0.
    assert found.config.layers_per_stage is not None
    assert found.config.layers_per_stage[1] == min(found.config.layers_per_stage)


def test_declared_speeds_replace_measured_ones() -> None:
    where = topology((1, 1), (1, 1))
    speeds = {"a": 1.0, "b": 2.0}
    config = {"pp": 2, "num_microbatches": 8, "cluster_speeds": speeds}
    found = decided(where, config, step(where), probe(where, slow={"b0": 2.0, "b1": 2.0}))
    first, last = found.config.layers_per_stage
    assert first > last


def test_a_layout_that_does_not_fit_is_replaced_where_degrees_are_open() -> None:
    where = topology((1, 1, 1, 1))
    usual = decided(where, {}, step(where), None)
    need = max(usual.prediction.memory_bytes) / MIB
    tight = decided(where, {"recompute": False}, step(where, memory=0.7 * need), None)
    assert tight.config.pp is not None
    assert tight.config.pp > 1
    assert tight.prediction.fits
    assert any("would not fit" in note for note in tight.notes)


def test_blocks_are_recomputed_where_that_is_enough() -> None:
    where = topology((1, 1))
    config = {"pp": 2, "num_microbatches": 2, "schedule": "gpipe"}
    plain = decided(where, {**config, "recompute": False}, step(where, batch=64), None)
    kept = decided(where, {**config, "recompute": True}, step(where, batch=64), None)
    between = (max(plain.prediction.memory_bytes) + max(kept.prediction.memory_bytes)) / 2 / MIB
    found = decided(where, config, step(where, batch=64, memory=between), None)
    assert found.recompute
    assert found.prediction.fits
    assert not decided(where, config, step(where, batch=64), None).recompute


def test_a_fixed_layout_that_does_not_fit_is_refused_with_the_nearest_that_does() -> None:
    where = topology((1, 1, 1, 1))
    config = {"pp": 1, "recompute": False}
    need = max(decided(where, config, step(where), None).prediction.memory_bytes)
    with pytest.raises(ConfigError) as caught:
        decided(where, config, step(where, memory=0.7 * need / MIB), None)
    missing = need - int(0.7 * need)
    assert f"({missing:,} bytes) are missing" in caught.value.seen or f"({missing + 1:,} bytes)" in caught.value.seen
    assert "host a0" in caught.value.seen
    proposed = [line for line in caught.value.do.splitlines() if line.startswith("- ")]
    assert proposed
    assert "pp: 2" in caught.value.do
    # What it proposes does fit.
    again = decided(where, {"pp": 2, "recompute": False}, step(where, memory=0.7 * need / MIB), None)
    assert again.prediction.fits


def test_nothing_fits() -> None:
    where = topology((1, 1))
    with pytest.raises(ConfigError, match="does not fit") as caught:
        decided(where, {}, step(where, memory=1), None)
    assert "no layout of these ranks fits" in caught.value.do


def test_frozen_parameters_need_no_states() -> None:
    where = topology((1, 1))
    whole = decided(where, {"pp": 2}, step(where), None).prediction
    part = decided(where, {"pp": 2}, step(where, trainable=0.01), None).prediction
    assert max(part.memory_bytes) < 0.6 * max(whole.memory_bytes)


def test_the_order_of_clusters_is_one_that_the_grid_can_make() -> None:
    where = topology((1, 1), (1, 1), (1, 1))
    slow = probe(where)
    links = tuple(replace(link, gbits=0.02) if set(link.pair.clusters) == {"b", "c"} else link for link in slow.links)
    found = decided(where, {"num_microbatches": 8}, step(where), replace(slow, links=links))
    # b and c are joined by a slow link; a must stay last, because rank 0 is there: nothing better can be made.
    assert found.topology.clusters[0].name in ("a", "b", "c")
    assert found.topology.world_size == 6


def test_what_hides_a_slow_link_is_decided_by_what_was_measured() -> None:
    where = topology((1, 1), (1, 1))
    measured = probe(where)
    links = tuple(replace(link, gbits=0.02) if link.pair.kind == "across" else link for link in measured.links)
    measured = replace(measured, links=links)
    found = decided(where, {"pp": 2, "num_microbatches": 8}, step(where), measured)
    assert found.config.run_ahead
    note = next(note for note in found.notes if "run_ahead" in note)
    assert "more samples per second" in note
    fixed = {"run_ahead": 0, "defer_weights": False, "sharding": "optimizer", "embedding": "first"}
    plain = decided(where, {"pp": 2, "num_microbatches": 8, **fixed}, step(where), measured)
    assert (plain.config.run_ahead, plain.config.defer_weights, plain.config.sharding) == (0, False, "optimizer")
    assert not any("run_ahead" in note for note in plain.notes)
    assert found.prediction.step_seconds < 0.95 * plain.prediction.step_seconds


def test_a_setting_that_is_off_is_named_where_it_would_gain() -> None:
    """Parameters that come under the next forward: not decided for the user, who is told what they would gain."""
    where = topology((1, 1), (1, 1))
    config = {"pp": 2, "num_microbatches": 8, "sharding": "optimizer"}
    name = "overlap_param_gather: true"
    slow = decided(where, config, step(where), probe(where, gbits=1.0))
    assert not slow.config.overlap_param_gather
    (note,) = (note for note in slow.notes if name in note)
    on = decided(where, {**config, "overlap_param_gather": True}, step(where), probe(where, gbits=1.0))
    gain = slow.prediction.step_seconds / on.prediction.step_seconds - 1
    assert f"{gain:.0%} more samples" in note
    assert not any(name in note for note in on.notes)
    fast = decided(where, config, step(where), probe(where, gbits=400.0))
    assert not any(name in note for note in fast.notes), "there is nothing to gain"
    none = decided(where, {**config, "sharding": "none"}, step(where), probe(where, gbits=1.0))
    assert not any(name in note for note in none.notes), "nothing is handed out"
    assert not any(name in note for note in decided(where, config, step(where), None).notes), "nothing was measured"


def test_nothing_is_hidden_by_guess() -> None:
    where = topology((1, 1), (1, 1))
    found = decided(where, {"pp": 2, "num_microbatches": 8}, step(where), None)
    assert (found.config.run_ahead, found.config.defer_weights) == (0, False)
    assert found.config.sharding == "optimizer"
    assert found.notes == ()


def test_micro_batches_are_decided_where_it_gains_much() -> None:
    """Links that take long for a message and none for its bytes: fewer, larger micro-batches."""
    where = topology((1, 1), (1, 1))
    slow = probe(where, gbits=100.0)
    links = tuple(replace(link, latency=0.5) for link in slow.links)
    config = {"pp": 2, "run_ahead": 0, "defer_weights": False}
    found = decided(where, config, step(where, batch=16), replace(slow, links=links))
    assert found.config.micro_batch_size is not None
    assert found.config.micro_batch_size > 4  # the rule would take 4 micro-batches of 4
    guess = decided(where, config, step(where, batch=None), replace(slow, links=links))
    assert guess.config.micro_batch_size is None, "the batch is not known"
    fixed = decided(where, {**config, "num_microbatches": 4}, step(where, batch=16), replace(slow, links=links))
    assert fixed.config.micro_batch_size is None


def test_named_stages_keep_their_embedding() -> None:
    """On a slow link a tied model's embedding goes to the last rank; stages that are named cannot have that."""
    where = topology((1, 1), (1, 1))
    tied = replace(step(where), profile=profile_of_config(GPT, seq=128, value_bytes=4))
    slow = probe(where)
    links = tuple(replace(link, gbits=0.02) if link.pair.kind == "across" else link for link in slow.links)
    slow = replace(slow, links=links)
    assert decided(where, {"pp": 2, "num_microbatches": 8}, tied, slow).config.embedding == "last"
    named = decided(where, {"pp": 2, "num_microbatches": 8, "split_points": ["h.4"]}, tied, slow)
    assert named.config.embedding == "first"
