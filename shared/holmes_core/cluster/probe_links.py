# SPDX-License-Identifier: Apache-2.0
"""Measure the links between hosts over sockets: who sends when, messages there and back, and a rate. No torch.

Every wait is bounded; what goes wrong with one link is a link without a number.
"""

from __future__ import annotations

import socket
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from holmes_core.cluster.exchange import Store
from holmes_core.cluster.probe import LinkRate, Pair
from holmes_core.errors import HolmesError

__all__ = ["MESSAGE", "listen", "measure_links", "rounds_of"]

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
