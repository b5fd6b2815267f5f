# SPDX-License-Identifier: Apache-2.0
"""What the planner predicts, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from holmes_core.config import V_SCHEDULES
from holmes_core.plan.cost import Choice, CostModel, Job, Prediction
from holmes_core.plan.plan import Plan
from holmes_core.plan.search import Candidate, SearchResult, why_slower
from holmes_core.plan.simulate import Simulation
from holmes_core.report.plan_table import render_plan

__all__ = ["prediction_table", "print_search", "print_simulation", "stage_reasons"]


def print_search(job: Job, result: SearchResult, plan: Plan | None, file: TextIO | None = None) -> None:
    """Print the plan, its prediction with reasons, and the runners-up.

    Args:
        job: What was planned.
        result: What the search has found.
        plan: The plan of the best; None leaves its tables out (very large jobs).
        file: Where to; standard output when None.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=110)
    if plan is not None:
        console.print(render_plan(plan))
    else:
        console.print(Text("Holmes plan: ", style="bold").append(result.best.choice.describe(), style="not bold"))
    console.print()
    console.print(prediction_table(job, result.best.choice, result.best.prediction))
    console.print()
    for line in stage_reasons(job, result):
        console.print(Text(f"- {line}"))
    if result.runners_up:
        console.print()
        console.print(_runners(result))


def prediction_table(job: Job, choice: Choice, prediction: Prediction) -> RenderableType:
    """Return times, rates and memory of a prediction, and what each stage and link carries."""
    p, profile = prediction, job.profile
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    table.add_column("predicted", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("")
    busy = p.pipeline_seconds
    table.add_row("step", seconds(p.step_seconds), f"{job.batch} samples x {profile.seq} tokens of {profile.name}")
    table.add_row("  pipeline", seconds(busy), f"ranks wait {p.bubble:.1%} of it")
    table.add_row("  gradients", seconds(p.gradient_seconds), "summed over replicas, parameters handed out")
    table.add_row("  optimizer", seconds(p.optimizer_seconds), "")
    table.add_row(
        "tokens/s", f"{p.tokens_per_second:,.0f}", f"{p.tokens_per_second / job.hardware.ranks:,.0f} per rank"
    )
    per_rank = job.batch * profile.flops / p.step_seconds / job.hardware.ranks / 1e12
    table.add_row("model TFLOP/s", f"{per_rank:.4g}", f"per rank; {p.mfu:.1%} of the peak (MFU)")
    worst = max(range(choice.pp), key=lambda rank: p.memory_bytes[rank] / p.limit_bytes[rank])
    table.add_row(
        "memory",
        f"{p.memory_bytes[worst] / 2**30:.1f} GiB",
        f"of {p.limit_bytes[worst] / 2**30:.1f} GiB that can be used, on pipeline rank {worst} (the fullest)",
    )
    links = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    links.add_column("link", no_wrap=True)
    links.add_column("bytes per step", justify="right", no_wrap=True)
    for label, moved in sorted(p.link_bytes.items(), key=lambda item: -item[1]):
        links.add_row(label, f"{moved / 1e9:,.2f} GB")
    return Group(table, Text(), links) if p.link_bytes else Group(table)


def stage_reasons(job: Job, result: SearchResult) -> list[str]:
    """Say why the best layout is as it is, one sentence each."""
    model, best = CostModel(job), result.best
    choice, clusters = best.choice, job.hardware.clusters
    costs = model.stage_costs(choice)
    lines = [
        f"fastest of {result.examined} layouts predicted, {result.simulated} of them simulated; "
        f"{result.too_large} do not fit the memory"
    ]
    places = model.places(choice)
    seen: set[tuple[int, int]] = set()
    last = choice.num_stages - 1
    for stage, count in enumerate(choice.layers_per_stage):
        place = places[choice.rank_of(stage)]
        if (key := (place.cluster, count)) in seen and stage != last:
            continue
        seen.add(key)
        speed = model.speeds[place.cluster] / 1e12
        known = "declared" if clusters[place.cluster].speed else "assumed"
        spent = costs.forward[stage] + costs.backward[stage]
        why = f"{speed:.4g} TFLOP/s per GPU ({known})"
        if stage == last:
            why += ", and the head and loss"
        lines.append(
            f"stage {stage} has {count} blocks: {clusters[place.cluster].name}, {why}: {seconds(spent)} a micro-batch"
        )
    for edge in {edge.label: edge for edge in costs.edges if edge.kind == "across"}.values():
        sending = costs.sent / edge.bandwidth
        lines.append(
            f"{edge.label}: an activation takes {seconds(sending)}, at {edge.bandwidth * 8 / 1e9:.3g} Gbit/s per rank"
        )
    if any(edge.kind == "across" for edge in costs.edges):
        lines.append("sockets: one port per pair of hosts; NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4 may fill it")
    if choice.recompute:
        lines.append("blocks are recomputed in the backward pass (recompute: true)")
    lines.append(f"each replica's batch is {job.batch // choice.dp} samples: the DataLoader's batch_size")
    last_cluster = clusters[choice.order[-1]].name
    if len(clusters) > 1 and choice.schedule not in V_SCHEDULES:
        lines.append(f"start global rank 0 on a host of {last_cluster}: its cluster comes last in the pipeline")
    lines += [f"assumed: {text}" for text in (*job.hardware.assumptions, *job.profile.assumptions)]
    return lines


def _runners(result: SearchResult) -> Table:
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    table.add_column("runner-up", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("why it lost")
    rows: Sequence[Candidate] = result.runners_up
    for one in rows:
        slower = max(0.0, one.prediction.step_seconds / result.best.prediction.step_seconds - 1)
        table.add_row(
            one.choice.describe(), seconds(one.prediction.step_seconds), f"+{slower:.1%}", why_slower(result.best, one)
        )
    return table


def seconds(value: float) -> str:
    """Write a time with three or four digits and its unit."""
    if value >= 1:
        return f"{value:.4g} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} us"


def print_simulation(job: Job, choice: Choice, simulation: Simulation, file: TextIO | None = None) -> None:
    """Print what a simulated step takes, in total and per pipeline rank.

    Args:
        job: What was simulated.
        choice: The layout.
        simulation: The step.
        file: Where to; standard output when None.
    """
    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console = Console(file=file, highlight=False, width=110)
    p = simulation.prediction
    console.print(Text("Holmes simulation: ", style="bold").append(choice.describe(), style="not bold"))
    console.print()
    console.print(prediction_table(job, choice, p))
    console.print()
    table = Table(box=box.ASCII2, pad_edge=False, show_edge=False)
    for name, justify in (("pipeline rank", "right"), ("cluster", "left"), ("stages", "left"), ("blocks", "right"),
                          ("busy", "right"), ("waits", "right"), ("memory", "right"), ("of", "right")):  # fmt: skip
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    places = CostModel(job).places(choice)
    for rank in range(choice.pp):
        busy = sum(e.end - e.start for e in simulation.events if e.rank == rank and e.stage >= 0)
        stages = choice.stages_of(rank)
        table.add_row(
            str(rank),
            job.hardware.clusters[places[rank].cluster].name,
            ", ".join(map(str, stages)),
            str(sum(choice.layers_per_stage[stage] for stage in stages)),
            seconds(busy),
            f"{1 - busy / p.pipeline_seconds:.1%}",
            f"{p.memory_bytes[rank] / 2**30:.1f} GiB",
            f"{p.limit_bytes[rank] / 2**30:.1f} GiB",
        )
    console.print(table)
    if not p.fits:
        console.print(Text("! this layout needs more memory than the GPUs have", style="bold"))
