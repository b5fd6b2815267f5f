# SPDX-License-Identifier: Apache-2.0
"""A Plan as tables that a person reads at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holmes_core.plan.plan import AXES, Plan
from holmes_core.plan.plan import Group as ProcessGroup

__all__ = ["print_plan", "render_plan"]


def render_plan(plan: Plan) -> RenderableType:
    """Return the plan as a rich renderable: stages, groups, reasons.

    Args:
        plan: The plan to show.

    Returns:
        Something ``rich.print`` shows well at 80 columns or more, in ASCII.
    """
    return Group(_headline(plan), Text(), _stage_table(plan), Text(), _group_table(plan), Text(), _reason_lines(plan))


def print_plan(plan: Plan, file: TextIO | None = None, *, warnings: Sequence[str] = ()) -> None:
    """Print the plan to a file, or to standard output.

    Args:
        plan: The plan to show.
        file: Where to; a file that is not a terminal gets plain text, 100 columns wide.
        warnings: What a person should know besides, printed last.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=100)
    console.print(render_plan(plan))
    for text in warnings:
        console.print(Text("! ", style="bold yellow").append(text, style="not bold"))


def _headline(plan: Plan) -> Text:
    layout = plan.layout
    stages = f", {layout.virtual_stages} stages per rank" if layout.virtual_stages > 1 else ""
    if layout.num_microbatches is not None:
        batches = f"{layout.num_microbatches} micro-batches"
    elif layout.micro_batch_size is not None:
        batches = f"micro-batches of {layout.micro_batch_size}"
    else:
        batches = "micro-batches: per batch"
    text = f"{layout.world_size} ranks = pp {layout.pp} x dp {layout.dp} x tp {layout.tp}; {layout.schedule}{stages}; "
    return Text("Holmes plan: ", style="bold").append(text + batches, style="not bold")


def _stage_table(plan: Plan) -> Table:
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    table.add_column("stage", justify="right", no_wrap=True)
    table.add_column("cluster (kind)")
    table.add_column("hosts")
    table.add_column("blocks", no_wrap=True)
    tp = plan.layout.tp
    table.add_column("ranks (dp)" if tp == 1 else "ranks (dp x tp)")
    for stage in range(plan.num_stages):
        rows = plan.grid.ranks[plan.pp_rank_of(stage)]
        ranks = [rank for row in rows for rank in row]
        cluster = plan.topology.cluster_of(ranks[0])
        hosts = list(dict.fromkeys(plan.topology.host_of(rank).name for rank in ranks))
        shown = [_short_numbers(ranks)] if tp == 1 else [_short_numbers(row) for row in rows]
        table.add_row(
            str(stage),
            f"{cluster.name} ({cluster.kind})",
            _hosts(hosts),
            _blocks(plan, stage),
            _shorten(shown, keep=3, separator=" | "),
        )
    return table


def _blocks(plan: Plan, stage: int) -> str:
    if not plan.layers_per_stage:
        return "from the start" if stage == 0 else f"from {plan.split_points[stage - 1]}"
    blocks = plan.stage_blocks(stage)
    if not blocks:
        return "embedding" if plan.layout.embedding_on_last and stage == 0 else "none"
    return f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0])


def _group_table(plan: Plan) -> Table:
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    table.add_column("groups", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("transport", no_wrap=True)
    table.add_column("why")
    for axis in AXES:
        by_transport: dict[tuple[str, str, str | None, str], list[ProcessGroup]] = {}
        for group in plan.groups:
            if group.axis == axis and len(group.ranks) > 1:
                # Whose host or cluster it is differs from group to group; one line per kind of reason is enough.
                t = group.transport
                why = "inside one host" if t.kind == "local" else t.reason
                by_transport.setdefault((t.backend, t.net, t.interface, why), []).append(group)
        for (backend, net, interface, why), groups in by_transport.items():
            sizes = _short_numbers({len(group.ranks) for group in groups})
            over = f"{backend} {net}" + (f" {interface}" if interface else "")
            table.add_row(axis, str(len(groups)), sizes, over, why)
    return table


def _reason_lines(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 1))
    for line in plan.reasons:
        table.add_row("-", Text(line))
    return table


def _hosts(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} .. {names[-1]} ({len(names)})"


def _shorten(items: Sequence[str], *, keep: int, separator: str) -> str:
    """Show a few items: the first ones and the last."""
    if len(items) <= keep:
        return separator.join(items)
    return f"{separator.join(items[: keep - 1])}{separator}...{separator}{items[-1]}"


def _short_numbers(numbers: Iterable[int]) -> str:
    """Write numbers in the given order, runs as ranges: ``0-7,16-23``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return _shorten(parts, keep=4, separator=",")
