# SPDX-License-Identifier: Apache-2.0
"""Measure what the hosts of a job can do: the values, the sockets, the rounds, the cache. No torch.

Ranks agree over the job's store only, so no process group is needed. Every wait is bounded, and a rank that does not
come is named with what it last said.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from holmes_core.cluster.exchange import Store
from holmes_core.cluster.value import Value
from holmes_core.errors import HolmesError

__all__ = [
    "MESSAGE",
    "LinkRate",
    "Pair",
    "ProbeResult",
    "RankSpeed",
    "cache_path",
    "gather",
    "key_of",
    "listen",
    "measure_links",
    "read_result",
    "rounds_of",
    "write_result",
]

#: Seconds for which one pair sends; the first part of it fills buffers and token buckets and does not count.
SEND_SECONDS = 0.4
_SKIP = 0.3
#: Messages that go there and back, and seconds after which no more are sent.
_PINGS, _PING_SECONDS = 15, 0.3
_FEWEST_PINGS = 3
#: Seconds between them, uneven: a processor quota comes in slices, and messages are to meet all parts of a slice.
_PAUSES = (0.007, 0.019, 0.013, 0.003, 0.011)
#: Bytes of such a message, where nobody says.
MESSAGE = 1 << 16
_CHUNK = 1 << 18
_LEAST_LATENCY = 5e-6  # where noise leaves less than nothing
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

    @property
    def block(self) -> float:
        """Seconds of one block, forward and backward, per sample of the measured micro-batch."""
        return self.forward + self.backward + (self.forward_fixed + self.backward_fixed) / self.samples


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


def rounds_of(pairs: Sequence[Pair]) -> list[list[int]]:
    """Put pairs into rounds in which no host takes part twice: what measures at once must not share a port.

    Pairs between the same two clusters come into the same rounds, as their hosts send at once in training, too.

    Returns:
        Positions in `pairs`, round by round.
    """
    found: list[tuple[set[str], str, list[int]]] = []
    for index, pair in enumerate(pairs):
        # Ways inside a host or fabric would take processor time from pairs that measure something else.
        for hosts, kind, members in found:
            if kind == pair.kind and not hosts & set(pair.hosts):
                hosts.update(pair.hosts)
                members.append(index)
                break
        else:
            found.append((set(pair.hosts), pair.kind, [index]))
    return [members for _, _, members in found]


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


def listen() -> socket.socket:
    """Return a listening socket on all addresses of this host, on a free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=64)


def measure_links(
    store: Store,
    pairs: Sequence[Pair],
    *,
    rank: int,
    server: socket.socket,
    ports: Sequence[int],
    timeout: float,
    message: int = MESSAGE,
) -> dict[int, LinkRate]:
    """Measure the pairs this rank receives for, round by round. Collective over the ranks of `pairs`.

    Args:
        store: The job's store, with a prefix of its own for one probe.
        pairs: All pairs, the same on every rank.
        rank: This rank.
        server: Its listening socket.
        ports: Port of each rank's listening socket.
        timeout: Longest wait for a round, in seconds.
        message: Bytes of the messages whose way is timed: an activation of the job, the same on every rank.

    Returns:
        Position in `pairs` -> what was measured, where this rank is the receiver.

    Raises:
        HolmesError: A round did not end in time; names its ranks.
    """
    found: dict[int, LinkRate] = {}
    for number, members in enumerate(rounds_of(pairs)):
        for index in members:
            pair = pairs[index]
            if rank == pair.sender == pair.receiver:
                continue
            if rank == pair.receiver:
                found[index] = _receive(server, pair, index, timeout, message)
                store.set(f"pair/{index}", "done")
            elif rank == pair.sender:
                _send(pair, index, ports[pair.receiver], timeout, message)
        keys = [f"pair/{index}" for index in members]
        try:
            store.wait(keys, timedelta(seconds=timeout))
        except Exception as error:
            raise _round_failed(store, pairs, members, error, rank, number, timeout) from error
    return found


