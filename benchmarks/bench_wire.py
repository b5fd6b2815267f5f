# SPDX-License-Identifier: Apache-2.0
"""What rounding on the slow link (`wire_dtype`) does to the loss: one training per form, and one from another seed.

    python benchmarks/bench_wire.py [--steps 500]

The GPT of recipes/lightning/pretrain_gpt.py on Python's own sources, two stages in two declared clusters. Everything
but `same` changes what is computed; a run from another seed shows how much losses differ anyway.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

RECIPE = Path(__file__).resolve().parents[1] / "recipes/lightning/pretrain_gpt.py"
CLUSTERS = [{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}]
RUNS = {
    "same": ("same", "32-true", 1234),
    "same, another seed": ("same", "32-true", 4321),
    "int8": ("int8", "32-true", 1234),
    "bf16-mixed, same": ("same", "bf16-mixed", 1234),
    "bf16-mixed, compute": ("compute", "bf16-mixed", 1234),
}


def train(form: str, precision: str, seed: int, *, steps: int, folder: Path) -> tuple[float, float]:
    """Return the mean training loss of the last tenth of the steps, and the validation loss at the end."""
    config = folder / "holmes.yaml"
    config.write_text(json.dumps({"pp": 2, "clusters": CLUSTERS, "wire_dtype": form, "print_plan": False}))
    words = [
        sys.executable, str(RECIPE), "--size", "tiny", "--layers", "6", "--hidden", "128", "--heads", "4",
        "--seq-len", "64", "--batch-size", "8", "--max-bytes", "2000000", "--max-steps", str(steps),
        "--warmup-steps", str(steps // 10), "--lr", "1e-3", "--val-every", str(steps), "--val-batches", "50",
        "--accelerator", "cpu", "--devices", "2", "--precision", precision, "--seed", str(seed),
        "--config", str(config), "--out", str(folder / "out"),
    ]  # fmt: skip
    done = subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    rows = list(csv.DictReader(next((folder / "out").glob("logs/*/metrics.csv")).open()))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    return statistics.mean(losses[-max(1, len(losses) // 10) :]), float(
        [r["val_loss"] for r in rows if r["val_loss"]][-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "transformers")))
    print(f"6 blocks of width 128, 8 x 64 tokens per step, {args.steps} steps, pp 2 in two clusters\n")
    print("| wire_dtype | training loss, last tenth | validation loss | against same |\n| --- | --- | --- | --- |")
    reference: dict[str, float] = {}
    for name, (form, precision, seed) in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="holmes-wire-") as folder:
            training, validation = train(form, precision, seed, steps=args.steps, folder=Path(folder))
        base = reference.setdefault(precision, validation)
        print(f"| {name} | {training:.4f} | {validation:.4f} | {validation - base:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
