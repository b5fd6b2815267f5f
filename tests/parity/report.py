# SPDX-License-Identifier: Apache-2.0
"""Run the matrix and write docs/parity.md.

    python -m tests.parity.report                      # the fast set and the mistakes
    python -m tests.parity.report --set all            # everything; takes long
    python -m tests.parity.report --only 'wide_pp4_*'  # some; what ran before is kept with --results FILE

Every row of the page is from a run; cases that were not run are listed as such.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.parity.cases import FAST, MISTAKES, SLOW, TOLERANCES, Case
from tests.parity.judge import judge
from tests.parity.lightning_cases import SCRIPTS, ScriptCase, run_and_compare
from tests.parity.runner import Worlds

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
_PACKAGES = ("torch", "transformers", "lightning", "torchmetrics")


def run(case: Case, worlds: Worlds) -> dict[str, Any]:
    """Run a case; its row."""
    row: dict[str, Any] = {"name": case.name, "problems": [], "seconds": 0.0}
    outcome = worlds.run("worker:run_case", case)
    row["seconds"] = round(outcome.seconds, 1)
    errors = [f"{error[0]}: {error[1].splitlines()[0]}" for error in outcome.errors if error]
    if errors:
        return {**row, "problems": errors[:1]}
    verdict = judge(case, outcome.values)
    return {**row, **dataclasses.asdict(verdict)}


def _words(case: Case) -> str:
    pp, dp, tp = case.degrees
    return f"pp {pp}, dp {dp}, tp {tp}"


def _row(case: Case, row: dict[str, Any]) -> str:
    result = "equal" if not row["problems"] else "**" + row["problems"][0].replace("|", "/") + "**"
    numbers = [f"{row[key]:.1e}" if key in row else "-" for key in ("loss", "norm", "weight")]
    cells = [f"`{case.name}`", case.description, case.ranks, _words(case), case.schedule, case.steps, *numbers, result]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


_HEAD = [
    "| case | what | processes | layout | schedule | steps | loss | norm | weight | result |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]


def _table(cases: Sequence[Case], rows: dict[str, dict[str, Any]]) -> list[str]:
    found = [_row(case, rows[case.name]) for case in cases if case.name in rows]
    missing = [case.name for case in cases if case.name not in rows]
    lines = [*_HEAD, *found] if found else []
    if missing:
        lines += ["", f"Not run for this page ({len(missing)}): " + ", ".join(f"`{name}`" for name in missing) + "."]
    return lines


def _mistakes(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["| mistake | processes | layout | loss | norm | weight | found by |", "| --- |" + " --- |" * 6]
    for case in MISTAKES:
        if case.name not in rows:
            continue
        row = rows[case.name]
        numbers = [f"{row[key]:.1e}" if key in row else "-" for key in ("loss", "norm", "weight")]
        found = ", ".join(dict.fromkeys(problem.split()[0].rstrip(":") for problem in row["problems"])) or "**nothing**"
        cells = [case.description, case.ranks, _words(case), *numbers, found]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return lines


def _scripts(rows: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| case | script | processes | layout | losses | norms | weights | validation | result |",
        "| --- |" + " --- |" * 8,
    ]
    missing = []
    for case in SCRIPTS:
        row = rows.get(case.name)
        if row is None:
            missing.append(case.name)
            continue
        numbers = [f"{row[key]:.1e}" if key in row else "-" for key in ("loss", "norm", "weight", "validation")]
        result = "equal" if not row["problems"] else "**" + row["problems"][0].splitlines()[0].replace("|", "/") + "**"
        layout = ", ".join(f"{key} {value}" for key, value in case.config.items())
        cells = [f"`{case.name}`", f"`{case.script}`", case.ranks, layout, *numbers, result]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    if missing:
        lines += ["", "Not run for this page: " + ", ".join(f"`{name}`" for name in missing) + "."]
    return lines


def page(rows: dict[str, dict[str, Any]], command: str) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    known = [case for case in (*FAST, *SLOW) if case.name in rows]
    equal = sum(not rows[case.name]["problems"] for case in known)
    lines = [
        "# Numbers do not change",
        "",
        "Each case below is a training that was laid out over processes, and the same training in one process that is",
        "fed the replicas' batches joined. Compared at every step: the loss, the gradient norm of the whole model, the",
        "actions that each rank executed (with what torch's own schedule of that name executes), and each parameter",
        "on all ranks that hold it (replicas, tied weights on two stages, weights that tensor parallelism leaves",
        "whole), bit for bit. At the end: the weights. Rows of a batch have unequal token counts.",
        "",
        f"Of {len(known)} cases that were run for this page, {equal} are equal within the tolerance.",
        "",
        f"- Written by `{command}`; one row per case, nothing by hand.",
        f"- Python {platform.python_version()}, {versions}; CPU, gloo, {os.cpu_count()} cores, one thread per process.",
        "- `make test` runs the fast set, `make test-all` everything (`pytest tests/parity -m 'slow or not slow'`).",
        "",
        "## Tolerances",
        "",
        "Columns *loss* and *norm* are the largest relative difference over all steps, *weight* the largest absolute",
        "difference of any element after the last step.",
        "",
        "| precision | optimizer | loss | norm | weight |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {precision} | {optimizer} | {t.loss:.0e} | {t.norm:.0e} | {t.weight:.0e} |"
            for (precision, optimizer), t in TOLERANCES.items()
        ),
        "",
        "Sums run in another order when a batch is cut, so the last bits differ; SGD passes such a difference on as",
        "it is. AdamW divides each element's gradient by that element's own recent size: where a gradient is nothing",
        "but rounding (the bias of keys, which softmax cancels), the step is still about as long as the learning",
        "rate, in a direction that rounding decides. Its tolerance for weights is therefore stated on its own, and",
        "because dividing by the size also hides a wrong scale of the loss, most cases use SGD with momentum. In",
        "bfloat16 (8 bits of mantissa) each sum over micro-batches rounds once more than in one process.",
        "",
    ]
    parts = {
        "Fast set": FAST,
        "Wide matrix": tuple(case for case in SLOW if case.name.startswith("wide_")),
        "bfloat16": tuple(case for case in SLOW if case.precision != "fp32"),
        "AdamW": tuple(case for case in SLOW if case.optimizer == "adamw"),
        "Compositions": tuple(
            case
            for case in SLOW
            if not case.name.startswith("wide_") and case.precision == "fp32" and case.optimizer == "sgd"
        ),
    }
    for title, cases in parts.items():
        lines += [f"## {title}", "", *_table(cases, rows), ""]
    lines += [
        "## Through Lightning",
        "",
        'The scripts in tests/scripts, `Trainer(strategy="auto")` beside `Trainer(strategy="holmes")`: losses, norms',
        "and validation values relative, weights absolute.",
        "",
        *_scripts(rows),
        "",
        "## Deliberate mistakes",
        "",
        "The same comparison with one thing made wrong in the engine. Each must be found; the same case without the",
        "mistake is equal.",
        "",
        *_mistakes(rows),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run, then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("fast", "slow", "all", "none"), default="fast")
    parser.add_argument("--only", default="*", help="pattern of case names")
    parser.add_argument("--results", type=Path, help="json lines of earlier rows; new ones are added")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    if args.results and args.results.exists():
        rows = {row["name"]: row for row in map(json.loads, args.results.read_text().splitlines())}
    chosen = {"fast": (*FAST, *MISTAKES), "slow": SLOW, "all": (*FAST, *MISTAKES, *SLOW), "none": ()}[args.set]
    wanted = {"fast": (False,), "slow": (True,), "all": (False, True), "none": ()}[args.set]
    scripts = [case for case in SCRIPTS if case.slow in wanted]
    worlds = Worlds()
    todo: list[Case | ScriptCase] = [*sorted(chosen, key=lambda case: case.ranks), *scripts]
    for case in todo:
        if not fnmatch(case.name, args.only):
            continue
        row = run(case, worlds) if isinstance(case, Case) else run_and_compare(case)
        rows[case.name] = row
        print(json.dumps(row), flush=True)
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    worlds.close()
    args.page.write_text(page(rows, "python -m tests.parity.report --set all"))


if __name__ == "__main__":
    main()
