# SPDX-License-Identifier: Apache-2.0
"""Closed-form predictions: memory, links and pace, by hand and against the simulation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from holmes_core.plan.cost import ACTION_OPERATIONS, CostModel, Prediction, StageCosts
from holmes_core.plan.cost_memory import HEAP, ParameterBytes
from holmes_core.plan.cost_network import SOCKET_EFFICIENCY, Network
from holmes_core.plan.cost_schedule import in_flight, pipeline_seconds
from holmes_core.plan.cost_values import SHOWN_ON_CPU, SOCKET_COPIES
from holmes_core.plan.hardware import Hardware, Link, Measured
from tests.core.plan.prediction_jobs import choice, cluster, gpt, job, two_clusters


def test_f4_13_early_stages_hold_more() -> None:
    def held(schedule: str) -> list[int]:
        return [in_flight(schedule, rank=r, pp=4, virtual_stages=1, num_microbatches=8) for r in range(4)]

    assert [3 * count for count in held("1f1b")] == [12, 9, 6, 3]  # GiB, at 3 GiB each
    assert [3 * count for count in held("gpipe")] == [24] * 4
    assert in_flight("1f1b", rank=0, pp=4, virtual_stages=1, num_microbatches=2) == 2


def test_f4_13_blocks_move_away_from_a_stage_without_memory() -> None:
    profile = gpt(4096, 24, 32, 4096)
    work = job(cluster("a", 4, gpu="V100-32GB"), batch=64, profile=profile, precision="bf16-true")
    plain = choice(work, micro_batch_size=2)
    model = CostModel(work)
    assert plain.layers_per_stage[0] < plain.layers_per_stage[2]
    assert model.predict(plain).fits
    equal = choice(work, micro_batch_size=2, layers_per_stage=(6, 6, 6, 6))
    assert not model.predict(equal).fits


def test_pace_of_equal_stages() -> None:
    """No links: (m + p - 1) (f + b), for 1F1B and GPipe alike; interleaving divides the bubble."""
    f, b, m = [1.0] * 4, [2.0] * 4, 16
    none = [0.0] * 3
    for schedule in ("1f1b", "gpipe"):
        assert pipeline_seconds(schedule, f, b, none, none, num_microbatches=m, pp=4) == pytest.approx((m + 3) * 3)
    halves = pipeline_seconds("interleaved_1f1b", [0.5] * 8, [1.0] * 8, [0.0] * 7, [0.0] * 7, num_microbatches=m, pp=4)
    assert halves == pytest.approx(m * 3 + 3 * 3 / 2)


def test_pace_of_one_slow_edge() -> None:
    """Two stages take turns: per two micro-batches the work of both and a round trip, so w + hop each."""
    f, b = [1.0, 1.0], [2.0, 2.0]
    short, long = (pipeline_seconds("1f1b", f, b, [0.8], [0.0], num_microbatches=m, pp=2) for m in (10, 20))
    assert (long - short) / 10 == pytest.approx(3.0 + 0.8)


def test_f4_23_one_ethernet_port_and_less_than_its_rate() -> None:
    """However many ports a host has, what crosses clusters goes through one, and does not fill it."""
    one, two = (
        Network(Hardware(clusters=(cluster("a", 8, nics=n), cluster("b", 8, kind="roce", nics=n)))) for n in (1, 2)
    )
    edges = [net.edge(net.places(0, 8)[0], net.places(1, 8)[0], 8) for net in (one, two)]
    assert edges[0].bandwidth == edges[1].bandwidth == 25e9 / 8 / 8 * SOCKET_EFFICIENCY  # eight ranks share it
    assert SOCKET_EFFICIENCY < 1
    assert edges[0].kind == "across"


def test_ranks_of_a_host_share_its_ports() -> None:
    net = Network(Hardware(clusters=(cluster("a", 8, 8, 8, 8, nics=4),)))
    whole, half = net.places(0, 8), net.places(0, 4)
    assert net.edge(whole[0], whole[1], 8).bandwidth * 2 == net.edge(half[1], half[2], 4).bandwidth
    assert net.edge(half[0], half[1], 4).kind == "host"
    assert [place.first_host for place in net.places(0, 16)] == [0, 2]


def test_declared_links_limit_what_crosses() -> None:
    clusters = (cluster("a", 8), cluster("b", 8, kind="roce"))
    for link in (Link(between=("b", "a"), rate=5.0), Link(between=("a", "b"), total=5.0)):
        net = Network(Hardware(clusters=clusters, links=(link,)))
        edge = net.edge(net.places(0, 8)[0], net.places(1, 8)[0], 8)
        assert edge.bandwidth == pytest.approx(5e9 / 8 / 8)


def test_uneven_hosts_are_cut_in_order() -> None:
    places = Network(Hardware(clusters=(cluster("a", 2, 3, 3),))).places(0, 4)
    assert [(p.first_host, p.last_host, p.per_host) for p in places] == [(0, 1, 2), (1, 2, 3)]


def test_memory_by_hand() -> None:
    """GPT 3.6B, two replicas: 10 bytes a parameter, Adam's 8 shared by two, kept activations and logits."""
    work = job(cluster("a", 2), batch=2)
    profile = work.profile
    one = choice(work, dp=2)
    expected = profile.parameters * (10 + 8 / 2) + 1.5 * 2**30
    kept = sum(block.activation_bytes for block in profile.blocks) + profile.head_activation_bytes
    expected += max(kept, 4 * profile.parameters)  # flat copies of the gradients, when activations are gone
    assert CostModel(work).predict(one).memory_bytes[0] == pytest.approx(expected, rel=1e-6)


