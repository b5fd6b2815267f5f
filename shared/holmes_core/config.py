# SPDX-License-Identifier: Apache-2.0
"""HolmesConfig: everything a user may say, and the one reader for keyword arguments, yaml and environment."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from holmes_core.cluster.host import ClusterSpec
from holmes_core.cluster.value import Value
from holmes_core.config_file import read_clusters_of_file, read_yaml
from holmes_core.config_values import (
    HARDWARE_KEYS,
    check_int,
    one_of,
    read_clusters,
    read_ints,
    read_names,
    read_placement,
    read_rank_order,
    read_seconds,
    read_speeds,
    refuse,
)
from holmes_core.errors import ConfigError, did_you_mean

__all__ = [
    "EMBEDDING_SCHEDULES",
    "HARDWARE_KEYS",
    "SCHEDULES",
    "V_SCHEDULES",
    "ZERO_BUBBLE",
    "ClusterSpec",
    "HolmesConfig",
    "normalize_schedule",
]

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "zbv", "dualpipev")
V_SCHEDULES = ("zbv", "dualpipev")
#: Schedules that split backward passes in two: the first two of them all, dualpipev those at both ends of a step.
ZERO_BUBBLE = ("interleaved_zb", "zbv", "dualpipev")

#: Schedules in which the embedding may be a stage of its own on the last rank.
EMBEDDING_SCHEDULES = ("1f1b", "gpipe")

_TORCH_NAMES = {"interleavedzerobubble": "interleaved_zb", "zbvzerobubble": "zbv"}
_STAGES_PER_RANK = {  # schedule -> (smallest, largest, default) number of stages per rank
    "1f1b": (1, 1, 1),
    "gpipe": (1, 1, 1),
    "interleaved_1f1b": (2, None, 2),
    "looped_bfs": (2, None, 2),
    "interleaved_zb": (1, None, 2),
    "zbv": (2, 2, 2),
    "dualpipev": (2, 2, 2),
}
_CHOICES = {
    "sharding": ("auto", "optimizer", "none"),
    "loss_weight": ("auto", "tokens", "samples", "sum"),
    "init": ("auto", "meta"),
    "embedding": ("auto", "first", "last"),
    "wire_dtype": ("same", "compute", "int8"),
    "checkpoint": ("single", "sharded"),
    "partition": ("auto", "equal", "paper"),
    "resume": ("auto", "off"),
}
_COUNTS = ("pp", "dp", "tp", "num_microbatches", "micro_batch_size", "virtual_stages", "seq_len")
_FLAGS = (
    "check_loss", "checkpoint_async", "dynamic_shapes", "last_stage_on_rank_zero", "overlap",
    "overlap_param_gather", "print_plan",
)  # fmt: skip
_ONE_OF = (("num_microbatches", "micro_batch_size"), ("clusters", "cluster_file"), ("layers_per_stage", "split_points"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HolmesConfig(Value):
    """What a user may say to Holmes. Every field is optional; what is left out, the planner decides."""

    pp: int | None = None
    """Pipeline-parallel degree: ranks along the pipeline. Decided from the clusters when left out."""

    dp: int | None = None
    """Data-parallel degree: model replicas. Each replica's batch is the data loader's batch."""

    tp: int | None = None
    """Tensor-parallel degree: ranks of one host that share each layer. 1 when left out."""

    clusters: tuple[ClusterSpec, ...] | None = None
    """Which hosts (or, on one machine, ranks) share a network: ``[{name: a, kind: infiniband, hosts: [n1, n2]}]``.
    All hosts form one cluster of unknown kind when left out."""

    cluster_file: str | None = None
    """A yaml file with the key ``clusters``, read by ``HolmesConfig.load``; relative to the file that names it."""

    num_microbatches: int | None = None
    """Micro-batches a batch is split into. Decided per batch when left out."""

    micro_batch_size: int | None = None
    """Samples per micro-batch, instead of ``num_microbatches``."""

    schedule: str = "1f1b"
    """Pipeline schedule, one of SCHEDULES; torch's class names (``Interleaved1F1B``) are understood, too."""

    run_ahead: int | None = None
    """Micro-batches that 1f1b runs ahead at each pipeline edge between clusters, to hide the slow link's round trip;
    costs their activations. The numbers stay the same. Decided by prediction where the job measures, else 0."""

    wire_dtype: str = "same"
    """Dtype of activations and their gradients between clusters: ``same`` as in the model, which leaves all numbers as
    they are, or that of the ``compute`` under mixed precision: half the bytes, rounded once more; or ``int8``: a
    quarter of float32's bytes, with a scale for every 256 elements; losses change a little (docs/slow-link.md)."""

    defer_weights: bool | None = None
    """Whether 1f1b puts off the weights' part of its first and last backward passes, to be idle less at the start and
    the end of a batch (as ZB-H1); costs the activations of as many micro-batches. The numbers stay the same. Decided by
    prediction where the job measures, else false."""

    taper: bool | None = None
    """Whether 1f1b cuts one micro-batch of each batch in two, one half for its beginning and one for its end, where
    ranks wait for the first to arrive and for the last to return. Sums stay the same; dropout draws other numbers, as
    with another number of micro-batches. Decided by prediction where the job measures, else false."""

    overlap: bool = True
    """Whether gradients are summed over replicas while the last backward of a step still runs."""

    overlap_param_gather: bool = False
    """Whether parameters that one replica has stepped come to the others while the next forward already runs. Safe for
    what uses them through modules and torch's functions; see docs/slow-link.md for what must not be done then."""

    virtual_stages: int | None = None
    """Stages per rank. 1 for 1f1b and gpipe, 2 or more for the interleaved schedules, 2 for zbv and dualpipev."""

    layers_per_stage: tuple[int, ...] | None = None
    """Blocks of each stage in pipeline order, ``pp * virtual_stages`` numbers; also as text: ``"4,4,3"``."""

    partition: str = "auto"
    """How blocks are split where ``layers_per_stage`` is left out: ``auto`` makes the slowest stage as fast as possible
    by ``cluster_speeds``, ``paper`` splits in proportion to them, ``equal`` ignores them."""

    cluster_speeds: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Speed of one rank of each cluster, in any unit: ``{a: 197, b: 160}``. Without it all count as equally fast."""

    plan: str | None = None
    """A plan.json of ``holmes plan``: the job follows it exactly, or refuses with the difference."""

    probe: str = "auto"
    """Where hosts or clusters may differ, ``auto`` measures compute and links in the first seconds of the job (or takes
    the last measurement of the same hosts and model); ``off`` does not; else a file of ``holmes probe -o``."""

    seq_len: int | None = None
    """Tokens of one sample, for predictions only. The most that the model was made for, up to 4096, when left out."""

    memory_limit: float | None = None
    """GiB that one rank may use, for predictions only; 0 switches the check off. Found out when left out."""

    recompute: bool | None = None
    """Recompute blocks in the backward pass to save memory. When left out, only where the memory would not do else."""

    split_points: tuple[str, ...] | None = None
    """Names of the modules that begin stages 1, 2, ..., for a model whose list of blocks is not found."""

    embedding: str = "auto"
    """Which pipeline rank runs the input embedding: ``first``, or ``last``, beside the head. Where both share their
    weight and lie in different clusters, ``auto`` means ``last``: embedded micro-batches, which pass while others
    compute, then cross the slow network instead of the weight's gradient, for which everybody waits. Where the job
    measures, the one that is predicted to be faster."""

    placement: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Where modules outside the list of blocks live: module name -> ``first``, ``last``, ``ends`` or ``all``."""

    sharding: str = "auto"
    """What replicas share: the ``optimizer`` step and its states (each parameter has one owner), or ``none``. ``auto``
    means ``optimizer`` unless the job measures, ``none`` is predicted to be faster, and fits the memory."""

    loss_weight: str = "auto"
    """How micro-batch losses add up to the batch's: by ``tokens``, by ``samples``, as a ``sum``, or ``auto``."""

    check_loss: bool = True
    """Compare the first batch's split loss with its unsplit loss and stop on a mismatch."""

    dynamic_shapes: bool = False
    """Micro-batches may differ in shape; shapes are then sent along with every activation."""

    init: str = "auto"
    """``meta`` builds the model without storage and fills only local parts; ``auto`` takes the model as it comes."""

    rank_order: tuple[int, ...] | None = None
    """Global ranks in grid order (pp, then dp, then tp varies fastest). Decided from the clusters when left out."""

    last_stage_on_rank_zero: bool = True
    """Put global rank 0 on the last stage, so that progress bars, loggers and predict work there natively."""

    timeout: float = 600.0
    """Seconds a collective may wait before the job counts as stuck."""

    failure_timeout: float = 30.0
    """Seconds in which all ranks end after one was killed, stopped or cut off. One that is only slow is left alone."""

    checkpoint: str = "single"
    """``single``: whole tensors, written by rank 0, as one process writes them. ``sharded``: a folder that all ranks
    write at once. Holmes loads either under any layout, whatever is said here."""

    checkpoint_async: bool = False
    """Write checkpoints in the background, from a copy on the CPU, while training goes on."""

    resume: str = "off"
    """Lightning: ``auto`` lets a ``Trainer.fit`` without ckpt_path go on from the newest whole checkpoint in the folder
    of its ModelCheckpoint(dirpath=...), if there is one; for jobs that a launcher or scheduler starts again."""

    print_plan: bool = True
    """Print the plan on rank 0 before training."""

    traffic_file: str | None = None
    """Where rank 0 writes at the end of a run, as JSON, how many bytes each process group has carried."""

    def __post_init__(self) -> None:
        """Normalise sequences and names, and refuse wrong types and values.

        Raises:
            ConfigError: Naming the field, what was seen and what is allowed.
        """
        put = partial(object.__setattr__, self)
        for name in _COUNTS:
            if (value := getattr(self, name)) is not None:
                check_int(name, value, at_least=1)
        if self.run_ahead is not None:
            check_int("run_ahead", self.run_ahead, at_least=0)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                refuse(name, getattr(self, name), "true or false")
        put("timeout", read_seconds("timeout", self.timeout))
        put("failure_timeout", read_seconds("failure_timeout", self.failure_timeout))
        if self.memory_limit is not None:
            limit = self.memory_limit
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < math.inf:
                refuse("memory_limit", limit, "a number of GiB, or 0")
        for name in ("recompute", "defer_weights", "taper"):
            if (value := getattr(self, name)) is not None and not isinstance(value, bool):
                refuse(name, value, "true or false")
        put("schedule", normalize_schedule(self.schedule))
        put("resume", "off" if str(self.resume) == "False" else self.resume)  # yaml reads off as false
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                refuse(name, getattr(self, name), one_of(choices), options=choices)
        put("layers_per_stage", read_ints("layers_per_stage", self.layers_per_stage))
        put("rank_order", read_rank_order(self.rank_order))
        put("split_points", read_names("split_points", self.split_points))
        put("placement", read_placement(self.placement))
        put("cluster_speeds", read_speeds(self.cluster_speeds))
        put("clusters", read_clusters(self.clusters))
        for name in ("cluster_file", "traffic_file", "plan", "probe"):
            if (path := getattr(self, name)) is not None and not isinstance(path, str):
                refuse(name, path, "the path of a file")
        for first, second in (_ONE_OF[0], _ONE_OF[2]):
            if getattr(self, first) is not None and getattr(self, second) is not None:
                raise _both(first, second, where=f"HolmesConfig.{first}")
        self._check_stages()
        if self.recompute:
            self.refuse_recomputing("recompute: true")

    def refuse_recomputing(self, how: str) -> None:
        """Refuse a schedule that splits backward passes if blocks are recomputed.

        Args:
            how: How recomputation is asked for.

        Raises:
            ConfigError: The schedule does, or ``defer_weights`` is set.
        """
        if self.schedule in ZERO_BUBBLE:
            what, do = f"schedule {self.schedule}", "use schedule: 1f1b or interleaved_1f1b"
        elif self.defer_weights:
            what, do = "defer_weights: true", "leave defer_weights out"
        else:
            return
        raise ConfigError(
            seen=f"{what}, and blocks that are recomputed in the backward pass ({how})",
            where=f"HolmesConfig.{'schedule' if self.schedule in ZERO_BUBBLE else 'defer_weights'}",
            means="it splits backward passes into the input's and the weights' part, and torch then recomputes a block "
            "for each of its weights: about 10 times instead of once",
            do=f"{do}, or do not recompute",
        )

    def _check_stages(self) -> None:
        low, high, _ = _STAGES_PER_RANK[self.schedule]
        v = self.stages_per_rank
        if v < low or (high is not None and v > high):
            allowed = f"exactly {low}" if low == high else f"{low} or more"
            fits = [name for name, (a, b, _) in _STAGES_PER_RANK.items() if a <= v and (b is None or v <= b)]
            raise ConfigError(
                seen=f"virtual_stages {v} with schedule {self.schedule!r}",
                where="HolmesConfig.virtual_stages",
                means=f"schedule {self.schedule!r} runs {allowed} stage(s) per rank",
                do=f"leave virtual_stages out, or choose a schedule for {v}: {', '.join(fits)}",
            )
        for name, extra in (("layers_per_stage", 0), ("split_points", 1)):
            given = getattr(self, name)
            count = 0 if given is None else len(given) + extra
            if count % v or (count and self.pp is not None and count != self.pp * v):
                ranks = "pp" if self.pp is None else f"pp {self.pp}"
                remedy = f"give {self.pp * v - extra} entries, or " if self.pp is not None else ""
                raise ConfigError(
                    seen=f"{name} describes {count} stages",
                    where=f"HolmesConfig.{name}",
                    means=f"the pipeline has {ranks} x {v} (stages per rank) stages",
                    do=f"{remedy}change {name}, pp, schedule or virtual_stages",
                )

    @property
    def stages_per_rank(self) -> int:
        """Stages per rank: ``virtual_stages``, or the schedule's default."""
        return _STAGES_PER_RANK[self.schedule][2] or 1 if self.virtual_stages is None else self.virtual_stages

    @classmethod
    def load(cls, kwargs: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None) -> HolmesConfig:
        """Read the configuration; what is said closest to the call wins.

        Precedence: keyword arguments, then the file, then defaults. The file is ``kwargs["config"]`` or the one
        named by HOLMES_CONFIG. Clusters come from the arguments, the file, or the file named by HOLMES_CLUSTER.
        A value of None means "not given".

        Args:
            kwargs: Field values, and ``config`` for the path of a yaml file.
            env: Environment to read; ``os.environ`` when None.

        Returns:
            The checked configuration.

        Raises:
            ConfigError: A file cannot be read, a key is unknown, or a value is wrong.
        """
        env = os.environ if env is None else env
        given = {key: value for key, value in (kwargs or {}).items() if value is not None}
        _refuse_unknown(given, {}, "keyword arguments", extra=("config",))
        path = given.pop("config", None) or env.get("HOLMES_CONFIG") or None
        origins = dict.fromkeys(given, "keyword arguments")
        _refuse_both(given, origins)
        merged: dict[str, Any] = {}
        if path is not None:
            merged, file_origins = _read_config_file(path)
            for group in _ONE_OF:  # an argument replaces the file's other spelling of the same thing
                if any(name in given for name in group):
                    merged = {name: value for name, value in merged.items() if name not in group}
            origins = {**file_origins, **origins}
        merged.update(given)
        if "clusters" not in merged and "cluster_file" not in merged and env.get("HOLMES_CLUSTER"):
            merged["cluster_file"], origins["cluster_file"] = env["HOLMES_CLUSTER"], "environment HOLMES_CLUSTER"
        if "cluster_file" in merged:
            merged["clusters"] = read_clusters_of_file(merged["cluster_file"], origins["cluster_file"])
        try:
            config = cls(**merged)
        except ConfigError as error:
            origin = origins.get((error.where or "").removeprefix("HolmesConfig.").split("[")[0])
            if origin is None:
                raise
            where = f"{error.where}, from {origin}"
            raise ConfigError(seen=error.seen, where=where, means=error.means, do=error.do) from None
        if config.plan is None:
            return config
        from holmes_core.plan.plan_file import config_of_plan

        return config_of_plan(config, given={name for name in merged if name != "plan"})


