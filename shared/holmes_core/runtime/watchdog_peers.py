# SPDX-License-Identifier: Apache-2.0
"""What a watchdog knows of its peers and of its own process, and what it concludes when some fall silent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holmes_core.runtime.cause import Cause
from holmes_core.runtime.pulse import Pulse

__all__ = ["Link", "Peer", "cut", "furthest_behind", "oom_kills", "process_state", "silent_peers"]


class Peer:
    """The watchdog of another rank, as this one sees it.

    Args:
        host: Its host.
        address: Address and port of its socket.
    """

    def __init__(self, host: str, address: tuple[str, int] = ("", 0)) -> None:
        self.host, self.address = host, address
        self.place = f"host {host}"
        self.heard: float | None = None  # monotonic time of its last datagram; None: nothing yet
        self.left = ""  # how it ended, if it did
        self.training = True
        self.ports: dict[str, int] = {}
        self.record: list[float] = []

    def state(self) -> str:
        """What the rank did when it was last heard."""
        return Pulse.describe(self.record)


class Link:
    """One way between two hosts, besides the control network."""

    def __init__(self, *, peer: int, own: str, theirs: str, text: str) -> None:
        self.peer, self.own, self.theirs, self.text = peer, own, theirs, text
        self.heard: float | None = None


def silent_peers(
    silent: Mapping[int, Peer], known: Mapping[int, Peer], *, run: int, me: tuple[int, Peer], seconds: float
) -> Cause:
    """Say what the silence of some peers means: a rank, a whole host, or this host's own network.

    Args:
        silent: Who was not heard for `seconds`.
        known: All who were heard before, the silent ones included.
        run: The run.
        me: This rank and its place.
        seconds: How long.
    """
    rank, peer = min(silent.items())
    host = me[1].host
    whole = [r for r, p in known.items() if p.host == peer.host]
    others = {p.host for p in known.values()} - {host}
    lost = {p.host for p in silent.values()}
    parts: dict[str, Any] = {
        "what": f"has given no sign of life for {seconds:.0f} s",
        "means": "its process and its watchdog were both ended, or nothing passes between the hosts",
        "do": f"look whether host {peer.host} is up and at its kernel's log; look at the network between the hosts",
    }
    if len(others) > 1 and lost == others:
        rank, peer = me
        parts["what"] = f"has lost the network of its host {host}: no other host was heard for {seconds:.0f} s"
        parts["means"] = "all other hosts fell silent at once, so it is this host's port, cable or switch"
        parts["do"] = f"look at the ports of {host} (`holmes detect`) and at its switch"
    elif peer.host != host and set(whole) <= set(silent):
        ranks = ", ".join(map(str, sorted(whole)))
        parts["what"] = f"is lost with its host {peer.host}: no sign of life from its ranks {ranks} for {seconds:.0f} s"
        parts["means"] = "the host is down, or nothing passes between it and the others"
    return Cause(run=run, rank=rank, place=peer.place, when=peer.state(), strong=False, **parts)


def cut(link: Link, peer: Peer, *, run: int, seconds: float) -> Cause:
    """Say that a link is down whose other end still answers elsewhere."""
    return Cause(
        run=run, rank=link.peer, place=peer.place, strong=False, when=peer.state(),
        what=f"is not reached any more over {link.text}: nothing came for {seconds:.0f} s",
        means="the rank lives and answers over the control network; this link is down",
        do="look at cable, port, switch and routes between these two addresses",
    )  # fmt: skip


def furthest_behind(peers: Mapping[int, Peer], *, run: int, me: tuple[int, Peer], symptom: str) -> Cause:
    """Say who has not arrived, when a collective timed out or broke and nobody has failed."""
    mine = me[0]
    states = {rank: peer for rank, peer in peers.items() if peer.record} | {mine: me[1]}
    late = min(states, key=lambda rank: Pulse.progress(states[rank].record))
    others = [f"rank {rank}: {peer.state()}" for rank, peer in sorted(states.items()) if rank != late]
    shown = "; ".join(others[:4]) + (f"; and {len(others) - 4} more" if len(others) > 4 else "")
    return Cause(
        run=run, rank=late, place=states[late].place, strong=False, when=states[late].state(),
        what=f"is furthest behind; rank {mine} gave up: {symptom}",
        means=f"no rank has ended; the others: {shown}",
        do="look at what that rank does (py-spy dump); if it is only slow, raise timeout",
    )  # fmt: skip


def process_state(pid: int) -> tuple[str, int | None]:
    """Return a process's state letter ("" when there is none) and its exit status, where it may be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", None
    return fields[0], int(fields[-1])


def oom_kills() -> int:
    """Return how many processes the kernel has ended on this host because memory was used up."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
