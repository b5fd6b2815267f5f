# SPDX-License-Identifier: Apache-2.0
"""Training speed in labs with unequal networks: Holmes against Lightning's DDP, same model, batch, ranks and data.

    sudo .venv/bin/python benchmarks/lab_throughput.py [--settings homogeneous hybrid8 hybrid25 hybrid100]
        [--systems holmes ahead1 ahead2 ddp] [--repeats 3] [--steps 8] [--out benchmarks/lab.md]

Four hosts with one rank each; CPU quotas that add up to the machine, so that nobody computes in another's waiting time.
`homogeneous` joins them by one fast fabric; in `hybridN` two clusters of two are joined by Ethernet at 1/N of the
fabric's rate. Runs are interleaved, each in a lab of its own; the median over steps of all repetitions counts, the
first steps of a run do not. DDP uses the network that all hosts share, as it does by default.
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

FABRIC = 2_500_000_000  # bit/s; what two virtual CPUs can move beside their computing
WARM_UP = 3
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "holmes": ("Holmes, pp 2 x dp 2, 8 micro-batches", {"pp": 2, "num_microbatches": 8}),
    "ahead1": ("the same, running 1 micro-batch ahead", {"pp": 2, "num_microbatches": 8, "run_ahead": 1}),
    "ahead2": ("the same, running 2 micro-batches ahead", {"pp": 2, "num_microbatches": 8, "run_ahead": 2}),
    "gpipe": ("Holmes, pp 2 x dp 2, GPipe", {"pp": 2, "num_microbatches": 8, "schedule": "gpipe"}),
    "dp": ("Holmes, dp 4", {"pp": 1}),
    "ddp": ("Lightning DDP, 4 replicas", {}),
}
BATCH, LENGTH, VOCAB = 16, 128, 4096  # sequences of the whole job per step


def spec_of(setting: str) -> dict[str, Any]:
    """Return the lab's specification."""
    cpu = {"cpu": round((os.cpu_count() or 1) / 4, 3)}
    if setting == "homogeneous":
        clusters = [{"name": "a", "kind": "roce", "hosts": 4}]
        return {"clusters": clusters, "rdma_rate": f"{FABRIC}bit", "ethernet_rate": f"{FABRIC}bit", **cpu}
    clusters = [{"name": "a", "kind": "infiniband", "hosts": 2}, {"name": "b", "kind": "roce", "hosts": 2}]
    rate = FABRIC // int(setting.removeprefix("hybrid"))
    return {"clusters": clusters, "rdma_rate": f"{FABRIC}bit", "ethernet_rate": f"{rate}bit", **cpu}


def train(system: str, steps: int, out: str) -> None:
    """Be one rank: train and, on rank 0, write seconds per step to `out`."""
    import lightning.pytorch as L
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    strategy = "holmes"
    replicas = 4 // SYSTEMS[system][1].get("pp", 1)
    if system == "ddp":
        strategy = L.strategies.DDPStrategy(process_group_backend="gloo")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            config = GPT2Config(vocab_size=VOCAB, n_positions=LENGTH, n_embd=512, n_layer=8, n_head=8, use_cache=False)
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
            config.bos_token_id = config.eos_token_id = None
            self.model = GPT2LMHeadModel(config)
            self.times: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def on_train_batch_end(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCAB, (BATCH * (steps + WARM_UP + 2), LENGTH), generator=generator)
    loader = torch.utils.data.DataLoader([{"input_ids": r, "labels": r} for r in rows], batch_size=BATCH // replicas)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=4, max_steps=steps + WARM_UP, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, loader)
    if trainer.is_global_zero:
        times = module.times[WARM_UP - 1 :]
        params = sum(p.numel() for p in module.parameters())
        Path(out).write_text(json.dumps({"steps": [b - a for a, b in pairwise(times)], "n": params}))


def measure(setting: str, system: str, steps: int) -> dict[str, Any]:
    """Run one system in a fresh lab; return seconds per step, parameters, and bytes sent on Ethernet per step."""
    from holmes_core.lab.job import run_job
    from holmes_core.lab.session import Lab
    from holmes_core.lab.spec_file import parse_spec

    with tempfile.TemporaryDirectory(prefix="holmes-bench-") as folder:
        config = Path(folder) / "holmes.yaml"
        config.write_text(json.dumps({"print_plan": False, "timeout": 120, **SYSTEMS[system][1]}))
        env = {"HOLMES_CONFIG": str(config), "OMP_NUM_THREADS": "1"}
        if system == "ddp":  # what a user has to type where names do not resolve; Holmes needs none
            env["GLOO_SOCKET_IFNAME"] = "rdma0" if setting == "homogeneous" else "eth0"
        lines: list[str] = []
        out = str(Path(folder) / "times.json")
        command = [sys.executable, __file__, "--be", system, "--steps", str(steps), "--out", out]
        lab = Lab.up(parse_spec(spec_of(setting)), name="bench-")
        try:
            done = run_job(lab, command, torchrun=True, env=env, timeout=900, write=lines.append)
        finally:
            lab.down()
        if done.returncode:
            raise SystemExit(f"{system} in {setting} failed:\n{''.join(lines)[-4000:]}")
        found: dict[str, Any] = json.loads(Path(out).read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["homogeneous", "hybrid8", "hybrid25", "hybrid100"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=["holmes", "ahead1", "ahead2", "ddp"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out")
    parser.add_argument("--be", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be:
        train(args.be, args.steps, args.out)
        return
    times: dict[tuple[str, str], list[float]] = {}
    params = 0
    for repeat in range(args.repeats):
        for setting in args.settings:
            for system in args.systems:
                found = measure(setting, system, args.steps)
                params = found["n"]
                times.setdefault((setting, system), []).extend(found["steps"])
                middle = statistics.median(found["steps"])
                print(f"{repeat + 1}/{args.repeats} {setting} {system}: {middle:.2f} s/step", flush=True)
    best = {
        setting: min(statistics.median(times[setting, system]) for system in args.systems) for setting in args.settings
    }
    words = " ".join(["--settings", *args.settings, "--systems", *args.systems])
    lines = [
        "# Training speed in the lab",
        "",
        f"GPT of {params / 1e6:.1f} M parameters, {BATCH} x {LENGTH} tokens per step, AdamW, fp32; 4 hosts with one "
        f"rank and {(os.cpu_count() or 1) / 4:g} CPUs each, fabric {FABRIC / 1e9:g} Gbit/s. Median of {args.repeats} "
        f"interleaved runs x {args.steps} steps. Load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} "
        "cores.",
        "",
        f"torch {version('torch')}, lightning {version('lightning')}, transformers {version('transformers')}, "
        f"Python {platform.python_version()}, Linux {platform.release()}.",
        "",
        f"Command: `python benchmarks/lab_throughput.py {words} --repeats {args.repeats} --steps {args.steps}`",
        "",
        "| setting | system | s/step | quartiles | tokens/s | against the best here |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for setting in args.settings:
        for system in args.systems:
            found = sorted(times[setting, system])
            low, middle, high = statistics.quantiles(found, n=4)
            lines.append(
                f"| {setting} | {SYSTEMS[system][0]} | {middle:.2f} | {low:.2f} - {high:.2f} | "
                f"{BATCH * LENGTH / middle:.0f} | {middle / best[setting]:.2f} x |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
