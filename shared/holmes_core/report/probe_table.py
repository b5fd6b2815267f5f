# SPDX-License-Identifier: Apache-2.0
"""What was measured, as tables."""

from __future__ import annotations

from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holmes_core.cluster.probe import ProbeResult
from holmes_core.report.prediction_table import seconds

__all__ = ["print_probe"]

_ROWS = 64  # ranks and pairs shown; --json has all


def print_probe(result: ProbeResult, file: TextIO | None = None) -> None:
    """Print what each rank takes for a block, and what each pair of hosts carries.

    Args:
        result: What was measured.
        file: Where to; standard output when None.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=110)
    text = f"{result.model}; {len(result.speeds)} ranks, measured in {result.seconds:.1f} s"
    console.print(Text("Holmes probe: ", style="bold").append(text, style="not bold"))
    console.print()
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    for name in ("rank", "host", "device", "cores", "forward", "backward", "of the fastest", "head", "AdamW"):
        table.add_column(name, justify="left" if name in ("host", "device") else "right", no_wrap=True)
    fastest = min(speed.block for speed in result.speeds)
    for one in result.speeds[:_ROWS]:
        x = one.samples
        table.add_row(
            str(one.rank),
            one.host,
            one.device,
            f"{one.cores:g}",
            seconds(x * one.forward + one.forward_fixed),
            seconds(x * one.backward + one.backward_fixed),
            f"{one.block / fastest:.2f} x",
            seconds(x * (one.head_forward + one.head_backward)),
            f"{one.optimizer * 1e9:.3g} ns",
        )
    console.print(table)
    console.print(Text("forward, backward: one block, one micro-batch; head: both passes; AdamW: per parameter"))
    if result.links:
        console.print()
        console.print(_links(result))
    hidden = max(0, len(result.speeds) - _ROWS) + max(0, len(result.links) - _ROWS)
    if hidden:
        console.print(Text(f"{hidden} more rows: --json"))


def _links(result: ProbeResult) -> Table:
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    for name in ("link", "hosts", "interfaces", "Gbit/s", "latency"):
        table.add_column(name, justify="right" if name in ("Gbit/s", "latency") else "left", no_wrap=True)
    for link in result.links[:_ROWS]:
        pair = link.pair
        where = {"host": "inside hosts of ", "fabric": "inside ", "across": ""}[pair.kind] + " - ".join(pair.clusters)
        measured = (f"{link.gbits:.3g}", seconds(link.latency)) if not link.problem else (link.problem, "")
        hosts = pair.hosts[0] if pair.kind == "host" else " -> ".join(pair.hosts)
        table.add_row(where, hosts, " -> ".join(dict.fromkeys(pair.interfaces)), *measured)
    return table
