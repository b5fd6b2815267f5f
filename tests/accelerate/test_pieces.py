# SPDX-License-Identifier: Apache-2.0
"""Losses, collectives, refusals and other spellings, each on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from holmes_accelerate.loaders import batch_size_of
from tests.lightning.farm import Farm

CALL = "tests.accelerate.scenarios:call"
PP2 = {"pp": 2, "num_microbatches": 2}


def on_ranks(farm: Farm, function: str, config: dict[str, Any] | None = PP2, **arguments: Any) -> list[Any]:
    config = config or {}
    world = arguments.pop("world", config.get("pp", 1) * config.get("dp", 1) * config.get("tp", 1))
    return farm.run(CALL, world=world, config=config or None, function=function, **arguments).values


def alone(farm: Farm, function: str, **arguments: Any) -> Any:
    return farm.run(CALL, rank_env=[{}], function=function, **arguments).values[0]


@pytest.mark.parametrize("config", [PP2, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=["stages", "tp"])
def test_what_scripts_do_with_losses(farm: Farm, config: dict[str, Any]) -> None:
    expected = alone(farm, "losses")
    for found in on_ranks(farm, "losses", config):
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected["quarter"] == pytest.approx(expected["plain"] / 4, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [{"dp": 2}, {"dp": 2, "overlap_param_gather": True}, pytest.param({**PP2, "dp": 2}, marks=pytest.mark.slow)],
    ids=["replicas", "and-parameters", "of-stages"],
)
def test_gradients_that_leave_during_the_backward(farm: Farm, config: dict[str, Any]) -> None:
    """They do where it can be known that the step is complete, and whatever a script does, nothing changes."""
    found, *others = on_ranks(farm, "ahead", config)
    expected, *_ = on_ranks(farm, "ahead", {**config, "overlap": False, "overlap_param_gather": False})
    for habit, run in expected.items():
        assert run["early"] == [0] * 6
        for name, value in run["weights"].items():
            torch.testing.assert_close(found[habit]["weights"][name], value, rtol=0, atol=1e-6, msg=f"{habit} {name}")
    early = {habit: [count > 0 for count in run["early"]] for habit, run in found.items()}
    assert early["accumulate"] == [False, True] * 3
    assert early["own_loss"] == [True] * 6  # nothing to guess
    if "pp" in config:
        # The first step shows what a loss is multiplied by; after one wrong guess there is none any more.
        assert early["plain"] == early["zero_first"] == [False] + [True] * 5
        assert early["scaled"] == early["zeroed_in_place"] == [False, True] + [False] * 4
        assert early["by_hand"] == early["changed"] == early["dropped"] == [False, True, True] + [False] * 3
        assert early["two_forwards"] == [False] * 6  # the backward of one is not all
    else:  # a model in one piece: what the backward makes is what leaves
        for habit in ("plain", "zero_first", "scaled", "zeroed_in_place", "two_forwards"):
            assert early[habit] == [True] * 6, habit
        assert early["dropped"] == [True, True, False, True, True, True]
        assert early["changed"] == [True] * 3 + [False] * 3
        assert early["by_hand"] == [True] + [False] * 5  # a second backward before the step
    assert all([count > 0 for count in run[habit]] == early[habit] for run in others for habit in early)


@pytest.mark.parametrize("sharding", ["optimizer", "none"])
def test_a_model_in_one_piece_is_called_as_in_any_loop(farm: Farm, sharding: str) -> None:
    """Outputs of one call in the next, losses made of several outputs, norms of unfinished gradients."""
    found, _ = on_ranks(farm, "whole_calls", {"dp": 2, "sharding": sharding})
    assert set(found["differences"]) == {"logits", "chain", "shared", "norms", "called", "inner", "replayed"}
    for name, difference in found["differences"].items():
        assert difference < 2e-6, (name, difference)
    assert found["type"] == "CausalLMOutputWithCrossAttentions"
    assert found["logits"][0] == 4


def test_what_one_replica_does_by_itself(farm: Farm) -> None:
    """It looks at gradients and outputs, or takes its batch in two calls: no sum waits for another that never comes."""
    ranks = on_ranks(farm, "habits_of_one_rank", {"dp": 2, "timeout": 30.0})
    assert ranks[0]["norm"] == ranks[1]["norm"]
    # The last but one step was not the same everywhere; after it nothing leaves early any more.
    assert ranks[0]["early"] == [True, True, True, False]
    assert ranks[1]["early"] == [True, True, False, False]
    expected = on_ranks(farm, "habits_of_one_rank", {"dp": 2, "overlap": False}, habits=False)[0]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, rtol=0, atol=1e-6, msg=name)
    assert all("after loss.backward()" in found["inside"] for found in ranks)


def test_an_optimizer_in_the_place_of_one_that_is_gone(farm: Farm) -> None:
    assert on_ranks(farm, "optimizers_that_come_and_go", {"dp": 2}) == [20, 20]


def test_three_replicas(farm: Farm) -> None:
    for found in on_ranks(farm, "parts_by_themselves", {"dp": 3}):
        assert max(found.values()) < 2e-6, found


def test_gradients_that_the_script_makes_itself(farm: Farm) -> None:
    """What changes after it has left is summed again, and what no backward has added is summed, too."""
    found = on_ranks(farm, "gradients_of_ones_own", {"dp": 2})
    expected = on_ranks(farm, "gradients_of_ones_own", {"dp": 2, "overlap": False})[0]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found[0]["weights"][name], value, rtol=0, atol=1e-6, msg=name)
    assert all("then optimizer.step()" in one["closure"] for one in found)
    whole = on_ranks(farm, "gradients_of_ones_own", {"dp": 2, "sharding": "none"})[0]["weights"]
    for name, value in expected["weights"].items():
        torch.testing.assert_close(whole[name], value, rtol=0, atol=1e-6, msg=name)


def test_parameters_of_before_and_after_prepare(farm: Farm) -> None:
    for found in on_ranks(farm, "parts_that_go_on", {"dp": 2}):
        assert "['late']" in found["late"]
        assert "before prepare" in found["late"]
        assert found["difference"] < 1e-6
        assert set(found["hooks"]) == {2}  # none of the model that was given back


@pytest.mark.parametrize("config", [PP2, {"dp": 2}], ids=["stages", "one-piece"])
def test_outputs_of_16_bit_compute_come_in_float32(farm: Farm, config: dict[str, Any]) -> None:
    expected = alone(farm, "precisions")
    assert set(expected.values()) == {"torch.float32"}
    assert on_ranks(farm, "precisions", config) == [expected] * 2


def test_a_trainer_that_asks_for_log_probabilities(farm: Farm) -> None:
    expected = alone(farm, "log_probabilities")
    for found in on_ranks(farm, "log_probabilities"):
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=2e-5), name


def test_a_module_without_a_loss(farm: Farm) -> None:
    expected = alone(farm, "frozen_half")
    for found in on_ranks(farm, "frozen_half"):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["lr"] == expected["lr"]
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=1e-6)


def test_refusals_say_what_to_do(farm: Farm) -> None:
    for found in on_ranks(farm, "refusals"):
        assert found["has"] == "False"
        for name, word in {
            "logits": "without labels", "twice": "second time", "part": "model.parameters()", "generate": "pp: 1",
            "second": "one pipeline trains one model", "local_sgd": "LocalSGD", "norm": "norm_type=2", "lbfgs": "AdamW",
        }.items():  # fmt: skip
            assert word in found[name], (name, found[name])
    for name, text in on_ranks(farm, "settings_refused")[0].items():
        assert name in text.lower(), (name, text)


@pytest.mark.slow
def test_saving_on_the_main_process_alone_is_explained(farm: Farm) -> None:
    found = on_ranks(farm, "saved_by_one", {**PP2, "timeout": 5.0})
    assert "not the main process" in found[0]
    assert "is_main_process" in found[0]


def test_collectives_over_replicas(farm: Farm) -> None:
    ranks = on_ranks(farm, "replicas", {"pp": 2, "dp": 2, "num_microbatches": 2})
    assert sorted(rank["index"] for rank in ranks) == [0, 0, 1, 1]
    assert [rank["last"] for rank in ranks] == [False, False, False, True]
    for found in ranks:
        d = found["index"]
        assert found["processes"] == 2
        assert found["gather"] == [0, 10, 1, 11]
        assert found["scalar"] == [0.0, 1.0]
        assert found["nested"] == [[0, 1]]
        assert (found["sum"], found["mean"], found["max"]) == (3.0, 1.5, 2.0)
        assert found["pad"] == ([[1, 1], [-1, -1]] if d == 0 else [[1, 1], [1, 1]])
        assert found["objects"] == ["r0", "r1"]
        assert found["part"] == (["a", "b"] if d == 0 else ["c"])
        assert found["trigger"] == [True, False]  # set on one rank only
        assert found["rows"] == found["expected"]  # 11 rows, none twice, in order
        assert "even_batches" in found["uneven"]


def test_clipping_past_the_accelerator_is_noticed(farm: Farm) -> None:
    for right, wrong in on_ranks(farm, "clipped_by_torch"):
        assert "clip_grad_norm_" not in right
        assert "Use accelerator.clip_grad_norm_" in wrong


def test_batches_are_equal_on_all_ranks_of_a_replica(farm: Farm) -> None:
    ranks = on_ranks(farm, "streams")
    assert ranks[0]["rows"] == ranks[1]["rows"]
    assert ranks[0]["again"] == ranks[1]["again"]
    assert ranks[0]["skipped"] == 2


def test_the_batch_of_a_step_is_known_to_predictions(farm: Farm) -> None:
    for found in on_ranks(farm, "what_is_known_of_a_step", {"pp": 2, "dp": 2}):
        assert "a replica's batch: 2 samples of" in found  # 4 rows, split over the replicas


def test_batch_sizes_of_loaders() -> None:
    rows = list(range(8))
    sampler = BatchSampler(SequentialSampler(rows), batch_size=3, drop_last=False)
    assert batch_size_of(DataLoader(rows, batch_size=2)) == 2  # type: ignore[arg-type]
    assert batch_size_of(DataLoader(rows, batch_sampler=sampler)) == 3  # type: ignore[arg-type]
    assert batch_size_of(DataLoader(rows, batch_sampler=[[0], [1, 2]])) is None  # type: ignore[arg-type]
    assert batch_size_of(torch.nn.Linear(1, 1)) is None


def test_settings_in_code(farm: Farm) -> None:
    for found in on_ranks(farm, "plugin", None, world=2):
        assert found["kinds"] == ["HolmesAccelerator", "HolmesAccelerator"]


def test_an_optimizer_that_has_stepped_keeps_its_state(farm: Farm) -> None:
    expected = alone(farm, "warm_optimizer")
    assert expected["steps"] == {3.0}
    found = on_ranks(farm, "warm_optimizer")
    assert found[0]["steps"] == {3.0}
    for rank in found:
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-5)
