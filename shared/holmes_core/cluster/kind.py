# SPDX-License-Identifier: Apache-2.0
"""What a port is and whether a job may use it: by properties, never by its name."""

from __future__ import annotations

import re

from holmes_core.cluster.facts import PortFacts
from holmes_core.cluster.nic import RDMA_KINDS, NicKind

__all__ = ["STATE_ASSUMED", "nic_kind", "odd_physical_state", "port_state", "port_verdict", "rate_of"]

# PCI vendor, PCI devices (none: all of them).
_EFA = ("0x1d0f", ("0xefa0", "0xefa1", "0xefa2", "0xefa3"))
_OMNIPATH = (("0x8086", ("0x24f0", "0x24f1")), ("0x434e", ()))
_SLINGSHOT = ("0x17db", ("0x0501",))
_ERDMA = "0x1ded"

#: What is said of a port whose state nobody could tell.
STATE_ASSUMED = "its state is not in this input: taken as active"

_STATES = {
    "nop": "down",
    "down": "down",
    "init": "init",
    "initialize": "init",
    "initializing": "init",
    "armed": "armed",
    "active": "active",
    "active_defer": "active",
    "up": "active",
}
_PHYSICAL = {
    "sleep",
    "polling",
    "disabled",
    "portconfigurationtraining",
    "training",
    "linkup",
    "linkerrorrecovery",
    "phytest",
}


def nic_kind(facts: PortFacts) -> NicKind:
    """Tell the kind from node type, driver, vendor and board, and only then from the link layer.

    The link layer alone misleads: Omni-Path and some iWARP ports say InfiniBand, EFA says Unknown.
    """
    if facts.kind is not None:
        return facts.kind
    driver, vendor, model = facts.driver.lower(), facts.vendor.lower(), facts.model.lower()
    node_type = facts.node_type.split(":")[0].strip()
    words = f"{facts.node_type} {facts.hca_type} {facts.board}".lower()
    layer = facts.link_layer.lower()
    if driver == "efa" or (vendor, model in _EFA[1]) == (_EFA[0], True):
        return "efa"
    if driver.startswith("cxi") or (vendor, model in _SLINGSHOT[1]) == (_SLINGSHOT[0], True):
        return "slingshot"
    known = any(vendor == maker and (not models or model in models) for maker, models in _OMNIPATH)
    if known or driver in ("hfi1", "hfi2") or "omni-path" in words or "omnipath" in words:
        return "omnipath"
    if driver == "erdma" or vendor == _ERDMA:  # says RNIC, and is used through NCCL's IB plugin all the same
        return "roce"
    if node_type == "4" or "rnic" in words or "i40iw" in words or driver in ("i40iw", "iw_cxgb4"):
        return "iwarp"
    if node_type in ("2", "3", "5", "6"):  # switch, router, usNIC: no channel adapter
        return "unknown"
    if layer == "infiniband":
        return "infiniband"
    if layer == "ethernet":
        return "roce"
    if layer in ("unknown", "unspecified"):
        return "efa" if node_type == "7" or "unspecified" in facts.node_type.lower() else "unknown"
    # Nothing readable says what the link is; the PCI class still does.
    by_class: dict[str, NicKind] = {"0x0207": "infiniband", "0x0208": "omnipath"}
    return by_class.get(facts.pci_class[:6].lower(), "unknown")


def port_state(text: str) -> str:
    """Return ``active``, ``armed``, ``init``, ``down`` or ``unknown`` for ``4: ACTIVE``, ``Initializing``, ``Up``."""
    word = re.sub(r"^\s*\d+\s*:\s*", "", text).strip().lower().removeprefix("port_")
    return _STATES.get(word, "unknown")


def odd_physical_state(text: str) -> bool:
    """Whether a physical state is none of those that the specification has."""
    return bool(text) and re.sub(r"[\s_]", "", text).lower() not in _PHYSICAL


def rate_of(text: str) -> float | None:
    """Return Gbit/s for ``400 Gb/sec (4X NDR)``, ``10 Gb/sec (4X)``, ``200``; None if there is no number."""
    found = re.match(r"\s*(\d+(?:\.\d+)?)", text)
    value = float(found[1]) if found else 0.0
    return value or None


def port_verdict(
    facts: PortFacts, kind: NicKind, state: str, *, gid_problem: str, state_told: bool
) -> tuple[bool, str]:
    """Decide whether a job may use a port.

    Args:
        facts: What was read.
        kind: What the port is.
        state: Its state.
        gid_problem: Why no GID of a RoCE port is right; empty if one is or none is needed.
        state_told: False where the source has no port states: such a port is taken as active.

    Returns:
        Usable or not, and the reason (of a usable port: what is odd, or empty).
    """
    physical = facts.physical_state or "no physical state"
    no_carrier = {"polling": "no cable, or nothing at its other end", "disabled": "disabled by its administrator"}
    if facts.problem:
        return False, facts.problem
    if kind == "iwarp":
        return False, "iWARP: NCCL cannot use it"
    if kind not in RDMA_KINDS:
        layer = f"link layer {facts.link_layer!r}" if facts.link_layer else "its link layer cannot be read"
        return False, f"no RDMA port that a job could use: {layer}" + (
            f", node type {facts.node_type!r}" if facts.node_type else ""
        )
    if facts.software:
        return False, "RDMA in software: slower than plain sockets"
    if state == "init":
        if kind in ("infiniband", "omnipath"):
            return False, "INIT: link up, no subnet manager yet"
        return False, f"INIT: not ready ({physical})"
    if state == "armed":
        return False, "ARMED: the subnet manager has not activated it yet"
    if state == "down":
        hint = no_carrier.get(facts.physical_state.lower(), "")
        return False, f"port is down ({physical}{': ' + hint if hint else ''})"
    if state == "unknown" and state_told:
        return False, f"its state cannot be read (got {facts.state!r})" if facts.state else "its state cannot be read"
    if facts.access:
        return False, facts.access
    if gid_problem:
        return False, gid_problem
    return True, "" if state == "active" else STATE_ASSUMED
