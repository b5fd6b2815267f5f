# SPDX-License-Identifier: Apache-2.0
"""Train the GPT of recipes/lightning in a lab of two clusters, and show which bytes went over which network.

    sudo make demo-lab          or        sudo .venv/bin/python recipes/lab/demo.py

The training script is the one of `make demo`, started once per host with nothing but `strategy="holmes"`: Holmes finds
out which hosts share a fabric, keeps data parallelism inside the clusters and lets the pipeline cross between them.
Data parallelism alone, in one cluster, is run as well. Each is run twice, with more and with fewer steps: the
difference is training alone, without start-up, validation and checkpoint. Takes about four minutes on two CPU cores;
needs root.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from holmes_core.errors import HolmesError
from holmes_core.lab.job import Finished, run_job
from holmes_core.lab.session import Lab
from holmes_core.lab.spec import LabSpec
from holmes_core.lab.spec_file import load_spec
from holmes_core.lab.tables import format_bytes, print_traffic

HERE = Path(__file__).resolve().parent
SCRIPT = HERE.parent / "lightning" / "pretrain_gpt.py"
BATCH, SEQ, HIDDEN, LAYERS, VOCAB, VALUE = 8, 128, 256, 6, 2048, 4  # VALUE: bytes of a number, training in float32
STEPS, FEW = 24, 8  # the difference of two runs is training alone: start-up, validation and checkpoint cancel out
LIMIT = 1.05  # of the lower bound, for what groups carry across
NOISE = ("hostname of the client socket", "litlogger", "available: False", "limit_val_batches")
CONSOLE = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


@dataclass(kw_only=True)
class Run:
    """One training run in a lab: what each group carried, and what the interfaces counted."""

    spec: LabSpec
    finished: Finished
    groups: list[dict[str, Any]]
    steps: int

    def sent(self, role: str) -> int:
        """Return the bytes that all hosts have sent on ``rdma`` or ``ethernet`` during the whole run."""
        names = {host.name: host.cluster.rdma if role == "rdma" else host.cluster.ethernet for host in self.spec.hosts}
        traffic = self.finished.traffic
        return sum(traffic[host][name].tx for host, name in names.items() if name in traffic[host])


def train(spec: LabSpec, out: Path, steps: int, settings: dict[str, Any], *, quiet: bool) -> Run:
    """Run the script once per host of a new lab."""
    out.mkdir()
    config, traffic = out / "holmes.yaml", out / "traffic.json"
    config.write_text(yaml.safe_dump({"traffic_file": str(traffic), "probe": "off", **settings}))
    words = [sys.executable, str(SCRIPT), "--accelerator", "cpu", "--devices", "1", "--num-nodes", str(len(spec.hosts))]
    words += ["--size", "demo", "--layers", str(LAYERS), "--hidden", str(HIDDEN), "--vocab-size", str(VOCAB)]
    words += ["--seq-len", str(SEQ), "--batch-size", str(BATCH), "--max-bytes", "1000000", "--lr", "1e-3"]
    words += ["--max-steps", str(steps), "--warmup-steps", "5", "--val-every", str(steps), "--val-batches", "1"]
    lines: list[str] = []

    def write(text: str) -> None:
        lines.append(text)
        if not any(noise in text for noise in NOISE) and not (quiet and "| Loss " not in text):
            sys.stdout.write(text)
            sys.stdout.flush()

    with Lab.up(spec, name="demo-") as lab:
        env = {"HOLMES_CONFIG": str(config)}
        finished = run_job(lab, [*words, "--out", str(out / "out")], env=env, timeout=200, write=write)
    if finished.returncode:
        if quiet:
            sys.stdout.writelines(lines)
        return Run(spec=spec, finished=finished, groups=[], steps=0)
    done = re.search(r"parameters for (\d+) steps", "".join(lines))
    return Run(
        spec=spec,
        finished=finished,
        groups=json.loads(traffic.read_text())["groups"],
        steps=int(done[1]) if done else steps,
    )


def crossing(run: Run) -> list[dict[str, Any]]:
    """Return the groups with members in several clusters."""
    return [row for row in run.groups if len(row["clusters"]) > 1]


def data_parallel_bytes(run: Run, role: str) -> int:
    """Return the payload of data-parallel groups on ``rdma``, or on ``ethernet`` (on any of their hosts)."""
    ethernet = {host.name: host.cluster.ethernet for host in run.spec.hosts}
    total = 0
    for row in run.groups:
        bound = row["transport"]["interfaces"]
        slow = any(bound.get(host, row["transport"]["interface"]) in (ethernet[host], None) for host in row["hosts"])
        total += row["payload_bytes"] * (row["axis"] == "dp" and slow == (role == "ethernet"))
    return total


def lower_bound(run: Run) -> tuple[int, int]:
    """Return the fewest bytes that one training step and one validation batch must move between the clusters.

    Each replica's activation once towards the last stage and its gradient once back, at every boundary between
    clusters; and the gradients of the tied embedding, which the first and the last stage each must hear of once.
    Holmes looks the embedding up beside the head instead: embedded micro-batches cross, and these gradients do not.
    """
    replicas = max((len(row["ranks"]) for row in run.groups if row["axis"] == "dp"), default=1)
    boundaries = len(run.spec.clusters) - 1
    activation = replicas * boundaries * BATCH * SEQ * HIDDEN * VALUE
    return 2 * activation + 2 * VOCAB * HIDDEN * VALUE, activation


def print_groups(run: Run, title: str) -> None:
    table = new_table("group", "ranks", "hosts", "over", "transport", "payload", right=(5,))
    table.title = title
    for row in run.groups:
        over = " - ".join(row["clusters"]) if len(row["clusters"]) > 1 else f"inside {row['clusters'][0]}"
        transport = row["transport"]
        interfaces = transport["interface"] or ", ".join(sorted(set(transport["interfaces"].values()))) or "-"
        table.add_row(
            row["group"],
            ", ".join(map(str, row["ranks"])),
            ", ".join(row["hosts"]),
            over,
            f"{transport['backend']} on {interfaces} ({transport['kind']})",
            format_bytes(row["payload_bytes"]),
        )
    CONSOLE.print(table)


def print_slow_link(run: Run, short: Run) -> tuple[float, int]:
    """Print the bytes between the clusters against their lower bound; return the ratio, and what strayed there."""
    step, validation = lower_bound(run)
    bound = run.steps * step + validation
    edges = sum(row["payload_bytes"] for row in crossing(run) if row["axis"] == "edge")
    shared = sum(row["payload_bytes"] for row in crossing(run) if row["axis"] == "shared")
    strayed = data_parallel_bytes(run, "ethernet")
    rest = run.sent("ethernet") - edges - shared
    more = run.steps - short.steps
    steady = (run.sent("ethernet") - short.sent("ethernet")) / more
    table = new_table("the slow link (eth0, all hosts)", "bytes", "of the bound", right=(1, 2))
    table.add_row(f"lower bound: {run.steps} steps, 1 validation", format_bytes(bound), "1.000")
    table.add_row("activations (embedded micro-batches, too) and their gradients", format_bytes(edges), "")
    table.add_row("gradients of the tied embedding (and of small modules at both ends)", format_bytes(shared), "")
    table.add_row("payload", format_bytes(edges + shared), f"{(edges + shared) / bound:.3f}")
    table.add_row("data-parallel gradients and parameters", format_bytes(strayed), "")
    table.add_row("beside it: start-up, batches, logs, checkpoints, headers", format_bytes(rest), "")
    table.add_row("", "", "")
    table.add_row("lower bound per training step", format_bytes(step), "1.000")
    table.add_row(
        f"everything on the wire, per step of {more} more steps", format_bytes(steady), f"{steady / step:.3f}"
    )
    CONSOLE.print(table)
    return (edges + shared) / bound, strayed


def print_data_parallel(run: Run, short: Run) -> None:
    table = new_table("data parallelism only, one cluster", "rdma0", "eth0", right=(1, 2))
    payload = [data_parallel_bytes(run, role) for role in ("rdma", "ethernet")]
    table.add_row("payload of the data-parallel group", *map(format_bytes, payload))
    table.add_row("on the wire, whole run", *(format_bytes(run.sent(role)) for role in ("rdma", "ethernet")))
    per_step = [(run.sent(role) - short.sent(role)) / (run.steps - short.steps) for role in ("rdma", "ethernet")]
    table.add_row("on the wire, per step", *map(format_bytes, per_step))
    CONSOLE.print(table)


def new_table(*columns: str, right: tuple[int, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number in right else "left", overflow="fold")
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lab", type=Path, default=HERE / "two-clusters.yaml", help="(default: %(default)s)")
    args = parser.parse_args(argv)
    start = time.monotonic()
    try:
        spec = load_spec(args.lab)
        # What the interfaces of one cluster count under data parallelism alone belongs to nothing else.
        first = LabSpec(clusters=(spec.clusters[0],))
        runs: list[Run] = []
        with tempfile.TemporaryDirectory(prefix="holmes-lab-") as scratch:
            for number, (title, lab, steps, settings) in enumerate(
                (
                    ("all clusters", spec, STEPS, {}),
                    ("all clusters, fewer steps", spec, FEW, {"print_plan": False}),
                    ("data parallelism in one cluster", first, STEPS // 2, {"pp": 1, "print_plan": False}),
                    ("data parallelism in one cluster, fewer steps", first, FEW // 2, {"pp": 1, "print_plan": False}),
                ),
                start=1,
            ):
                CONSOLE.print(f"\n[{number}/4] {title}: {steps} steps\n", markup=False)
                runs.append(train(lab, Path(scratch, str(number)), steps, settings, quiet=number > 1))
                if runs[-1].finished.returncode:
                    return runs[-1].finished.returncode
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2
    print()
    print_groups(runs[0], "bytes that each group was given")
    print()
    print_traffic(spec, runs[0].finished.traffic, seconds=runs[0].finished.seconds)
    print()
    ratio, strayed = print_slow_link(runs[0], runs[1])
    print()
    print_data_parallel(runs[2], runs[3])
    print(f"\n{time.monotonic() - start:.0f} s. The slow link carried {ratio:.3f} x the lower bound.")
    if ratio > LIMIT or strayed:
        print(f"That is too much: at most {LIMIT} x, and no data-parallel byte, should cross.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
