# SPDX-License-Identifier: Apache-2.0
"""What `nvidia-smi topo -m`, `ibdev2netdev`, `show_gids` and `ip -br addr` print."""

from __future__ import annotations

import re

from holmes_core.cluster.facts import GpuFacts, HostFacts, NetFacts, PortFacts
from holmes_core.cluster.gid import gid_ip, gid_type
from holmes_core.cluster.links import global_addresses, is_global
from holmes_core.cluster.nic import Gid
from holmes_core.cluster.pci import DISTANCES

__all__ = [
    "is_addresses",
    "is_ibdev2netdev",
    "is_show_gids",
    "is_topo_matrix",
    "read_addresses",
    "read_ibdev2netdev",
    "read_show_gids",
    "read_topo_matrix",
]

_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its header
_DEV2NET = re.compile(
    r"^(?:(?P<pci>[0-9a-f]{4,}:[0-9a-f:.]+)\s+)?(?P<device>\S+)\s+(?:.*\s)?port\s+(?P<port>\d+)\s*"
    r"(?:\(\s*(?P<state>\w+)\s*\)\s*)?==>\s*(?P<net>\S+)\s+\((?P<up>\w+)\)",
    re.IGNORECASE | re.MULTILINE,
)
_GID_ROW = re.compile(
    r"^(?P<device>\S+)\s+(?P<port>\d+)\s+(?P<index>\d+)\s+(?P<gid>[0-9a-fA-F:]{15,39})\s+"
    r"(?:(?P<ip>\d+\.\d+\.\d+\.\d+)\s+)?(?P<version>v\d)\s*(?P<net>\S*)\s*$",
    re.MULTILINE,
)
_ADDRESS_ROW = re.compile(r"^(\S+)\s+(UP|DOWN|UNKNOWN|LOWERLAYERDOWN|DORMANT)\b(.*)$", re.MULTILINE)


def is_topo_matrix(text: str) -> bool:
    """Whether a text is ``nvidia-smi topo -m``'s."""
    return bool(re.search(r"^\s*GPU0\b.*\sX(\s|$)", _ESCAPE.sub("", text), re.MULTILINE))


def read_topo_matrix(text: str) -> HostFacts:
    """Read the matrix: accelerators, their NUMA nodes, and their distance to each RDMA device."""
    lines = [line.strip() for line in _ESCAPE.sub("", text).splitlines()]
    legend = {}
    for line in lines:
        entry = re.fullmatch(r"(NIC\d+)\s*:\s*(\S+)", line)
        if entry:
            legend[entry[1]] = entry[2]
    columns: list[str] = []
    found = HostFacts(states_told=False)
    for line in lines:
        words = line.split()
        if not columns and words[:1] == ["GPU0"] and words[1:2] != ["X"]:
            end = next((i for i, word in enumerate(words) if word in ("CPU", "NUMA")), len(words))
            columns = words[:end]
            nics = [name for name in columns if not re.fullmatch(r"GPU\d+", name)]
            if any(re.fullmatch(r"NIC\d+", legend.get(name, name)) for name in nics):
                found.warnings.append("NIC0, NIC1, ... are nvidia-smi's numbers: add the NIC Legend below its matrix")
            found.ports = [PortFacts(device=legend.get(name, name), card=legend.get(name, name)) for name in nics]
        elif columns and re.fullmatch(r"GPU\d+", words[0] if words else ""):
            cells = words[1 : 1 + len(columns)]
            rest = words[1 + len(columns) :]
            near = {
                legend.get(name, name): cell
                for name, cell in zip(columns, cells, strict=False)
                if cell in DISTANCES and not re.fullmatch(r"GPU\d+", name)
            }
            numa = int(rest[1]) if len(rest) > 1 and rest[1].isdecimal() else None
            found.gpus.append(GpuFacts(numa=numa, distances=near))
    return found


def is_ibdev2netdev(text: str) -> bool:
    """Whether a text is ibdev2netdev's, with or without -v."""
    return bool(_DEV2NET.search(text))


def read_ibdev2netdev(text: str) -> HostFacts:
    """Read which interface belongs to which port."""
    found = HostFacts(states_told=False)
    for row in _DEV2NET.finditer(text):
        up = row["up"].lower() == "up"
        found.ports.append(
            PortFacts(
                device=row["device"],
                port=int(row["port"]),
                netdevs=(row["net"],),
                pci=(row["pci"] or "").lower(),
                # The interface's state is not the port's: an InfiniBand port works while its interface is down.
                state=row["state"] or ("ACTIVE" if up else ""),
                card=row["device"],
            )
        )
        found.nets.append(NetFacts(name=row["net"], up=up))
    return found


def is_show_gids(text: str) -> bool:
    """Whether a text is show_gids's."""
    return bool(_GID_ROW.search(text)) or "n_gids_found" in text


def read_show_gids(text: str) -> HostFacts:
    """Read the GID tables."""
    tables: dict[tuple[str, int], list[Gid]] = {}
    for row in _GID_ROW.finditer(text):
        if row["gid"].strip("0:"):
            gid = Gid(index=int(row["index"]), address=row["gid"].lower(), type=gid_type(row["version"]))
            gid = Gid(index=gid.index, address=gid.address, type=gid.type, netdev=row["net"])
            tables.setdefault((row["device"], int(row["port"])), []).append(gid)
    ports = []
    for (device, port), gids in tables.items():
        # Only RoCE has a version 2, and only RoCE's entries have an address.
        roce = any(gid.type == "roce_v2" or (":" not in gid_ip(gid.address)) for gid in gids)
        netdevs = tuple(dict.fromkeys(gid.netdev for gid in gids if gid.netdev))
        ports.append(
            PortFacts(
                device=device,
                port=port,
                gids=tuple(gids),
                netdevs=netdevs,
                link_layer="Ethernet" if roce else "",
                card=device,
            )
        )
    return HostFacts(ports=ports, states_told=False)


def is_addresses(text: str) -> bool:
    """Whether a text is ``ip -br addr``'s."""
    return bool(_ADDRESS_ROW.search(text))


def read_addresses(text: str) -> HostFacts:
    """Read interfaces and their addresses."""
    found = HostFacts(states_told=False)
    for row in _ADDRESS_ROW.finditer(text):
        name = row[1].split("@")[0]
        addresses = [word for word in row[3].split() if re.match(r"[0-9a-fA-F.:]+(/\d+)?$", word)]
        loopback = any(word.startswith(("127.", "::1/")) for word in addresses)
        net = NetFacts(name=name, what="loopback" if loopback else "", addresses=global_addresses(addresses))
        net.up = {"UP": True, "UNKNOWN": None}.get(row[2], False)
        net.local_only = bool(addresses) and not any(is_global(word) for word in addresses)
        found.nets.append(net)
    return found
