# SPDX-License-Identifier: Apache-2.0
"""The first seconds of a job: every host says what it has, then the control group is made on a network all share.

Order: rendezvous (a TCP store, nothing else) -> inventories -> topology -> checks -> default group on gloo. Whatever
is wrong with hosts, clusters or environment is found before any process group exists.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from holmes_core.cluster.detect import detect_host
from holmes_core.cluster.exchange import exchange, say
from holmes_core.cluster.fabric import job_warnings
from holmes_core.cluster.hca_list import NameList
from holmes_core.cluster.host import ClusterSpec
from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.topology import Topology, build_topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import HolmesError
from holmes_core.plan.environment import check_environment, environment_warnings
from holmes_core.plan.network import ethernet_interfaces
from holmes_core.plan.transport import LOOPBACK
from holmes_core.runtime.environment import gloo_interface, set_missing
from holmes_core.runtime.watchdog import Watchdog

__all__ = ["Meeting", "host_name", "join", "meet", "tell_apart"]


def host_name(env: Mapping[str, str] | None = None) -> str:
    """Return this host's name: HOLMES_HOST, else what the system says."""
    return (os.environ if env is None else env).get("HOLMES_HOST") or socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What the ranks of a job know of each other before they form a process group.

    Args:
        rank: This rank.
        inventories: What each rank's host has, by global rank.
        store: The store they met at, without a prefix; None where a default group existed before.
        watch: This rank's watchdog, from `join` on; None in a job of one rank.
    """

    rank: int
    inventories: tuple[Inventory, ...]
    store: Any = None
    watch: Watchdog | None = None

    def warnings(self, topology: Topology, device_type: str) -> tuple[str, ...]:
        """Return what a person should know about the hosts and how they were grouped, one sentence each."""
        hosts = list({inventory.host: inventory for inventory in self.inventories}.values())
        specs = [
            ClusterSpec(name=c.name, kind=c.kind, hosts=tuple(host.name for host in c.hosts), reason=c.reason)
            for c in topology.clusters
        ]
        nccl = environment_warnings(self.inventories) if device_type == "cuda" else ()
        return (*job_warnings(hosts, specs), *nccl)

    def topology(self, config: HolmesConfig) -> Topology:
        """Return where every rank runs: declared clusters, else hosts grouped by fabric.

        Raises:
            ConfigError: The declaration and the hosts do not fit together.
        """
        return build_topology(config, [inventory.host for inventory in self.inventories], self.inventories)


def meet(*, rank: int, world_size: int, timeout: float, env: Mapping[str, str] | None = None) -> Meeting:
    """Exchange inventories with all ranks of the job. Collective, without a process group.

    Args:
        rank: This rank.
        world_size: Ranks of the job.
        timeout: Longest wait for a rank, in seconds.
        env: Environment to read; ``os.environ`` when None.

    Raises:
        HolmesError: The rendezvous cannot be reached, or ranks did not come in time; names them.
    """
    env = os.environ if env is None else env
    if dist.is_initialized():
        store, base = dist.distributed_c10d._get_default_store(), None
    elif world_size > 1:
        store = base = _rendezvous(rank, world_size, timeout)
    else:
        store = base = HashStore()
    meeting_place = PrefixStore("holmes/hosts", store)
    say(meeting_place, rank=rank, text=f"host {host_name(env)}: looking at its networks")
    inventory = _as_named_by_user(detect_host(host=host_name(env), env=env), env)
    found = exchange(meeting_place, inventory, rank=rank, world_size=world_size, timeout=timeout)
    return Meeting(rank=rank, inventories=tuple(tell_apart(found)), store=base)


def _as_named_by_user(inventory: Inventory, env: Mapping[str, str]) -> Inventory:
    """The interface a user has named for sockets is the one between clusters; that it exists is checked later."""
    named = env.get("GLOO_SOCKET_IFNAME") or env.get("NCCL_SOCKET_IFNAME", "")
    wanted = NameList.parse(named)
    fits = [nic.netdev for nic in inventory.nics if nic.netdev and nic.addresses and wanted.selects(nic.netdev)]
    return replace(inventory, ethernet=fits[0]) if named and fits and inventory.ethernet not in fits else inventory


def join(meeting: Meeting, *, config: HolmesConfig, device_type: str) -> Meeting:
    """Make the default group: gloo, on a network that all hosts share.

    It carries control only, so that no GPU communicator ever spans networks that cannot meet.

    Args:
        meeting: Who takes part.
        config: The user's settings.
        device_type: ``cuda`` or ``cpu``: which variables of the environment matter.

    Returns:
        The meeting without its store, which lives as long as the default group.

    Raises:
        ConfigError: The environment contradicts itself or the networks.
        HolmesError: The hosts do not reach each other.
    """
    if dist.is_initialized():
        watch = meeting.watch or Watchdog.running() or _watch(meeting, "", config)
        return replace(meeting, store=None, watch=watch)
    topology = meeting.topology(config)
    check_environment(meeting.inventories, device_type=device_type)
    hosts = [host for cluster in topology.clusters for host in cluster.hosts]
    names = {inventory.host for inventory in meeting.inventories}
    me = meeting.inventories[meeting.rank].host
    interfaces = {me: LOOPBACK} if len(names) == 1 else _by_machine(ethernet_interfaces(hosts)[0])
    timeout = timedelta(seconds=config.timeout)
    watch = _watch(meeting, interfaces.get(me, ""), config)
    try:
        with gloo_interface(interfaces.get(me)):
            dist.init_process_group(
                "gloo",
                store=PrefixStore("default_pg", meeting.store),
                rank=meeting.rank,
                world_size=len(meeting.inventories),
                timeout=timeout,
            )
        atexit.register(_let_threads_finish)
    except RuntimeError as error:
        used = ", ".join(f"{host}:{interface}" for host, interface in interfaces.items()) or "gloo's default interface"
        raise HolmesError(
            seen=f"the ranks do not reach each other: {(str(error).strip().splitlines() or ['no text'])[0][:300]}",
            where=f"rank {meeting.rank} on host {me}; interfaces: {used}",
            means="the hosts met at the store, but the control group over these interfaces could not be made",
            do="check that these interfaces reach each other (firewall, routes); name others with GLOO_SOCKET_IFNAME",
        ) from error
    if len(names) > 1 and me in interfaces:
        # Hosts and user code make gloo groups of their own (Lightning around prepare_data), and gloo would bind them to
        # the address of the host's name, often 127.0.1.1.
        set_missing({"GLOO_SOCKET_IFNAME": interfaces[me]})
    return replace(meeting, store=None, watch=watch)


def _let_threads_finish() -> None:
    """Give gloo's threads time to drop the last collective's tensors, which takes Python's lock, before Python ends.

    Before 3.14, Python ends a thread that asks for its lock too late by unwinding it; torch's destructors cannot be
    unwound, and the process would die of SIGABRT ("terminate called without an active exception") after all is done.
    """
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        time.sleep(0.01)  # whoever waits for the lock has it now
        try:
            states = [task.read_text().rpartition(")")[2].split()[0] for task in Path("/proc/self/task").glob("*/stat")]
        except OSError:  # a thread that has ended meanwhile
            continue
        if states.count("R") <= 1:  # this thread
            return


def _watch(meeting: Meeting, interface: str, config: HolmesConfig) -> Watchdog | None:
    """Start this rank's watchdog; its signs of life go over the network of the control group."""
    world = len(meeting.inventories)
    if world == 1:
        return None
    hosts = [inventory.host for inventory in meeting.inventories]
    store = meeting.store if meeting.store is not None else dist.distributed_c10d._get_default_store()
    nic = meeting.inventories[meeting.rank].nic(interface)
    address = nic.addresses[0].split("/")[0] if nic is not None and nic.addresses else ""
    if len(set(hosts)) == 1 or interface == LOOPBACK:
        address = "127.0.0.1"
    return Watchdog.start(
        PrefixStore("holmes/watch", store),
        rank=meeting.rank,
        world=world,
        hosts=hosts,
        address=address or _address_towards(os.environ.get("MASTER_ADDR", "")),
        limit=config.failure_timeout,
        timeout=config.timeout,
    )


