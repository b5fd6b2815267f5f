# SPDX-License-Identifier: Apache-2.0
"""Parts that need no processes: merging of logged values, watched lists, watched loaders."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from holmes_core.errors import ConfigError
from holmes_core.runtime.step_record import ListWatch, StepRecord, merge_outputs
from holmes_lightning.feed import Feed, Feeds, Progress, progress_of, restore, snapshot

CPU = torch.device("cpu")


def _record(values: list[float], probe: bool = False, **kwargs: Any) -> StepRecord:
    record = StepRecord(lambda _: None)
    if probe:  # the engine tries the step on more micro-batches than the batch has
        record.counts = False
        for index in range(3):
            record.index = index
            record.log("x", 100.0, **kwargs)
        record.counts = True
    for index, value in enumerate(values):
        record.index = index
        record.log("x", torch.tensor(value), **kwargs)
    return record


@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", 1.5), ("sum", 4.0), ("max", 3.0), ("min", 1.0), (torch.mean, 1.5), (sum, 4.0)]
)
def test_values_are_merged_over_micro_batches(reduce_fx: Any, expected: float, probe: bool) -> None:
    (call,) = _record([1.0, 3.0], probe, reduce_fx=reduce_fx).merge([0.75, 0.25], None)
    assert call.value == pytest.approx(expected)


def test_batch_sizes_add_up_without_probes() -> None:
    (call,) = _record([1.0, 3.0], True, batch_size=4).merge([0.5, 0.5], None)
    assert call.kwargs["batch_size"] == 8


def test_lists_that_grew_and_lists_cut_back() -> None:
    owner = SimpleNamespace(outputs=[1], other=[], _hidden=[])
    watch = ListWatch(owner)
    owner.outputs.append(torch.ones(2, requires_grad=True))
    owner._hidden.append(1)
    tails = watch.tails()
    assert list(tails) == ["outputs"]
    assert not tails["outputs"][0].requires_grad
    watch.cut()
    assert owner.outputs == [1]


def test_outputs_beside_the_loss() -> None:
    outputs = [{"loss": 1, "acc": torch.tensor(0.0), "rows": torch.ones(2, 3)} for _ in range(2)]
    outputs[1]["acc"] = torch.tensor(1.0)
    merged = merge_outputs(outputs, [0.25, 0.75])
    assert float(merged["acc"]) == 0.75
    assert merged["rows"].shape == (4, 3)


# ---- loaders ---------------------------------------------------------------------------------------------------------


def test_a_watched_loader_is_the_users_loader_again_afterwards() -> None:
    class Mine(DataLoader):
        pass

    loader = Mine(list(range(6)), batch_size=2)
    feed = Feed(loader, CPU)
    assert feed.watch() is loader
    assert isinstance(loader, Mine)
    assert len(loader) == 3
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]]
    assert feed.started is not None
    assert feed.drawn is not None
    feed.release()
    assert type(loader) is Mine
    assert "_holmes_feed" not in vars(loader)


def test_skipped_samples_are_not_loaded() -> None:
    loaded: list[int] = []

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> int:
            loaded.append(i)
            return i

    torch.manual_seed(3)
    first = Feeds(device=CPU, dp=1, replica=0)
    loader = first.add(DataLoader(Data(), batch_size=3, shuffle=True), None)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 2:
            saved = first.state([first.mine()])
    loaded.clear()
    torch.manual_seed(4)
    again = Feeds(device=CPU, dp=1, replica=0)
    again.load(saved)
    rest = [b.tolist() for b in again.add(DataLoader(Data(), batch_size=3, shuffle=True), Progress(epoch=0, done=2))]
    assert rest == batches[2:]
    assert loaded == [*batches[2], *batches[3]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_checkpoints_of_other_strategies_skip_too(shuffle: bool, recwarn: pytest.WarningsRecorder) -> None:
    feeds = Feeds(device=CPU, dp=1, replica=0)
    feeds.load({})
    loader = feeds.add(DataLoader(list(range(6)), batch_size=2, shuffle=shuffle), Progress(epoch=0, done=2))
    assert len(list(loader)) == 1
    assert any("saved by another strategy" in str(w.message) for w in recwarn) == shuffle


def test_stateful_loaders_are_left_to_lightning() -> None:
    class Stateful(DataLoader):
        def state_dict(self) -> dict:
            return {}

        def load_state_dict(self, state: dict) -> None: ...

    loader = Stateful(list(range(4)))
    assert Feeds(device=CPU, dp=1, replica=0).add(loader, Progress(epoch=0, done=2)) is loader
    assert type(loader) is Stateful


@pytest.mark.parametrize(("dp", "batch", "fits"), [(2, 3, True), (1, 3, False), (2, 6, False)])
def test_other_positions_are_refused(dp: int, batch: int, fits: bool) -> None:
    """F3-36."""
    one = Feeds(device=CPU, dp=2, replica=0)
    one.add(DataLoader(list(range(12)), batch_size=3), None)
    saved = one.state([one.mine(), one.mine()])
    other = Feeds(device=CPU, dp=dp, replica=0)
    other.load(saved)
    loader = DataLoader(list(range(12)), batch_size=batch)
    if fits:
        other.add(loader, Progress(epoch=0, done=1))
        return
    with pytest.raises(ConfigError, match="saved after 1 batches of an epoch, by 2 replicas with batches of 3"):
        other.add(loader, Progress(epoch=0, done=1))
    other.add(loader, Progress(epoch=1, done=0))  # between epochs nothing stands in the way


def test_random_state_survives_a_checkpoint(tmp_path: Any) -> None:
    import numpy as np

    torch.save(snapshot(CPU, []), tmp_path / "state.pt")
    draws = (torch.rand(2).tolist(), random.random(), np.random.rand())
    restore(torch.load(tmp_path / "state.pt", weights_only=True), CPU, [])
    assert draws == (torch.rand(2).tolist(), random.random(), np.random.rand())


@pytest.mark.parametrize(
    ("started", "processed", "ready", "done", "last", "expected"),
    [
        (1, 0, 3, 3, False, Progress(epoch=0, done=3)),
        (1, 0, 4, 3, False, Progress(epoch=0, done=3)),  # stopped within a step
        (1, 0, 5, 5, True, Progress(epoch=1, done=0)),
        (1, 1, 5, 5, True, Progress(epoch=1, done=0)),
        (0, 0, 0, 0, False, Progress(epoch=0, done=0)),
    ],
)
def test_where_a_restored_loop_goes_on(
    started: int, processed: int, ready: int, done: int, last: bool, expected: Progress
) -> None:
    batches = SimpleNamespace(is_last_batch=last, current=SimpleNamespace(ready=ready, processed=done))
    loop = SimpleNamespace(
        epoch_progress=SimpleNamespace(current=SimpleNamespace(started=started, processed=processed)),
        epoch_loop=SimpleNamespace(batch_progress=batches),
    )
    assert progress_of(loop) == expected
