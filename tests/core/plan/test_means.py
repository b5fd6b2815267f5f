# SPDX-License-Identifier: Apache-2.0
"""What hides the waiting of a layout is chosen by prediction: where it helps, and only there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holmes_core.plan.cost import Choice, CostModel
from holmes_core.plan.means import choose_means
from holmes_core.plan.search import Limits, search
from holmes_core.plan.simulate import predict_by_simulation
from tests.core.plan.prediction_jobs import choice, cluster, gpt, job

SMALL = gpt(1024, 8, 16, 512, vocab_size=4096)


def _two(ethernet_rate: float, *, batch: int = 16, **more: object) -> CostModel:
    halves = [cluster(name, 2, ethernet_rate=ethernet_rate, **more) for name in "ab"]
    return CostModel(job(*halves, batch=batch, profile=SMALL))


def test_a_slow_edge_is_run_ahead_of() -> None:
    model = _two(20.0)
    plain = choice(model.job, dp=2)
    found, prediction = choose_means(model, plain, Limits(defer_weights=False))
    assert found.run_ahead
    assert found == replace(plain, run_ahead=found.run_ahead, sharding=found.sharding)
    slower = predict_by_simulation(model, replace(found, run_ahead=0))
    assert prediction == predict_by_simulation(model, found)
    assert prediction.step_seconds < 0.99 * slower.step_seconds


def test_deferred_weights_shorten_both_ends() -> None:
    model = _two(2000.0, batch=8)
    plain = choice(model.job, dp=2)
    found, prediction = choose_means(model, plain, Limits())
    assert found.defer_weights
    assert not found.run_ahead  # nothing to hide
    assert prediction.bubble < predict_by_simulation(model, plain).bubble
    again = choose_means(model, replace(plain, recompute=True), Limits())[0]
    assert not again.defer_weights  # each weight would compute its block once more


def test_what_is_fixed_stays() -> None:
    model = _two(20.0, batch=8)
    plain = choice(model.job, dp=2)
    fixed = Limits(run_ahead=0, defer_weights=False, sharding="optimizer")
    assert choose_means(model, plain, fixed)[0] == plain
    ahead = replace(plain, run_ahead=2)
    assert choose_means(model, ahead, replace(fixed, run_ahead=2))[0] == ahead


def test_what_needs_too_much_memory_is_left() -> None:
    model = _two(20.0)
    plain = choice(model.job, dp=2)
    found, prediction = choose_means(model, plain, Limits())
    assert found != plain
    need = predict_by_simulation(model, plain).memory_bytes
    assert max(prediction.memory_bytes) > max(need)
    for own in model.job.hardware.clusters:
        assert own.usable is None
    clusters = [replace(own, usable=max(need)) for own in model.job.hardware.clusters]
    hardware = replace(model.job.hardware, clusters=tuple(clusters))
    tight = CostModel(replace(model.job, hardware=hardware))
    assert choose_means(tight, plain, Limits())[1].fits


def test_replicas_share_the_optimizer_unless_gradients_hide() -> None:
    """Summing under the last backward: nothing is handed out in sight; in sight both send as much."""
    work = job(cluster("a", 1, 1, 1, 1, ethernet_rate=100.0, kind="ethernet"), batch=512, profile=SMALL)
    plain = Choice(tp=1, dp=4, order=(0,), stages=(1,), micro_batch_size=128, layers_per_stage=(8,))
    for overlap, sharding in ((None, "none"), (1.0, "none"), (0.0, "optimizer")):
        assert choose_means(CostModel(replace(work, overlap=overlap)), plain, Limits())[0].sharding == sharding
    under_forward = replace(work, overlap_param_gather=True)
    assert choose_means(CostModel(under_forward), plain, Limits())[0].sharding == "optimizer", "and steps are shared"


def test_micro_batches_are_cut_smaller_where_ranks_wait() -> None:
    model = CostModel(replace(_two(2000.0).job, batch=0, replica_batch=64))
    coarse = replace(choice(model.job, dp=2), micro_batch_size=32)
    found = choose_means(model, coarse, Limits())[0]
    assert found.micro_batch_size < 32
    assert choose_means(model, coarse, Limits(micro_batch_size=32))[0].micro_batch_size == 32


def test_smaller_micro_batches_at_the_ends_shorten_the_wait_for_the_first() -> None:
    model = _two(2000.0, batch=256)
    plain = replace(choice(model.job, dp=2), micro_batch_size=32, sharding="none")
    fixed = Limits(run_ahead=0, defer_weights=False, sharding="none", micro_batch_size=32)
    found, prediction = choose_means(model, plain, fixed)
    assert found == replace(plain, taper=True)
    before = predict_by_simulation(model, plain)
    one = before.pipeline_seconds / 5  # four micro-batches, and one for filling and draining
    assert 0.25 * one < before.pipeline_seconds - prediction.pipeline_seconds < 0.5 * one
    put_off = [predict_by_simulation(model, replace(plain, defer_weights=True, taper=taper)) for taper in (False, True)]
    assert put_off[1].pipeline_seconds < put_off[0].pipeline_seconds - 0.1 * one
    assert choose_means(model, plain, replace(fixed, taper=False))[0] == plain
    single = replace(plain, micro_batch_size=1)
    assert not replace(single, taper=True).tapered
    same = predict_by_simulation(model, replace(single, taper=True))
    assert same == predict_by_simulation(model, single)


@pytest.mark.parametrize("rate", [20.0, 2000.0])
def test_a_search_ends_with_them(rate: float) -> None:
    work = _two(rate).job
    limits = Limits(pp=2, dp=2, tp=1, schedule="1f1b")
    free = search(work, limits).best
    without = search(work, replace(limits, run_ahead=0, defer_weights=False, taper=False, sharding="optimizer")).best
    assert free.choice.run_ahead or free.choice.defer_weights
    assert free.prediction.step_seconds < without.prediction.step_seconds


def test_several_means_are_put_together() -> None:
    """A tied embedding, a slow link, few and large micro-batches, idle ends: each of four means gains."""
    tied = gpt(1024, 8, 16, 512, vocab_size=16384, tie_word_embeddings=True)
    work = replace(_two(50.0).job, profile=tied, batch=0, replica_batch=32)
    plain = replace(choice(work, dp=2), micro_batch_size=16)
    found, prediction = choose_means(CostModel(work), plain, Limits())
    means = ("embedding_on_last", "defer_weights", "sharding", "micro_batch_size", "run_ahead", "taper")
    changed = [name for name in means if getattr(found, name) != getattr(plain, name)]
    assert len(changed) >= 3, changed
    for name in changed:  # none of them is there for nothing
        without = predict_by_simulation(CostModel(work), replace(found, **{name: getattr(plain, name)}))
        assert without.step_seconds >= prediction.step_seconds, name
