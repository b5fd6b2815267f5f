# SPDX-License-Identifier: Apache-2.0
"""Read the RDMA devices of a host from sysfs: the infiniband class and, for Slingshot, the cxi class."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holmes_core.cluster.facts import PortFacts
from holmes_core.cluster.files import entries, link_name, number, pci_address, read
from holmes_core.cluster.gid import gid_type
from holmes_core.cluster.kind import rate_of
from holmes_core.cluster.nic import Gid

__all__ = ["read_cxi", "read_rdma"]

_NO_DEVICE_FILES = (
    "no /dev/infiniband/uverbs* in this container: start it with --device=/dev/infiniband (or an RDMA device plugin) "
    "and --ulimit memlock=-1; outside a container load ib_uverbs"
)


def read_rdma(sysfs: Path, dev: Path | None) -> list[PortFacts]:
    """Read every port of every device in ``class/infiniband``.

    Args:
        sysfs: What stands for /sys.
        dev: What stands for /dev; None if whether this process can open the devices is not to be judged.

    Returns:
        At least one entry per device, also for devices of which nothing can be read.
    """
    devices = sysfs / "class" / "infiniband"
    names = entries(devices)
    access = _access(sysfs, dev, names)
    by_net = _devices_of_interfaces(sysfs)
    found = []
    for name in names:
        device = devices / name
        if not device.is_dir():
            continue
        common = _device_facts(device)
        ports = [port for port in entries(device / "ports") if port.isdecimal() and port.isascii()]
        for port in ports:
            facts = PortFacts(device=name, port=int(port), **common, access=access.get(name, ""))
            _port_facts(facts, device, device / "ports" / port, by_net, first=port == ports[0])
            found.append(facts)
        if not ports:
            found.append(PortFacts(device=name, **common, problem="none of its ports can be read"))
    return found


def _device_facts(device: Path) -> dict[str, Any]:
    pci = device / "device"
    address = pci_address(pci) if pci.exists() else pci_address(device)
    numa = number(pci / "numa_node")
    guid = read(device / "sys_image_guid") or read(device / "node_guid")
    driver = link_name(pci / "driver")
    if not driver:
        uevent = re.search(r"^DRIVER=(\S+)", read(pci / "uevent"), re.MULTILINE)
        driver = uevent[1] if uevent else ""
    return {
        "node_type": read(device / "node_type"),
        "hca_type": read(device / "hca_type"),
        "board": read(device / "board_id"),
        "vendor": read(pci / "vendor"),
        "model": read(pci / "device"),
        "pci_class": read(pci / "class"),
        "driver": driver,
        "pci": address,
        "numa": numa if numa is not None and numa >= 0 else None,
        "physical_function": link_name(pci / "physfn").lower(),
        "card": address.rpartition(".")[0] or (guid if guid.strip("0x:") else "") or device.name,
        # rxe and siw hang below no hardware and name the interface they were put on.
        "software": "/virtual/infiniband/" in os.path.realpath(device) or driver in ("rxe", "siw"),
    }


def _port_facts(facts: PortFacts, device: Path, port: Path, by_net: Mapping[str, str], *, first: bool) -> None:
    facts.link_layer = read(port / "link_layer")
    facts.state = read(port / "state")
    facts.physical_state = re.sub(r"^\s*\d+\s*:\s*", "", read(port / "phys_state"))
    facts.rate = rate_of(read(port / "rate"))
    gids = []
    for index in entries(port / "gids"):
        address = read(port / "gids" / index).lower()
        if not index.isdecimal() or not address.strip("0:") or ":" not in address:
            continue  # an empty entry, or one that cannot be read
        kind = gid_type(read(port / "gid_attrs" / "types" / index))
        kind = "ib" if kind == "roce_v1" and facts.link_layer.lower() == "infiniband" else kind
        gids.append(
            Gid(index=int(index), address=address, type=kind, netdev=read(port / "gid_attrs" / "ndevs" / index))
        )
    facts.gids = tuple(gids)
    names = [gid.netdev for gid in gids if gid.netdev]
    if not names:  # a table has hundreds of entries: read them again only where they are needed
        owners = port / "gid_attrs" / "ndevs"
        names = [name for index in entries(owners) if (name := read(owners / index))]
    names += _interfaces(device, facts.port, first=first)
    names += [net for net, owner in by_net.items() if owner == facts.device and first]
    facts.netdevs = tuple(dict.fromkeys(names))


def _interfaces(device: Path, port: int, *, first: bool) -> list[str]:
    """Return the interfaces of the PCI function that are this port's: both count ports, the kernel's from 0."""
    found = []
    for name in entries(device / "device" / "net"):
        net = device / "device" / "net" / name
        position = number(net / "dev_port") or number(net / "dev_id", 0)  # older drivers count in dev_id
        if position == port - 1 or (position is None and first):
            found.append(name)
    parent = read(device / "parent")  # what rxe and siw were put on
    return [*found, parent] if parent else found


def _devices_of_interfaces(sysfs: Path) -> dict[str, str]:
    """Return interface -> RDMA device where the interface's side of the link says so."""
    found = {}
    for name in entries(sysfs / "class" / "net"):
        devices = entries(sysfs / "class" / "net" / name / "device" / "infiniband")
        if len(devices) == 1:
            found[name] = devices[0]
    return found


def _access(sysfs: Path, dev: Path | None, names: list[str]) -> dict[str, str]:
    """Return device -> why this process cannot open it. uverbsN and mlx5_N have nothing to do with each other."""
    if dev is None:
        return {}
    files = [name for name in entries(dev / "infiniband") if name.startswith("uverbs")]
    if not files:
        return dict.fromkeys(names, _NO_DEVICE_FILES)
    verbs = sysfs / "class" / "infiniband_verbs"
    mapped = {device: name for name in entries(verbs) if (device := read(verbs / name / "ibdev"))}
    found = {}
    for name in names if mapped else ():
        file = mapped.get(name, "")
        if not file:
            found[name] = "the kernel has registered no verbs device for it (class/infiniband_verbs)"
        elif file not in files:
            found[name] = f"its /dev/infiniband/{file} is not in this container, others are: pass this one, too"
        elif not os.access(dev / "infiniband" / file, os.R_OK | os.W_OK):
            found[name] = f"no permission to open /dev/infiniband/{file}"
    return found


def read_cxi(sysfs: Path, dev: Path | None) -> list[PortFacts]:
    """Read the Slingshot NICs in ``class/cxi``."""
    found = []
    for name in entries(sysfs / "class" / "cxi"):
        device = sysfs / "class" / "cxi" / name / "device"
        address = pci_address(device) if device.exists() else ""
        numa = number(device / "numa_node")
        state = read(device / "port" / "link_state") or read(device / "port" / "link") or "up"
        speed = re.search(r"(\d+)", read(device / "port" / "speed"))
        missing = dev is not None and not (dev / name).exists()
        found.append(
            PortFacts(
                device=name,
                kind="slingshot",
                driver=link_name(device / "driver"),
                vendor=read(device / "vendor"),
                model=read(device / "device"),
                state="ACTIVE" if state.lower() in ("up", "1", "active") else "DOWN",
                rate=float(speed[1]) if speed else None,
                netdevs=tuple(entries(device / "net")),
                pci=address,
                numa=numa if numa is not None and numa >= 0 else None,
                card=address or name,
                access=f"no /dev/{name} in this container: start it with --device=/dev/{name}" if missing else "",
            )
        )
    return found
