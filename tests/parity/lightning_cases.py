# SPDX-License-Identifier: Apache-2.0
"""Scripts as people write them, under Trainer(strategy="auto") and Trainer(strategy="holmes"), compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SCRIPTS", "ScriptCase", "compare", "run_and_compare", "words_of"]

_SCRIPTS = Path(__file__).parents[1] / "scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCase:
    """A script, its arguments and the layout.

    Args:
        name: Unique.
        script: File in tests/scripts.
        config: For HolmesConfig, by a yaml file.
        args: More arguments of the script, for both runs.
        batch_size: Of each replica.
        slow: Only in `make test-all`.
    """

    name: str
    script: str
    config: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    batch_size: int = 8
    slow: bool = True

    @property
    def ranks(self) -> int:
        """Processes of the holmes run."""
        return int(self.config.get("pp", 1) * self.config.get("dp", 1) * self.config.get("tp", 1))


_USUAL = ("--clip", "0.5", "--accumulate", "2", "--layers", "4", "--length", "12", "--changing")

SCRIPTS = (
    ScriptCase(
        name="lightning_output_loss_pp2",
        script="output_loss.py",
        config={"pp": 2},
        args=(*_USUAL, "--model", "gpt2", "--tied"),
        slow=False,
    ),
    ScriptCase(
        name="lightning_output_loss_dp2_parameters_on_their_way",
        script="output_loss.py",
        config={"dp": 2, "overlap_param_gather": True},
        args=(*_USUAL, "--tied", "--rows", "64"),
        batch_size=4,
        slow=False,
    ),
    ScriptCase(name="lightning_own_loss_pp2", script="own_loss.py", config={"pp": 2}, args=_USUAL),
    ScriptCase(
        name="lightning_own_loss_pp2_dp2_tied",
        script="own_loss.py",
        config={"pp": 2, "dp": 2},
        args=(*_USUAL, "--tied", "--rows", "64"),
        batch_size=4,
    ),
    ScriptCase(
        name="lightning_output_loss_pp2_tp2",
        script="output_loss.py",
        config={"pp": 2, "tp": 2},
        args=(*_USUAL, "--tied"),
    ),
    ScriptCase(
        name="lightning_output_loss_pp2_dp2_tp2",
        script="output_loss.py",
        config={"pp": 2, "dp": 2, "tp": 2, "schedule": "interleaved_1f1b"},
        args=(*_USUAL, "--rows", "64"),
        batch_size=8,
    ),
)


def words_of(case: ScriptCase, out: Path, *, holmes: bool) -> tuple[list[str], dict[str, str]]:
    """The script's arguments and environment for one of the two runs."""
    dp = int(case.config.get("dp", 1))
    words = [str(_SCRIPTS / case.script), "--out", str(out), *case.args]
    if not holmes:
        order = ["--like-replicas"] if dp > 1 else []  # Lightning shuffles replicas' training rows
        return [*words, *order, "--strategy", "auto", "--batch-size", str(case.batch_size * dp)], {}
    file = out.with_suffix(".yaml")
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in {**case.config, "timeout": 120}.items()))
    words += ["--strategy", "holmes", "--devices", str(case.ranks), "--batch-size", str(case.batch_size)]
    return words, {"HOLMES_CONFIG": str(file)}


def compare(case: ScriptCase, alone: Path, laid_out: Path) -> dict[str, Any]:
    """Largest differences, and what is out of tolerance."""
    import torch

    expected = json.loads(Path(f"{alone}.rank0.json").read_text())
    ranks = [json.loads(Path(f"{laid_out}.rank{r}.json").read_text()) for r in range(case.ranks)]
    dp = int(case.config.get("dp", 1))
    problems: list[str] = []

    def far(a: list[float], b: list[float], what: str) -> float:
        if len(a) != len(b) or not a:
            problems.append(f"{what}: {len(a)} values, {len(b)} expected")
            return float("inf")
        return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))

    found: dict[str, Any] = {"loss": 0.0, "norm": 0.0, "validation": 0.0}
    if not any("val_ppl" in values for values in expected["validation"]):
        problems.append("vacuous: nothing was validated")
    for rank in ranks:
        found["norm"] = max(found["norm"], far(rank["norms"], expected["norms"], "norms"))
        for key in ("events", "rates", "global_step", "epoch"):
            if rank[key] != expected[key]:
                problems.append(f"{key}: {rank[key]}, {expected[key]} expected")
        for ours, theirs in zip(rank["validation"], expected["validation"], strict=True):
            if set(ours) != set(theirs):
                problems.append(f"validation logs {sorted(ours)}, {sorted(theirs)} expected")
            # A mean over batches depends on how the rows were shared out; perplexity counts tokens.
            keys = [key for key in theirs if key.startswith("val_ppl" if dp > 1 else "val")]
            found["validation"] = max(
                [found["validation"], *(far([ours[key]], [theirs[key]], key) for key in keys if key in ours)]
            )
        found["loss"] = max(found["loss"], far(rank["losses"], expected["losses"], "losses"))
    weights, right = torch.load(f"{laid_out}.pt"), torch.load(f"{alone}.pt")
    if weights.keys() != right.keys():
        problems.append(f"weights of other names: {sorted(weights.keys() ^ right.keys())[:4]}")
    found["weight"] = max(float((weights[key] - right[key]).abs().max()) for key in weights.keys() & right.keys())
    problems += [
        f"{key} differs by {found[key]:.1e}"
        for key in ("loss", "norm", "validation", "weight")
        if not found[key] <= 1e-5
    ]
    return {"name": case.name, **found, "problems": problems}


def run_and_compare(case: ScriptCase) -> dict[str, Any]:
    """Run both and compare (for the report; the tests start processes by `run_script`)."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outs = {holmes: Path(folder) / ("holmes" if holmes else "alone") for holmes in (False, True)}
        for holmes, out in outs.items():
            words, environment = words_of(case, out, holmes=holmes)
            done = subprocess.run(
                [sys.executable, *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no output"])[-1]
                return {"name": case.name, "problems": [f"exit status {done.returncode}: {last}"]}
        row = compare(case, outs[False], outs[True])
    return {**row, "seconds": round(time.monotonic() - start, 1)}
