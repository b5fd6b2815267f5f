# SPDX-License-Identifier: Apache-2.0
"""A rank's side of the watch over a job: starts its watchdog process and tells it what only the rank knows."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import holmes_core
from holmes_core.plan.plan import Plan
from holmes_core.runtime.cause import Cause, RankLost, message
from holmes_core.runtime.pulse import EDGES, Pulse
from holmes_core.runtime.reach import links_of

__all__ = ["Watchdog"]

_START = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); from holmes_core.runtime.watchdog_process import main; main()"
)


class Watchdog:
    """The rank's handle on its watchdog process (`holmes_core.runtime.watchdog_process`).

    Args:
        rank: This rank.
        world: Ranks of the job.
        host: This host's name.
        address: Address of this host on the network that all hosts share; others send their signs of life there.
        limit: Seconds from a failure to the end of all ranks (`HolmesConfig.failure_timeout`).

    Attributes:
        pulse: Where the rank writes what it is doing.
        place: Host, stage and replica in words.
    """

    #: A process has one watchdog, as it has one default process group.
    _running: ClassVar[Watchdog | None] = None

    def __init__(self, *, rank: int, world: int, host: str, address: str, limit: float) -> None:
        self.rank, self.world, self.host, self.address, self.limit = rank, world, host, address, limit
        self._place = f"host {host}"
        self._pid = os.getpid()
        record = os.memfd_create("holmes-pulse")
        os.ftruncate(record, mmap.PAGESIZE)
        self.pulse = Pulse(mmap.mmap(record, mmap.PAGESIZE))
        server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        server.bind((address, 0))
        self.port = int(server.getsockname()[1])
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        about = {
            "rank": rank, "world": world, "host": host, "parent": self._pid, "limit": limit,
            "commands": commands, "events": events, "server": server.fileno(), "record": record,
        }  # fmt: skip
        folder = str(Path(holmes_core.__file__).parents[1])
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _START, folder, json.dumps(about)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(commands, events, server.fileno(), record),
            start_new_session=True,  # what ends or stops the rank's process group must not end its watchdog
        )
        for fd in (commands, events, record):
            os.close(fd)
        server.close()
        self._subscriber: Callable[[RankLost | None], None] = lambda cause: None
        threading.Thread(target=self._read, name="holmes-watchdog", daemon=True).start()
        if (before := Watchdog.running()) is not None:  # of a process group that was destroyed
            before.leave()
        Watchdog._running = self

    @classmethod
    def start(
        cls, store: Any, *, rank: int, world: int, hosts: Sequence[str], address: str, limit: float, timeout: float
    ) -> Watchdog | None:
        """Start the watchdogs of a job and let them know each other. Collective.

        Args:
            store: The job's store, with a prefix of its own.
            rank: This rank.
            world: Ranks of the job.
            hosts: Host of each rank.
            address: Address of this host that the other hosts reach.
            limit: Seconds from a failure to the end of all ranks.
            timeout: Longest wait for the other ranks, in seconds.

        Returns:
            The watchdog; None, with a warning, where this machine cannot start one.
        """
        made, error = None, ""
        try:
            made = cls(rank=rank, world=world, host=hosts[rank], address=address, limit=limit)
        except OSError as failed:
            error = str(failed)
        if rank == 0:
            store.set("token", secrets.token_hex(16))
        store.set(f"rank/{rank}", json.dumps([hosts[rank], address, made.port if made is not None else 0]))
        keys = [f"rank/{other}" for other in range(world)]
        store.wait(["token", *keys], timedelta(seconds=timeout))
        addresses = [json.loads(text) for text in store.multi_get(keys)]
        if made is None:
            warnings.warn(
                f"Holmes: no watchdog for rank {rank} on host {hosts[rank]} ({error}): failures of other ranks are "
                "noticed here through lost connections and timeouts only",
                stacklevel=2,
            )
            return None
        made._tell(do="peers", token=store.get("token").decode(), addresses=addresses)
        return made

    @classmethod
    def running(cls) -> Watchdog | None:
        """This process's watchdog, if it has one."""
        found = cls._running
        return found if found is not None and found._pid == os.getpid() else None

    def leave(self) -> None:
        """End the watchdog process while this process lives on."""
        self.bye()
        os.close(self._commands)

    @property
    def place(self) -> str:
        """Host, stage and replica in words."""
        return self._place

    @place.setter
    def place(self, place: str) -> None:
        self._place = place
        self._tell(do="place", place=place)

    def planned(self, plan: Plan) -> None:
        """Tell what the plan says: which links to watch, and which groups join this rank with which others."""
        shared: dict[int, dict[str, list[str]]] = {}
        for group in plan.groups_of(self.rank):
            if group.axis in ("tp", "dp", "edge"):
                transport = group.transport
                interface = transport.interface_on(self.host)
                over = f"{transport.backend} {transport.net}" + (f" on {interface}" if interface else "")
                for other in group.ranks:
                    shared.setdefault(other, {}).setdefault(over, []).append(group.name)
        links = [
            {
                "peer": link.peer,
                "own": link.own_address,
                "theirs": link.peer_address,
                "text": f"{link.peer_host}:{link.peer_interface} ({link.peer_address}) - {self.host}:{link.own} "
                f"({link.own_address}), group {link.group}",
            }
            for link in links_of(plan, self.rank)
            if link.own_address != self.address
        ]
        words = {
            other: "; ".join(f"{', '.join(names)} ({over})" for over, names in by_way.items())
            for other, by_way in shared.items()
        }
        pipeline = _pipeline(plan) if self.rank == 0 and plan.num_stages > 1 else None
        self._tell(do="plan", links=links, shared=words, pipeline=pipeline)

    def listen(self, on: bool) -> None:
        """Begin or end a run: failures count only during one."""
        self._tell(do="listen", on=on)

    def report(self, what: str, *, weak: bool = False, means: str = "", do: str = "") -> None:
        """This rank has failed; `weak`: it may have been ended with all others."""
        self._tell(do="report", what=what, weak=weak, means=means, remedy=do)

    def symptom(self, text: str) -> None:
        """This rank has lost a connection or waited too long; somebody else has failed."""
        self._tell(do="symptom", text=text)

    def told(self) -> None:
        """This rank says by itself why it ends."""
        self._tell(do="told")

    def bye(self) -> None:
        """This rank ends normally."""
        self._tell(do="bye")

    def _tell(self, **command: Any) -> None:
        if os.getpid() != self._pid:  # a forked child, e.g. a data loader's worker
            return
        with suppress(OSError):
            os.write(self._commands, json.dumps(command).encode() + b"\n")

    def subscribe(self, subscriber: Callable[[RankLost | None], None]) -> None:
        """Name who is told, in a thread, that another failure ends this rank; None: the watchdog process is gone."""
        self._subscriber = subscriber

    def _read(self) -> None:
        partial = b""
        while data := os.read(self._events, 65536):
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                said: Mapping[str, Any] = json.loads(line)
                cause = Cause.from_json(said["cause"])
                if cause.rank != self.rank or not cause.strong:  # its own exception it knows best
                    self._subscriber(message(cause, rank=self.rank, place=self.place, shared=said["shared"]))
        self._process.wait()
        if self._process.returncode:
            self._subscriber(None)


