# SPDX-License-Identifier: Apache-2.0
"""`holmes config`: write a holmes.yaml from flags, or from answers to a few questions."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import yaml

from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError

__all__ = ["main"]

_QUESTIONS = (  # flag, question, default
    ("machines", "How many machines?", "1"),
    ("processes", "How many processes (GPUs) on all of them?", "2"),
    ("pp", "Pipeline stages (empty: Holmes decides from the networks)?", ""),
    ("tp", "Tensor-parallel ranks per layer (empty: 1)?", ""),
    ("mixed_precision", "Mixed precision (no, bf16)?", "no"),
)


def main(words: list[str]) -> int:
    """Write the file; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="holmes config",
        description="Write a holmes.yaml for `accelerate launch --config` and `holmes launch`. On a terminal, what is"
        " not given is asked for; elsewhere the defaults count.",
    )
    parser.add_argument("-o", "--output", default="holmes.yaml", metavar="FILE", help="where to write (holmes.yaml)")
    parser.add_argument("--processes", type=int, metavar="N", help="processes of the whole job, one per GPU")
    parser.add_argument("--machines", type=int, metavar="N", help="machines")
    parser.add_argument("--main-ip", metavar="ADDRESS", help="address of the first machine, where there are several")
    for name, text in (("pp", "pipeline"), ("dp", "data"), ("tp", "tensor")):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{text}-parallel degree")
    parser.add_argument("--microbatches", type=int, metavar="N", help="micro-batches per batch")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"))
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    given = parser.parse_args(words)
    if os.path.exists(given.output) and not given.force:
        print(f"holmes config: {given.output} exists; --force replaces it", file=sys.stderr)
        return 2
    try:
        _ask(given, interactive=sys.stdin.isatty())
        text = _render(given)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with open(given.output, "w", encoding="utf-8") as file:
        file.write(text)
    print(f"wrote {given.output}. Start with: accelerate launch --config {given.output} train.py")
    return 0


def _ask(given: argparse.Namespace, *, interactive: bool) -> None:
    for name, question, default in _QUESTIONS:
        if getattr(given, name) is not None:
            continue
        answer = input(f"{question} [{default}] ").strip() if interactive else ""
        answer = answer or default
        if name == "mixed_precision":
            given.mixed_precision = answer
        elif answer:
            if not answer.isdecimal() or int(answer) < 1:
                raise ConfigError(seen=f"{answer!r}", where=f"the answer to: {question}", do="give a number from 1")
            setattr(given, name, int(answer))


def _render(given: argparse.Namespace) -> str:
    ours = {"pp": given.pp, "dp": given.dp, "tp": given.tp, "num_microbatches": given.microbatches}
    ours = {name: value for name, value in ours.items() if value is not None}
    HolmesConfig.load(kwargs=ours, env={})
    product = 1
    for name in ("pp", "dp", "tp"):
        product *= ours.get(name, 1)
    if given.processes % product:
        raise ConfigError(
            seen=f"pp x dp x tp is a multiple of {product}, which does not divide {given.processes} processes",
            where="holmes config",
            do="choose degrees whose product is the number of processes",
        )
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "num_machines": given.machines,
        "num_processes": given.processes,
        "machine_rank": 0,
        "mixed_precision": given.mixed_precision,
        "use_cpu": given.cpu,
    }
    if given.machines > 1:
        data["main_process_ip"] = given.main_ip or "ADDRESS-OF-THE-FIRST-MACHINE"
        data["main_process_port"] = 29500
    head = "# Written by `holmes config`. accelerate launch --config THIS train.py\n"
    if given.machines > 1:
        head += "# On every machine, with its own --machine_rank 0, 1, ...\n"
    lines = yaml.safe_dump(data, sort_keys=False)
    section = yaml.safe_dump({"holmes_config": ours}, sort_keys=False) if ours else "holmes_config: {}\n"
    note = "# What is left out here, Holmes decides: pp, dp, tp, num_microbatches, schedule, ...\n"
    return head + lines + note + section