def normalize_schedule(name: object) -> str:
    """Return the name in SCHEDULES for any accepted spelling of a schedule.

    Raises:
        ConfigError: The name is unknown.
    """
    key = name.lower().replace("_", "").replace("-", "") if isinstance(name, str) else ""
    by_key = {known.replace("_", ""): known for known in SCHEDULES} | _TORCH_NAMES
    if key not in by_key:
        refuse("schedule", name, one_of(SCHEDULES), options=by_key.values(), word=key)
    return by_key[key]


def _both(first: str, second: str, *, where: str) -> ConfigError:
    return ConfigError(seen=f"both {first} and {second} are given", where=where, do="give only one of them")


def _refuse_both(given: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    for first, second in _ONE_OF:
        if first in given and second in given:
            raise _both(first, second, where=origins[second])


def _refuse_unknown(keys: Iterable[object], lines: Mapping[str, int], where: str, *, extra: Sequence[str] = ()) -> None:
    known = [item.name for item in dataclasses.fields(HolmesConfig)] + list(extra)
    for key in keys:
        if key not in known:
            at = f"{where}, line {lines[str(key)]}" if str(key) in lines else where
            raise ConfigError(
                seen=f"unknown key {key!r}{did_you_mean(str(key), known)}", where=at, do=f"use only: {', '.join(known)}"
            )


def _read_config_file(path: str | Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values a config file gives and, per field, the file and line."""
    data, lines = read_yaml(path, section="holmes_config")
    _refuse_unknown(data, lines, f"file {path}")
    origins = {name: f"file {path}, line {lines.get(name, 1)}" for name in data}
    data = {name: value for name, value in data.items() if value is not None}
    _refuse_both(data, origins)
    if isinstance(data.get("cluster_file"), str):
        data["cluster_file"] = str(Path(path).parent / data["cluster_file"])
    return data, origins
