# SPDX-License-Identifier: Apache-2.0
"""Small trees that stand for /sys and /dev, for the tests of detection."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holmes_core.cluster.detect import detect_host
from holmes_core.cluster.links import Link
from holmes_core.cluster.nic import Inventory, Nic

LINK_LOCAL = "fe80:0000:0000:0000:0202:02ff:fe02:0202"
MAPPED = "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}"
V1, V2 = "IB/RoCE v1", "RoCE v2"


class Tree:
    """A root with sys/ and dev/, filled by short calls."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.dev = root / "sys", root / "dev"
        self.sysfs.mkdir(parents=True)

    def write(self, files: Mapping[str, str]) -> Tree:
        for path, text in files.items():
            target = self.sysfs / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text + "\n")
        return self

    def port(self, device: str, port: int = 1, *, layer: str = "InfiniBand", **files: str) -> Tree:
        """Add a port; keywords with __ are paths of the device (hca_type__, device__vendor), others of the port."""
        mine = {"link_layer": layer, "rate": "200 Gb/sec (4X HDR)", "state": "4: ACTIVE", "phys_state": "5: LinkUp"}
        root = f"class/infiniband/{device}"
        for name, text in (mine | files).items():
            if text == "":
                continue
            where = name.strip("_").replace("__", "/") if "__" in name else f"ports/{port}/{name}"
            self.write({f"{root}/{where}": text})
        return self

    def gids(self, device: str, *table: tuple[str, str], netdev: str = "", port: int = 1) -> Tree:
        """Add (address, type) entries; entries without a type have no readable one."""
        root = f"class/infiniband/{device}/ports/{port}"
        for index, (address, kind) in enumerate(table):
            self.write({f"{root}/gids/{index}": address})
            if kind:
                self.write({f"{root}/gid_attrs/types/{index}": kind})
            if netdev and kind:
                self.write({f"{root}/gid_attrs/ndevs/{index}": netdev})
        return self

    def net(self, name: str, *, speed: str = "25000", **files: str) -> Tree:
        defaults = {"type": "1", "operstate": "up", "carrier": "1", "flags": "0x1003", "mtu": "1500", "speed": speed}
        files = {key.replace("__", "/"): text for key, text in files.items()}
        return self.write({f"class/net/{name}/{key}": text for key, text in (defaults | files).items() if text})

    def pci(self, path: str, address: str, **files: str) -> Path:
        """Add a PCI function below bridges (``pci0000:00/0000:00:01.0``), and its entry in bus/pci/devices."""
        device = self.sysfs / "devices" / path / address
        device.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (device / name.removesuffix("_")).write_text(text + "\n")
        bus = self.sysfs / "bus/pci/devices"
        bus.mkdir(parents=True, exist_ok=True)
        self.link(f"bus/pci/devices/{address}", device)
        return device

    def link(self, path: str, target: Path) -> Tree:
        place = self.sysfs / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))
        return self

    def card(self, device: str, path: str, address: str, *, layer: str = "InfiniBand", **files: str) -> Tree:
        """Add an RDMA device whose PCI function sits below ``path``."""
        keep = {name: files.pop(name) for name in ("numa_node", "class_", "vendor") if name in files}
        target = self.pci(path, address, **keep)
        self.port(device, layer=layer, **files)
        return self.link(f"class/infiniband/{device}/device", target)

    def uverbs(self, *devices: str, present: Sequence[int] | None = None) -> Tree:
        """Register devices as uverbs0, uverbs1, ...; ``present`` are those with a file in dev/."""
        for number, device in enumerate(devices):
            self.write({f"class/infiniband_verbs/uverbs{number}/ibdev": device})
            if present is None or number in present:
                (self.dev / "infiniband").mkdir(parents=True, exist_ok=True)
                (self.dev / "infiniband" / f"uverbs{number}").touch()
        return self

    def detect(self, *links: Link, dev: bool = False, env: Mapping[str, str] | None = None, **more: Any) -> Inventory:
        """Detect with these interfaces of the system; without any the tree is about another machine."""
        return detect_host(
            host="n1",
            sysfs=self.sysfs,
            dev=self.dev if dev else None,
            addresses=lambda: links or None,
            env=env or {},
            **more,
        )


def verdicts(inventory: Inventory) -> dict[str, str]:
    """Device:port -> kind, and why it is not usable."""
    return {f"{nic.device}:{nic.port}": nic.kind + ("" if nic.usable else f", {nic.reason}") for nic in inventory.nics}


def only(inventory: Inventory, device: str) -> Nic:
    [nic] = [nic for nic in inventory.nics if nic.device == device]
    return nic
