# SPDX-License-Identifier: Apache-2.0
"""What lab_throughput.py compares: labs with unequal networks, and ways to train the same model in them.

`homogeneous` joins four hosts by one fast fabric; in `hybridN` two clusters of two are joined by Ethernet at 1/N of the
fabric's rate; `three8` are clusters of two, one and one; `ethernet8` has no fabric at all. One rank per host. The CPU
quotas add up to less than the machine, so that nobody computes in another's waiting time and what else the machine does
disturbs less. Peers use one network for all ranks, as they do: the one that all hosts share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FABRIC = 2_250_000_000  # bit/s; what two virtual CPUs can move beside their computing
SHARE = 0.9  # of the machine that all hosts together may use
TITLES = {
    "homogeneous": "one fabric",
    "hybrid8": "two clusters, Ethernet 1/8",
    "hybrid25": "two clusters, Ethernet 1/25",
    "hybrid100": "two clusters, Ethernet 1/100",
    "three8": "three clusters (2, 1, 1 hosts), Ethernet 1/8",
    "ethernet8": "Ethernet only, at 1/8",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a system.

    Args:
        system: Whose best variant counts.
        kind: Of `lab_systems.train`.
        label: Of this variant.
        options: For `lab_systems.train`.
        config: For Holmes.
    """

    system: str
    kind: str
    label: str
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def _holmes(label: str, replicas: int, kind: str = "holmes", system: str = "Holmes", **config: Any) -> Variant:
    options = {"replicas": replicas}
    return Variant(system=system, kind=kind, label=label, options=options, config={"probe": "off", **config})


PP2: dict[str, Any] = {"pp": 2, "layers_per_stage": [6, 5]}
BEST: dict[str, Any] = {**PP2, "num_microbatches": 8, "defer_weights": True, "taper": True}
#: Pipeline ranks of "planned" in each setting; what else there is to decide, the job decides.
PLANNED = {"homogeneous": 1, "three8": 4, "ethernet8": 4}
VARIANTS = {
    "planned": _holmes("as the job plans itself", 2, probe="auto", print_plan=True),
    "planned-late": _holmes(
        "as the job plans itself, overlap_param_gather", 2, probe="auto", print_plan=True, overlap_param_gather=True
    ),
    "planned-accelerate": _holmes(
        "as the job plans itself", 2, kind="holmes_accelerate", system="Holmes (Accelerate)", probe="auto",
        print_plan=True,
    ),
    "holmes": _holmes("pp 2 x dp 2, 8 micro-batches, deferred weights, taper", 2, **BEST),
    "holmes16": _holmes("the same, 16 micro-batches", 2, **{**BEST, "num_microbatches": 16}),
    "even": _holmes("without taper", 2, **{**BEST, "taper": False}),
    "plain": _holmes("without deferred weights", 2, **{**BEST, "defer_weights": False}),
    "first": _holmes("with the embedding on the first rank", 2, **BEST, embedding="first"),
    "late": _holmes("gradients summed after the backward", 2, **BEST, overlap=False),
    "ahead": _holmes("one micro-batch further ahead", 2, **BEST, run_ahead=1),
    "whole": _holmes("every replica steps all (sharding none)", 2, **BEST, sharding="none"),
    "gather": _holmes("parameters come under the next forward", 2, **BEST, overlap_param_gather=True),
    "dp": _holmes("dp 4", 4, pp=1),
    "dpwhole": _holmes("dp 4, every replica steps all", 4, pp=1, sharding="none"),
    "dpsmall": _holmes("dp 4, 4 micro-batches", 4, pp=1, sharding="none", num_microbatches=4),
    "pp4": _holmes("pp 4, 8 micro-batches", 1, **{**BEST, "pp": 4, "layers_per_stage": [3, 3, 3, 2]}),
    "holmes-accelerate": _holmes(
        "pp 2 x dp 2, 8 micro-batches", 2, kind="holmes_accelerate", system="Holmes (Accelerate)", **BEST
    ),
    "ddp": Variant(system="Lightning DDP", kind="ddp", label="25 MB buckets", options={"bucket_cap_mb": 25}),
    "ddp4": Variant(system="Lightning DDP", kind="ddp", label="4 MB buckets", options={"bucket_cap_mb": 4}),
    "fsdp2": Variant(
        system="Lightning FSDP2", kind="fsdp2", label="parameters kept after the forward", options={"reshard": False}
    ),
    "fsdp2-reshard": Variant(
        system="Lightning FSDP2", kind="fsdp2", label="parameters gathered twice", options={"reshard": True}
    ),
    "accelerate-ddp": Variant(
        system="Accelerate DDP", kind="accelerate_ddp", label="25 MB buckets", options={"bucket_cap_mb": 25}
    ),
    "accelerate-ddp4": Variant(
        system="Accelerate DDP", kind="accelerate_ddp", label="4 MB buckets", options={"bucket_cap_mb": 4}
    ),
    "accelerate-fsdp2": Variant(
        system="Accelerate FSDP2", kind="accelerate_fsdp2", label="parameters kept", options={"reshard": False}
    ),
    "accelerate-fsdp2-reshard": Variant(
        system="Accelerate FSDP2", kind="accelerate_fsdp2", label="parameters gathered twice", options={"reshard": True}
    ),
    "composed": Variant(
        system="torch pipelining + FSDP2", kind="composed", label="pp 2 x dp 2, 8 micro-batches",
        options={"replicas": 2, "microbatches": 8, "reshard": False},
    ),
    "composed4": Variant(
        system="torch pipelining + FSDP2", kind="composed", label="pp 2 x dp 2, 4 micro-batches",
        options={"replicas": 2, "microbatches": 4, "reshard": False},
    ),
}  # fmt: skip


