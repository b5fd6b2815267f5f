# SPDX-License-Identifier: Apache-2.0
"""Measure what the hosts of a job can do: the values, the exchange, the cache. No torch.

Ranks agree over the job's store only, so no process group is needed. Every wait is bounded, and a rank that does not
come is named with what it last said.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from holmes_core.cluster.exchange import Store
from holmes_core.cluster.value import Value
from holmes_core.errors import HolmesError

__all__ = [
    "LinkRate",
    "Pair",
    "ProbeResult",
    "RankSpeed",
    "cache_path",
    "gather",
    "key_of",
    "make_comparable",
    "read_result",
    "write_result",
]

_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed(Value):
    """What one rank takes for the parts of the model that is trained, all ranks computing at the same time.

    Args:
        rank: Global rank.
        host: Its host.
        device: What it computes on.
        cores: Cores that the process may use (CPU).
        memory: Bytes that the rank may use, what it has now included.
        occupied: Bytes that it has now, before training (runtime, libraries).
        samples: Samples of the micro-batch that was measured.
        forward: Seconds of one block's forward pass for one more sample.
        backward: The same of its backward pass.
        forward_fixed: Seconds of a forward pass that do not depend on the number of samples.
        backward_fixed: The same of a backward pass.
        head_forward: Seconds per sample of what surrounds the blocks: embedding, head, loss.
        head_backward: The same of its backward pass.
        head_fixed: Seconds of that backward pass that do not depend on the number of samples.
        around: Seconds of a forward pass of that micro-batch outside of blocks, head and loss: embedding, masks,
            positions, the model's own Python. Every stage of a pipeline has them.
        operation: Seconds of one small tensor operation, called from Python.
        optimizer: Seconds of an AdamW step per parameter.
        copied: Seconds to copy a byte of gradients or parameters in memory.
        fastest: `block` in the fastest moment of the measurement; 0: not known.
    """

    rank: int
    host: str
    device: str = ""
    cores: float = 0.0
    memory: int = 0
    occupied: int = 0
    samples: int = 1
    forward: float
    backward: float
    forward_fixed: float = 0.0
    backward_fixed: float = 0.0
    head_forward: float = 0.0
    head_backward: float = 0.0
    head_fixed: float = 0.0
    around: float = 0.0
    operation: float = 0.0
    optimizer: float = 0.0
    copied: float = 0.0
    fastest: float = 0.0

    @property
    def block(self) -> float:
        """Seconds of one block, forward and backward, per sample of the measured micro-batch."""
        return self.forward + self.backward + (self.forward_fixed + self.backward_fixed) / self.samples


#: Fields of RankSpeed that are times of this rank's computing.
_TIMES = ("forward", "backward", "forward_fixed", "backward_fixed", "head_forward", "head_backward", "head_fixed",
          "around", "operation", "optimizer", "copied")  # fmt: skip


def make_comparable(speeds: Sequence[RankSpeed]) -> tuple[RankSpeed, ...]:
    """Compare ranks by their fastest moments, and let all be disturbed alike.

    What disturbs a rank while it is measured (neighbours on its machine, other programs) disturbs another rank a moment
    later; it must not decide who gets fewer blocks. A slow rank is slow in its fastest moment, too.

    Args:
        speeds: As they were measured.

    Returns:
        The same with other times: how much longer than its fastest moment a block usually takes is the median of all.
    """
    if not speeds or any(not speed.fastest for speed in speeds):
        return tuple(speeds)
    usual = median(speed.block / speed.fastest for speed in speeds)
    found = []
    for speed in speeds:
        factor = speed.fastest * usual / speed.block
        found.append(replace(speed, **{name: getattr(speed, name) * factor for name in _TIMES}))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair(Value):
    """Two ranks that measure the way between them.

    Args:
        kind: ``host`` (inside one), ``fabric`` (inside a cluster) or ``across`` (two clusters).
        clusters: Their clusters' names: one, or two.
        sender: Rank that sends.
        receiver: Rank that receives.
        hosts: Their hosts.
        interfaces: The interfaces that the plan would use.
        addresses: The interfaces' addresses.
    """

    kind: str
    clusters: tuple[str, ...]
    sender: int
    receiver: int
    hosts: tuple[str, ...]
    interfaces: tuple[str, ...]
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRate(Value):
    """What a pair has measured.

    Args:
        pair: Who.
        gbits: Gbit/s of payload, one way, while the other pairs of the round send, too.
        latency: Seconds one way besides what the rate accounts for: half of a round trip of a message of the size of
            an activation, while both ranks compute. (Where processors are short, a message waits until its receiver may
            run again.)
        problem: Why nothing was measured; empty if it was.
    """

    pair: Pair
    gbits: float = 0.0
    latency: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult(Value):
    """What a job's hosts can do.

    Args:
        speeds: Of each rank.
        links: Of each measured pair.
        model: The block that was measured, in words.
        seconds: How long measuring took.
        key: What the numbers hold for: topology, model block, versions.
    """

    speeds: tuple[RankSpeed, ...]
    links: tuple[LinkRate, ...] = ()
    model: str = ""
    seconds: float = 0.0
    key: str = ""


def gather(store: Store, name: str, text: str, *, rank: int, world_size: int, timeout: float, doing: str) -> list[str]:
    """Hand in a text and wait for those of all ranks. Collective.

    Args:
        store: The job's store, with a prefix of its own for one probe.
        name: Of this exchange.
        text: This rank's.
        rank: This rank.
        world_size: Ranks of the job.
        timeout: Longest wait, in seconds.
        doing: What the ranks are doing, for the error.

    Raises:
        HolmesError: Ranks did not come in time; names them.
    """
    keys = [f"{name}/{other}" for other in range(world_size)]
    try:
        store.set(keys[rank], text)
        store.wait(keys, timedelta(seconds=timeout))
        if hasattr(store, "multi_get"):
            with suppress(RuntimeError):  # FileStore and HashStore have the method and refuse it
                return [value.decode() for value in store.multi_get(keys)]
        return [store.get(key).decode() for key in keys]
    except Exception as error:  # whatever the store raises: there is no one class
        raise _absent(store, keys, error, rank=rank, timeout=timeout, doing=doing) from error


def _absent(store: Any, keys: Sequence[str], error: Exception, *, rank: int, timeout: float, doing: str) -> HolmesError:
    missing = []
    try:
        missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
    except Exception:
        missing = []
    if not missing:
        return HolmesError(
            seen=f"the job's store does not answer: {(str(error).strip().splitlines() or ['no text'])[0][:300]}",
            where=f"rank {rank}, {doing}",
            means="the process that serves the store (rank 0, or the launcher's agent) has ended or cannot be reached",
            do="look at that process's output first",
        )
    lines = []
    for other in missing[:_SHOWN]:
        word = b""
        with suppress(Exception):
            word = store.get(f"said/{other}") if store.check([f"said/{other}"]) else b""
        lines.append(f"rank {other}" + (f" (last said: {word.decode()})" if word else ""))
    if len(missing) > _SHOWN:
        lines.append(f"and {len(missing) - _SHOWN} more")
    return HolmesError(
        seen=f"{len(missing)} of {len(keys)} ranks did not hand in what they measured within {timeout:g} s: "
        + ", ".join(lines),
        where=f"rank {rank}, {doing}",
        means="the ranks have ended, or hang",
        do="look at the output of those ranks; `probe: off` plans without measuring",
    )


def cache_path(key: str, env: Mapping[str, str] | None = None) -> Path:
    """Return where the result with a key is kept: ``$XDG_CACHE_HOME/holmes/probe/KEY.json``."""
    env = os.environ if env is None else env
    base = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "holmes" / "probe" / f"{key[:32]}.json"


def read_result(path: Path) -> ProbeResult | None:
    """Read a result; None if the file is not there, or is something else (an older version's)."""
    try:
        return ProbeResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, HolmesError):
        return None


def write_result(path: Path, result: ProbeResult) -> None:
    """Write a result whole or not at all. OSError where that is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def key_of(*parts: object) -> str:
    """Return a key for everything that the numbers depend on (JSON values)."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
