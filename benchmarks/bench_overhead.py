# SPDX-License-Identifier: Apache-2.0
"""What the engine costs: one process through it, against a plain torch loop and Lightning; and two stages on two cores.

    python benchmarks/bench_overhead.py [--repeats 5] [--steps 20] [--out benchmarks/overhead.md]

Every variant trains the same GPT on the same batches. Variants run interleaved (a, b, c, a, b, c, ...), each in a
process of its own with one thread per process; the median time per step over all repetitions is reported. The first
five steps of each run are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM_UP = 5
VARIANTS = {
    "torch": "plain torch loop, 1 process",
    "auto": 'Lightning strategy="auto", 1 process',
    "holmes": 'Lightning strategy="holmes", 1 process (pp=1)',
    "auto8": 'Lightning "auto", 1 process, 8 accumulated batches of 1/8 (the pipeline\'s micro-batches)',
    "pp2": 'Lightning strategy="holmes", 2 processes (pp=2, 8 micro-batches)',
}


def model_and_data(batch: int, length: int, vocab: int = 2048) -> tuple[Any, list[Any]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab, n_positions=length, n_embd=256, n_layer=8, n_head=4, use_cache=False)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.bos_token_id = config.eos_token_id = None
    rows = torch.randint(0, vocab, (batch * 64, length))
    return GPT2LMHeadModel(config), [{"input_ids": r, "labels": r} for r in rows]


def run_variant(name: str, steps: int, batch: int, length: int) -> None:
    """Train and write seconds per step to the file in BENCH_OUT (rank 0)."""
    import torch

    torch.set_num_threads(1)
    model, rows = model_and_data(batch, length)
    total = steps + WARM_UP
    loader = torch.utils.data.DataLoader(rows[: batch * 64], batch_size=batch if name != "auto8" else batch // 8)
    times: list[float] = []
    if name == "torch":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batches = iter(loader)
        for _ in range(total):
            start = time.perf_counter()
            optimizer.zero_grad()
            model(**next(batches)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            times.append(time.perf_counter() - start)
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(times[WARM_UP:]))
        return
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Clock(L.Callback):
        last: float | None = None

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            accumulate = trainer.accumulate_grad_batches
            if (trainer.fit_loop.epoch_loop.batch_idx + 1) % accumulate:
                return
            now = time.perf_counter()
            if self.last is not None:
                times.append(now - self.last)
            self.last = now

    if name == "holmes":
        os.environ.pop("HOLMES_CONFIG", None)
    trainer = L.Trainer(
        strategy="holmes" if name in ("holmes", "pp2") else "auto",
        devices=2 if name == "pp2" else 1,
        accelerator="cpu",
        max_steps=total + 1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=8 if name == "auto8" else 1,
        callbacks=[Clock()],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(Module(), loader)
    if trainer.global_rank == 0:
        Path(os.environ["BENCH_OUT"]).write_text(json.dumps(times[WARM_UP : WARM_UP + steps]))


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in args.variants}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "pp2.yaml")
        config.write_text("pp: 2\nnum_microbatches: 8\nprint_plan: false\n")
        for repeat in range(args.repeats):
            for name in args.variants:
                out = Path(folder, f"{name}{repeat}.json")
                env = {**os.environ, "OMP_NUM_THREADS": "1", "BENCH_OUT": str(out)}
                env.pop("HOLMES_CONFIG", None)
                if name == "pp2":
                    env["HOLMES_CONFIG"] = str(config)
                words = [sys.executable, __file__, "--run", name, "--steps", str(args.steps)]
                words += ["--batch", str(args.batch), "--length", str(args.length)]
                subprocess.run(words, env=env, check=True, timeout=900, capture_output=True)
                found[name] += json.loads(out.read_text())
                print(f"{repeat + 1}/{args.repeats} {name}: {1e3 * statistics.median(found[name]):.1f} ms", flush=True)
    return found


def report(found: dict[str, list[float]], args: argparse.Namespace) -> str:
    import lightning
    import torch
    import transformers

    median = {name: statistics.median(times) for name, times in found.items()}
    lines = [
        "# Overhead of the engine",
        "",
        f"GPT-2 shape, 8 layers, hidden 256, vocabulary 2048; batch {args.batch} x {args.length} tokens, AdamW,"
        " clip 1.0, fp32, one thread per process.",
        f"Median of {args.repeats} interleaved runs x {args.steps} steps. Load average at the end:"
        f" {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        f"torch {torch.__version__}, lightning {lightning.__version__}, transformers {transformers.__version__},"
        f" Python {platform.python_version()}, {platform.machine()}.",
        "",
        f"Command: `python benchmarks/bench_overhead.py --repeats {args.repeats} --steps {args.steps}`",
        "",
        "| variant | ms/step | quartiles | against Lightning auto |",
        "| --- | --- | --- | --- |",
    ]
    for name, times in found.items():
        low, _, high = statistics.quantiles(times, n=4)
        ratio = f"{median[name] / median['auto']:.3f} x" if "auto" in median else ""
        lines.append(
            f"| {VARIANTS[name]} | {1e3 * median[name]:.1f} | {1e3 * low:.1f} - {1e3 * high:.1f} | {ratio} |"
        )
    if "pp2" in median and "auto8" in median:
        lines += [
            "",
            f"Two stages on two cores against one process doing the same micro-batches:"
            f" {median['auto8'] / median['pp2']:.2f} x as fast. With 2 stages and 8 micro-batches 1F1B is busy for 8 of"
            " 9 slots, so at most 1.78 x can be had, less what two busy cores of one machine slow each other down.",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", choices=VARIANTS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    if args.run:
        run_variant(args.run, args.steps, args.batch, args.length)
        return
    text = report(measure(args), args)
    print(text)
    if args.out:
        Path(args.out).write_text(text)


if __name__ == "__main__":
    main()
