# SPDX-License-Identifier: Apache-2.0
"""A host's /sys and /dev as the Linux kernel lays them out, for the ports that the lab gives it.

The interfaces are real (veth); that one of them belongs to an InfiniBand or RoCE card is what these files say. As in
a real tree, `class/` holds links into `devices/`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holmes_core.lab.network import interface_mtu, mac_address
from holmes_core.lab.spec import PORT_RATES, LabHost, LabSpec

__all__ = ["write_dev", "write_sysfs"]

_RDMA_PCI, _ETHERNET_PCI = "0000:3b:00.0", "0000:5e:00.0"
_GID_ENTRIES = 16
_EMPTY_GID = ":".join(["0000"] * 8)


def write_sysfs(root: Path, spec: LabSpec, host: LabHost) -> None:
    """Write what stands for /sys on one host.

    Args:
        root: A directory that does not exist yet.
        spec: The lab; its faults show up in the files.
        host: The host.
    """
    (root / "class" / "net").mkdir(parents=True)
    _write_loopback(root)
    rate = host.cluster.ethernet_rate
    _write_pci(root, _ETHERNET_PCI, driver="i40e", vendor="0x8086", device="0x1572", numa=0)
    _write_interface(root, spec, host, "ethernet", _ETHERNET_PCI, speed=max(1, (rate or 10**10) // 10**6))
    if host.rdma_address:
        (root / "class" / "infiniband").mkdir()
        _write_pci(root, _RDMA_PCI, driver="mlx5_core", vendor="0x15b3", device="0x1017", numa=0)
        _write_interface(root, spec, host, "rdma", _RDMA_PCI, speed=host.cluster.port_rate * 1000)
        _write_rdma_device(root, spec, host)


def write_dev(root: Path, host: LabHost) -> None:
    """Write what stands for /dev on one host: the files through which a process reaches its RDMA devices."""
    root.mkdir(parents=True)
    if host.rdma_address:
        _write(root / "infiniband", {"uverbs0": "", "rdma_cm": "", "umad0": ""})


def _write_pci(root: Path, address: str, *, driver: str, vendor: str, device: str, numa: int) -> None:
    home = _pci_home(root, address)
    files = {
        "vendor": vendor,
        "device": device,
        "subsystem_vendor": vendor,
        "subsystem_device": "0x0001",
        "class": "0x020700" if vendor == "0x15b3" else "0x020000",
        "numa_node": str(numa),
        "local_cpulist": f"0-{(os.cpu_count() or 1) - 1}",
        "current_link_speed": "8.0 GT/s PCIe",
        "current_link_width": "16",
        "max_link_speed": "8.0 GT/s PCIe",
        "max_link_width": "16",
        "enable": "1",
        "uevent": f"DRIVER={driver}\nPCI_CLASS=20000\nPCI_ID={vendor[2:].upper()}:{device[2:].upper()}\n"
        f"PCI_SLOT_NAME={address}",
    }
    _write(home, files)
    driver_home = root / "bus" / "pci" / "drivers" / driver
    driver_home.mkdir(parents=True, exist_ok=True)
    _link(home / "driver", driver_home)
    _link(home / "subsystem", root / "bus" / "pci")
    _link(driver_home / address, home)
    _link(root / "bus" / "pci" / "devices" / address, home)


def _write_interface(root: Path, spec: LabSpec, host: LabHost, nic: str, pci: str, *, speed: int) -> None:
    name = host.cluster.rdma if nic == "rdma" else host.cluster.ethernet
    infiniband = nic == "rdma" and host.cluster.kind == "infiniband"
    down = bool(spec.faults_of(host.name, "nic-down", nic=nic))
    address = mac_address(host, nic)
    home = _pci_home(root, pci) / "net" / name
    files = {
        # An IPoIB interface has 20 bytes: 4 of flags and queue pair, then the port's GID.
        "address": f"00:00:10:29:{_colon_bytes(_infiniband_gid(host))}" if infiniband else address,
        "addr_len": "20" if infiniband else "6",
        "mtu": str(interface_mtu(host, nic)),
        "type": "32" if infiniband else "1",  # ARPHRD_INFINIBAND, ARPHRD_ETHER
        "flags": "0x1002" if down else "0x1003",
        "operstate": "down" if down else "up",
        "ifindex": "3" if nic == "rdma" else "2",
        "dev_id": "0x0",
        "dev_port": "0",
        "duplex": "full",
        "uevent": f"INTERFACE={name}\nIFINDEX={3 if nic == 'rdma' else 2}",
    }
    if not down:  # the kernel refuses to read these two while the interface is down
        files |= {"carrier": "1", "speed": str(speed)}
    _write(home, files)
    _link(home / "device", _pci_home(root, pci))
    _link(home / "subsystem", root / "class" / "net")
    _link(root / "class" / "net" / name, home)


def _write_loopback(root: Path) -> None:
    home = root / "devices" / "virtual" / "net" / "lo"
    files = {"address": "00:00:00:00:00:00", "mtu": "65536", "type": "772", "flags": "0x9", "operstate": "unknown"}
    _write(home, files | {"carrier": "1", "ifindex": "1", "uevent": "INTERFACE=lo\nIFINDEX=1"})
    _link(root / "class" / "net" / "lo", home)


def _write_rdma_device(root: Path, spec: LabSpec, host: LabHost) -> None:
    pci = _pci_home(root, _RDMA_PCI)
    home = pci / "infiniband" / "mlx5_0"
    infiniband = host.cluster.kind == "infiniband"
    down = bool(spec.faults_of(host.name, "nic-down", nic="rdma"))
    _write(
        home,
        {
            "board_id": "MT_0000000008",
            "fw_ver": "16.35.3502",
            "hca_type": "MT4119",
            "hw_rev": "0",
            "node_type": "1: CA",
            "node_guid": _guid(host),
            "sys_image_guid": _guid(host),
            "node_desc": f"{host.name} mlx5_0",
        },
    )
    _link(home / "device", pci)
    _link(home / "subsystem", root / "class" / "infiniband")
    _link(root / "class" / "infiniband" / "mlx5_0", home)
    port = home / "ports" / "1"
    lid = host.index + 1 if infiniband else 0
    _write(
        port,
        {
            "link_layer": "InfiniBand" if infiniband else "Ethernet",
            "rate": PORT_RATES[host.cluster.port_rate],
            "state": "1: DOWN" if down else "4: ACTIVE",
            "phys_state": "3: Disabled" if down else "5: LinkUp",
            "lid": f"0x{lid:x}",
            "lid_mask_count": "0",
            "sm_lid": "0x1" if infiniband else "0x0",
            "sm_sl": "0",
            "cap_mask": "0xa651e848" if infiniband else "0x04010000",
        },
    )
    gids = _gid_table(host)
    _write(port / "gids", {str(i): gids[i][0] if i in gids else _EMPTY_GID for i in range(_GID_ENTRIES)})
    # Reading the type or interface of an empty entry is an error in a real tree; here the file is missing.
    _write(port / "gid_attrs" / "types", {str(i): kind for i, (_, kind) in gids.items()})
    _write(port / "gid_attrs" / "ndevs", {str(i): host.cluster.rdma for i in gids})
    _write(port / "pkeys", {"0": "0xffff"})
    verbs = pci / "infiniband_verbs" / "uverbs0"
    _write(verbs, {"ibdev": "mlx5_0", "abi_version": "1", "dev": "231:192"})
    _link(verbs / "device", pci)
    _link(root / "class" / "infiniband_verbs" / "uverbs0", verbs)
    _write(root / "class" / "infiniband_verbs", {"abi_version": "6"})


def _gid_table(host: LabHost) -> dict[int, tuple[str, str]]:
    """Return index -> (GID, type); the kernel calls InfiniBand's own type by the same text as RoCE v1's."""
    if host.cluster.kind == "infiniband":
        return {0: (_infiniband_gid(host), "IB/RoCE v1")}
    mac = bytes.fromhex(mac_address(host, "rdma").replace(":", ""))
    link_local = b"\xfe\x80" + bytes(6) + bytes([mac[0] ^ 2]) + mac[1:3] + b"\xff\xfe" + mac[3:]
    mapped = bytes(10) + b"\xff\xff" + bytes(map(int, host.rdma_address.split(".")))
    texts = (_colon_words(link_local), _colon_words(mapped))
    kinds = ("IB/RoCE v1", "RoCE v2")
    return {2 * i + j: (text, kind) for i, text in enumerate(texts) for j, kind in enumerate(kinds)}


def _infiniband_gid(host: LabHost) -> str:
    prefix = host.cluster.subnet_prefix or f"fe80:0000:0000:{host.cluster_index + 1:04x}"
    return f"{prefix}:{_guid(host)}"


def _guid(host: LabHost) -> str:
    return f"0200:00{host.cluster_index:02x}:0000:{host.index + 1:04x}"


def _colon_words(data: bytes) -> str:
    return ":".join(data[i : i + 2].hex() for i in range(0, len(data), 2))


def _colon_bytes(gid: str) -> str:
    return bytes.fromhex(gid.replace(":", "")).hex(":")


def _pci_home(root: Path, address: str) -> Path:
    return root / "devices" / f"pci{address[:7]}" / address


def _write(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(f"{text}\n" if text else "")


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))
