# SPDX-License-Identifier: Apache-2.0
"""What `ibstat` and `ibstatus` print."""

from __future__ import annotations

import re

from holmes_core.cluster.facts import HostFacts, PortFacts
from holmes_core.cluster.kind import rate_of
from holmes_core.cluster.nic import Gid

__all__ = ["is_ibstat", "is_ibstatus", "read_ibstat", "read_ibstatus"]

_CA = re.compile(r"^CA '([^']+)'", re.MULTILINE)
_BROKEN = re.compile(r"(?:ibpanic|ibwarn|ibstat).*?'([^']+)'(.*)")
_STATUS = re.compile(r"^Infiniband device '([^']+)' port (\d+) status:", re.MULTILINE)


def is_ibstat(text: str) -> bool:
    """Whether a text is ibstat's; also where it stopped with an error before the first device."""
    return bool(_CA.search(text)) or text.lstrip().startswith("ibpanic")


def read_ibstat(text: str) -> HostFacts:
    """Read ibstat's blocks. A device on which it broke off is reported, the others are kept."""
    found = HostFacts(states_told=False)
    device, card, hca_type = "", "", ""
    port: PortFacts | None = None
    for line in text.splitlines():
        name = _CA.match(line)
        broken = _BROKEN.match(line)
        key, _, value = (part.strip() for part in line.partition(":"))
        key = key.lower()
        if name:
            device, card, hca_type, port = name[1], "", "", None
        elif broken:
            reason = "ibstat could not read it" + broken[2].rstrip().removeprefix(" failed")
            found.ports.append(PortFacts(device=broken[1], problem=reason, card=broken[1]))
            found.warnings.append(f"{broken[1]}: {reason}")
        elif key == "ca type":
            hca_type = value
        elif key == "system image guid":
            card = value if value.strip("0x") else ""
        elif numbered := re.fullmatch(r"port (\d+)", key):
            port = PortFacts(device=device, port=int(numbered[1]), hca_type=hca_type, card=card or device)
            found.ports.append(port)
        elif port is not None:
            _set(port, key, value)
    return found


def is_ibstatus(text: str) -> bool:
    """Whether a text is ibstatus's."""
    return bool(_STATUS.search(text))


def read_ibstatus(text: str) -> HostFacts:
    """Read ibstatus's blocks, which also tell the first GID."""
    found = HostFacts(states_told=False)
    port: PortFacts | None = None
    for line in text.splitlines():
        start = _STATUS.match(line)
        if start:
            port = PortFacts(device=start[1], port=int(start[2]), card=start[1])
            found.ports.append(port)
            continue
        key, _, value = (part.strip() for part in line.partition(":"))
        if port is not None:
            _set(port, key.lower(), value)
    return found


def _set(port: PortFacts, key: str, value: str) -> None:
    if key == "state":
        port.state = value
    elif key in ("physical state", "phys state"):
        port.physical_state = re.sub(r"^\d+\s*:\s*", "", value)
    elif key == "rate":
        port.rate = rate_of(value)
    elif key in ("link layer", "link_layer"):
        port.link_layer = value
    elif key == "default gid" and value.strip("0:"):
        port.gids = (Gid(index=0, address=value.lower()),)
