# SPDX-License-Identifier: Apache-2.0
"""A simulated step as a timeline: JSON for Perfetto, and a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holmes_core.errors import HolmesError
from holmes_core.plan.simulate import Simulation

__all__ = ["perfetto_events", "write_perfetto", "write_png"]

_NAMES = {"F": "forward", "B": "backward", "I": "backward of the input", "W": "backward of the weights"}
# Told apart also without colour (lightness differs) and by those who do not see red and green alike.
_COLOURS = {"F": "#9ecae9", "B": "#1f5f99", "I": "#4292c6", "W": "#08306b", "reduce": "#f58518", "gather": "#ffbf79",
            "optimizer": "#54a24b", "across": "#e45756", "link": "#bab0ac"}  # fmt: skip
_LARGEST_LABELLED = 200  # boxes per rank up to which micro-batches are numbered


def perfetto_events(simulation: Simulation) -> list[dict[str, Any]]:
    """Return the step in Chrome's trace event format, which Perfetto reads: times in microseconds.

    Each pipeline rank is a process with a track for compute and one for what it sends in each direction.
    """
    events: list[dict[str, Any]] = []
    ranks = sorted({event.rank for event in simulation.events})
    for rank in ranks:
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipeline rank {rank}"}})
        for track, name in enumerate(("compute", "sends activations", "sends gradients")):
            events.append({"ph": "M", "pid": rank, "tid": track, "name": "thread_name", "args": {"name": name}})
    for event in simulation.events:
        known = event.kind in _NAMES
        events.append(
            {
                "ph": "X",
                "pid": event.rank,
                "tid": 0,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
                "name": f"{event.kind}{event.micro_batch} (stage {event.stage})" if known else event.kind,
                "cat": _NAMES.get(event.kind, event.kind),
            }
        )
    for sent in simulation.transfers:
        events.append(
            {
                "ph": "X",
                "pid": sent.sender,
                "tid": 1 if sent.kind == "F" else 2,
                "ts": sent.start * 1e6,
                "dur": (sent.end - sent.start) * 1e6,
                "name": f"{sent.kind}{sent.micro_batch} to rank {sent.receiver}",
                "cat": sent.label,
            }
        )
    return events


def write_perfetto(simulation: Simulation, path: str, *, title: str = "") -> None:
    """Write the step as JSON that https://ui.perfetto.dev opens.

    Args:
        simulation: The step.
        path: File to write.
        title: Stands in the file's metadata.
    """
    data = {"traceEvents": perfetto_events(simulation), "otherData": {"title": title, "what": "a prediction"}}
    Path(path).write_text(json.dumps(data), encoding="utf-8")


def write_png(simulation: Simulation, path: str, *, title: str = "", how: str = "predicted") -> None:
    """Draw the step: one row per pipeline rank, with a thin row below it for what it sends.

    Args:
        simulation: The step.
        path: File to write; its ending decides the format.
        title: Stands above the picture.
        how: The times were found.

    Raises:
        HolmesError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise HolmesError(seen=str(error), where="timeline", do="pip install matplotlib") from error
    ranks = max(event.rank for event in simulation.events) + 1
    figure = Figure(figsize=(14, min(1.6 + 0.55 * ranks, 24)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max(event.end for event in simulation.events)
    scale, unit = (1.0, "s") if longest >= 1 else (1e3, "ms")
    boxes: dict[str, list[list[tuple[float, float]]]] = {}

    def box(kind: str, start: float, end: float, low: float, high: float) -> None:
        corners = [(start * scale, low), (end * scale, low), (end * scale, high), (start * scale, high)]
        boxes.setdefault(kind, []).append(corners)

    per_rank = len(simulation.events) / ranks
    for event in simulation.events:
        low, high = event.rank - 0.38, event.rank + 0.18
        box(event.kind, event.start, event.end, low, high)
        wide = (event.end - event.start) / longest > 0.009
        if event.kind in _NAMES and per_rank <= _LARGEST_LABELLED and wide:
            axes.text((event.start + event.end) / 2 * scale, (low + high) / 2, str(event.micro_batch), ha="center",
                      va="center", fontsize=7, color="black" if event.kind == "F" else "white")  # fmt: skip
    for sent in simulation.transfers:
        kind = "across" if "->" in sent.label else "link"
        offset = 0.22 if sent.kind == "F" else 0.34
        box(kind, sent.start, sent.end, sent.sender + offset, sent.sender + offset + 0.1)
    for kind, found in boxes.items():
        axes.add_collection(PolyCollection(found, facecolors=_COLOURS[kind], edgecolors="white", linewidths=0.3))
    axes.set_xlim(0, longest * scale)
    axes.set_ylim(ranks - 0.45, -0.55)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_xlabel(f"{unit} ({how})")
    axes.set_title(title, fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    words = {**_NAMES, "across": "sent to another cluster", "link": "sent inside a cluster"}
    shown = [kind for kind in _COLOURS if kind in boxes]
    axes.legend(
        handles=[Patch(facecolor=_COLOURS[kind], label=words.get(kind, kind)) for kind in shown],
        loc="upper center", bbox_to_anchor=(0.5, -0.18 if ranks < 6 else -0.07), ncols=len(shown), frameon=False,
        fontsize=9,
    )  # fmt: skip
    figure.savefig(path)
