# SPDX-License-Identifier: Apache-2.0
"""How good predictions are: layouts predicted from `holmes probe`, then run in a lab and measured.

    sudo .venv/bin/python benchmarks/simulator.py [--layouts NAME ...] [--steps 5] [--json FILE] [--out FILE]
    .venv/bin/python benchmarks/simulator.py --from FILE ... --out benchmarks/simulator.md

The model is a GPT of 27 M parameters; hosts have one rank each, and CPU quotas that leave part of the machine free, so
that other programs disturb less. Each setting is a lab of its own: it is probed once, each layout's step time and
memory are predicted from that, and then each layout trains in it. Step time is the median after warm-up; memory
is each rank's peak resident set after warm-up. Several shorter runs can be put together into one page (--from).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

WARM_UP = 2
REPLICA_BATCH, LENGTH, VOCAB = 8, 64, 4096
MODEL = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 512, "n_layer": 8, "n_head": 8,
    "use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
_TWO = {
    "clusters": [{"name": "a", "kind": "infiniband", "hosts": 2}, {"name": "b", "kind": "roce", "hosts": 2}],
    "rdma_rate": "2500mbit", "ethernet_rate": "100mbit", "cpu": 0.36,
}  # fmt: skip
_SLOW = {**_TWO, "clusters": [{**_TWO["clusters"][0], "cpu": 0.48}, {**_TWO["clusters"][1], "cpu": 0.24}]}  # type: ignore[index]
SETTINGS: dict[str, dict[str, Any]] = {"two clusters": _TWO, "b slowed to half": _SLOW}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pp2 dp2": ("two clusters", {"pp": 2, "num_microbatches": 4}),
    "pp2 dp2, 8 micro-batches": ("two clusters", {"pp": 2, "num_microbatches": 8}),
    "pp2 dp2, gpipe": ("two clusters", {"pp": 2, "num_microbatches": 4, "schedule": "gpipe"}),
    "pp2 dp2, 5+3 blocks": ("two clusters", {"pp": 2, "num_microbatches": 4, "layers_per_stage": [5, 3]}),
    "pp2 dp2, 2 micro-batches": ("two clusters", {"pp": 2, "num_microbatches": 2}),
    "pp4": ("two clusters", {"pp": 4, "num_microbatches": 8}),
    "pp4, gpipe": ("two clusters", {"pp": 4, "num_microbatches": 4, "schedule": "gpipe"}),
    "pp2 dp2, recompute": ("two clusters", {"pp": 2, "num_microbatches": 4, "recompute": True}),
    "pp2 dp2, embedding first": ("two clusters", {"pp": 2, "num_microbatches": 4, "embedding": "first"}),
    "pp2 dp2, sharding none": ("two clusters", {"pp": 2, "num_microbatches": 4, "sharding": "none"}),
    "pp2 dp2, zbv": ("two clusters", {"pp": 2, "num_microbatches": 4, "schedule": "zbv"}),
    "pp4, interleaved": ("two clusters", {"pp": 4, "num_microbatches": 8, "schedule": "interleaved_1f1b"}),
    "pp4, interleaved_zb": ("two clusters", {"pp": 4, "num_microbatches": 8, "schedule": "interleaved_zb"}),
    "pp2 dp2, deferred weights": ("two clusters", {"pp": 2, "num_microbatches": 4, "defer_weights": True}),
    "pp2 dp2, 8 micro-batches, deferred weights": (
        "two clusters", {"pp": 2, "num_microbatches": 8, "defer_weights": True},
    ),
    "pp2 dp2, 1 ahead": ("two clusters", {"pp": 2, "num_microbatches": 4, "run_ahead": 1}),
    "pp4, deferred weights": ("two clusters", {"pp": 4, "num_microbatches": 8, "defer_weights": True}),
    "pp2 dp2, embedding first, deferred weights": (
        "two clusters", {"pp": 2, "num_microbatches": 4, "embedding": "first", "defer_weights": True},
    ),
    "slowed, equal": ("b slowed to half", {"pp": 2, "num_microbatches": 4, "partition": "equal"}),
    "slowed, as planned": ("b slowed to half", {"pp": 2, "num_microbatches": 4}),
}


def train(steps: int, out: str) -> None:
    """Be one rank: train, and write what was predicted and measured."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from holmes_core import parallelize

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = parallelize(model, optimizer)
    plan = run.engine.plan
    times, pipelines, spent = [], [], []
    for step in range(steps + WARM_UP):
        if step == WARM_UP:  # the check of the first loss is past
            _forget_peak()
        generator = torch.Generator().manual_seed(step * plan.layout.dp + run.replica)
        ids = torch.randint(0, VOCAB, (REPLICA_BATCH, LENGTH), generator=generator)
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        pipelines.append(time.perf_counter() - begin)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
        spent.append(time.process_time())
    peaks: list[Any] = [None] * dist.get_world_size()
    cpu = (spent[-1] - spent[WARM_UP - 1]) / steps
    dist.all_gather_object(peaks, (plan.grid.coordinates(dist.get_rank()).pp, _peak(), cpu))
    if dist.get_rank() == 0:
        assert plan.prediction is not None
        found = {
            "steps": [b - a for a, b in pairwise(times[WARM_UP - 1 :])],
            "pipelines": pipelines[WARM_UP:],
            "processor": [max(cpu for pp, _, cpu in peaks if pp == rank) for rank in range(plan.layout.pp)],
            "peaks": [max(peak for pp, peak, _ in peaks if pp == rank) for rank in range(plan.layout.pp)],
            "topology": plan.topology.to_json(),
            "prediction": plan.prediction.to_json(),
            "layers": plan.layers_per_stage,
            "samples": REPLICA_BATCH * plan.layout.dp,
            "degrees": [plan.layout.pp, plan.layout.dp, plan.layout.tp],
        }
        Path(out).write_text(json.dumps(found))


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here


