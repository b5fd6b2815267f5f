# SPDX-License-Identifier: Apache-2.0
"""The watchdog of one rank: a small process beside it that lives on when the rank is killed, stopped or stuck.

The watchdogs of a job send each other a signed datagram about once a second. Each looks at its own rank through /proc:
whether it lives, whether it is stopped. Whoever sees a failure tells the others, who pass it on; so it does not matter
which rank or host is lost, the one with the store included. A rank that is merely slow is never touched: its watchdog
goes on saying that it lives.

Runs as ``python -S``, without torch: it is up in some hundredths of a second and needs about 20 MB.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from holmes_core.runtime.cause import Cause, ended, message
from holmes_core.runtime.clocks import Clocks
from holmes_core.runtime.pulse import Pulse
from holmes_core.runtime.stragglers import Watcher
from holmes_core.runtime.watchdog_peers import (
    Link,
    Peer,
    cut,
    furthest_behind,
    oom_kills,
    process_state,
    silent_peers,
)

__all__ = ["main", "neighbours", "patience"]

_EVERYONE = 64  # ranks up to which each watchdog talks to all others
_SIGNATURE = 16  # bytes
_DATAGRAM = 8192
# Shares of failure_timeout. A failure is seen after at most _SILENCE, told within a second, and ends a rank
# _ENDS later; together less than one.
_BEAT, _SILENCE, _STOPPED, _STUCK, _ENDS = 1 / 30, 0.4, 0.33, 0.25, 0.5
_SETTLE = 1.5  # seconds that a weak cause waits for a strong one
_LINGER = 1.5  # seconds in which the last words are repeated
_DYING = 5.0  # seconds that a killed process may take to end after its files are closed


def patience(limit: float) -> float:
    """Return how long a rank that has lost a connection waits for the cause: until a silent host would be known."""
    return (_SILENCE + 3 * _BEAT) * limit + _SETTLE + 2.5


def neighbours(rank: int, world: int) -> set[int]:
    """Return whom a watchdog talks to: everyone in small jobs, else ranks at distances of powers of two.

    Every rank reaches every other in at most log2(world) hops, by many ways.
    """
    if world <= _EVERYONE:
        return set(range(world)) - {rank}
    steps = [1 << k for k in range(world.bit_length()) if 1 << k < world]
    return {(rank + sign * step) % world for step in steps for sign in (1, -1)} - {rank}


class Watchdog:
    """See the module.

    Args:
        rank: The rank it belongs to.
        world: Ranks of the job.
        host: This host's name.
        parent: The rank's process.
        limit: Seconds from a failure to the end of all ranks.
        commands: Pipe from the rank, lines of JSON.
        events: Pipe to the rank, lines of JSON.
        server: UDP socket of this watchdog.
        record: File descriptor of the rank's `Pulse`.
    """

    def __init__(
        self, *, rank: int, world: int, host: str, parent: int, limit: float, commands: int, events: int, server: int,
        record: int,
    ) -> None:  # fmt: skip
        self.rank, self.world, self.host, self.parent, self.limit = rank, world, host, parent, limit
        self.beat = max(0.1, min(1.0, _BEAT * limit))  # seconds between two signs of life
        self.commands, self.events = commands, events
        self.server = socket.socket(fileno=server)
        self.server.setblocking(False)
        self.pulse = Pulse(mmap.mmap(record, 0))
        self.place = f"host {host}"
        self.shared: dict[int, str] = {}
        self.key = b""
        self.peers: dict[int, Peer] = {}
        self.near: set[int] = set()
        self.links: list[Link] = []  # that this rank sends over ...
        self.incoming: list[Link] = []  # ... and others send over, to this rank
        self.link_sockets: dict[str, socket.socket] = {}
        self.run, self.listening = 0, False
        self.cause: Cause | None = None
        self.pending: Cause | None = None  # of a run that this rank has not begun yet
        self.known_at = self.delivered_at = 0.0
        self.told = self.bye = False
        self.symptom = ""
        self.symptom_at = 0.0
        self.status: int | None = None
        self.gone_at: float | None = None  # when the rank ended
        self.stopped_at: float | None = None
        self.beat_at = self.looked_at = time.monotonic()
        self.oom = oom_kills()
        self.watcher: Watcher | None = None
        self.clocks = Clocks(host)
        self._buffer = b""
        self.commands_closed = False
        self.closed_at = 0.0
        self.selector = selectors.DefaultSelector()
        os.set_blocking(commands, False)
        self.selector.register(commands, selectors.EVENT_READ, self._read_commands)
        self.selector.register(self.server, selectors.EVENT_READ, lambda: self._receive(self.server, ""))
        self.pidfd: int | None = None
        with suppress(OSError, AttributeError):  # older kernels: /proc alone
            self.pidfd = os.pidfd_open(parent)
            self.selector.register(self.pidfd, selectors.EVENT_READ, self._look)

    # ---- loop ----------------------------------------------------------------------------------------------------
    def loop(self) -> None:
        """Watch until the rank has ended and the others have been told."""
        self._look()
        while not self._finished():
            before = time.monotonic()
            for key, _ in self.selector.select(0.2 if self.cause is None else 0.1):
                key.data()
            now = time.monotonic()
            if now - before > max(2.0, 3 * self.beat):  # this process itself was stopped, with its host or job
                for peer in self.peers.values():
                    peer.heard = now if peer.heard is not None else None
                for link in (*self.links, *self.incoming):
                    link.heard = now if link.heard is not None else None
                self.stopped_at = None
                self.beat_at = 0.0
            if self.gone_at is None:
                self._look()
                self._look_at_peers(now)
            if now >= self.beat_at:
                self._send(now)
            self._act(now)

    def _finished(self) -> bool:
        if self.gone_at is None:
            return False
        waits = _LINGER + (_SETTLE if self._wants_to_know() else 0.0)
        return time.monotonic() - self.gone_at > (0.5 if self._left_well() else waits)

    def _left_well(self) -> bool:
        return self.status == 0 or (self.status is None and self.bye)

    def _wants_to_know(self) -> bool:
        """Whether the rank was ended by SIGTERM before it could say why; the watchdog says it."""
        return bool(self.status) and not self.told and (self.cause is None or self.cause.quiet)

    # ---- the own rank --------------------------------------------------------------------------------------------
    def _look(self) -> None:
        if self.gone_at is not None:
            return
        state, status = process_state(self.parent)
        now = time.monotonic()
        # A rank that has left the job and lives on. One that is killed closes its files first and is a zombie later.
        left = self.commands_closed and (self.bye or now - self.closed_at > _DYING)
        if left and state not in ("", "Z", "X"):
            self.listening, state, status = False, "Z", 0
        if state in ("", "Z", "X") or os.getppid() != self.parent:
            self._rank_ended(status if state == "Z" else None, now)
        elif state == "T":
            self.stopped_at = self.stopped_at or now
            if self.listening and self.cause is None and now - self.stopped_at > _STOPPED * self.limit:
                self._own(
                    what=f"has been stopped for {now - self.stopped_at:.0f} s (SIGSTOP, or Ctrl-Z in its terminal)",
                    means="a stopped process keeps all others waiting; it was ended with them",
                    do=f"do not stop single ranks; to look at one attach a debugger, or raise failure_timeout "
                    f"({self.limit:g} s)",
                )
        else:
            self.stopped_at = None

    def _rank_ended(self, status: int | None, now: float) -> None:
        self.gone_at, self.status = now, status
        if self.pidfd is not None:
            self.selector.unregister(self.pidfd)
        if not self.commands_closed:
            self._read_commands()  # what it has said at last
        self.beat_at = 0.0
        if self._left_well():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nothing to say: let readers of the output see its end
            return
        if self.cause is None and self.run:
            oom = oom_kills() > self.oom
            found = ended(status, host=self.host, out_of_memory=oom)
            if self.symptom:
                self._adopt(self._unexplained())
            elif status is not None:
                self._own(**found)

    def _own(self, **parts: Any) -> None:
        when = Pulse.describe(self.pulse.values())
        self._adopt(Cause(run=self.run, rank=self.rank, place=self.place, when=when, **parts))

    # ---- commands of the rank ------------------------------------------------------------------------------------
    def _read_commands(self) -> None:
        if self.commands_closed:  # the rank's end and that of its commands can come from one call of select
            return
        with suppress(BlockingIOError):
            while data := os.read(self.commands, 65536):
                self._buffer += data
            self.selector.unregister(self.commands)
            self.commands_closed, self.closed_at = True, time.monotonic()
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            command = json.loads(line)
            getattr(self, "_do_" + command.pop("do"))(**command)

    def _do_peers(self, token: str, addresses: list[list[Any]]) -> None:
        self.key = token.encode()
        for rank, (host, address, port) in enumerate(addresses):
            if rank != self.rank and port:  # 0: it has no watchdog
                peer = self.peers[rank] = Peer(host, (address, port))
                if host == self.host:  # nothing is lost on the way: it is silent from now on, if it ever is
                    peer.heard, peer.training = time.monotonic(), False
        self.near = neighbours(self.rank, self.world)

    def _do_place(self, place: str) -> None:
        self.place = place
        self.beat_at = 0.0  # others may need to name it soon

    def _do_plan(self, links: list[dict[str, Any]], shared: dict[str, str], pipeline: dict[str, Any] | None) -> None:
        self.shared = {int(rank): text for rank, text in shared.items()}
        self.links = [Link(**spec) for spec in links]
        self.near |= {link.peer for link in self.links}
        for address in {link.own for link in self.links} - set(self.link_sockets):
            with suppress(OSError):  # an address that is gone shows at the other end
                made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
                made.bind((address, 0))
                made.setblocking(False)
                self.link_sockets[address] = made
                self.selector.register(
                    made, selectors.EVENT_READ, lambda made=made, address=address: self._receive(made, address)
                )
        self.watcher = Watcher(pipeline) if pipeline is not None else None

    def _do_listen(self, on: bool) -> None:
        self.listening = on
        if not on:
            return
        self.run += 1
        self.cause, self.told, self.symptom, self.delivered_at = None, False, "", 0.0
        self.beat_at = 0.0  # from now on its silence counts for others
        if self.pending is not None and self.pending.run == self.run:
            self._adopt(self.pending)

    def _do_report(self, what: str, weak: bool, means: str, remedy: str) -> None:
        remedy = remedy or f"look at the traceback of rank {self.rank}"
        self._own(what=what, means=means, do=remedy, strong=not weak, quiet=weak)

    def _do_symptom(self, text: str) -> None:
        self.symptom, self.symptom_at = text, time.monotonic()

    def _do_told(self) -> None:
        self.told = True

    def _do_bye(self) -> None:
        self.bye = True

    # ---- the others ----------------------------------------------------------------------------------------------
    def _packet(self, **more: Any) -> bytes:
        body = json.dumps({"r": self.rank, **more}, separators=(",", ":")).encode()
        return hmac.digest(self.key, body, hashlib.sha256)[:_SIGNATURE] + body

    def _send(self, now: float) -> None:
        hurry = self.cause is not None or self.gone_at is not None
        self.beat_at = now + (0.2 if hurry else self.beat)
        if not self.key:
            return
        left = ""
        if self.gone_at is not None:
            left = "left" if self._left_well() else "ended"
        packet = self._packet(
            d=self.place,
            w=time.time(),
            v=[round(value, 6) for value in self.pulse.values()],
            t=self.listening,
            c=self.cause.to_json() if self.cause is not None else None,
            l=left,
            p={address: made.getsockname()[1] for address, made in self.link_sockets.items()},
            b=self.clocks.least(self.peers[0].host) if 0 in self.peers else None,
        )
        for rank in (self.near | {0}) - {self.rank}:
            if rank in self.peers:
                _send(self.server, packet, self.peers[rank].address)
        for link in self.links:
            port = self.peers[link.peer].ports.get(link.theirs) if link.peer in self.peers else None
            made = self.link_sockets.get(link.own)
            if port is not None and made is not None:
                _send(made, self._packet(a=link.own, x=link.text), (link.theirs, port))

    def _receive(self, made: socket.socket, own: str) -> None:
        for _ in range(256):
            try:
                data = made.recv(_DATAGRAM)
            except OSError:  # nothing more, or the other end's port is closed
                return
            body = data[_SIGNATURE:]
            if not self.key or not hmac.compare_digest(hmac.digest(self.key, body, hashlib.sha256)[:_SIGNATURE],
                                                       data[:_SIGNATURE]):  # fmt: skip
                continue
            said = json.loads(body)
            peer = self.peers.get(said["r"])
            if peer is None:
                continue
            if own:
                self._heard_over_link(own, said)
            else:
                self._heard(said, peer)

    def _heard(self, said: dict[str, Any], peer: Peer) -> None:
        rank = said["r"]
        peer.heard, peer.training, peer.record, peer.place = time.monotonic(), said["t"], said["v"], said["d"]
        peer.ports = said["p"]
        if 0 in (self.rank, rank) and peer.host != self.host:  # rank 0 compares its clock with all others'
            line = self.clocks.heard(peer.host, said["w"], time.time(), said.get("b") if self.rank == 0 else None)
            if line:
                _say(line)
        peer.left = said["l"] or peer.left
        self.near.add(rank)
        if said["c"] is not None and (self.gone_at is None or self._wants_to_know()):
            self._adopt(Cause.from_json(said["c"]))

    def _heard_over_link(self, own: str, said: dict[str, Any]) -> None:
        for link in (*self.links, *self.incoming):
            if link.peer == said["r"] and link.own == own and link.theirs == said["a"]:
                link.heard = time.monotonic()
                return
        self.incoming.append(Link(peer=said["r"], own=own, theirs=said["a"], text=said["x"]))

    def _look_at_peers(self, now: float) -> None:
        if not self.listening or self.cause is not None:
            return
        silence = _SILENCE * self.limit
        # With a lost connection a rank that had not said yet that it trains counts, too: it may have died at once.
        known = {rank: peer for rank, peer in self.peers.items() if peer.heard is not None and not peer.left
                 and (peer.training or self.symptom) and rank in self.near}  # fmt: skip
        silent = {rank: peer for rank, peer in known.items() if now - (peer.heard or now) > silence}
        if silent:
            # Those who fell silent together were last heard within a beat or two: wait for all of them.
            if any(now - (peer.heard or now) > silence + 3 * self.beat for peer in silent.values()):
                self._adopt(silent_peers(silent, known, run=self.run, me=self._me(), seconds=silence))
            return
        for link in (*self.links, *self.incoming):
            peer = known.get(link.peer)
            if link.heard is None or peer is None or now - (peer.heard or 0.0) > 2.5 * self.beat:
                continue
            if now - link.heard > silence:
                self._adopt(cut(link, peer, run=self.run, seconds=silence))
                return
        stuck = self.pulse.busy_for(now)
        if self.symptom:
            if now - self.symptom_at > silence + _SETTLE:
                self._adopt(self._unexplained())
            elif now - self.symptom_at > 0.5:
                self._blame_who_left()
        elif stuck > _STUCK * self.limit:
            self._blame_who_left()

    def _me(self) -> tuple[int, Peer]:
        me = Peer(self.host)
        me.place, me.record = self.place, self.pulse.values()
        return self.rank, me

    def _unexplained(self) -> Cause:
        return furthest_behind(self.peers, run=self.run, me=self._me(), symptom=self.symptom)

    def _blame_who_left(self) -> None:
        """A rank that ended without a failure matters only to ranks that still need it."""
        for rank, peer in self.peers.items():
            if peer.left:
                parts = ended(0 if peer.left == "left" else None, host=peer.host, out_of_memory=False)
                self._adopt(Cause(run=self.run, rank=rank, place=peer.place, when=peer.state(), **parts))
                return

    # ---- the end -------------------------------------------------------------------------------------------------
    def _adopt(self, cause: Cause) -> None:
        if cause.run > self.run:
            self.pending = cause
        if cause.run != self.run or (self.cause is not None and (self.cause.strong or not cause.strong)):
            return
        if self.cause is None:
            self.known_at = time.monotonic()
        self.cause = cause
        self.beat_at = 0.0

    def _act(self, now: float) -> None:
        if self.watcher is not None and self.cause is None and self.listening:
            records = {self.rank: self.pulse.values(), **{r: p.record for r, p in self.peers.items() if p.record}}
            for line in self.watcher.look(records, now):
                _say(line)
        cause = self.cause
        if cause is None or (not cause.strong and now - self.known_at < _SETTLE):
            return
        if self.gone_at is not None:
            if self.status and not self.told and cause.rank != self.rank and not cause.quiet and self.run:
                self.told = True
                self._tell()
            return
        if not self.listening:
            return
        if not self.delivered_at:
            self.delivered_at = now
            text = {"cause": cause.to_json(), "shared": self.shared.get(cause.rank, "")}
            with suppress(OSError):
                os.write(self.events, json.dumps(text).encode() + b"\n")
        mine = cause.rank == self.rank
        patience = _ENDS if self.told or mine else 0.6 * _ENDS
        if now - self.delivered_at > patience * self.limit or (mine and self.stopped_at is not None):
            if not self.told:
                self.told = True
                self._tell()
            with suppress(ProcessLookupError):
                os.kill(self.parent, signal.SIGKILL)

    def _tell(self) -> None:
        assert self.cause is not None
        found = message(self.cause, rank=self.rank, place=self.place, shared=self.shared.get(self.cause.rank, ""))
        _say(f"holmes: rank {self.rank} ends, because of another failure\n{found}" if self.cause.rank != self.rank
             else f"holmes: rank {self.rank} is ended\n{found}")  # fmt: skip


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, (text + "\n").encode())


def _send(made: socket.socket, packet: bytes, address: tuple[str, int]) -> None:
    with suppress(OSError):  # what is not heard is what counts
        made.sendto(packet, address)


def main() -> None:
    """Run a watchdog as told on the command line (one JSON object)."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # launchers end whole process groups; the rank's end is ours
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    Watchdog(**json.loads(sys.argv[1])).loop()


if __name__ == "__main__":
    main()
