# SPDX-License-Identifier: Apache-2.0
"""The lists of NCCL_IB_HCA and NCCL_SOCKET_IFNAME: what a value selects, what is wrong with it, and the right one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holmes_core.cluster.nic import RDMA_KINDS, Inventory
from holmes_core.cluster.value import Value
from holmes_core.errors import did_you_mean

__all__ = ["Lint", "NameList", "exact_hcas", "exact_interface", "lint_hcas", "lint_interfaces", "lint_list"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NameList(Value):
    """A parsed list.

    One optional ``^`` (all but these), then one optional ``=`` (whole names; without it a name's beginning is
    enough), both once, before the first name; then names with an optional port, separated by commas.

    Args:
        exclude: Whether the list says what not to use.
        exact: Whether names have to be equal.
        entries: Names and their ports; None is any port.

    Source:
        NCCL src/misc/utils.cc, parseStringList and matchIfList; src/misc/socket.cc, findInterfaces.
    """

    exclude: bool = False
    exact: bool = False
    entries: tuple[tuple[str, int | None], ...] = ()

    @classmethod
    def parse(cls, value: str) -> NameList:
        """Read a value as NCCL does: nothing is stripped, and a modifier further on is part of a name."""
        exclude = value.startswith("^")
        rest = value[1:] if exclude else value
        exact = rest.startswith("=")
        rest = rest[1:] if exact else rest
        entries = []
        for word in rest.split(","):
            name, colon, port = word.partition(":")
            if name:
                entries.append((name, int(port) if colon and port.isdecimal() and port.isascii() else None))
        return cls(exclude=exclude, exact=exact, entries=tuple(entries))

    def selects(self, name: str, port: int | None = None) -> bool:
        """Whether a device (and port) is in use; an empty list selects everything."""
        if not self.entries:
            return True
        return any(self._matches(entry, name, port) for entry in self.entries) != self.exclude

    def _matches(self, entry: tuple[str, int | None], name: str, port: int | None) -> bool:
        wanted, wanted_port = entry
        same = name == wanted if self.exact else name.startswith(wanted)
        return same and (wanted_port is None or port is None or wanted_port == port)

    def __str__(self) -> str:
        """Return the value as one would write it."""
        words = [name if port is None else f"{name}:{port}" for name, port in self.entries]
        return ("^" if self.exclude else "") + ("=" if self.exact else "") + ",".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint(Value):
    """What a value does.

    Args:
        selected: The devices (``device`` or, of several ports, ``device:port``) that it leaves in use.
        problems: What is wrong with it, one sentence each; empty if nothing is.
        suggestion: A value that does what was probably meant; empty if there is nothing to correct.
    """

    selected: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    suggestion: str = ""


def lint_list(value: str, ports: Sequence[tuple[str, int]], *, variable: str = "NCCL_IB_HCA") -> Lint:
    """Check a list against the devices there are.

    Args:
        value: The variable's value.
        ports: Device and port number of every port; interfaces have port 1.
        variable: The variable's name, for the sentences.

    Returns:
        What it selects and what is wrong with it.
    """
    parsed, names = NameList.parse(value), list(dict.fromkeys(name for name, _ in ports))
    problems: list[str] = []
    fixed: list[tuple[str, int | None]] = []
    exact = parsed.exact
    for name, port in parsed.entries:
        clean = name.strip().lstrip("^=").strip()
        if clean != name:
            what = "modifiers are allowed once, at the beginning" if name.strip()[:1] in "^=" else "no space is allowed"
            problems.append(f"{what}: {name!r} is read as a name and matches nothing")
            exact = exact or "=" in name[: len(name) - len(name.lstrip(" ^="))]
        elif not any(parsed._matches((name, None), other, None) for other in names):
            problems.append(f"{name} names no device{did_you_mean(name, names)}")
        elif port is not None and not any(parsed._matches((name, port), *one) for one in ports):
            problems.append(f"{name} has no port {port}")
        elif not parsed.exact and name in names:
            more = [other for other in names if other != name and other.startswith(name)]
            if more:
                problems.append(f"{name} is the beginning of {', '.join(more[:4])}, too; write = for whole names")
                exact = True
        near = did_you_mean(clean, names)
        known = clean in names or (not exact and any(other.startswith(clean) for other in names))
        if known or near:
            fixed.append((clean if known else near.split("'")[1], port))
    several = {name for name, port in ports if port != 1}
    selected = [f"{name}:{port}" if name in several else name for name, port in ports if parsed.selects(name, port)]
    if ports and not selected:
        problems.append(f"it leaves nothing in use of: {', '.join(names)}")
    suggestion = ""
    if problems and fixed:
        suggestion = str(NameList(exclude=parsed.exclude, exact=exact, entries=tuple(dict.fromkeys(fixed))))
    return Lint(
        selected=tuple(dict.fromkeys(selected)),
        problems=tuple(f"{variable}={value}: {text}" for text in problems),
        suggestion=suggestion if suggestion != value else "",
    )


def lint_hcas(value: str, inventory: Inventory) -> Lint:
    """Check a value of NCCL_IB_HCA on a host: the list itself, and whether what it selects can work together.

    Args:
        value: The variable's value.
        inventory: The host.

    Returns:
        As ``lint_list``; the suggestion falls back to the host's rails.
    """
    rdma = [nic for nic in inventory.nics if nic.kind in RDMA_KINDS]
    found = lint_list(value, [(nic.device, nic.port) for nic in rdma])
    parsed, problems = NameList.parse(value), list(found.problems)
    chosen = [nic for nic in rdma if parsed.selects(nic.device, nic.port)]
    kinds = sorted({nic.kind for nic in chosen if nic.usable})
    prefix = f"NCCL_IB_HCA={value}: "
    if len(kinds) > 1:
        problems.append(f"{prefix}it selects ports of different kinds ({', '.join(kinds)}), which cannot meet")
    dead = [f"{nic.device} ({nic.reason})" for nic in chosen if not nic.usable]
    if dead and not parsed.exclude and parsed.exact:
        problems.append(f"{prefix}it selects what cannot be used: {', '.join(dead[:3])}")
    devices = {nic.device for nic in chosen}
    left_out = [rail for rail in inventory.rails if rail not in devices]
    extra = [name for name in dict.fromkeys(n.device for n in chosen if n.usable) if name not in inventory.rails]
    if left_out and len(left_out) < len(inventory.rails):
        problems.append(f"{prefix}it leaves out {len(left_out)} of {len(inventory.rails)} rails: {', '.join(left_out)}")
    elif left_out:
        problems.append(f"{prefix}it selects none of the rails ({', '.join(inventory.rails)})")
    if extra and inventory.rails and len(kinds) <= 1:
        problems.append(f"{prefix}it selects what is no rail: {', '.join(extra)}")
    right = exact_hcas(inventory)
    suggestion = found.suggestion or (right if problems and right != value else "")
    return Lint(selected=found.selected, problems=tuple(problems), suggestion=suggestion)


def lint_interfaces(value: str, inventory: Inventory, *, several_hosts: bool = True) -> Lint:
    """Check a value of NCCL_SOCKET_IFNAME on a host.

    Args:
        value: The variable's value.
        inventory: The host.
        several_hosts: Whether the job has other hosts, which the loopback interface does not reach.

    Returns:
        As ``lint_list``.
    """
    names = [nic.netdev for nic in inventory.nics if nic.netdev]
    found = lint_list(value, [(name, 1) for name in dict.fromkeys(names)], variable="NCCL_SOCKET_IFNAME")
    problems = list(found.problems)
    usable = {nic.netdev for nic in inventory.nics if nic.netdev and nic.addresses}
    useless = [name for name in found.selected if name not in usable]
    if several_hosts and found.selected and len(useless) == len(found.selected):
        why = {nic.netdev: nic.reason for nic in inventory.nics}
        shown = ", ".join(f"{name} ({why[name] or 'no global address'})" for name in useless[:3])
        problems.append(f"NCCL_SOCKET_IFNAME={value}: no other host can be reached over {shown}")
    right = exact_interface(inventory)
    return Lint(
        selected=found.selected,
        problems=tuple(problems),
        suggestion=found.suggestion or (right if problems and right != value else ""),
    )


def exact_hcas(inventory: Inventory) -> str:
    """Return the value of NCCL_IB_HCA that selects a host's rails and nothing else: ``=mlx5_0,mlx5_1``.

    Empty where NCCL's IB transport has nothing to use (Ethernet hosts, kinds that need a plugin) and where only PCI
    addresses are known of the rails.
    """
    nics = inventory.rail_nics
    if inventory.kind not in ("infiniband", "roce", "omnipath") or any(":" in nic.device for nic in nics) or not nics:
        return ""
    several = {nic.device for nic in inventory.nics if nic.kind in RDMA_KINDS and nic.port != 1}
    words = [f"{nic.device}:{nic.port}" if nic.device in several else nic.device for nic in nics]
    return "=" + ",".join(dict.fromkeys(words))


def exact_interface(inventory: Inventory) -> str:
    """Return the value of NCCL_SOCKET_IFNAME that selects a host's Ethernet interface and nothing else."""
    return f"={inventory.ethernet}" if inventory.ethernet else ""
