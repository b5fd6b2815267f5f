# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT-2 on text files with PyTorch Lightning.

An ordinary Lightning script: what Holmes needs is the word in `Trainer(strategy="holmes")`.

    python pretrain_gpt.py --demo                                    # two clusters on this machine, a few minutes
    python pretrain_gpt.py --strategy auto --size tiny --devices 1   # the same script without Holmes
    python pretrain_gpt.py --data my_texts/ --size 124m --devices 8 --pp 2 --dp 4
    torchrun --nnodes 4 --nproc-per-node 8 ... pretrain_gpt.py --data texts/ --devices 8 --num-nodes 4 --config c.yaml
"""

from __future__ import annotations

import argparse
import math
import os
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from text_data import TextData
from torchmetrics.text import Perplexity
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).resolve().parent

# The names of the larger ones are their sizes with GPT-2's own vocabulary of 50257.
SIZES = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2},
    "demo": {"n_layer": 6, "n_embd": 256, "n_head": 8},
    "124m": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "350m": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "774m": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "1.5b": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}

# What --demo sets, where the command line says nothing else.
DEMO = {
    "size": "demo",
    "seq_len": 128,
    "batch_size": 8,
    "max_steps": 100,
    "max_minutes": 3.0,  # a slow or busy machine stops earlier instead of being late
    "warmup_steps": 15,
    "lr": 1e-3,
    "val_every": 25,
    "val_batches": 4,
    "max_bytes": 2_000_000,
    "accelerator": "cpu",
    "devices": 4,
    "config": HERE / "demo.yaml",
    "out": Path("outputs/demo"),
}


class PretrainGPT(L.LightningModule):
    """GPT-2 with the usual recipe: AdamW, no decay for biases and norms, warm-up and cosine."""

    def __init__(
        self,
        model: dict[str, Any],
        lr: float = 6e-4,
        weight_decay: float = 0.1,
        warmup_steps: int = 100,
        max_steps: int = 1000,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: torch.nn.Module | None = None
        self.val_ppl = Perplexity(ignore_index=-100)

    def configure_model(self) -> None:
        """Build the model here and not in __init__, so that a strategy may build only its own part."""
        if self.model is None:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.hparams.model))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean token loss."""
        loss = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log loss and perplexity of text that was not trained on."""
        output = self.model(**batch, use_cache=False)
        self.val_ppl(output.logits[:, :-1], batch["labels"][:, 1:])
        self.log("val_loss", output.loss, prog_bar=True, sync_dist=True)
        self.log("val_ppl", self.val_ppl, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Decay matrices only; one learning rate per optimizer step."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": self.hparams.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        warmup, total = self.hparams.warmup_steps, self.hparams.max_steps

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min(1.0, (step - warmup) / max(1, total - warmup))
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LossHistory(Callback):
    """Keep every step's loss for the summary, and print a line at each validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Take the value that was logged: it is the same on every rank."""
        self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Print above the progress bar; logs without a terminal show no bar."""
        ppl = float(module.val_ppl.compute())
        module.print(f"step {trainer.global_step:5d}: train loss {self.losses[-1]:.3f}, val perplexity {ppl:.1f}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--demo", action="store_true", help="settings that show everything within minutes on two CPU cores")
    group = parser.add_argument_group("data")
    add = group.add_argument
    add("--data", type=Path, nargs="*", default=[], help="text files or folders (default: Python's standard library)")
    add("--tokenizer", default="bpe", help="bpe (trained on the data), bytes, or a Hugging Face tokenizer directory")
    add("--vocab-size", type=int, default=2048, help="of the trained BPE (default: %(default)s)")
    add("--max-bytes", type=int, default=64_000_000, help="use about this much text at most (default: %(default)s)")
    add("--seq-len", type=int, default=256, help="tokens per sequence (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="sequences per model replica and step (default: %(default)s)")
    add("--workers", type=int, default=0, help="data loader processes (default: %(default)s)")
    group = parser.add_argument_group("model and training")
    add = group.add_argument
    add("--size", choices=SIZES, default="demo", help="(default: %(default)s)")
    add("--layers", type=int, help="instead of the size's number")
    add("--hidden", type=int, help="instead of the size's width")
    add("--heads", type=int, help="instead of the size's number")
    add("--dropout", type=float, default=0.0, help="(default: %(default)s)")
    add("--max-steps", type=int, default=1000, help="optimizer steps (default: %(default)s)")
    add("--max-minutes", type=float, help="stop training after so many minutes (default: no limit)")
    add("--warmup-steps", type=int, default=100, help="(default: %(default)s)")
    add("--lr", type=float, default=6e-4, help="(default: %(default)s)")
    add("--weight-decay", type=float, default=0.1, help="(default: %(default)s)")
    add("--clip", type=float, default=1.0, help="largest gradient norm of the whole model (default: %(default)s)")
    add("--accumulate", type=int, default=1, help="batches per optimizer step (default: %(default)s)")
    add("--val-every", type=int, default=200, help="batches between validations (default: %(default)s)")
    add("--val-batches", type=int, default=50, help="batches per validation (default: %(default)s)")
    add("--seed", type=int, default=1234, help="(default: %(default)s)")
    add("--out", type=Path, default=Path("outputs/pretrain_gpt"), help="(default: %(default)s)")
    add("--resume", type=Path, help="checkpoint to continue from")
    group = parser.add_argument_group("machines")
    add = group.add_argument
    add("--strategy", default="holmes", help="any Lightning strategy (default: %(default)s)")
    add("--accelerator", default="auto", help="(default: %(default)s)")
    add("--devices", default="auto", help="processes on this machine (default: %(default)s)")
    add("--num-nodes", type=int, default=1, help="machines (default: %(default)s)")
    add("--precision", default="32-true", help="Lightning's names, e.g. bf16-mixed (default: %(default)s)")
    add("--config", type=Path, help="holmes.yaml with degrees and clusters")
    add("--pp", type=int, help="pipeline stages (instead of --config)")
    add("--dp", type=int, help="model replicas (instead of --config)")
    add("--tp", type=int, help="tensor-parallel ranks (instead of --config)")
    if parser.parse_known_args(argv)[0].demo:
        parser.set_defaults(**DEMO)
    args = parser.parse_args(argv)
    if args.config and (args.pp or args.dp or args.tp):
        parser.error("--config and --pp/--dp/--tp say the same thing twice: use one")
    return args


def choose_strategy(args: argparse.Namespace) -> Any:
    """Return what goes into `Trainer(strategy=...)`; everything else in this file knows nothing of Holmes."""
    if args.strategy != "holmes":
        return args.strategy
    degrees = {name: getattr(args, name) for name in ("pp", "dp", "tp") if getattr(args, name) is not None}
    if degrees:
        from holmes_lightning import HolmesStrategy

        return HolmesStrategy(**degrees)
    if args.config:
        os.environ["HOLMES_CONFIG"] = str(args.config.resolve())  # before the Trainer; its processes inherit it
    return "holmes"


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    # Advice that does not fit runs this short, and deprecations inside the libraries; each process would print them.
    for noise in (
        "does not have many workers",
        "smaller than the logging interval",
        "LeafSpec",
        "is_gradient_checkpointing",
    ):
        warnings.filterwarnings("ignore", message=f".*{noise}")
    transformers_logging.set_verbosity_error()
    L.seed_everything(args.seed, verbose=False)
    data = TextData(
        paths=args.data,
        cache=args.out / "data",
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        seq_len=args.seq_len,
        batch_size=args.batch_size,
        max_bytes=args.max_bytes,
        workers=args.workers,
    )
    history = LossHistory()
    best = ModelCheckpoint(args.out / "checkpoints", "best", monitor="val_loss", enable_version_counter=False)
    trainer = L.Trainer(
        strategy=choose_strategy(args),
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
        max_steps=args.max_steps,
        max_time=None if args.max_minutes is None else timedelta(minutes=args.max_minutes),
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        val_check_interval=args.val_every,
        check_val_every_n_epoch=None,
        limit_val_batches=args.val_batches,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=CSVLogger(args.out, name="logs"),
        callbacks=[best, history, LearningRateMonitor("step")],
        enable_model_summary=False,
    )
    shape = SIZES[args.size] | {
        key: value
        for key, value in (("n_layer", args.layers), ("n_embd", args.hidden), ("n_head", args.heads))
        if value is not None
    }
    if args.tokenizer in ("bpe", "bytes"):
        vocab_size, end = (args.vocab_size if args.tokenizer == "bpe" else 257), 0
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
        vocab_size, end = len(tokenizer), tokenizer.eos_token_id
    drop = {name: args.dropout for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    ends = {"bos_token_id": end, "eos_token_id": end}
    model = {"model_type": "gpt2", **shape, **drop, **ends, "vocab_size": vocab_size, "n_positions": args.seq_len}
    module = PretrainGPT(model, args.lr, args.weight_decay, args.warmup_steps, args.max_steps)
    start = time.perf_counter()
    trainer.fit(module, data, ckpt_path=args.resume, weights_only=True)
    seconds = time.perf_counter() - start
    last = args.out / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(last, weights_only=False)  # with optimizer state, to go on from
    if trainer.is_global_zero:
        finish(args, trainer, history.losses, last, data.cache / "tokenizer", seconds)


def finish(
    args: argparse.Namespace,
    trainer: L.Trainer,
    losses: list[float],
    checkpoint: Path,
    tokenizer_dir: Path,
    seconds: float,
) -> None:
    """On one rank: write the Hugging Face directory, let it continue a line, and sum up."""
    from holmes_core.convert import convert_checkpoint

    hf_dir = convert_checkpoint(checkpoint, args.out / "hf", tokenizer=tokenizer_dir, overwrite=True)
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    transformers_logging.disable_progress_bar()
    reloaded = AutoModelForCausalLM.from_pretrained(hf_dir)
    torch.manual_seed(args.seed)
    prompt = tokenizer("def main():\n    ", return_tensors="pt")
    room = min(48, args.seq_len - prompt["input_ids"].shape[1])
    ids = reloaded.generate(
        **prompt, max_new_tokens=room, do_sample=True, top_k=20, temperature=0.8, pad_token_id=tokenizer.eos_token_id
    )
    text = tokenizer.decode(ids[0], skip_special_tokens=True)
    mean = min(10, max(1, len(losses) // 2))  # single steps are noisy
    perplexity = trainer.callback_metrics.get("val_ppl")
    shown = "not measured: stopped before the first validation" if perplexity is None else f"{float(perplexity):.1f}"
    first, final = sum(losses[:mean]) / mean, sum(losses[-mean:]) / mean
    parameters = sum(p.numel() for p in reloaded.parameters()) / 1e6
    print(
        f"\nThe reloaded Hugging Face model continues:\n{'-' * 72}\n{text}\n{'-' * 72}\n"
        f"Trained    {parameters:.1f} M parameters for {trainer.global_step} steps in {seconds:.0f} s on "
        f"{trainer.world_size} process(es)\n"
        f"Loss       {first:.3f} -> {final:.3f} (mean of the first and last {mean} steps)\n"
        f"Validation perplexity {shown} (a guess among all tokens would be {reloaded.config.vocab_size})\n"
        f"Checkpoint {checkpoint}\n"
        f"HF model   {hf_dir}   AutoModelForCausalLM.from_pretrained({str(hf_dir)!r})\n"
        f"Your data  python {Path(__file__).name} --data YOUR_TEXT_FILES --size 124m --devices N --config YOUR.yaml"
    )


if __name__ == "__main__":
    main()