def _pipeline(plan: Plan) -> dict[str, Any]:
    """What `stragglers.Watcher` needs of a plan."""
    ranks: dict[int, Any] = {}
    topology, grid = plan.topology, plan.grid
    for rank in range(topology.world_size):
        place, stages = grid.coordinates(rank), plan.stages_of(rank)
        edges: list[Any] = [None] * EDGES
        for index, stage in enumerate(sorted(stages)[: EDGES // 2]):
            for edge, neighbour in ((2 * index, stage - 1), (2 * index + 1, stage + 1)):
                if 0 <= neighbour < plan.num_stages and neighbour not in stages:
                    peer = plan.rank_of(stage=neighbour, dp=place.dp, tp=place.tp)
                    ends = [(topology.cluster_of(r).name, topology.host_of(r).name) for r in (peer, rank)]
                    edges[edge] = [
                        stage,
                        f"link {ends[0][0]} -> {ends[1][0]} (host {ends[0][1]} -> {ends[1][1]}, rank {peer} -> {rank})",
                    ]
        words = f"host {topology.host_of(rank).name}, stage {'+'.join(map(str, stages))}, dp {place.dp}, tp {place.tp}"
        ranks[rank] = {"place": words, "stages": list(stages), "edges": edges}
    return {"stages": plan.num_stages, "ranks": ranks}
