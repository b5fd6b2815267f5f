# SPDX-License-Identifier: Apache-2.0
"""Who steps which parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holmes_core.errors import HolmesError
from holmes_core.runtime.data_parallel import DataParallel, _make_buckets, assign_owners
from holmes_core.runtime.torch_compat import storage_is_shared


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 9), st.data())
def test_owners_are_balanced(sizes: list[int], ranks: int, data: st.DataObject) -> None:
    load = data.draw(st.none() | st.lists(st.integers(0, 500), min_size=ranks, max_size=ranks))
    before = list(load) if load else None
    owners = assign_owners(sizes, ranks, load)
    assert load == before, "the caller's list is left alone"
    assert owners == assign_owners(sizes, ranks, load)
    assert len(owners) == len(sizes)
    total = list(load) if load else [0] * ranks
    for owner, size in zip(owners, sizes, strict=True):
        assert 0 <= owner < ranks
        total[owner] += size
    # Greedy: whoever ends fullest was the emptiest before its last (smallest) parameter.
    for rank in range(ranks):
        mine = [s for s, o in zip(sizes, owners, strict=True) if o == rank]
        if mine:
            assert total[rank] - min(mine) <= min(total)



def test_memory_that_somebody_looks_at_is_told() -> None:
    home = torch.zeros(10)
    assert not storage_is_shared(home)
    param = torch.nn.Parameter(torch.zeros(4))
    param.grad = home[:4]
    assert storage_is_shared(home)
    aside = param.grad.view(2, 2)[0]
    param.grad = None
    assert storage_is_shared(home), "a view of a view is held still"
    del aside
    assert not storage_is_shared(home)


def test_gradients_that_were_put_aside_keep_their_values(tmp_path: Path) -> None:
    """Sums go where the last ones were, unless the script still holds those; parameters nobody used have none."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        group = dist.group.WORLD
        one = DataParallel(params, owner=None, group=group, count=lambda *_: None)
        one._buckets = _make_buckets(params, lambda _: None)  # one rank has none by itself
        places, aside = [], None
        for step in range(4):
            for value, param in enumerate(params[:2]):
                param.grad = torch.full((3,), 10.0 * step + value)
            if step == 2:
                assert aside is not None
                assert aside.tolist() == [11.0] * 3
            one.reduce_gradients()
            assert params[2].grad is None
            assert [p.grad[0].item() for p in params[:2]] == [10.0 * step, 10.0 * step + 1]
            places.append(params[0].grad.untyped_storage().data_ptr())
            if step == 1:
                aside = params[1].grad
            for param in params:
                param.grad = None
        assert places[0] == places[1]
        assert places[1] != places[2], "step 1's are held"
        assert places[2] == places[3]
        assert aside is not None
        assert aside.tolist() == [11.0] * 3
    finally:
        dist.destroy_process_group()


def test_what_a_split_backward_tells_makes_buckets_leave_in_order(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        params = [torch.nn.Parameter(torch.ones(2**18)) for _ in range(3)]
        for overlap, expected in ((True, [0, 1, 1, 3]), (False, [0, 0, 0, 0])):
            one = DataParallel(params, owner=None, group=dist.group.WORLD, count=lambda *_: None, overlap=overlap)
            one.expect(dict.fromkeys(params, (1,)), keep=False)
            one.completing(1)
            one.accumulated(params[0])  # one replica: nothing to sum, nothing to do
            one.completing(None)
            one.discard()
            one._buckets = _make_buckets(params, lambda _: None)
            one._bucket_of = {p: b for b in one._buckets for part in b.parts.values() for p in part}
            for param in params:
                param.grad = torch.ones_like(param)
            one.expect(dict.fromkeys(params, (1,)), keep=False)
            launched = []
            one.accumulated(params[2])  # not the last backward yet
            launched.append(one._launched)
            one.completing(1)
            for index in (2, 0, 1):
                one.accumulated(params[index])
                launched.append(one._launched)
            assert launched == expected
            one.completing(None)
            assert one._launched == 3
            one.reduce_gradients()
            assert [float(p.grad[0]) for p in params] == [1.0, 1.0, 1.0]
    finally:
        dist.destroy_process_group()


def test_what_two_stages_add_to_leaves_when_both_have(tmp_path: Path) -> None:
    """Between two buckets of the stage whose backward is interrupted for the other's."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        params = [torch.nn.Parameter(torch.ones(2**18)) for _ in range(4)]
        one = DataParallel(params, owner=None, group=dist.group.WORLD, count=lambda *_: None)
        buckets = one._in_order(last={params[0]}, last_at=2 / 3)
        assert [part[None] for part in (bucket.parts for bucket in buckets)] == [[params[i]] for i in (3, 2, 0, 1)]
        one._buckets = buckets
        one._bucket_of = {p: b for b in one._buckets for part in b.parts.values() for p in part}
        for param in params:
            param.grad = torch.ones_like(param)
        one.expect({param: (0, 2) if param is params[0] else (2,) for param in params}, keep=False)
        one.completing(2)
        for index in (0, 3, 2):
            one.accumulated(params[index])
        assert one._launched == 2
        one.pausing()
        one.accumulated(params[1])  # some backward that is not the stage's last
        one.accumulated(params[0])  # nor is this the other stage's
        assert one._launched == 2
        one.completing(0)
        one.accumulated(params[0])
        assert one._launched == 3
        one.completing(None)
        one.completing(2)
        one.accumulated(params[1])
        assert one._launched == 4
        one.reduce_gradients()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("keep", [False, True])
def test_a_gradient_that_grows_after_it_has_left_is_noticed(tmp_path: Path, keep: bool) -> None:
    """As of a parameter used twice, recomputed each time in a backward of its own."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        params = [torch.nn.Parameter(torch.ones(2**18)) for _ in range(3)]
        one = DataParallel(params, owner=None, group=dist.group.WORLD, count=lambda *_: None)
        one._buckets = _make_buckets(params, lambda _: None)
        one._bucket_of = {p: b for b in one._buckets for part in b.parts.values() for p in part}
        for _ in range(2):  # what was noticed is forgotten by the next step
            for param in params:
                param.grad = torch.ones_like(param)
            one.expect(dict.fromkeys(params, (1,)), keep=keep)
            one.completing(1)
            one.accumulated(params[2])
            assert not one.grown
            if keep:
                one.accumulated(params[2])
                assert one.grown
            else:
                with pytest.raises(HolmesError, match="use_reentrant=False"):
                    one.accumulated(params[2])
            one.discard()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("owner", [None, 0])
def test_gradients_are_scaled_as_they_leave(tmp_path: Path, owner: int | None) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        params = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter()]
        owners = None if owner is None else dict.fromkeys(params, owner)
        one = DataParallel(params, owner=owners, group=dist.group.WORLD, count=lambda *_: None)
        one._buckets = _make_buckets(params, one.owner.get)
        one.factor = 0.25
        for value in (4.0, 8.0):
            params[0].grad, params[1].grad = torch.full((3, 2), value).t(), torch.full((4,), value)
            one.reduce_gradients()
            assert params[0].grad.tolist() == [[value / 4] * 3] * 2
            assert params[1].grad.tolist() == [value / 4] * 4
            assert params[2].grad is None
    finally:
        dist.destroy_process_group()
