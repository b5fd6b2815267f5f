# SPDX-License-Identifier: Apache-2.0
"""NCCL's topology XML: what NCCL_TOPO_DUMP_FILE writes and cloud images ship as NCCL_TOPO_FILE."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

from holmes_core.cluster.facts import GpuFacts, HostFacts, NetFacts, PortFacts
from holmes_core.cluster.pci import by_address, pci_distance
from holmes_core.errors import ConfigError

__all__ = ["is_nccl_xml", "read_nccl_xml"]

_GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
_NIC_CLASSES = ("0x0200", "0x0207", "0x0208")


def is_nccl_xml(text: str) -> bool:
    """Whether a text is NCCL's topology."""
    return text.lstrip().startswith("<") and "<system" in text


def read_nccl_xml(text: str) -> HostFacts:
    """Read accelerators, NICs and their places in the PCI tree.

    Raises:
        ConfigError: The text is no XML.
    """
    try:
        root = ElementTree.fromstring(text.strip())
    except ElementTree.ParseError as error:
        raise ConfigError(
            seen=f"no valid XML: {error}", where="NCCL topology", do="write it anew with NCCL_TOPO_DUMP_FILE"
        ) from error
    found = HostFacts(states_told=False)
    places: dict[str, list[str]] = {}
    gpu_places: list[tuple[GpuFacts, list[str]]] = []
    for cpu in root.iter("cpu"):
        numa = int(cpu.get("numaid", "")) if cpu.get("numaid", "").isdecimal() else None
        place = f"cpu {cpu.get('host_hash', '')} {cpu.get('numaid')}"
        for element, chain in _pci_functions(cpu, [place]):
            if element.find("gpu") is not None or _is(element, _GPU_CLASSES):
                gpu_places.append((GpuFacts(pci=element.get("busid", "").lower(), numa=numa), chain))
            elif element.find("nic") is not None or _is(element, _NIC_CLASSES):
                for port in _ports(element, numa, found.nets):
                    found.ports.append(port)
                    places.setdefault(port.device, chain)
        for nic in cpu.findall("nic"):  # no PCI device behind it
            found.nets += [NetFacts(name=net.get("name", ""), speed=_speed(net)) for net in nic.findall("net")]
    for gpu, chain in sorted(gpu_places, key=lambda item: by_address(item[0].pci)):
        for device, place_ in places.items():
            numa_of = next(port.numa for port in found.ports if port.device == device)
            gpu.distances[device] = pci_distance(chain, place_, (gpu.numa, numa_of), switch_levels=1)
        found.gpus.append(gpu)
    return found


def _pci_functions(element: ElementTree.Element, above: list[str]) -> Iterator[tuple[ElementTree.Element, list[str]]]:
    for child in element.findall("pci"):
        chain = [*above, child.get("busid", "")]
        yield child, chain
        yield from _pci_functions(child, chain)


def _ports(pci: ElementTree.Element, numa: int | None, nets: list[NetFacts]) -> list[PortFacts]:
    """Return the RDMA ports of a PCI function; a port that only sockets can use goes to ``nets``."""
    bus, pci_class = pci.get("busid", "").lower(), pci.get("class", "").lower()
    vendor, model = pci.get("vendor", "").lower(), pci.get("device", "").lower()
    efa = vendor == "0x1d0f" and model.startswith("0xefa")
    found: dict[tuple[str, int], PortFacts] = {}
    elements = [net for nic in pci.findall("nic") for net in nic.findall("net")] or [ElementTree.Element("net")]
    for net in elements:
        # NCCL marks a card's Data Direct path by a suffix that is no device of the kernel's.
        name = net.get("name", bus).removesuffix("_dma")
        guid, ethernet = net.get("guid", "0x0"), pci_class.startswith("0x0200") and not efa
        if ethernet and not guid.strip("0x"):
            nets.append(NetFacts(name=name, what="physical", speed=_speed(net), pci=bus, numa=numa))
            continue
        number = int(net.get("port", "")) if net.get("port", "").isdecimal() else 0
        port = PortFacts(device=name, port=number or 1, pci=bus, pci_class=pci_class, vendor=vendor, model=model)
        port.link_layer = "Ethernet" if ethernet else ""
        port.rate, port.numa, port.card = _speed(net), numa, bus.rpartition(".")[0]
        found.setdefault((name, port.port), port)
    return list(found.values())


def _is(element: ElementTree.Element, classes: tuple[str, ...]) -> bool:
    return element.get("class", "").lower().startswith(classes)


def _speed(net: ElementTree.Element) -> float | None:
    """Gbit/s; the file has Mbit/s."""
    text = net.get("speed", "")
    return int(text) / 1000 if text.isdecimal() and int(text) > 0 else None
