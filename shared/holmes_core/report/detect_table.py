# SPDX-License-Identifier: Apache-2.0
"""What one host has, and what the hosts of a job have in common, as tables that a person reads at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holmes_core.cluster.hca_list import exact_hcas, exact_interface, lint_hcas, lint_interfaces
from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.kind import STATE_ASSUMED
from holmes_core.cluster.nic import RDMA_KINDS, Inventory, Nic
from holmes_core.cluster.topology import Topology
from holmes_core.plan.network import ethernet_interfaces

__all__ = ["environment_problems", "print_inventory", "print_topology", "rails_text", "render_inventory"]

# Clusters up to so many hosts are shown whole; of larger ones so many, and those that differ.
_ALL_HOSTS, _FIRST_HOSTS = 16, 4
_PLUGIN_KINDS = {"efa": "aws-ofi-nccl, provider efa", "slingshot": "aws-ofi-nccl, provider cxi"}


def print_inventory(inventory: Inventory, *, everything: bool = False, file: TextIO | None = None) -> None:
    """Print what a host has, with the conclusion; see ``render_inventory``."""
    _print(render_inventory(inventory, everything=everything), file)


def render_inventory(inventory: Inventory, *, everything: bool = False) -> RenderableType:
    """Return a host's ports with their verdicts, then what follows for a job.

    Args:
        inventory: The host.
        everything: Also one row for each interface that no job could use; else they share a line.

    Returns:
        Something that ``rich.print`` shows well at 100 columns or more, in ASCII.
    """
    shown, rest = _split(inventory, everything)
    parts: list[RenderableType] = [Text(f"Host {inventory.host}", style="bold"), Text()]
    parts.append(_ports(inventory, shown) if shown else Text("no network interface was found"))
    if rest:
        words = [f"{nic.netdev or nic.device} ({nic.reason.split(':')[0]})" for nic in rest[:8]]
        more = f", and {len(rest) - 8} more (--all)" if len(rest) > 8 else ""
        parts += [Text(), Text(f"cannot carry a job: {', '.join(words)}{more}", style="dim")]
    parts += [Text(), _conclusion(inventory)]
    warnings = [*inventory.warnings, *environment_problems(inventory)]
    if any(nic.reason == STATE_ASSUMED for nic in inventory.nics):
        warnings.append("port states in brackets are in none of the inputs: taken as active")
    if warnings:
        parts += [Text(), _bullets("warnings", warnings)]
    return Group(*parts)


def environment_problems(inventory: Inventory) -> list[str]:
    """Return what is wrong with the NCCL lists in a host's environment, with the value that would do."""
    variables = dict(inventory.environment)
    found: list[str] = []
    for name, lint in (("NCCL_IB_HCA", lint_hcas), ("NCCL_SOCKET_IFNAME", lint_interfaces)):
        if variables.get(name):
            result = lint(variables[name], inventory)
            found += result.problems
            if result.problems and result.suggestion:
                found.append(f"{name}: write {result.suggestion}, or leave it unset: Holmes sets it")
    return found


def _split(inventory: Inventory, everything: bool) -> tuple[list[Nic], list[Nic]]:
    """RDMA ports and interfaces with an address are always rows."""
    rows = [nic for nic in inventory.nics if everything or nic.usable or nic.kind != "ethernet" or nic.addresses]
    return rows, [nic for nic in inventory.nics if nic not in rows]


def _ports(inventory: Inventory, nics: Sequence[Nic]) -> Table:
    table = _table("port", "kind", "Gbit/s", "state", "interface", "GPUs", "verdict", right=(2,))
    gpus = _gpus_of(inventory)
    several = {nic.device for nic in inventory.nics if nic.port != 1}
    for nic in nics:
        rate = "?" if nic.rate is None else f"{nic.members} x {nic.rate:g}" if nic.members > 1 else f"{nic.rate:g}"
        table.add_row(
            f"{nic.device}:{nic.port}" if nic.device in several else nic.device,
            nic.kind,
            rate,
            "(active)" if nic.reason == STATE_ASSUMED else nic.state,
            " ".join([nic.netdev, *nic.addresses[:2]]).strip() or "-",
            gpus.get(nic.device, "-") if nic.kind in RDMA_KINDS else "-",
            _verdict(inventory, nic),
        )
    return table


