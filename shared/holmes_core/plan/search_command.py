# SPDX-License-Identifier: Apache-2.0
"""`holmes plan`: find the fastest layout for a model on declared clusters, and write it down for the job."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from holmes_core.cluster.host import ClusterSpec
from holmes_core.config import SCHEDULES, V_SCHEDULES, HolmesConfig
from holmes_core.errors import ConfigError, HolmesError
from holmes_core.plan.cost import COMPUTE_EFFICIENCY, PRECISIONS, Job
from holmes_core.plan.hardware import Hardware, load_hardware, topology_of_specs
from holmes_core.plan.layout import choose_layout
from holmes_core.plan.plan import Plan, make_plan
from holmes_core.plan.plan_file import write_plan
from holmes_core.plan.profile_config import profile_of_config
from holmes_core.plan.profile_names import find_config
from holmes_core.plan.search import Candidate, Limits, SearchResult, search

__all__ = ["add_job_options", "config_of", "job_of", "main", "plan_of"]

_LARGEST_TABLE = 512  # ranks up to which every process group is worked out and shown


def main(words: list[str]) -> int:
    """Run `holmes plan`; return the exit status.

    Args:
        words: The words after `holmes plan`.
    """
    parser = argparse.ArgumentParser(
        prog="holmes plan",
        description="Find the fastest layout for a model on declared clusters. Needs no GPU, no network, no weights.",
    )
    add_job_options(parser)
    parser.add_argument("-o", "--output", metavar="FILE",
        help="write the layout as a holmes.yaml, the job's config; a name ending in .json gets the whole plan, which "
        "the job follows exactly or refuses (`plan: FILE`)")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace FILE")
    parser.add_argument("--runners-up", type=int, default=5, metavar="N", help="how many to show (default 5)")
    given = parser.parse_args(words)
    try:
        if given.output and os.path.exists(given.output) and not given.overwrite:
            raise ConfigError(seen=f"{given.output} exists", where="--output", do="choose another name, or --overwrite")
        specs, job, limits = job_of(given)
        _check_limits(specs, job, limits)
        result = search(job, limits, keep=given.runners_up)
        config = config_of(specs, result.best)
        as_plan = bool(given.output) and given.output.endswith(".json")
        plan = plan_of(config, job, result.best) if as_plan or job.hardware.ranks <= _LARGEST_TABLE else None
        from holmes_core.report.prediction_table import print_search

        print_search(job, result, plan if job.hardware.ranks <= _LARGEST_TABLE else None)
        if as_plan and plan is not None:
            write_plan(plan, given.output)
            print(f"\nwritten: {given.output}")
        elif given.output:
            Path(given.output).write_text(_yaml(config, job, result), encoding="utf-8")
            print(f"\nwritten: {given.output}")
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """Add what `holmes plan` and `holmes simulate` both ask: the model, the clusters, the batch, what is fixed."""
    add = parser.add_argument
    add("--model", required=True, help="config.json, a directory with one, or a name (no download)")
    add("--cluster", required=True, metavar="FILE", help="yaml file with the clusters and their hardware")
    add("--batch", type=int, default=0, metavar="N", help="samples per step over all replicas (default: 8 per rank)")
    add("--seq", type=int, default=0, metavar="N", help="tokens per sample (default: the model's, at most 4096)")
    add("--precision", choices=sorted(PRECISIONS), default="bf16-mixed")
    for name in ("pp", "dp", "tp", "virtual-stages", "micro-batch-size"):
        add(f"--{name}", type=int, metavar="N", help=argparse.SUPPRESS if "-" in name else f"fix {name}")
    add("--schedule", choices=SCHEDULES, help="fix the schedule")
    add("--recompute", action=argparse.BooleanOptionalAction, help="fix whether blocks are recomputed")
    add("--sharding", choices=("optimizer", "none"), help="fix whether replicas share the optimizer")
    add("--partition", choices=("auto", "equal", "paper"), default="auto", help="how blocks are split (default: auto)")
    add("--rank-zero", metavar="NAME", help="the cluster global rank 0 is started in: it comes last in the pipeline")
    add("--efficiency", type=float, default=COMPUTE_EFFICIENCY, metavar="X",
        help=f"part of the GPUs' peak that compute reaches (default {COMPUTE_EFFICIENCY})")  # fmt: skip
    add("--overlap", type=float, metavar="X",
        help="part of summing gradients that is hidden (default: what passes under the last backward)")  # fmt: skip


def job_of(given: argparse.Namespace) -> tuple[tuple[ClusterSpec, ...], Job, Limits]:
    """Read the files that the options name.

    Raises:
        ConfigError: A file or a value is wrong.
    """
    for name in ("batch", "seq", "pp", "dp", "tp", "virtual_stages", "micro_batch_size"):
        if (value := getattr(given, name)) is not None and value < (0 if name in ("batch", "seq") else 1):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(seen=f"{flag} {value}", where=flag, do="give a positive number")
    if not 0 < given.efficiency <= 1 or not 0 <= (given.overlap or 0) <= 1:
        raise ConfigError(
            seen=f"--efficiency {given.efficiency}, --overlap {given.overlap}", do="give numbers from 0 to 1"
        )
    if given.recompute and given.schedule:
        HolmesConfig(schedule=given.schedule).refuse_recomputing("--recompute")
    specs, hardware = load_hardware(given.cluster)
    name, config = find_config(given.model)
    # Under autocast the residual stream, which stages send, stays in float32.
    stream = 2 if given.precision == "bf16-true" else 4
    value_bytes = 4 if given.precision == "32-true" else 2
    job = Job(
        profile=profile_of_config(config, seq=given.seq, value_bytes=value_bytes, stream_bytes=stream, name=name),
        hardware=hardware,
        batch=given.batch or 8 * hardware.ranks,
        precision=given.precision,
        efficiency=given.efficiency,
        overlap=given.overlap,
    )
    limits = Limits(
        pp=given.pp,
        dp=given.dp,
        tp=given.tp,
        schedule=given.schedule,
        virtual_stages=given.virtual_stages,
        micro_batch_size=given.micro_batch_size,
        recompute=given.recompute,
        sharding=given.sharding,
        last=_last(given.rank_zero, specs),
        partition=given.partition,
    )
    return specs, job, limits


def _last(name: str | None, specs: tuple[ClusterSpec, ...]) -> int | None:
    """The cluster that must come last: where rank 0 is, if the user or the ranks of the cluster file say so."""
    names = [spec.name for spec in specs]
    if name is not None and name not in names:
        raise ConfigError(seen=f"cluster {name!r}", where="--rank-zero", do=f"name one of: {', '.join(names)}")
    pinned = next((index for index, spec in enumerate(specs) if 0 in spec.ranks), None)
    return pinned if name is None else names.index(name)


def _check_limits(specs: tuple[ClusterSpec, ...], job: Job, limits: Limits) -> None:
    """Refuse fixed degrees that no layout has, with the nearest ones that exist."""
    fixed = {name: getattr(limits, name) for name in ("pp", "dp", "tp") if getattr(limits, name) is not None}
    if fixed:
        config = HolmesConfig(**fixed, clusters=specs, virtual_stages=None)
        choose_layout(topology_of_specs(specs, job.hardware), config, job.profile.facts())


def config_of(specs: tuple[ClusterSpec, ...], best: Candidate) -> HolmesConfig:
    """Return the configuration that makes a job follow a candidate; its clusters stand in pipeline order."""
    choice = best.choice
    return HolmesConfig(
        pp=choice.pp,
        dp=choice.dp,
        tp=choice.tp,
        schedule=choice.schedule,
        virtual_stages=choice.virtual_stages,
        micro_batch_size=choice.micro_batch_size,
        layers_per_stage=choice.layers_per_stage,
        recompute=choice.recompute or None,
        embedding="last" if choice.embedding_on_last else "auto",
        sharding=choice.sharding,
        run_ahead=choice.run_ahead if choice.ahead() else None,
        defer_weights=True if choice.split else None,
        taper=True if choice.tapered else None,
        clusters=tuple(specs[index] for index in choice.order),
    )


def plan_of(config: HolmesConfig, job: Job, best: Candidate | None = None) -> Plan:
    """Return the plan of a job that follows a configuration, with the prediction of a candidate.

    Its rank 0 is in the last cluster (V schedules: in the first), where the last stage is.
    """
    assert config.clusters is not None
    by_name = {cluster.name: cluster for cluster in job.hardware.clusters}
    specs = list(config.clusters)
    if config.schedule not in V_SCHEDULES:
        specs = [specs[-1], *specs[:-1]]  # ranks count from the last cluster; clusters then stand in pipeline order
    topology = topology_of_specs(tuple(specs), Hardware(clusters=tuple(by_name[spec.name] for spec in specs)))
    position = {spec.name: index for index, spec in enumerate(config.clusters)}
    clusters = sorted(topology.clusters, key=lambda cluster: position[cluster.name])
    plan = make_plan(config, replace(topology, clusters=tuple(clusters)), job.profile.facts(), device_type="cuda")
    return plan if best is None else replace(plan, prediction=best.prediction)


def _yaml(config: HolmesConfig, job: Job, result: SearchResult) -> str:
    """The configuration as a file that people read, too."""
    choice, prediction = result.best.choice, result.best.prediction
    assert config.clusters is not None
    end, last = ("first", config.clusters[0]) if choice.schedule in V_SCHEDULES else ("last", config.clusters[-1])
    lines = [
        f"# {job.profile.name} on {job.hardware.ranks} ranks: {choice.describe()}.",
        f"# Predicted: {prediction.step_seconds:.4g} s per step of {job.batch} samples x {job.profile.seq} tokens.",
        f"# Each replica's batch (DataLoader batch_size): {job.batch // choice.dp}.",
    ]
    if len(config.clusters) > 1 and last.hosts:
        lines.append(f"# Start global rank 0 on {last.hosts[0]}: the cluster of rank 0 comes {end} in the pipeline.")
    lines += [f"{name}: {getattr(config, name)}" for name in ("pp", "dp", "tp", "schedule", "micro_batch_size")]
    if choice.schedule not in ("1f1b", "gpipe"):
        lines.append(f"virtual_stages: {choice.virtual_stages}")
    if choice.recompute:
        lines.append("recompute: true  # without it the memory would not do")
    if choice.embedding_on_last:
        lines.append("embedding: last")
    lines += [f"sharding: {choice.sharding}"] if choice.dp > 1 else []
    if choice.pp > 1 and choice.schedule == "1f1b":
        lines += [f"run_ahead: {choice.run_ahead}", f"defer_weights: {str(choice.defer_weights).lower()}"]
        lines.append(f"taper: {str(choice.tapered).lower()}")
    lines.append(f"layers_per_stage: {list(choice.layers_per_stage)}")
    lines.append("clusters:  # in pipeline order")
    for spec in config.clusters:
        members = f"hosts: {_quoted(spec.hosts)}" if spec.hosts else f"ranks: {list(spec.ranks)}"
        lines.append(f"  - {{name: {_quote(spec.name)}, kind: {spec.kind}, {members}}}")
    return "\n".join(lines) + "\n"


def _quoted(names: tuple[str, ...]) -> str:
    return "[" + ", ".join(_quote(name) for name in names) + "]"


def _quote(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
