# SPDX-License-Identifier: Apache-2.0
"""Checks of what is around this process: names, limits, the rendezvous, versions, the clock."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from holmes_core.cluster.hca_list import lint_interfaces
from holmes_core.cluster.nic import Inventory
from holmes_core.doctor.finding import Finding
from holmes_core.doctor.surroundings import Surroundings

__all__ = ["surroundings_findings"]

_VERBS = ("infiniband", "roce", "omnipath", "efa")


def surroundings_findings(around: Surroundings, inventory: Inventory) -> Iterator[Finding]:
    """Check what is around this process; see Surroundings."""
    where = (f"host {inventory.host}",)
    yield from _names(around, inventory, where)
    yield from _limits(around, inventory, where)
    yield from _rendezvous(around, inventory, where)
    if inventory.kind in ("efa", "slingshot") and inventory.rails and not around.plugin:
        yield Finding(
            id="ofi-plugin-missing",
            severity="error",
            seen=f"{inventory.kind} rails ({', '.join(inventory.rails)}), and no NCCL network plugin in "
            f"LD_LIBRARY_PATH",
            means="NCCL reaches this fabric only through the OFI plugin; without it it falls back to sockets silently",
            do="install aws-ofi-nccl, put its lib directory into LD_LIBRARY_PATH, set NCCL_NET_PLUGIN=ofi",
            where=where,
            likelihood=88,
        )
    if around.clock_synchronised is False:
        yield Finding(
            id="clock",
            severity="note",
            seen="the kernel's clock is not kept in step by NTP or PTP",
            means="times in the logs of several hosts cannot be compared; certificates and tokens may be refused",
            do="start chronyd, ntpd or systemd-timesyncd on the host (not in the container)",
            where=where,
            likelihood=15,
        )
    if around.versions:
        yield Finding(
            id="versions",
            severity="note",
            seen=", ".join(f"{name} {version}" for name, version in around.versions)
            + (f"; in a {around.container} container" if around.container else ""),
            means="all hosts of a job need the same",
            where=where,
            likelihood=10,
        )
    nccl = [name for name, _ in around.versions if name.startswith("nvidia-nccl")]
    if len(nccl) > 1:
        yield Finding(
            id="nccl-versions",
            severity="warning",
            seen=f"{' and '.join(nccl)} are both installed",
            means="both bring a libnccl.so.2 to the same place: which one is loaded depends on the order of "
            "installation",
            do="uninstall the one that does not belong to this torch (torch.version.cuda tells), and reinstall the "
            "other",
            where=where,
            likelihood=60,
        )


def _names(around: Surroundings, inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    own = [
        nic.addresses[0].split("/")[0] for nic in inventory.nics if nic.netdev == inventory.ethernet and nic.addresses
    ]
    instead = f"{own[0]} ({inventory.ethernet})" if own else "the address that other hosts reach"
    if around.hostname.split(".")[0] == "localhost":
        yield Finding(
            id="host-named-localhost",
            severity="error" if around.several_hosts else "warning",
            seen=f"this host is called {around.hostname!r}",
            means="NCCL takes ranks with equal host names for ranks of one host; the name resolves to another host "
            "elsewhere",
            do="give it its own name (`hostnamectl set-hostname NAME`; containers: --hostname)",
            where=where,
            likelihood=80,
        )
    local = [text for text in around.own_addresses if ipaddress.ip_address(text).is_loopback]
    if around.own_addresses and len(local) == len(around.own_addresses):
        yield Finding(
            id="name-is-loopback",
            severity="warning",
            seen=f"the own name {around.hostname!r} resolves to {', '.join(local)}",
            means="what binds to the own name (gloo without an interface) advertises loopback, and no other host can "
            "connect; all of 127.0.0.0/8 is loopback, 127.0.1.1 too",
            do=f"put the name beside {instead} in /etc/hosts, or set "
            f"GLOO_SOCKET_IFNAME={inventory.ethernet or 'IFACE'} "
            "(Holmes binds to interfaces and is not affected)",
            where=(*where, "/etc/hosts"),
            likelihood=65,
        )
    elif not around.own_addresses and around.hostname:
        yield Finding(
            id="name-resolution",
            severity="warning",
            seen=f"the own name {around.hostname!r} does not resolve"
            + ("" if around.name_answered else " (the name server does not answer)"),
            means="gloo falls back to loopback, and launchers that pass names on fail on other hosts",
            do=f"add it with {instead} to /etc/hosts or DNS",
            where=where,
            likelihood=60,
        )


def _limits(around: Surroundings, inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    rdma = any(nic.kind in _VERBS and nic.usable for nic in inventory.nics)
    if rdma and around.memlock is not None and around.memlock >= 0:
        yield Finding(
            id="memlock",
            severity="error" if around.memlock < 1 << 30 else "warning",
            seen=f"the limit on locked memory is {around.memlock // 1024} KiB (ulimit -l), and the host has RDMA "
            f"devices",
            means="RDMA pins its buffers: registration fails with 'Cannot allocate memory'",
            do="set it to unlimited for the process that runs the ranks (container: --ulimit memlock=-1; SLURM: "
            "LimitMEMLOCK of slurmd), and look inside a launched rank",
            where=where,
            likelihood=90,
        )
    if inventory.accelerators and around.shared_memory is not None and around.shared_memory < 1 << 30:
        yield Finding(
            id="shared-memory",
            severity="warning",
            seen=f"/dev/shm has {around.shared_memory >> 20} MiB",
            means="NCCL and DataLoader workers use it: Bus error, or 'No space left on device'",
            do="start the container with --shm-size=16g or --ipc=host",
            where=where,
            likelihood=70,
        )


def _rendezvous(around: Surroundings, inventory: Inventory, where: tuple[str, ...]) -> Iterator[Finding]:
    addresses = [ipaddress.ip_address(text) for text in around.master_addresses]
    if not around.master or not around.several_hosts:
        return
    if addresses and all(address.is_loopback for address in addresses):
        yield Finding(
            id="master-is-loopback",
            severity="error",
            seen=f"MASTER_ADDR={around.master} is {addresses[0]} here, and the job has other hosts",
            means="each host would wait for the rendezvous at itself",
            do="set MASTER_ADDR to the first host's address as the others see it",
            where=where,
            likelihood=95,
        )
    variables = dict(inventory.environment)
    value = variables.get("NCCL_SOCKET_IFNAME") or variables.get("GLOO_SOCKET_IFNAME")
    if not value or not addresses:
        return
    selected = lint_interfaces(value, inventory).selected
    networks = [
        ipaddress.ip_interface(text).network
        for nic in inventory.nics
        if nic.netdev in selected
        for text in nic.addresses
    ]
    if networks and not any(address in network for address in addresses for network in networks):
        yield Finding(
            id="master-subnet",
            severity="warning",
            seen=f"MASTER_ADDR={around.master} ({addresses[0]}) is in no network of {', '.join(selected)}",
            means="connections leave by another interface than the named one, and answers may go astray",
            do=f"set MASTER_ADDR to an address in {networks[0]}, or name the other interface; check `ip route get "
            f"{addresses[0]}` and rp_filter",
            where=where,
            likelihood=72,
        )
