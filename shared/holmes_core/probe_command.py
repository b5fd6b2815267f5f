# SPDX-License-Identifier: Apache-2.0
"""`holmes probe`: measure how fast each rank of a job computes a model's block, and how fast the links are."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from holmes_core.cluster.probe import ProbeResult, write_result
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, HolmesError
from holmes_core.plan.profile_names import find_config
from holmes_core.topology_command import leave_together, place_in_job

__all__ = ["main"]

_DTYPES = {"bf16-mixed": "float32", "bf16-true": "bfloat16", "32-true": "float32"}


def main(words: list[str]) -> int:
    """Run `holmes probe WORDS`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="holmes probe",
        description="Measure the ranks and links of a job with a model's own block. Start it on every rank like the "
        "job itself (torchrun --no-python holmes probe; srun holmes probe); alone it measures this process.",
    )
    add = parser.add_argument
    add("--model", default="gpt2", help="config.json, a directory with one, or a name (no download; default gpt2)")
    add("--seq", type=int, help="tokens per sample (default: the model's, at most 1024)")
    add("--micro-batch-size", type=int, default=4, metavar="N", help="samples per micro-batch (default 4)")
    add("--precision", choices=_DTYPES, default="bf16-mixed", help="(default bf16-mixed)")
    add("--cluster", metavar="FILE", help="declared clusters (default: the file HOLMES_CLUSTER names)")
    add("--device", choices=("auto", "cpu"), default="auto", help="cpu measures processors where there are GPUs")
    add("--fresh", action="store_true", help="measure again, whatever is known from before")
    add("--json", action="store_true", help="print what was measured as JSON")
    add("-o", "--output", metavar="FILE", help="write what was measured; a job takes it with `probe: FILE`")
    add("--timeout", type=float, default=60.0, metavar="S", help="longest wait for a rank (60)")
    given = parser.parse_args(words)
    try:
        result = _probe(given)
        if result is not None:
            _show(given, result)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _probe(given: argparse.Namespace) -> ProbeResult | None:
    """Measure; None on all ranks but the first."""
    for name in ("seq", "micro_batch_size"):
        if (value := getattr(given, name)) is not None and value < 1:
            raise ConfigError(seen=f"{value}", where=f"--{name.replace('_', '-')}", do="give a positive number")
    name, values = find_config(given.model)
    import torch

    from holmes_core.runtime.probe import StepHint, Waits, run_probe
    from holmes_core.runtime.start import meet

    place = place_in_job()
    rank, world_size = place if place is not None else (0, 1)
    use_cuda = torch.cuda.is_available() and given.device == "auto"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    meeting = meet(rank=rank, world_size=world_size, timeout=given.timeout)
    config = HolmesConfig.load({"cluster_file": given.cluster} if given.cluster else {})
    topology = meeting.topology(config)
    model = _model(name, values, getattr(torch, _DTYPES[given.precision]))
    seq = given.seq or min(1024, _longest(model))
    result = run_probe(
        model,
        topology,
        store=meeting.store,
        rank=rank,
        device=device,
        hint=StepHint(seq=seq, precision=given.precision),
        samples=given.micro_batch_size,
        seq=seq,
        waits=Waits(arrive=given.timeout, measure=given.timeout),
        fresh=given.fresh,
    )
    leave_together(meeting.store, rank, world_size)
    return result if rank == 0 else None


def _model(name: str, values: dict[str, Any], dtype: Any) -> Any:
    """Return the model without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            seen=f"no model can be made from it: {(str(error).splitlines() or [''])[0][:200]}",
            where=f"--model {name}",
            do="give the config.json of a causal language model of transformers",
        ) from None
    return model.to(dtype)


def _longest(model: Any) -> int:
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else 1024


def _show(given: argparse.Namespace, result: ProbeResult) -> None:
    if given.output:
        write_result(Path(given.output), result)
    if given.json:
        print(json.dumps(result.to_json(), indent=2))
        return
    from holmes_core.report.probe_table import print_probe

    print_probe(result)
    if given.output:
        print(f"\nwritten: {given.output}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