def _round_failed(
    store: Any, pairs: Sequence[Pair], members: Sequence[int], error: Exception, rank: int, number: int, timeout: float
) -> HolmesError:
    late = []
    with suppress(Exception):
        late = [pairs[index] for index in members if not store.check([f"pair/{index}"])]
    shown = ", ".join(
        f"rank {pair.receiver} on {pair.hosts[-1]} (from rank {pair.sender} on {pair.hosts[0]})" for pair in late
    )
    return HolmesError(
        seen=f"round {number + 1} of measuring links did not end within {timeout:g} s: "
        + (shown or (str(error).strip().splitlines() or ["no text"])[0][:300]),
        where=f"rank {rank}",
        means="the ranks have ended, or hang" if late else "the job's store does not answer",
        do="look at the output of those ranks; `probe: off` plans without measuring",
    )


_HEADER = struct.Struct("!8sIQ")
_MAGIC = b"hlmsprb2"


def _send(pair: Pair, index: int, port: int, timeout: float, message: int) -> None:
    """Send messages there and back, then send for a while. What goes wrong shows at the receiver."""
    with suppress(OSError):
        source = (pair.addresses[0], 0) if pair.addresses[0] else None
        target = pair.addresses[-1] or "127.0.0.1"
        with socket.create_connection((target, port), timeout=timeout, source_address=source) as wire:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire.sendall(_HEADER.pack(_MAGIC, index, message))
            trips: list[float] = []
            payload = bytes(message)
            end = time.perf_counter() + _PING_SECONDS
            with _computing():
                while len(trips) < _FEWEST_PINGS or (len(trips) < _PINGS and time.perf_counter() < end):
                    time.sleep(_PAUSES[len(trips) % len(_PAUSES)])
                    start = time.perf_counter()
                    wire.sendall(b"p")
                    wire.sendall(payload)
                    _exactly(wire, message)
                    trips.append(time.perf_counter() - start)
            wire.sendall(b"e" + struct.pack("!d", statistics.mean(trips) / 2))
            # Do not fill buffers that a slow link would take seconds to empty.
            wire.setsockopt(socket.IPPROTO_TCP, 25, 2 * _CHUNK)  # TCP_NOTSENT_LOWAT of Linux; Python 3.12 names it
            chunk = bytes(_CHUNK)
            end = time.perf_counter() + SEND_SECONDS
            while time.perf_counter() < end:
                wire.sendall(chunk)
            wire.shutdown(socket.SHUT_WR)
            wire.recv(1)  # until the receiver has all


def _receive(server: socket.socket, pair: Pair, index: int, timeout: float, message: int) -> LinkRate:
    # The sender has the whole timeout for its connection; whoever else calls is sent away.
    deadline = time.monotonic() + timeout * 0.8
    try:
        while True:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            wire, _ = server.accept()
            with wire:
                wire.settimeout(max(0.01, deadline - time.monotonic()))
                if _exactly(wire, _HEADER.size) != _HEADER.pack(_MAGIC, index, message):
                    continue
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with _computing():
                    while _exactly(wire, 1) == b"p":
                        wire.sendall(_exactly(wire, message))
                (one_way,) = struct.unpack("!d", _exactly(wire, 8))
                rate = _rate(wire)
                return LinkRate(pair=pair, gbits=rate * 8 / 1e9, latency=max(_LEAST_LATENCY, one_way - message / rate))
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error))
        return LinkRate(pair=pair, problem=why)


@contextmanager
def _computing() -> Iterator[None]:
    """Keep this process busy, as training does, while it waits for messages."""
    stop = threading.Event()

    def work() -> None:
        block = bytes(1 << 20)
        while not stop.is_set():
            zlib.crc32(block)  # other threads of the process may run meanwhile

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _rate(wire: socket.socket) -> float:
    """Bytes per second that arrive, the first part aside."""
    buffer = bytearray(4 * _CHUNK)
    start = time.perf_counter()
    total, mark, at = 0, 0, start
    while count := wire.recv_into(buffer):
        total += count
        now = time.perf_counter()
        if not mark and now - start > _SKIP * SEND_SECONDS:
            mark, at = total, now
    seconds = time.perf_counter() - at
    if total > mark > 0 and seconds > 0:
        return (total - mark) / seconds
    return total / max(time.perf_counter() - start, 1e-6)


def _exactly(wire: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = wire.recv(count - len(found))
        if not part:
            raise OSError("the connection was closed")
        found += part
    return bytes(found)


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
