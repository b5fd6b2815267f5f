# SPDX-License-Identifier: Apache-2.0
"""Measure how fast each rank computes the model's own block, and how fast the links are, in a job's first seconds.

All ranks compute at the same time, as they do in training: ranks of a host share its processors and memory. The block
runs in a copy of the model with four blocks and a small vocabulary, so that a model of any size can be measured.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore

from holmes_core.cluster.exchange import say
from holmes_core.cluster.limits import available_memory, cpu_cores, resident_bytes
from holmes_core.cluster.probe import (
    LinkRate,
    ProbeResult,
    RankSpeed,
    cache_path,
    gather,
    key_of,
    make_comparable,
    read_result,
    write_result,
)
from holmes_core.cluster.probe_links import MESSAGE, listen, measure_links
from holmes_core.cluster.topology import Topology
from holmes_core.errors import ConfigError
from holmes_core.plan.probe import pairs_of
from holmes_core.runtime.chain import find_chain
from holmes_core.runtime.model_facts import hugging_face_model
from holmes_core.runtime.probe_speed import StepHint, measure_speed

__all__ = ["StepHint", "Waits", "measure_speed", "rank_memory", "read_probe", "run_probe"]

_LARGEST_MESSAGE = 1 << 22
_USABLE = 0.92  # of a GPU's memory, before fragmentation makes an allocation fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """How long ranks wait for each other, in seconds.

    Args:
        arrive: For all ranks to begin.
        measure: For each thing that is measured.
    """

    arrive: float = 600.0
    measure: float = 30.0


def rank_memory(device: torch.device, ranks_on_host: int) -> tuple[int, int]:
    """Return the bytes this rank may use, and those it occupies already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        return int(total * _USABLE), max(0, total - free - own)
    own = resident_bytes()
    return available_memory() // max(1, ranks_on_host) + own, own


def run_probe(
    root: nn.Module,
    topology: Topology,
    *,
    store: Any,
    rank: int,
    device: torch.device,
    hint: StepHint,
    samples: int,
    seq: int,
    waits: Waits | None = None,
    fresh: bool = False,
) -> ProbeResult:
    """Measure every rank and every class of links, or take what was measured before. Collective.

    Args:
        root: The user's module.
        topology: Where the ranks run.
        store: The job's store.
        rank: This rank.
        device: Its device.
        hint: Precision.
        samples: Samples of a micro-batch.
        seq: Tokens of a sample.
        waits: Bounds.
        fresh: Measure, whatever is in the cache.

    Returns:
        The same on every rank.

    Raises:
        HolmesError: A rank did not come, or hangs; names it.
    """
    waits = waits or Waits()
    world = topology.world_size
    store = PrefixStore(f"holmes/probe/{store.add(f'holmes/probes/{rank}', 1)}", store)
    host = topology.host_of(rank).name
    say(store, rank=rank, text=f"host {host}: beginning to measure")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    facts = {"host": host, "device": name, "cores": cpu_cores(), "threads": torch.get_num_threads()}
    facts["lab"] = os.environ.get("HOLMES_LAB", "")  # its quotas cannot be seen from inside, and host names repeat
    arrived = gather(
        store, "facts", json.dumps(facts), rank=rank, world_size=world, timeout=waits.arrive, doing="before measuring"
    )
    block = _block_of(root, samples, seq, hint)
    text = ""
    if rank == 0:
        key = key_of(topology.to_json(), [json.loads(one) for one in arrived], block, _versions())
        known = None if fresh else read_result(cache_path(key))
        text = json.dumps({"key": key, "known": known.to_json() if known is not None else None})
    said = gather(
        store, "decided", text, rank=rank, world_size=world, timeout=waits.measure, doing="looking into the cache"
    )
    decided = json.loads(said[0])
    if decided["known"] is not None:
        return ProbeResult.from_json(decided["known"])
    start = time.perf_counter()
    say(store, rank=rank, text=f"host {host}: computing a block of the model")
    memory, occupied = rank_memory(device, len(topology.host_of(rank).ranks))
    problem = ""
    try:
        speed = measure_speed(root, device=device, hint=hint, samples=samples, seq=seq)
    except Exception as error:  # whatever the user's model raises
        speed, problem = None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    pairs = pairs_of(topology, device.type)
    with listen() as server:
        own = {
            "port": server.getsockname()[1],
            "problem": problem,
            "speed": replace(
                speed, rank=rank, host=host, device=name, cores=cpu_cores(), memory=memory, occupied=occupied
            ).to_json()
            if speed is not None
            else None,
        }
        parts = gather(
            store, "speed", json.dumps(own), rank=rank, world_size=world, timeout=waits.measure, doing="computing"
        )
        reports = [json.loads(part) for part in parts]
        failed = [(number, one["problem"]) for number, one in enumerate(reports) if one["problem"]]
        if failed:
            raise ConfigError(
                seen=f"a small copy of the model cannot be measured: {failed[0][1]}",
                where=f"rank {failed[0][0]}" + (f" and {len(failed) - 1} more" if len(failed) > 1 else ""),
                do="`probe: off` plans without measuring; cluster_speeds declares how fast clusters are",
            )
        say(store, rank=rank, text=f"host {host}: measuring links")
        ports = [one["port"] for one in reports]
        mine = measure_links(
            store, pairs, rank=rank, server=server, ports=ports, timeout=waits.measure / 2, message=block["message"]
        )
        links = gather(
            store, "links", json.dumps({index: link.to_json() for index, link in mine.items()}),
            rank=rank, world_size=world, timeout=waits.measure, doing="measuring links",
        )  # fmt: skip
    found: dict[int, LinkRate] = {}
    for part in links:
        found.update({int(index): LinkRate.from_json(link) for index, link in json.loads(part).items()})
    result = ProbeResult(
        speeds=make_comparable([RankSpeed.from_json(one["speed"]) for one in reports]),
        links=tuple(found[index] for index in sorted(found)),
        model=block["name"],
        seconds=time.perf_counter() - start,
        key=decided["key"],
    )
    # The same number on all ranks, and in the cache: rank 0's.
    shared = gather(
        store, "result", json.dumps(result.to_json()) if rank == 0 else "", rank=rank, world_size=world,
        timeout=waits.measure, doing="sharing what was measured",
    )[0]  # fmt: skip
    result = ProbeResult.from_json(json.loads(shared))
    if rank == 0:
        with suppress(OSError):  # a read-only home: the next job measures again
            write_result(cache_path(result.key), result)
    return result


