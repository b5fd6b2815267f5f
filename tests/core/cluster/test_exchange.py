# SPDX-License-Identifier: Apache-2.0
"""Inventories travel over any store; whoever does not come is named."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from holmes_core.cluster.exchange import exchange, say
from holmes_core.cluster.nic import Inventory, Nic
from holmes_core.errors import HolmesError


class MemoryStore:
    """The least a store has to offer."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.changed = threading.Condition()
        self.reads: list[str] = []

    def set(self, key: str, value: Any) -> None:
        with self.changed:
            self.values[key] = value.encode() if isinstance(value, str) else value
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        self.reads.append(key)
        with self.changed:
            return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: all(key in self.values for key in keys), timeout.total_seconds()):
                raise RuntimeError("wait timeout")


def host(name: str, rank: int) -> Inventory:
    nics = (Nic(device="mlx5_0", kind="roce", rate=100.0, addresses=("192.0.2.1/24",)),)
    return Inventory(host=name, nics=nics, rails=("mlx5_0",), kind="roce", environment=(("NCCL_TEST", str(rank)),))


def meet(stores: list[Any], ranks: list[int], world_size: int, timeout: float) -> list[Any]:
    def one(rank: int) -> Any:
        inventory = host(f"h{rank // 2}", rank)
        try:
            return exchange(stores[rank], inventory, rank=rank, world_size=world_size, timeout=timeout)
        except HolmesError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks))


def test_every_rank_gets_all_inventories() -> None:
    store = MemoryStore()
    results = meet([store] * 4, [0, 1, 2, 3], 4, 10.0)
    expected = [host(f"h{rank // 2}", rank) for rank in range(4)]
    assert results == [expected] * 4
    # The host's part is read once per host, not once per rank.
    bodies = [key for key in store.reads if key.startswith("inventory/")]
    assert len(set(bodies)) == 2
    assert len(bodies) == 2 * 4


def test_absent_ranks_are_named_with_what_they_last_said() -> None:
    store = MemoryStore()
    say(store, rank=2, text="host h1: looking at its networks")
    start = time.monotonic()
    first, second = meet([store] * 4, [0, 1], 4, 0.3)
    assert time.monotonic() - start < 5
    for error in (first, second):
        assert isinstance(error, HolmesError)
        text = str(error)
        assert "2 of 4 ranks did not hand in their inventory within 0.3 s" in text
        assert "rank 2: last said: host h1: looking at its networks" in text
        assert "rank 3: was never heard of" in text
        assert "run on: h0" in text


def test_a_dead_store_is_an_error_of_its_own() -> None:
    class Dead(MemoryStore):
        def set(self, key: str, value: Any) -> None:
            raise ConnectionError("Connection reset by peer")

    with pytest.raises(HolmesError, match="store does not answer: Connection reset"):
        exchange(Dead(), host("h0", 0), rank=0, world_size=2, timeout=1.0)


def test_another_version_is_named() -> None:
    store = MemoryStore()
    store.set("rank/1", '{"host": "h9", "inventory": "abc", "environment": []}')
    import zlib

    store.set("inventory/abc", zlib.compress(b'{"host": "h9", "colour": 1}'))
    with pytest.raises(HolmesError, match="inventory of rank 1 cannot be read: unknown key 'colour'"):
        exchange(store, host("h0", 0), rank=0, world_size=2, timeout=1.0)


def test_over_torch_stores() -> None:
    dist = pytest.importorskip("torch.distributed")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))
    stores = [dist.PrefixStore("holmes/hosts", store) for store in (server, client)]
    assert meet(stores, [0, 1], 2, 10.0) == [[host("h0", 0), host("h0", 1)]] * 2
    lonely = [dist.PrefixStore("again", store) for store in (server, client)]
    say(lonely[1], rank=1, text="host h0: importing torch")
    [error] = meet(lonely, [0], 2, 0.3)
    assert "rank 1: last said: host h0: importing torch" in str(error)
    in_memory = dist.HashStore()
    assert meet([in_memory], [0], 1, 5.0) == [[host("h0", 0)]]
