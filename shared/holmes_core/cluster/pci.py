# SPDX-License-Identifier: Apache-2.0
"""The PCI tree of a host: accelerators, and how far each is from each network card."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from holmes_core.cluster.facts import GpuFacts, NetFacts, PortFacts
from holmes_core.cluster.files import entries, link_name, number, read

__all__ = ["DISTANCES", "by_address", "gpu_names", "pci_distance", "read_gpus", "unregistered_cards"]

#: From near to far, as ``nvidia-smi topo -m`` writes them.
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")

_FUNCTION = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
# Vendor -> beginnings of the PCI classes under which it sells accelerators (display 03xx, processing 12xx).
_ACCELERATORS = {
    "0x10de": ("0x0300", "0x0302"),
    "0x1002": ("0x0300", "0x0302", "0x0380", "0x1200"),
    "0x8086": ("0x0302", "0x0380", "0x1200"),
    "0x1da3": ("0x1200",),
}


def read_gpus(sysfs: Path, ports: Sequence[PortFacts]) -> list[GpuFacts]:
    """Find the accelerators in ``bus/pci/devices`` and their distance to each RDMA device.

    Args:
        sysfs: What stands for /sys.
        ports: The RDMA ports, for the distances.

    Returns:
        In the order of PCI addresses, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    devices = sysfs / "bus" / "pci" / "devices"
    found = []
    for address in sorted(entries(devices), key=by_address):
        device = devices / address
        if not read(device / "class").lower().startswith(_ACCELERATORS.get(read(device / "vendor").lower(), ("none",))):
            continue
        node = number(device / "numa_node")
        gpu = GpuFacts(pci=address.lower(), numa=node if node is not None and node >= 0 else None)
        for port in ports:
            if port.pci and port.device not in gpu.distances:
                gpu.distances[port.device] = pci_distance(
                    _chain(devices / address), _chain(devices / port.pci), (gpu.numa, port.numa)
                )
        found.append(gpu)
    return found


def pci_distance(
    one: Sequence[str], other: Sequence[str], numa: tuple[int | None, int | None], *, switch_levels: int = 2
) -> str:
    """Return the distance of two PCI devices.

    Args:
        one: Root complex, then every bridge down to the device.
        other: The same of the other device.
        numa: NUMA node of each.
        switch_levels: How many bridges one switch counts for: two in sysfs, its upstream port and a downstream port
            for each device.

    Returns:
        ``PIX`` behind one switch, ``PXB`` behind several, ``PHB`` at one root complex, ``NODE`` in one NUMA node,
        else ``SYS``.
    """
    shared = 0
    for left, right in zip(one[:-1], other[:-1], strict=False):
        if left != right:
            break
        shared += 1
    if shared > 1:  # more than the root complex: a bridge
        return "PIX" if max(len(one), len(other)) - shared <= switch_levels else "PXB"
    if shared == 1:
        return "PHB"
    return "NODE" if numa[0] == numa[1] else "SYS"


def unregistered_cards(sysfs: Path, ports: Sequence[PortFacts], nets: Sequence[NetFacts]) -> list[PortFacts]:
    """Find RDMA hardware for which the kernel has registered no RDMA device (driver or firmware fault).

    An InfiniBand or Omni-Path controller always counts; an Ethernet card does not, whatever its chip could do.
    """
    devices = sysfs / "bus" / "pci" / "devices"
    known = {port.pci for port in ports} | {port.physical_function for port in ports}
    found = []
    for address in entries(devices):
        device = devices / address
        pci_class, vendor, model = (read(device / name).lower() for name in ("class", "vendor", "device"))
        efa = vendor == "0x1d0f" and model.startswith("0xefa")
        if address.lower() in known or not (pci_class.startswith(("0x0207", "0x0208")) or efa):
            continue
        node = number(device / "numa_node")
        found.append(
            PortFacts(
                device=address.lower(),
                pci=address.lower(),
                pci_class=pci_class,
                vendor=vendor,
                model=model,
                driver=link_name(device / "driver"),
                numa=node if node is not None and node >= 0 else None,
                netdevs=tuple(net.name for net in nets if net.pci == address.lower()),
                problem="RDMA hardware present, no device registered: look at the driver's messages (dmesg) and at "
                "its firmware, and load its RDMA module (for mlx5_core: mlx5_ib)",
            )
        )
    return found


def gpu_names() -> Mapping[str, str]:
    """Return PCI address -> product name from NVML; nothing where it is not installed or finds no driver."""
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        try:
            found = {}
            for index in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name, bus = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetPciInfo(handle).busId
                text = bus.decode() if isinstance(bus, bytes) else str(bus)
                # NVML writes the domain with eight digits, sysfs with four.
                found[text.lower()[-12:]] = name.decode() if isinstance(name, bytes) else str(name)
            return found
        finally:
            pynvml.nvmlShutdown()
    except Exception:  # whatever is wrong with an optional library is no reason to fail
        return {}


def _chain(device: Path) -> list[str]:
    parts = os.path.realpath(device).lower().split(os.sep)
    chain = [part for part in parts if _FUNCTION.fullmatch(part)]
    root = next((part for part in parts if part.startswith("pci") and ":" in part), "")
    # Without a root complex nothing is known about what is above the device: it shares nothing with others.
    return [root or f"unknown root of {device.name}", *chain]


def by_address(address: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key of a PCI address (hexadecimal, so ``natural`` would not do)."""
    return tuple(
        (0, int(part, 16)) if re.fullmatch("[0-9a-f]+", part) else (1, part) for part in re.split("[:.]", address)
    )