def _verdict(inventory: Inventory, nic: Nic) -> Text:
    reason = "" if nic.reason == STATE_ASSUMED else nic.reason
    if not nic.usable:
        return Text(f"no: {reason}", style="red")
    if nic.device in inventory.rails and nic.kind == inventory.kind:
        return Text("rail" + (f" ({reason})" if reason else ""), style="green")
    if nic.netdev and nic.netdev == inventory.ethernet:
        return Text("between clusters" + (f" ({reason})" if reason else ""), style="green")
    return Text(reason or "usable, not needed", style="dim")


def _gpus_of(inventory: Inventory) -> dict[str, str]:
    """Return device -> the GPUs that use it, with their distance."""
    found: dict[str, dict[str, list[int]]] = {}
    for gpu in inventory.accelerators:
        if gpu.nearest:
            distance = dict(gpu.distances).get(gpu.nearest, "?")
            found.setdefault(gpu.nearest, {}).setdefault(distance, []).append(gpu.index)
    return {
        device: "\n".join(f"{','.join(map(str, gpus))} {distance}" for distance, gpus in by_distance.items())
        for device, by_distance in found.items()
    }


def _conclusion(inventory: Inventory) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row(Text("cluster kind", style="bold"), Text(_kind_text(inventory)))
    if inventory.rails:
        table.add_row("rails", Text(", ".join(inventory.rails)))
    if inventory.accelerators:
        named = {gpu.name for gpu in inventory.accelerators if gpu.name}
        table.add_row("GPUs", f"{len(inventory.accelerators)}" + (f" ({', '.join(sorted(named))})" if named else ""))
    if hcas := exact_hcas(inventory):
        table.add_row("NCCL_IB_HCA", Text(hcas))
    elif inventory.rails and inventory.kind not in _PLUGIN_KINDS:
        table.add_row("NCCL_IB_HCA", Text("the inputs have no device names"))
    if inventory.kind == "roce":
        table.add_row("NCCL_IB_GID_INDEX", Text(_gid_text(inventory)))
    if inventory.kind in _PLUGIN_KINDS:
        table.add_row("NCCL_NET_PLUGIN", Text(f"ofi ({_PLUGIN_KINDS[inventory.kind]}; NCCL_IB_* has no effect)"))
    nic = inventory.nic(inventory.ethernet)
    where = f"  ({', '.join(nic.addresses)})" if nic is not None and nic.addresses else ""
    table.add_row("NCCL_SOCKET_IFNAME", Text((exact_interface(inventory) or "none") + where))
    table.add_row("", Text("Holmes sets these itself, per host; they are here for comparison.", style="dim"))
    return table


def _kind_text(inventory: Inventory) -> str:
    if not inventory.rails:
        return "ethernet: no RDMA port that a job could use"
    lost = f"; degraded, {inventory.missing_rails} more cannot be used" if inventory.missing_rails else ""
    return f"{inventory.kind}: {rails_text(inventory)}{lost}"


def rails_text(inventory: Inventory) -> str:
    """Return ``8 rails x 400 Gbit/s`` or, of unequal or multi-port rails, the sum."""
    nics = inventory.rail_nics
    if not nics:
        return "no rails"
    count = f"{len(inventory.rails)} rail" + ("s" if len(inventory.rails) > 1 else "")
    if any(nic.rate is None for nic in nics):
        return count
    if len(nics) == len(inventory.rails) and len({(nic.rate, nic.members) for nic in nics}) == 1:
        bond = f"{nics[0].members} x " if nics[0].members > 1 else ""
        return f"{count} x {bond}{nics[0].rate:g} Gbit/s"
    return f"{count}, {sum((nic.rate or 0.0) * nic.members for nic in nics):g} Gbit/s in all"


def _gid_text(inventory: Inventory) -> str:
    indices = {nic.device: nic.gid_index for nic in inventory.rail_nics}
    values = set(indices.values())
    if values == {None}:
        return "not known (no GID table was seen)"
    if len(values) == 1:
        return str(values.pop())
    each = ", ".join(f"{device}: {index}" for device, index in indices.items())
    return f"differs ({each}): one value cannot suit all rails; leave it unset"