def test_a_processors_heap_holds_more_than_is_in_use() -> None:
    """Small tensors leave holes where they were freed; those of 32 MiB and more are mapped one by one."""
    for hidden, factor in ((512, HEAP), (2048, 1.0)):
        profile = gpt(hidden, 8, 8, 128, vocab_size=4096)
        sizes = [
            CostModel(work).predict(choice(work, dp=2)).memory_bytes[0]
            for kind in ("cpu", "cuda")
            for work in [job(cluster("a", 2), batch=4, profile=profile, precision="32-true", runtime_bytes=0,
                device_type=kind)]
        ]  # fmt: skip
        # 4 + 4 + 8 / 2 bytes and, at the end, 4 for what leaves and, with gloo, 2 for what the owner receives.
        assert sizes[0] / sizes[1] == pytest.approx(factor * 18 / 16, rel=0.01)


def test_recomputation_trades_memory_for_time() -> None:
    work = two_clusters()
    model = CostModel(work)
    plain, again = (model.predict(choice(work, dp=8, recompute=r)) for r in (False, True))
    assert max(again.memory_bytes) < max(plain.memory_bytes)
    assert again.pipeline_seconds > plain.pipeline_seconds


def test_tensor_parallelism_halves_weights_and_adds_traffic() -> None:
    work = two_clusters()
    model = CostModel(work)
    one, two = (model.stage_costs(choice(work, tp=tp, dp=16 // tp)) for tp in (1, 2))
    assert two.static_bytes[0] < one.static_bytes[0]
    assert one.forward[0] / 2 < two.forward[0] < one.forward[0]


def test_gradients_cross_hosts_or_stay_inside() -> None:
    work = two_clusters()
    model = CostModel(work)
    wide, narrow = model.stage_costs(choice(work, dp=16)), model.stage_costs(choice(work, dp=8))
    assert min(wide.gradient_bytes) > 0
    assert max(narrow.gradient_bytes) == 0
    assert max(narrow.reduce_seconds) < max(wide.reduce_seconds)
    hidden = CostModel(two_clusters(overlap=1.0)).predict(choice(work, dp=16))
    shown = CostModel(two_clusters(overlap=0.0)).predict(choice(work, dp=16))
    assert hidden.gradient_seconds == pytest.approx(shown.gradient_seconds / 2)  # parameters are handed out in sight


def test_without_shared_optimizers_nothing_is_handed_out() -> None:
    """The same bytes, but all of them while gradients are summed; every replica holds and steps everything."""
    work = two_clusters(overlap=1.0)
    model = CostModel(work)
    shared, own = (model.predict(choice(work, dp=16, sharding=name)) for name in ("optimizer", "none"))
    assert own.gradient_seconds == 0 < shared.gradient_seconds
    assert own.link_bytes == shared.link_bytes
    assert own.optimizer_seconds == pytest.approx(16 * shared.optimizer_seconds)
    assert min(own.memory_bytes) > max(shared.memory_bytes)


def test_memory_at_the_end_of_a_step() -> None:
    """gloo's owners receive a copy of every replica; AdamW's square roots on GPUs; flat copies of parameters."""
    gloo, nccl = (ParameterBytes.of("32-true", gloo=gloo) for gloo in (True, False))
    assert gloo.static(2, sharded=True) == 4 + 4 + 8 / 2
    assert gloo.static(2, sharded=False) == 16 + 4  # sums have a place of their own
    assert gloo.static(1, sharded=False) == nccl.static(2, sharded=False) == 16
    assert gloo.ending(2, sharded=True) == 4 * 1.5
    assert gloo.ending(4, sharded=True) == 4 * 1.75
    assert gloo.ending(4, sharded=False) == 0
    assert nccl.ending(4, sharded=True) == 4
    assert gloo.ending(1, sharded=True) == 0
    assert nccl.ending(1, sharded=True) == 4  # 4 bytes of square roots for each parameter
    held = ParameterBytes.of("32-true", gloo=True, heap=1.5)
    assert held.static(2, sharded=True) == 1.5 * 12
    assert held.ending(2, sharded=True) == 1.5 * 6
    frozen = ParameterBytes.of("32-true", trainable=0.0)
    assert frozen.static(1, sharded=True) == 4


def test_what_was_measured_around_the_blocks_is_counted() -> None:
    """Every stage runs the user's step; gradients and parameters are copied into flat buffers and out again."""
    plain = Measured(block_flops=gpt().blocks[0].forward_flops, forward=0.01, backward=0.02, optimizer=1e-9)

    def costs(**more: float) -> StageCosts:
        work = job(cluster("a", 4, measured=replace(plain, **more)), batch=64, device_type="cpu", precision="32-true")
        return CostModel(work).stage_costs(choice(work, dp=2, micro_batch_size=4, layers_per_stage=(15, 15)))

    nothing, around, fixed, copied = costs(), costs(around=0.003), costs(head_fixed=0.5), costs(copied=1e-9)
    slow = costs(operation=1e-5)
    for passes, count in zip(("forward", "backward"), ACTION_OPERATIONS, strict=True):
        each = [b - a for a, b in zip(getattr(nothing, passes), getattr(slow, passes), strict=True)]
        assert each == pytest.approx([count * 1e-5] * 2)
    assert [b - a for a, b in zip(nothing.forward, around.forward, strict=True)] == pytest.approx([0.003, 0.003])
    assert [b - a for a, b in zip(nothing.backward, fixed.backward, strict=True)] == pytest.approx([0, 0.5])
    parameters = 15 * gpt().blocks[0].parameters + gpt().embedding_parameters
    # Gradients: everything once, and the other replica's half added. Parameters: half into sockets, half out of them.
    for name, copies in (("copy_seconds", 1.5), ("spread_seconds", SOCKET_COPIES)):
        more = getattr(copied, name)[0] - getattr(nothing, name)[0]
        assert more == pytest.approx(copies * 4 * parameters * 1e-9)
    # What travels hides under the next forward pass; what a processor does for it, and a part of the way, does not.
    travel, spread = copied.gather_seconds[0], copied.spread_seconds[0]
    assert copied.exposed_gather(0, False) == travel + spread
    for opening in (0.01 * travel, travel):
        left = max(SHOWN_ON_CPU * travel, travel - opening)
        assert replace(copied, opening=(opening, 0.0)).exposed_gather(0, True) == pytest.approx(left + spread)


def test_tied_weights_cost_a_trip_between_the_ends() -> None:
    tied = two_clusters(profile=gpt(tie_word_embeddings=True))
    untied = two_clusters()
    costs = [CostModel(work).stage_costs(choice(work, dp=8)) for work in (tied, untied)]
    assert costs[0].tied_seconds > 0
    assert costs[1].tied_seconds == 0


def test_bytes_per_link() -> None:
    work = two_clusters(batch=32)
    found = CostModel(work).predict(choice(work, dp=16)).link_bytes
    # 32 samples, 2048 x 3072 bf16 values each, there and back.
    assert found["a -> b (ethernet)"] == 2 * 32 * 2048 * 3072 * 2


def test_a_faster_cluster_gets_more_blocks() -> None:
    work = job(cluster("a", 8, speed=197.0), cluster("b", 8, kind="roce", speed=160.0))
    layers = choice(work, dp=8).layers_per_stage
    assert layers[0] > layers[1]


def test_prediction_goes_to_json_and_back() -> None:
    work = two_clusters()
    prediction = CostModel(work).predict(choice(work, dp=8))
    assert Prediction.from_json(json.loads(json.dumps(prediction.to_json()))) == prediction