def read_probe(path: str, topology: Topology) -> ProbeResult:
    """Read what `holmes probe -o` has written, for a job with the same hosts.

    Raises:
        ConfigError: The file cannot be read, or is about other ranks or hosts.
    """
    result = read_result(Path(path))
    if result is None:
        raise ConfigError(
            seen=f"{path} holds no measurements", where="HolmesConfig.probe", do="write it with `holmes probe -o FILE`"
        )
    there = {speed.rank: speed.host for speed in result.speeds}
    here = {rank: topology.host_of(rank).name for rank in range(topology.world_size)}
    if there != here:
        other = next((rank for rank in sorted({*there, *here}) if there.get(rank) != here.get(rank)), 0)
        raise ConfigError(
            seen=f"{path} was measured with rank {other} on {there.get(other, 'no host')}; "
            f"here it runs on {here.get(other, 'no host')}",
            where="HolmesConfig.probe",
            do="measure this job's hosts: start `holmes probe -o FILE` as the job is started, or use probe: auto",
        )
    return result


def _block_of(root: nn.Module, samples: int, seq: int, hint: StepHint) -> dict[str, Any]:
    """Return what identifies the block that is measured."""
    found = hugging_face_model(root)
    chain = find_chain(root)
    shapes = sorted({str((tuple(p.shape), str(p.dtype))) for p in chain.blocks[-1].parameters()})
    kind = type(found[1]).__name__ if found else type(root).__name__
    words = 0 if found is None else int(getattr(found[1].config.get_text_config(), "vocab_size", 0))  # type: ignore[union-attr, operator]
    name = f"{type(chain.blocks[-1]).__name__} of {kind}, {samples} x {seq} tokens"
    hidden = 0 if found is None else int(getattr(found[1].config.get_text_config(), "hidden_size", 0))  # type: ignore[union-attr, operator]
    message = min(_LARGEST_MESSAGE, samples * seq * hidden * 4) or MESSAGE  # an activation in float32
    return {"name": name, "shapes": shapes, "words": words, "precision": str(hint.autocast), "message": message}


def _versions() -> list[str]:
    found = [str(torch.__version__)]
    for name in ("transformers", "holmes-parallel"):
        try:
            found.append(version(name))
        except PackageNotFoundError:
            found.append("")
    return found
