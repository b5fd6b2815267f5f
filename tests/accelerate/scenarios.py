# SPDX-License-Identifier: Apache-2.0
"""Scripts of tests/scripts/accelerate run on every rank by `Farm`, as the launcher's workers would run them."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tests.lightning.farm import ROOT, Context

# Imported once, before the ranks are forked.
import accelerate  # isort: skip
import peft  # noqa: F401  isort: skip
import transformers.trainer  # noqa: F401  isort: skip

SCRIPTS = ROOT / "tests" / "scripts" / "accelerate"


def started_for_holmes() -> None:
    """Do what the import hook does in a worker; here the hosts were imported before HOLMES_CONFIG was set."""
    from holmes_accelerate import registry

    for name, hook in (
        ("accelerate.state", registry.patch_state),
        ("accelerate.utils.operations", registry.patch_operations),
        ("accelerate.accelerator", registry.patch_accelerator),
        ("accelerate.local_sgd", registry.patch_local_sgd),
        ("transformers.trainer", registry.patch_trainer),
    ):
        hook(importlib.import_module(name))


def script(context: Context, *, name: str, words: list[str] | None = None, out: str | None = None) -> dict[str, Any]:
    """Run a script; returns what it recorded on this rank, and the final weights on rank 0."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    started_for_holmes()
    folder = Path(out) if out else context.out / "files"
    folder.mkdir(exist_ok=True)
    sys.argv = [name, str(folder), *(words or [])]
    runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    record = json.loads((folder / f"rank{context.rank}.json").read_text())
    if context.rank == 0:
        record["weights"] = torch.load(folder / "weights.pt")
    record["folder"] = str(folder)
    return record


def call(context: Context, *, function: str, **arguments: Any) -> Any:
    """Run a function of `tests.accelerate.pieces`."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    started_for_holmes()
    return getattr(importlib.import_module("tests.accelerate.pieces"), function)(context, **arguments)


assert accelerate.__version__
