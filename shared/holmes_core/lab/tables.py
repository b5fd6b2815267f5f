# SPDX-License-Identifier: Apache-2.0
"""The lab's tables: labs, hosts, bytes per interface."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from holmes_core.lab.network import Traffic
from holmes_core.lab.session import Lab
from holmes_core.lab.spec import FAULTS, LabHost, LabSpec
from holmes_core.lab.state import LabState

__all__ = ["format_bytes", "format_rate", "print_hosts", "print_labs", "print_traffic"]


def print_labs(labs: Sequence[LabState]) -> None:
    """Print one line per lab."""
    table = _table("lab", "clusters", "hosts", "age", "ends")
    for state in labs:
        clusters = ", ".join(f"{c.name} ({c.kind}, {len(c.hosts)})" for c in state.spec.clusters)
        ends = f"with process {state.owner}" if state.owner else "holmes lab down"
        table.add_row(state.name, clusters, str(len(state.spec.hosts)), f"{time.time() - state.created:.0f} s", ends)
    _print(table)


def print_hosts(lab: Lab) -> None:
    """Print one line per host of a lab."""
    table = _table("host", "cluster", "kind", "ranks", "RDMA", "Ethernet", "cores", "broken", "namespace")
    for host in lab.spec.hosts:
        cluster = host.cluster
        last = host.first_rank + cluster.ranks_per_host - 1
        rdma = f"{cluster.rdma} {host.rdma_address} {format_rate(cluster.rdma_rate)}" if host.rdma_address else "-"
        table.add_row(
            host.name,
            cluster.name,
            cluster.kind,
            str(last) if last == host.first_rank else f"{host.first_rank}-{last}",
            rdma,
            f"{cluster.ethernet} {host.ethernet_address} {format_rate(cluster.ethernet_rate)}",
            "any" if cluster.cpu is None else f"{cluster.cpu:g}" + ("" if lab.state.groups else " (not enforced)"),
            "; ".join(_faults(lab.spec, host)) or "-",
            lab.state.namespaces[host.name],
        )
    _print(table)


def print_traffic(spec: LabSpec, traffic: Mapping[str, Mapping[str, Traffic]], *, seconds: float) -> None:
    """Print the bytes of each interface, and their sums per cluster and kind of link."""
    table = _table("host", "cluster", "interface", "link", "sent", "received", right=(4, 5))
    table.title = f"bytes per interface in {seconds:.1f} s"
    for host in spec.hosts:
        for nic, value in traffic[host.name].items():
            rdma = nic == host.cluster.rdma and bool(host.rdma_address)
            rate = format_rate(host.cluster.rdma_rate if rdma else host.cluster.ethernet_rate)
            link = f"{host.cluster.kind if rdma else 'ethernet'} {rate}"
            table.add_row(host.name, host.cluster.name, nic, link, format_bytes(value.tx), format_bytes(value.rx))
    _print(table)


def format_bytes(count: float) -> str:
    """Return a number of bytes for people: ``12.3 MB`` (powers of 1000, as link rates)."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def format_rate(rate: int | None) -> str:
    """Return a rate in bit/s for people: ``200 Mbit/s``."""
    if rate is None:
        return "unlimited"
    for unit, size in (("Gbit/s", 10**9), ("Mbit/s", 10**6), ("kbit/s", 10**3)):
        if rate >= size:
            return f"{rate / size:g} {unit}"
    return f"{rate} bit/s"


def _faults(spec: LabSpec, host: LabHost) -> list[str]:
    found = [fault for fault in spec.faults if fault.host == host.name]
    return [
        f"{f.nic + ': ' if f.nic else ''}{FAULTS[f.fault]}{' ' + format_rate(f.rate) if f.rate else ''}" for f in found
    ]


def _table(*columns: str, right: Sequence[int] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number in right else "left", overflow="fold")
    return table


def _print(table: Table) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe or a file has no width: never cut a name
        console.width = 200
    console.print(table)
