# SPDX-License-Identifier: Apache-2.0
"""Nic, Accelerator and Inventory: what one host has, as frozen values that travel between hosts and to files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from holmes_core.cluster.value import Value

__all__ = ["NIC_KINDS", "RDMA_KINDS", "Accelerator", "Gid", "Inventory", "Nic", "NicKind"]

NicKind = Literal["infiniband", "roce", "iwarp", "omnipath", "efa", "slingshot", "ethernet", "unknown"]
NIC_KINDS: tuple[NicKind, ...] = get_args(NicKind)
# Kinds over which a process group can use RDMA. iWARP is RDMA too, but no transport of NCCL's can use it.
RDMA_KINDS: tuple[NicKind, ...] = ("infiniband", "roce", "omnipath", "efa", "slingshot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gid(Value):
    """One entry of a port's GID table.

    Args:
        index: Position in the table.
        address: The 128 bits as lower-case colon groups, as sysfs writes them.
        type: ``ib``, ``roce_v1``, ``roce_v2``, or empty where the type cannot be read.
        netdev: Network interface the entry belongs to, empty if unknown.
    """

    index: int
    address: str
    type: str = ""
    netdev: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic(Value):
    """One network port of a host.

    Args:
        device: The RDMA device (``mlx5_0``, ``hfi1_0``, ``cxi0``); for plain Ethernet the interface's name.
        port: Port number on the device; 1 where there are no ports.
        kind: What the port is, told by link layer, node type, driver and vendor, never by its name.
        rate: Gbit/s of the port (a bond: of one member); None if unknown.
        members: Physical ports behind it: 2 or more for a bond.
        state: ``active``, ``armed``, ``init``, ``down`` or ``unknown``.
        physical_state: The text sysfs gives, without its number (``LinkUp``); empty if unknown.
        netdev: Its network interface, through which sockets use it; empty if there is none.
        addresses: Global addresses of that interface, with prefix length (``192.0.2.7/24``), IPv4 first.
        mtu: Of the interface; None if unknown.
        gids: The GID table without empty entries.
        gid_index: The entry to use for RoCE; None where none is needed or none is right.
        subnet_prefix: Upper 64 bits of the first InfiniBand GID (``fe80:0000:0000:0000``); empty for others.
        pci: PCI address; empty if unknown.
        numa: NUMA node; None if unknown.
        driver: Kernel driver; empty if unknown.
        physical_function: PCI address of the physical function if this is a virtual one; empty otherwise.
        rail: What pairs it with the same rail on other hosts; empty if unknown.
        usable: Whether a job may use it.
        reason: Why it is not usable, or what is odd about it.
    """

    device: str
    port: int = 1
    kind: NicKind
    rate: float | None = None
    members: int = 1
    state: str = "unknown"
    physical_state: str = ""
    netdev: str = ""
    addresses: tuple[str, ...] = ()
    mtu: int | None = None
    gids: tuple[Gid, ...] = ()
    gid_index: int | None = None
    subnet_prefix: str = ""
    pci: str = ""
    numa: int | None = None
    driver: str = ""
    physical_function: str = ""
    rail: str = ""
    usable: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator(Value):
    """One GPU (or other accelerator) and the NICs nearest to it.

    Args:
        index: CUDA order (by PCI address).
        pci: PCI address; empty if unknown.
        numa: NUMA node; None if unknown.
        name: Product name; empty if unknown.
        distances: NIC device -> ``PIX``, ``PXB``, ``PHB``, ``NODE`` or ``SYS``, as ``nvidia-smi topo -m`` writes it.
        nearest: The NIC device it should use: of the nearest, spread evenly over GPUs; empty if none is known.
    """

    index: int
    pci: str = ""
    numa: int | None = None
    name: str = ""
    distances: tuple[tuple[str, str], ...] = ()
    nearest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory(Value):
    """What one host found out about itself.

    Args:
        host: Its name.
        nics: Every port of every RDMA device, then every other interface; those that cannot be used say why.
        accelerators: Its GPUs.
        rails: Devices that carry training traffic, in rail order (nearest GPU first): the best usable RDMA kind,
            without storage and management cards. Empty on a host that has only Ethernet.
        kind: Kind of the rails; ``ethernet`` where there are none.
        ethernet: The interface for traffic between clusters and for rendezvous; empty if none can carry it.
        missing_rails: How many rails should be there and cannot be used (7 of 8: 1).
        warnings: What a person should know, one sentence each.
        environment: The variables of this process that NCCL, gloo and libfabric read, sorted by name.
    """

    host: str
    nics: tuple[Nic, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    rails: tuple[str, ...] = ()
    kind: NicKind = "ethernet"
    ethernet: str = ""
    missing_rails: int = 0
    warnings: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def nic(self, name: str) -> Nic | None:
        """Return the port with a device or interface name (its first usable port), or None."""
        found = [nic for nic in self.nics if name and name in (nic.device, nic.netdev)]
        return next((nic for nic in found if nic.usable), found[0] if found else None)

    @property
    def rail_nics(self) -> tuple[Nic, ...]:
        """The usable ports of the rails, in rail order."""
        # A card may have an InfiniBand and an Ethernet port: only ports of the rails' kind count.
        usable = [nic for nic in self.nics if nic.usable and nic.kind == self.kind]
        return tuple(nic for device in self.rails for nic in usable if nic.device == device)
