# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a LLaMA on instructions and responses with PyTorch Lightning.

An ordinary Lightning script: what Holmes needs is the word in `Trainer(strategy="holmes")`.

    python finetune_llama.py --accelerator cpu --devices 2 --pp 2          # a small random model, data that ships
    python finetune_llama.py --model DIR --data my.jsonl --devices 8 --pp 4 --dp 2 --precision bf16-true
    python finetune_llama.py --model DIR --lora --devices 1 --strategy auto

The data is one JSON object per line with "instruction" and "response". Only the tokens of the response are learned.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from text_data import make_once
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).resolve().parent
PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
END = "</s>"


def make_small_model(folder: Path) -> None:
    """Write a random 1 M parameter LLaMA with a byte tokenizer, in the layout of every Hugging Face model."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=258, special_tokens=[END, "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, bos_token=END, pad_token="<pad>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)


class FinetuneLlama(L.LightningModule):
    """A causal language model from a Hugging Face directory, whole or with LoRA adapters."""

    def __init__(
        self,
        path: str,
        lr: float = 2e-4,
        weight_decay: float = 0.0,
        warmup_steps: int = 10,
        lora: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()  # `lora` too: the adapters' scale is not in their weights
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        """Load the weights here and not in __init__, so that a strategy may load only its own part."""
        if self.model is not None:
            return
        self.model = AutoModelForCausalLM.from_pretrained(self.hparams.path)
        self.model.train()  # from_pretrained returns it in eval mode
        if self.hparams.lora:
            import peft

            self.model = peft.get_peft_model(self.model, peft.LoraConfig(**self.hparams.lora))

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss of the response tokens."""
        loss = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log the loss of instructions that were not trained on."""
        loss = self.model(**batch, use_cache=False).loss
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW on what is trainable (with LoRA: the adapters), warm-up and cosine per step."""
        params = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(params, lr=self.hparams.lr, weight_decay=self.hparams.weight_decay)
        warmup, total = self.hparams.warmup_steps, self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Instructions(L.LightningDataModule):
    """Pairs from a jsonl file; every tenth one validates."""

    def __init__(self, *, data: Path, model: Path, small: bool, batch_size: int, max_len: int, workers: int) -> None:
        super().__init__()
        self.data, self.model, self.small = data, model, small
        self.batch_size, self.max_len, self.workers = batch_size, max_len, workers

    def prepare_data(self) -> None:
        """Make the small model on the spot, where none was given."""
        if self.small:
            make_once(self.model, make_small_model)

    def setup(self, stage: str) -> None:
        """Tokenize everything once."""
        self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token  # padding is masked, so any token will do
        rows = [json.loads(line) for line in self.data.read_text("utf-8").splitlines() if line.strip()]
        pairs = [encode(row, self.tokenizer, self.max_len) for row in rows]
        self.train = [pair for i, pair in enumerate(pairs) if i % 10]
        self.val = pairs[::10]

    def _loader(self, rows: list[Any], shuffle: bool) -> DataLoader:
        fold = partial(collate, pad=self.tokenizer.pad_token_id)
        return DataLoader(
            rows, self.batch_size, shuffle=shuffle, collate_fn=fold, num_workers=self.workers, drop_last=shuffle
        )

    def train_dataloader(self) -> DataLoader:
        """Shuffle; every replica gets its own share from Lightning."""
        return self._loader(self.train, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        """Keep the order."""
        return self._loader(self.val, shuffle=False)


def encode(row: dict[str, str], tokenizer: Any, max_len: int) -> tuple[list[int], list[int]]:
    """Return token ids and labels; -100 tells the loss to skip the prompt's tokens."""
    prompt = tokenizer(PROMPT.format(instruction=row["instruction"]))["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]  # some tokenizers end every text
    answer = [*tokenizer(row["response"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return (prompt + answer)[:max_len], ([-100] * len(prompt) + answer)[:max_len]


def collate(rows: list[tuple[list[int], list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Pad on the right to the longest row, rounded up to 8."""
    longest = -(-max(len(ids) for ids, _ in rows) // 8) * 8
    ids = torch.full((len(rows), longest), pad)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, (tokens, targets) in enumerate(rows):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        labels[i, : len(tokens)] = torch.tensor(targets)
        mask[i, : len(tokens)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face directory with safetensors (default: a small random model)")
    add("--data", type=Path, default=HERE / "data" / "instructions.jsonl", help="jsonl (default: the one that ships)")
    add("--out", type=Path, default=Path("outputs/finetune_llama"), help="(default: %(default)s)")
    add("--batch-size", type=int, default=8, help="pairs per model replica and step (default: %(default)s)")
    add("--max-len", type=int, default=512, help="longest pair in tokens (default: %(default)s)")
    add("--workers", type=int, default=0, help="data loader processes (default: %(default)s)")
    add("--epochs", type=int, default=5, help="passes over the data (default: %(default)s)")
    add("--max-steps", type=int, default=-1, help="stop after so many optimizer steps (default: no limit)")
    add("--warmup-steps", type=int, default=10, help="(default: %(default)s)")
    add("--lr", type=float, help="(default: 2e-4; small random model: 3e-3)")
    add("--weight-decay", type=float, default=0.0, help="(default: %(default)s)")
    add("--clip", type=float, default=1.0, help="largest gradient norm of the whole model (default: %(default)s)")
    add("--accumulate", type=int, default=1, help="batches per optimizer step (default: %(default)s)")
    add("--lora", action="store_true", help="train LoRA adapters only (needs peft)")
    add("--lora-rank", type=int, default=8, help="(default: %(default)s)")
    add("--resume", type=Path, help="checkpoint to continue from")
    add("--seed", type=int, default=1234, help="(default: %(default)s)")
    add("--strategy", default="holmes", help="any Lightning strategy (default: %(default)s)")
    add("--accelerator", default="auto", help="(default: %(default)s)")
    add("--devices", default="auto", help="processes on this machine (default: %(default)s)")
    add("--num-nodes", type=int, default=1, help="machines (default: %(default)s)")
    add("--precision", default="32-true", help="Lightning's names, e.g. bf16-true (default: %(default)s)")
    add("--config", type=Path, help="holmes.yaml with degrees and clusters")
    add("--pp", type=int, help="pipeline stages (instead of --config)")
    add("--dp", type=int, help="model replicas (instead of --config)")
    add("--tp", type=int, help="tensor-parallel ranks (instead of --config)")
    args = parser.parse_args(argv)
    if args.config and (args.pp or args.dp or args.tp):
        parser.error("--config and --pp/--dp/--tp say the same thing twice: use one")
    if args.lr is None:
        args.lr = 2e-4 if args.model else 3e-3
    return args


def choose_strategy(args: argparse.Namespace) -> Any:
    """Return what goes into `Trainer(strategy=...)`; training itself knows nothing of Holmes."""
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
    transformers_logging.disable_progress_bar()
    L.seed_everything(args.seed, verbose=False)
    path = args.model or args.out / "small_model"
    lora = {"r": args.lora_rank, "lora_alpha": 2 * args.lora_rank, "target_modules": ["q_proj", "v_proj"]}
    module = FinetuneLlama(
        str(path),
        lr=args.lr,
        weight_decay=args.weight_decay,
        warmup_steps=args.warmup_steps,
        lora={**lora, "task_type": "CAUSAL_LM"} if args.lora else None,
    )
    data = Instructions(
        data=args.data,
        model=path,
        small=args.model is None,
        batch_size=args.batch_size,
        max_len=args.max_len,
        workers=args.workers,
    )
    trainer = L.Trainer(
        strategy=choose_strategy(args),
        accelerator=args.accelerator,
        devices=args.devices,
        num_nodes=args.num_nodes,
        precision=args.precision,
        max_epochs=args.epochs,
        max_steps=args.max_steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        logger=CSVLogger(args.out, name="logs"),
        callbacks=[ModelCheckpoint(args.out / "checkpoints", "best", monitor="val_loss", enable_version_counter=False)],
        enable_model_summary=False,
    )
    trainer.fit(module, data, ckpt_path=args.resume, weights_only=True)
    last = args.out / "checkpoints" / "last.ckpt"
    trainer.save_checkpoint(last, weights_only=False)  # with optimizer state, to go on from
    if not trainer.is_global_zero:
        return
    from holmes_core.convert import convert_checkpoint

    hf_dir = convert_checkpoint(
        last, args.out / "hf", config=path, tokenizer=path, merge_lora=args.lora, overwrite=True
    )
    metrics = {name: float(trainer.callback_metrics.get(name, math.nan)) for name in ("train_loss", "val_loss")}
    tokenizer = AutoTokenizer.from_pretrained(hf_dir)
    prompt = tokenizer(PROMPT.format(instruction="What is the capital of France?"), return_tensors="pt")
    reloaded = AutoModelForCausalLM.from_pretrained(hf_dir)
    ids = reloaded.generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=40,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    print(
        f"\n{tokenizer.decode(ids[0], skip_special_tokens=True)}\n\n"
        f"Loss       train {metrics['train_loss']:.3f}, validation {metrics['val_loss']:.3f} after "
        f"{trainer.global_step} steps\n"
        f"Checkpoint {last}   (--resume continues from it)\n"
        f"HF model   {hf_dir}"
    )


if __name__ == "__main__":
    main()