def _peak() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(setting: str, names: list[str], steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Probe one lab, then run layouts in it."""
    from holmes_core.lab.job import run_job
    from holmes_core.lab.session import Lab
    from holmes_core.lab.spec_file import parse_spec

    env = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    (folder / "model.json").write_text(json.dumps(MODEL))
    found: dict[str, dict[str, Any]] = {}

    def run(lab: Any, command: list[str], config: dict[str, Any] | None, what: str) -> None:
        lines: list[str] = []
        more = {}
        if config is not None:
            (folder / "holmes.yaml").write_text(json.dumps(config))
            more = {"HOLMES_CONFIG": str(folder / "holmes.yaml")}
        done = run_job(lab, command, torchrun=False, env={**env, **more}, timeout=300, write=lines.append)
        if done.returncode:
            raise SystemExit(f"{what} failed:\n{''.join(lines)[-4000:]}")

    with Lab.up(parse_spec(SETTINGS[setting]), name="sim-") as lab:
        _first_in_line(lab)
        probe = str(folder / f"{setting.replace(' ', '-')}.json")
        words = ["probe", "--model", str(folder / "model.json"), "--precision", "32-true", "--micro-batch-size", "4"]
        run(lab, [sys.executable, "-m", "holmes_core.cli", *words, "-o", probe], None, "holmes probe")
        for name in names:
            out = str(folder / "times.json")
            command = [sys.executable, __file__, "--be", "--steps", str(steps), "--out", out]
            fixed = {"run_ahead": 0, "defer_weights": False, "sharding": "optimizer", **LAYOUTS[name][1]}
            config = {"print_plan": False, "timeout": 120, "probe": probe, **fixed}
            run(lab, command, config, name)
            found[name] = json.loads(Path(out).read_text())
            took, thought = statistics.median(found[name]["steps"]), found[name]["prediction"]["step_seconds"]
            print(f"{name}: {took:.2f} s/step, predicted {thought:.2f} ({thought / took - 1:+.0%})", flush=True)
        found["probe " + setting] = json.loads(Path(probe).read_text())
    return found


def _first_in_line(lab: Any) -> None:
    """Give the lab's hosts their quotas whatever else runs on the machine (cgroup v1 weights; v2 has others)."""
    for group in Path("/sys/fs/cgroup/cpu").glob("holmes-*"):
        if any(group.name.endswith(f"{lab.name}.{host.name}") for host in lab.spec.hosts):
            (group / "cpu.shares").write_text("200000")


_ABOUT = """\
Written by [simulator.py](simulator.py): it probes a lab, predicts each layout's step from that (the job does it by
itself, with `probe: FILE`), and trains. A GPT of 27.4 M parameters, float32, AdamW, each replica's batch {batch}
tokens; four hosts with one rank each in two clusters, fabrics 2.5 Gbit/s, Ethernet between them 100 Mbit/s, 0.36 cores
per host; in "slowed" 0.48 in one cluster and 0.24 in the other. 1F1B where nothing else is said; medians after warm-up,
one run of each layout. The probe measures a block, the head, links, and how long small operations and copies take; two
constants of the model were found in other runs on this machine, with this model: how many small operations the runtime
needs for an action (`ACTION_OPERATIONS`), and what a heap holds beyond what is in use (`HEAP`)."""


def page(found: dict[str, dict[str, Any]], where: str) -> str:
    """Return benchmarks/simulator.md."""
    rows = [
        "| layout | blocks | s/step measured (quartiles) | predicted | off by | after the pipeline: measured | "
        "predicted | peak MiB per rank: measured | predicted | off by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    times, sizes = [], []
    for name, one in found.items():
        low, middle, high = statistics.quantiles(one["steps"], n=4)
        p = one["prediction"]
        ending = middle - statistics.median(one["pipelines"])
        off = p["step_seconds"] / middle - 1
        each = [thought / peak - 1 for thought, peak in zip(p["memory_bytes"], one["peaks"], strict=True)]
        worst = max(each, key=abs)
        times.append(off)
        sizes.append(worst)
        mib = [", ".join(f"{value / 2**20:.0f}" for value in values) for values in (one["peaks"], p["memory_bytes"])]
        rows.append(
            f"| {name} | {'+'.join(map(str, one['layers']))} | {middle:.2f} ({low:.2f} - {high:.2f}) | "
            f"{p['step_seconds']:.2f} | {off:+.1%} | {ending:.2f} | {p['step_seconds'] - p['pipeline_seconds']:.2f} | "
            f"{mib[0]} | {mib[1]} | {worst:+.1%} |"
        )
    found_times, found_sizes = (
        f"median {statistics.median(map(abs, values)):.1%}, worst {max(values, key=abs):+.1%}"
        for values in (times, sizes)
    )
    parts = (
        "# Predictions against runs",
        _ABOUT.format(batch=f"{REPLICA_BATCH} x {LENGTH}"),
        f"{where}",
        f"**Step time** is off by: {found_times}.\n**Memory** (the worst rank of each layout; peak resident set after "
        f"warm-up): {found_sizes}.",
        "\n".join(rows),
        '"After the pipeline": gradients, optimizer, parameters handed out, and waiting for other ranks.\n\n'
        "Command: `sudo .venv/bin/python benchmarks/simulator.py --out benchmarks/simulator.md` (about 15 minutes).",
    )
    return "\n\n".join(parts) + "\n"


def _where() -> str:
    return (
        f"torch {version('torch')}, transformers {version('transformers')}, Python {platform.python_version()}, "
        f"Linux {platform.release()}, {os.cpu_count()} cores; load average at the end {os.getloadavg()[0]:.1f}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write everything that was measured")
    parser.add_argument("--out", metavar="FILE", help="write the page")
    parser.add_argument(
        "--from", dest="runs", nargs="+", metavar="FILE", help="what --json has written; nothing is run"
    )
    parser.add_argument("--be", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        train(args.steps, args.out)
        return
    found: dict[str, dict[str, Any]] = {}
    where = _where()
    for file in args.runs or ():
        earlier = json.loads(Path(file).read_text())
        where = earlier.pop("where")
        found |= earlier
    with tempfile.TemporaryDirectory(prefix="holmes-sim-") as folder:
        for setting in () if args.runs else SETTINGS:
            names = [name for name in args.layouts if LAYOUTS[name][0] == setting]
            if names:
                found |= measure(setting, names, args.steps, Path(folder))
                where = _where()
    if args.json:
        Path(args.json).write_text(json.dumps({"where": where, **found}, indent=1))
    layouts = {name: one for name, one in found.items() if name in LAYOUTS}
    text = page({name: layouts[name] for name in LAYOUTS if name in layouts}, where)
    print(text)
    if args.out:
        Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
