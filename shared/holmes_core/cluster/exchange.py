# SPDX-License-Identifier: Apache-2.0
"""Every rank tells every other what its host has, over the job's store, before any process group exists.

The store is anything with ``set``, ``get`` and ``wait`` (torch's stores have them). A rank writes a small record with
its own environment, and the host's part under its hash: equal for all ranks of a host, so it is fetched once.
"""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

from holmes_core.cluster.nic import Inventory
from holmes_core.errors import ConfigError, HolmesError

__all__ = ["Store", "exchange", "say"]

# How long to look for a rank's last words once the time is up, in seconds, all ranks together.
_LAST_LOOK = 2.0


class Store(Protocol):
    """What the exchange needs of a store; keys that are waited for appear when another rank sets them."""

    def set(self, key: str, value: Any, /) -> None:
        """Write a value (bytes or text)."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Return when all keys are there; raise when the time is up."""


def say(store: Store, *, rank: int, text: str) -> None:
    """Leave word of what a rank is doing, for the error message of those who wait for it in vain.

    Args:
        store: The store that ``exchange`` will be given.
        rank: This rank.
        text: One line, for example ``host a1: looking at its networks``.
    """
    store.set(f"said/{rank}", text)


def exchange(store: Store, inventory: Inventory, *, rank: int, world_size: int, timeout: float) -> list[Inventory]:
    """Hand in this rank's inventory and wait for all others. Collective.

    Args:
        store: The job's store, with a prefix of its own for one exchange.
        inventory: What this rank's host has.
        rank: This rank.
        world_size: Ranks of the job.
        timeout: Longest wait, in seconds.

    Returns:
        The inventories by global rank.

    Raises:
        HolmesError: Ranks did not come in time (names them, and what they last said), or the store is gone.
    """
    deadline = time.monotonic() + timeout
    shared = json.dumps(replace(inventory, environment=()).to_json(), sort_keys=True).encode()
    digest = hashlib.sha256(shared).hexdigest()
    record = {"host": inventory.host, "inventory": digest, "environment": inventory.environment}
    try:
        store.set(f"inventory/{digest}", zlib.compress(shared))
        store.set(f"rank/{rank}", json.dumps(record))
    except Exception as error:  # whatever the store raises: there is no one class
        raise _store_gone(error, rank, inventory) from error
    keys = [f"rank/{other}" for other in range(world_size)]
    try:
        store.wait(keys, timedelta(seconds=max(timeout, 0.001)))
        found = _get_all(store, keys)
    except Exception as error:
        raise _who_is_absent(store, error, rank, world_size, timeout, inventory) from error
    records = [json.loads(text) for text in found]
    digests = list(dict.fromkeys(str(record["inventory"]) for record in records))
    try:
        store.wait([f"inventory/{one}" for one in digests], timedelta(seconds=max(deadline - time.monotonic(), 1.0)))
        bodies = _get_all(store, [f"inventory/{one}" for one in digests])
    except Exception as error:
        raise _store_gone(error, rank, inventory) from error
    by_digest = {one: zlib.decompress(body) for one, body in zip(digests, bodies, strict=True)}
    return [_read(record, by_digest, number) for number, record in enumerate(records)]


def _read(record: dict[str, Any], by_digest: dict[str, bytes], rank: int) -> Inventory:
    try:
        inventory = Inventory.from_json(json.loads(by_digest[record["inventory"]]))
    except ConfigError as error:
        raise HolmesError(
            seen=f"the inventory of rank {rank} cannot be read: {error.seen}",
            where=f"host {record['host']}",
            means="that host probably has another version of Holmes",
            do="install the same version on all hosts (`holmes version`)",
        ) from error
    return replace(inventory, environment=tuple((str(name), str(value)) for name, value in record["environment"]))


def _get_all(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Fetch all values, in one round trip where the store can."""
    if hasattr(store, "multi_get"):
        try:
            return list(store.multi_get(list(keys)))
        except RuntimeError:  # FileStore and HashStore have the method and refuse it
            pass
    return [store.get(key) for key in keys]


def _who_is_absent(
    store: Any, error: Exception, rank: int, world_size: int, timeout: float, inventory: Inventory
) -> HolmesError:
    until = time.monotonic() + _LAST_LOOK
    absent, hosts = [], set()
    for other in range(world_size):
        text = _peek(store, f"rank/{other}", until)
        if text is None:
            absent.append(other)
        else:
            hosts.add(str(json.loads(text)["host"]))
    if rank in absent or not absent:
        return _store_gone(error, rank, inventory)
    lines = []
    for other in absent[:8]:
        word = _peek(store, f"said/{other}", until)
        lines.append(f"rank {other}: " + (f"last said: {word.decode()}" if word else "was never heard of"))
    if len(absent) > 8:
        lines.append(f"... and {len(absent) - 8} more")
    came = ", ".join(sorted(hosts)[:8]) + (", ..." if len(hosts) > 8 else "")
    return HolmesError(
        seen=f"{len(absent)} of {world_size} ranks did not hand in their inventory within {timeout:g} s\n"
        + "\n".join(lines),
        where=f"rank {rank} on host {inventory.host}; the ranks that came run on: {came}",
        means="the job cannot be planned before every host has said what networks it has",
        do="look at those ranks' output; check that they were started, reach MASTER_ADDR, and have the same "
        "WORLD_SIZE; raise `timeout` if hosts start far apart",
    )


def _peek(store: Any, key: str, until: float) -> bytes | None:
    """Return a value if it is there now."""
    try:
        if hasattr(store, "check"):
            if not store.check([key]):
                return None
        elif time.monotonic() > until:
            return None
        else:
            store.wait([key], timedelta(milliseconds=20))
        value = store.get(key)
        return value if isinstance(value, bytes) else str(value).encode()
    except Exception:  # a dead store, or a rank that never came: both mean "not there"
        return None


def _store_gone(error: Exception, rank: int, inventory: Inventory) -> HolmesError:
    return HolmesError(
        seen=f"the job's store does not answer: {(str(error).strip().splitlines() or ['no text'])[0][:300]}",
        where=f"rank {rank} on host {inventory.host}, exchange of inventories",
        means="the process that serves the store (rank 0, or the launcher's agent) has ended or cannot be reached",
        do="look at that process's output first; check MASTER_ADDR, MASTER_PORT and firewalls",
    )