def print_topology(topology: Topology, warnings: Sequence[str] = (), *, file: TextIO | None = None) -> None:
    """Print the clusters of a job, their hosts, the networks between them, and what is odd.

    Args:
        topology: The clusters.
        warnings: One sentence each.
        file: Where to; standard output when None.
    """
    parts: list[RenderableType] = [_clusters(topology), Text(), _hosts(topology)]
    between = _between(topology)
    if between:
        parts += [Text(), Text(between)]
    if warnings:
        parts += [Text(), _bullets("warnings", warnings)]
    _print(Group(*parts), file)


def _clusters(topology: Topology) -> Table:
    table = _table("cluster", "kind", "hosts", "ranks", "per host", "why", right=(2, 3))
    silent = "declared" if sum(len(cluster.hosts) for cluster in topology.clusters) > 1 else "one host"
    for cluster in topology.clusters:
        rails = list(dict.fromkeys(_host_rails(host) for host in cluster.hosts))
        table.add_row(
            cluster.name,
            cluster.kind,
            str(len(cluster.hosts)),
            str(len(cluster.ranks)),
            rails[0] if len(rails) == 1 else f"{rails[0]} ... {rails[-1]}",
            Text(cluster.reason or silent),
        )
    return table


def _host_rails(host: Host) -> str:
    return "?" if host.inventory is None else rails_text(host.inventory)


def _hosts(topology: Topology) -> Table:
    table = _table("host", "cluster", "ranks", "GPUs", "NCCL_IB_HCA", "interface", "address", right=(3,))
    for cluster in topology.clusters:
        shown = _worth_a_row(cluster)
        for host in shown:
            table.add_row(*_host_row(cluster, host))
        if len(shown) < len(cluster.hosts):
            table.add_row(f"({len(cluster.hosts) - len(shown)} more)", cluster.name, *[""] * 5)
    return table


def _worth_a_row(cluster: Cluster) -> Sequence[Host]:
    """Of a large cluster the first hosts, and those that differ from the first or have lost something."""
    if len(cluster.hosts) <= _ALL_HOSTS:
        return cluster.hosts
    usual = _host_row(cluster, cluster.hosts[0])[3:6]
    odd = [
        host
        for host in cluster.hosts[_FIRST_HOSTS:]
        if _host_row(cluster, host)[3:6] != usual or (host.inventory is not None and host.inventory.missing_rails)
    ]
    return (*cluster.hosts[:_FIRST_HOSTS], *odd[:_ALL_HOSTS])


def _host_row(cluster: Cluster, host: Host) -> list[str]:
    ranks = f"{host.ranks[0]}-{host.ranks[-1]}" if len(host.ranks) > 1 else str(host.ranks[0])
    if host.inventory is None:
        return [host.name, cluster.name, ranks, "?", "?", "?", "?"]
    nic = host.inventory.nic(host.inventory.ethernet)
    return [
        host.name,
        cluster.name,
        ranks,
        str(len(host.inventory.accelerators)),
        exact_hcas(host.inventory) or (", ".join(host.inventory.rails) or "-"),
        host.inventory.ethernet or "none",
        nic.addresses[0] if nic is not None and nic.addresses else "-",
    ]


def _between(topology: Topology) -> str:
    hosts = [host for cluster in topology.clusters for host in cluster.hosts]
    if len(hosts) < 2:
        return ""
    interfaces, how = ethernet_interfaces(hosts)
    names = list(dict.fromkeys(interfaces.values()))
    return f"between clusters: {', '.join(names[:4])} ({how})" if interfaces else ""


def _bullets(title: str, lines: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.title, table.title_justify, table.title_style = title, "left", "bold"
    for line in lines:
        table.add_row("-", Text(line))
    return table


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(
            column,
            justify="right" if index in right else "left",
            overflow="fold",
            no_wrap=column in ("port", "kind", "state", "cluster", "host", "ranks"),
        )
    return table


def _print(what: RenderableType, file: TextIO | None) -> None:
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=120)
    console.print(what)
