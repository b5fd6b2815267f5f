# SPDX-License-Identifier: Apache-2.0
"""Facts before any verdict: what sysfs or a tool's output says about ports, interfaces and accelerators."""

from __future__ import annotations

from dataclasses import dataclass, field

from holmes_core.cluster.nic import Gid, NicKind

__all__ = ["GpuFacts", "HostFacts", "NetFacts", "PortFacts"]


@dataclass(slots=True, kw_only=True)
class PortFacts:
    """One port of an RDMA device, as told; empty strings and None where nothing was told.

    Args:
        device: The RDMA device.
        port: Its number.
        link_layer: ``InfiniBand``, ``Ethernet``, ``Unknown`` or ``Unspecified``.
        node_type: ``1: CA``, ``4: RNIC``, ...
        hca_type: Model as the driver calls it.
        board: Board description.
        vendor: PCI vendor, ``0x15b3``.
        model: PCI device, ``0x1021``.
        pci_class: PCI class, ``0x020700``.
        driver: Kernel driver of the PCI device.
        kind: Where the source itself knows the kind (a cxi device).
        state: Port state text.
        physical_state: Physical state text.
        rate: Gbit/s.
        gids: GID table without empty entries.
        netdevs: Interfaces of the port, the likeliest first.
        pci: PCI address.
        numa: NUMA node.
        physical_function: PCI address of the physical function of a virtual one.
        card: What ports of one card have in common.
        software: No hardware behind it (rxe, siw).
        access: Why this process cannot open it; empty if it can or nobody looked.
        problem: What could not be read.
    """

    device: str
    port: int = 1
    link_layer: str = ""
    node_type: str = ""
    hca_type: str = ""
    board: str = ""
    vendor: str = ""
    model: str = ""
    pci_class: str = ""
    driver: str = ""
    kind: NicKind | None = None
    state: str = ""
    physical_state: str = ""
    rate: float | None = None
    gids: tuple[Gid, ...] = ()
    netdevs: tuple[str, ...] = ()
    pci: str = ""
    numa: int | None = None
    physical_function: str = ""
    card: str = ""
    software: bool = False
    access: str = ""
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class NetFacts:
    """One network interface.

    Args:
        name: Its name.
        what: ``physical``, ``virtual``, ``bond``, ``vlan``, ``bridge``, ``tunnel``, ``loopback``, ``dummy``, ``wlan``,
            or empty if nothing tells.
        ipoib: Whether it is IP over InfiniBand.
        up: Whether it is up with a carrier; None if unknown.
        speed: Gbit/s; None if unknown.
        mtu: Bytes; None if unknown.
        addresses: Global addresses with prefix length, IPv4 first; None if nobody looked.
        local_only: Whether it has addresses, all of them link-local or loopback.
        default_route: Whether the default route leaves by it.
        master: The bond or bridge it is part of.
        members: A bond's or bridge's parts.
        shares_load: Whether a bond uses all members at once.
        parents: Interfaces below it (a VLAN's).
        pci: PCI address.
        numa: NUMA node.
        driver: Kernel driver.
        here: False if it belongs to another network namespace.
    """

    name: str
    what: str = ""
    ipoib: bool = False
    up: bool | None = None
    speed: float | None = None
    mtu: int | None = None
    addresses: tuple[str, ...] | None = None
    local_only: bool = False
    default_route: bool = False
    master: str = ""
    members: tuple[str, ...] = ()
    shares_load: bool = True
    parents: tuple[str, ...] = ()
    pci: str = ""
    numa: int | None = None
    driver: str = ""
    here: bool = True


@dataclass(slots=True, kw_only=True)
class GpuFacts:
    """One accelerator.

    Args:
        pci: PCI address.
        numa: NUMA node.
        name: Product name.
        distances: NIC device -> distance as ``nvidia-smi topo -m`` writes it.
    """

    pci: str = ""
    numa: int | None = None
    name: str = ""
    distances: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class HostFacts:
    """All that was told about one host.

    Args:
        ports: RDMA ports.
        nets: Interfaces.
        gpus: Accelerators in CUDA order.
        warnings: What was odd while reading.
        states_told: Whether a port without a state is a fault (sysfs) or was not asked (an XML file).
    """

    ports: list[PortFacts] = field(default_factory=list)
    nets: list[NetFacts] = field(default_factory=list)
    gpus: list[GpuFacts] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    states_told: bool = True