def _address_towards(host: str) -> str:
    """Return this host's address on the way to another; no packet is sent."""
    family, kind, protocol, _, there = socket.getaddrinfo(host or "127.0.0.1", 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def _by_machine(interfaces: Mapping[str, str]) -> dict[str, str]:
    """A rehearsal's ``machine/cluster`` names belong to one machine."""
    return {
        **interfaces,
        **{name.rpartition("/")[0]: interface for name, interface in interfaces.items() if "/" in name},
    }


def _rendezvous(rank: int, world_size: int, timeout: float) -> Any:
    where = f"{os.environ.get('MASTER_ADDR', '(MASTER_ADDR is not set)')}:{os.environ.get('MASTER_PORT', '?')}"
    wait = timedelta(seconds=timeout)
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves the store, outside the ranks
            store = next(iter(rendezvous("env://", rank=rank, world_size=world_size, timeout=wait)))[0]
            return _of_this_attempt(store, rank, world_size)
        # Not through env://: there rank 0 waits for a number of clients, and cannot say who is missing.
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=rank == 0,
            timeout=wait,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, KeyError) as error:
        raise HolmesError(
            seen=f"no meeting place: {(str(error).strip().splitlines() or ['no text'])[0][:300]}",
            where=f"rank {rank} of {world_size} on host {host_name()}, MASTER_ADDR:MASTER_PORT {where}",
            means="rank 0 serves a TCP store there, and every rank must reach it within the timeout",
            do="check that rank 0 runs, that the address is one the other hosts can route to (not 127.0.0.1 or a "
            "container's own), and that the port is open",
        ) from error


def _of_this_attempt(store: Any, rank: int, world_size: int) -> Any:
    """Keep apart from what earlier attempts left: torchrun keeps one store through all its restarts.

    Its count of restarts stays the same when only the number of hosts changes, so arrivals are counted, too.
    """
    attempt = f"holmes/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{world_size}"
    return PrefixStore(f"{attempt}/{store.add(f'{attempt}/{rank}', 1)}", store)


def tell_apart(inventories: Sequence[Inventory]) -> list[Inventory]:
    """Give hosts that call themselves the same (``localhost``) different names, by their addresses."""
    machines: dict[str, dict[tuple[str, ...], None]] = {}
    for inventory in inventories:
        machines.setdefault(inventory.host, {})[_addresses(inventory)] = None
    if all(len(found) == 1 for found in machines.values()):
        return list(inventories)
    names = {}
    for host, found in machines.items():
        for number, addresses in enumerate(found):
            label = addresses[0].split("/")[0] if addresses else str(number)
            names[host, addresses] = host if len(found) == 1 else f"{host}@{label}"
    return [replace(inventory, host=names[inventory.host, _addresses(inventory)]) for inventory in inventories]


def _addresses(inventory: Inventory) -> tuple[str, ...]:
    preferred = inventory.nic(inventory.ethernet)
    first = preferred.addresses if preferred is not None else ()
    rest = [address for nic in inventory.nics if nic.usable for address in nic.addresses]
    return tuple(dict.fromkeys([*first, *rest]))
