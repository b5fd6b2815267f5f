# SPDX-License-Identifier: Apache-2.0
"""`holmes simulate`: replay one step of a layout; times, memory, bytes per link, and a timeline."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, HolmesError
from holmes_core.plan.cost import Choice, CostModel, Job
from holmes_core.plan.search import Limits, search, split_blocks
from holmes_core.plan.search_command import add_job_options, job_of
from holmes_core.plan.simulate import simulate
from holmes_core.plan.simulate_orders import Action, read_orders

__all__ = ["choice_of_config", "main"]


def main(words: list[str]) -> int:
    """Run `holmes simulate`; return the exit status.

    Args:
        words: The words after `holmes simulate`.
    """
    parser = argparse.ArgumentParser(
        prog="holmes simulate",
        description="Replay one step of a layout: of holmes.yaml, or of the fastest one that `holmes plan` finds.",
    )
    add_job_options(parser)
    parser.add_argument("--config", metavar="FILE", help="holmes.yaml with the layout, as `holmes plan` writes it")
    parser.add_argument(
        "--actions", metavar="FILE", help="action lists of any schedule, as torch's schedules write them"
    )
    parser.add_argument("--perfetto", metavar="FILE", help="write the timeline as JSON for https://ui.perfetto.dev")
    parser.add_argument("--png", metavar="FILE", help="write the timeline as a picture (needs matplotlib)")
    given = parser.parse_args(words)
    try:
        _, job, limits = job_of(given)
        model = CostModel(job)
        if given.config:
            choice = choice_of_config(HolmesConfig.load({"config": given.config}, env={}), model, limits)
        else:
            choice = search(job, limits).best.choice
        found = simulate(model, choice, _orders(given.actions) if given.actions else None)
        from holmes_core.report.prediction_table import print_simulation

        print_simulation(job, choice, found)
        if given.perfetto or given.png:
            from holmes_core.report.timeline import write_perfetto, write_png

            for path, write in ((given.perfetto, write_perfetto), (given.png, write_png)):
                if path:
                    write(found, path, title=f"{job.profile.name}: {choice.describe()}")
                    print(f"written: {path}")
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def choice_of_config(config: HolmesConfig, model: CostModel, limits: Limits) -> Choice:
    """Return the choice that a configuration describes.

    Args:
        config: With ``dp``, ``tp`` and, by default equal, ``layers_per_stage``; clusters in pipeline order.
        model: The job's costs.
        limits: ``recompute``, ``micro_batch_size`` and ``partition`` where the configuration does not say.

    Raises:
        ConfigError: The configuration does not fit the clusters or the model.
    """
    job = model.job
    names = [cluster.name for cluster in job.hardware.clusters]
    order = tuple(range(len(names)))
    if config.clusters is not None:
        given = [spec.name or f"cluster{index}" for index, spec in enumerate(config.clusters)]
        if sorted(given) != sorted(names):
            raise ConfigError(
                seen=f"clusters {', '.join(given)}; the cluster file has {', '.join(names)}",
                where="HolmesConfig.clusters",
                do="give both files the same clusters",
            )
        order = tuple(names.index(name) for name in given)
    width = (config.dp or 1) * (config.tp or 1)
    _check_width(job, config, width)
    dp = config.dp or 1
    batch = max(1, job.batch // dp)
    x = config.micro_batch_size or limits.micro_batch_size
    if x is None:
        x = max(1, batch // config.num_microbatches) if config.num_microbatches else 1
    choice = Choice(
        tp=config.tp or 1,
        dp=dp,
        order=order,
        stages=tuple(job.hardware.clusters[index].ranks // width for index in order),
        schedule=config.schedule,
        virtual_stages=config.stages_per_rank,
        micro_batch_size=x,
        recompute=bool(limits.recompute if config.recompute is None else config.recompute),
        embedding_on_last=config.embedding == "last",
        sharding=limits.sharding or ("none" if config.sharding == "none" else "optimizer"),
        run_ahead=config.run_ahead or 0,
        defer_weights=bool(config.defer_weights),
        taper=bool(config.taper),
    )
    layers = config.layers_per_stage or split_blocks(model, choice, limits.partition)
    if layers is None or len(layers) != choice.num_stages or sum(layers) != len(job.profile.blocks):
        raise ConfigError(
            seen=f"layers_per_stage {layers} for {choice.num_stages} stages and {len(job.profile.blocks)} blocks",
            where="HolmesConfig.layers_per_stage",
            do="give each stage its blocks, or leave layers_per_stage out",
        )
    return replace(choice, layers_per_stage=layers)


def _check_width(job: Job, config: HolmesConfig, width: int) -> None:
    for cluster in job.hardware.clusters:
        if cluster.ranks % width:
            raise ConfigError(
                seen=f"stages of dp x tp = {width} ranks do not fill cluster {cluster.name!r} of {cluster.ranks}",
                where="HolmesConfig.dp, tp",
                do="give dp and tp whose product divides every cluster",
            )
    pp = sum(cluster.ranks // width for cluster in job.hardware.clusters)
    if config.pp not in (None, pp):
        raise ConfigError(
            seen=f"pp {config.pp}, but dp x tp = {width} makes {pp} stages of {job.hardware.ranks} ranks",
            where="HolmesConfig.pp",
            do=f"give pp {pp}, or other dp and tp",
        )


def _orders(path: str) -> list[list[Action]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(seen=f"cannot read: {error}", where=path, do="give a file of action lists") from None
    return read_orders(text, where=path)