def host_cpus() -> float:
    """Return how many CPUs a host may use."""
    return round(SHARE * (os.cpu_count() or 1) / 4, 3)


def spec_of(setting: str) -> dict[str, Any]:
    """Return the lab's specification."""
    cpu = {"cpu": host_cpus()}
    rates = {"rdma_rate": f"{FABRIC}bit", **cpu}
    if setting == "homogeneous":
        clusters = [{"name": "a", "kind": "roce", "hosts": 4}]
        return {"clusters": clusters, "ethernet_rate": f"{FABRIC}bit", **rates}
    part = int(setting.lstrip("abcdefghijklmnopqrstuvwxyz"))
    rates["ethernet_rate"] = f"{FABRIC // part}bit"
    if setting.startswith("ethernet"):
        return {"clusters": [{"name": "a", "kind": "ethernet", "hosts": 4}], **rates}
    kinds = {"a": ("infiniband", 2), "b": ("roce", 2)}
    if setting.startswith("three"):
        kinds = {"a": ("infiniband", 2), "b": ("roce", 1), "c": ("roce", 1)}
    return {"clusters": [{"name": n, "kind": k, "hosts": h} for n, (k, h) in kinds.items()], **rates}


def bound(setting: str, batch: int) -> int:
    """Return the bytes that clusters must exchange per step: activations and their gradients, in float32.

    Once per border between clusters; and once more between the last and the first, for the tied embedding: embedded
    micro-batches, or its gradients and values (which with these sizes are as much).
    """
    from lab_systems import LENGTH, WIDTH

    clusters = len(spec_of(setting)["clusters"])
    return 0 if clusters == 1 else 2 * clusters * batch * LENGTH * WIDTH * 4


def run(
    setting: str,
    name: str,
    command: Callable[[int], list[str]],
    folder: Path,
    *,
    write: Callable[[str], None],
    timeout: float = 900.0,
) -> int:
    """Run ranks of a variant in a fresh lab.

    Args:
        setting: The lab.
        name: The variant.
        command: What a rank runs, by the number of replicas.
        folder: For the configuration.
        write: Takes each line of output.
        timeout: Seconds after which the run is ended.

    Returns:
        The exit status.
    """
    from holmes_core.lab.job import run_job
    from holmes_core.lab.session import Lab
    from holmes_core.lab.spec_file import parse_spec

    variant = VARIANTS[name]
    env = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    given = variant.config
    replicas = variant.options.get("replicas", 4)
    if name.startswith("planned"):
        pp = PLANNED.get(setting, 2)
        given, replicas = {**given, "pp": pp}, 4 // pp
    if variant.config:
        config = folder / "holmes.yaml"
        config.write_text(json.dumps({"print_plan": False, "timeout": timeout, **given}))
        env["HOLMES_CONFIG"] = str(config)
    else:  # what a user has to type where names do not resolve; Holmes needs none
        env["GLOO_SOCKET_IFNAME"] = "rdma0" if setting == "homogeneous" else "eth0"
    with Lab.up(parse_spec(spec_of(setting)), name="bench-") as lab:
        return run_job(lab, command(replicas), torchrun=True, env=env, timeout=timeout, write=write).returncode
