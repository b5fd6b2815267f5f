# SPDX-License-Identifier: Apache-2.0
"""Draw what each rank did in one step of a lab run, as it was measured: where the time goes that is not computing.

    sudo .venv/bin/python benchmarks/lab_timeline.py [--setting hybrid8] [--variant holmes] [--out lab_timeline.png]

Prints, per rank, the seconds of the step by what they were spent on, and waits by where they are: before the second
pass, between passes, after the last (for the loss, and for sums). Clocks are one: all hosts are namespaces of this
machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lab_settings

STEPS = 4
Record = tuple[str, int, int, float, float]  # kind, stage, micro-batch, start, end
#: Passes shorter than this are the embedding's: too thin to be drawn.
SHORTEST = 0.01


def watch(records: list[Record]) -> None:
    """Write down every pass of this rank, and what follows them in a step."""
    from holmes_core.runtime.engine import Engine
    from holmes_core.runtime.stage import HolmesStage

    def wrap(owner: Any, name: str, describe: Callable[[Any, Any, Any], tuple[str, int, int]]) -> None:
        inner = getattr(owner, name)

        def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            try:
                return inner(self, *args, **kwargs)
            finally:
                records.append((*describe(self, args, kwargs), start, time.monotonic()))

        setattr(owner, name, timed)

    wrap(HolmesStage, "forward_one_chunk", lambda stage, args, _: ("F", stage.stage_index, args[0]))
    wrap(
        HolmesStage,
        "backward_one_chunk",
        lambda stage, args, kwargs: ("B" if kwargs.get("full_backward", True) else "I", stage.stage_index, args[0]),
    )
    wrap(HolmesStage, "backward_weight_one_chunk", lambda stage, args, _: ("W", stage.stage_index, args[0]))
    wrap(Engine, "reduce_gradients", lambda *_: ("reduce", -1, -1))
    wrap(Engine, "broadcast_parameters", lambda *_: ("gather", -1, -1))
    # Under Lightning Optimizer.step holds the whole step (its closure); AdamW's update alone is this function.
    module = importlib.import_module("torch.optim.adam")
    update = module.adam

    def timed_update(*args: Any, **kwargs: Any) -> None:
        start = time.monotonic()
        update(*args, **kwargs)
        records.append(("optimizer", -1, -1, start, time.monotonic()))

    module.adam = timed_update  # type: ignore[attr-defined]


def be(name: str, replicas: int, out: str) -> None:
    """Be one rank."""
    import lab_systems

    records: list[Record] = []
    watch(records)
    variant = lab_settings.VARIANTS[name]
    lab_systems.train(variant.kind, {**variant.options, "replicas": replicas}, batch=32, steps=STEPS)
    Path(out, f"records.{os.environ['RANK']}").write_text(json.dumps(records))


def step_of(records: list[Record]) -> list[Record]:
    """Return the last whole step but one of a rank, from the end of the one before."""
    ends = [index for index, record in enumerate(records) if record[0] == "gather"]
    return records[ends[-3] + 1 : ends[-2] + 1]


def waits(step: list[Record]) -> tuple[float, float, float]:
    """Return for how long a rank waited before its second pass, between passes, and after its last."""
    passes = [index for index, record in enumerate(step) if record[0] in "FBIW" and record[4] - record[3] > SHORTEST]
    gaps = [max(0.0, after[3] - before[4]) for before, after in pairwise(step)]  # gaps[i] lies before step[i + 1]
    second, last = passes[1], passes[-1]
    return sum(gaps[:second]), sum(gaps[second:last]), sum(gaps[last:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=lab_settings.TITLES, default="hybrid8")
    parser.add_argument("--variant", choices=lab_settings.VARIANTS, default="holmes")
    parser.add_argument("--out", default="lab_timeline.png")
    parser.add_argument("--be", nargs=2, metavar=("REPLICAS", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        be(args.variant, int(args.be[0]), args.be[1])
        return
    from holmes_core.report.timeline import write_png

    title = f"{lab_settings.TITLES[args.setting]}: {lab_settings.VARIANTS[args.variant].label}"
    with tempfile.TemporaryDirectory(prefix="holmes-bench-") as folder:
        words = [sys.executable, __file__, "--variant", args.variant]
        lines: list[str] = []
        status = lab_settings.run(
            args.setting,
            args.variant,
            lambda replicas: [*words, "--be", str(replicas), folder],
            Path(folder),
            write=lines.append,
        )
        if status:
            raise SystemExit("\n".join(line for line in lines if "Error" in line) or "\n".join(lines[-20:]))
        steps = [step_of(json.loads(file.read_text())) for file in sorted(Path(folder).glob("records.*"))]
    write_png(simulation_of(steps), args.out, title=title, how="measured")
    print(f"{title}\n{'rank':>4} {'step':>6}  " + " ".join(f"{kind:>9}" for kind in (*KINDS, *WAITS)))
    for rank, step in enumerate(steps):
        length = step[-1][4] - step[0][3]
        spent = Counter({kind: sum(r[4] - r[3] for r in step if r[0] == kind) for kind in KINDS})
        row = [*(spent[kind] for kind in KINDS), *waits(step)]
        print(f"{rank:>4} {length:>6.2f}  " + " ".join(f"{seconds:>9.2f}" for seconds in row))


WAITS = ("w start", "w between", "w end")
KINDS = ("F", "B", "I", "W", "reduce", "optimizer", "gather")


def simulation_of(steps: list[list[Record]]) -> Any:
    """Return measured steps of all ranks in the form that the picture of a simulated one takes."""
    from types import SimpleNamespace

    from holmes_core.plan.simulate import Event

    begin = min(step[0][3] for step in steps)
    events = [
        Event(rank, kind, stage, micro_batch, start - begin, end - begin)
        for rank, step in enumerate(steps)
        for kind, stage, micro_batch, start, end in step
        if kind not in "FB" or end - start > SHORTEST
    ]
    return SimpleNamespace(events=events, transfers=[])


if __name__ == "__main__":
    main()
