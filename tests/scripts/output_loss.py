# SPDX-License-Identifier: Apache-2.0
"""A Lightning script as people write it: the transformers model computes the loss (`self.model(**batch).loss`)."""

from __future__ import annotations

import argparse
import json
import os

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

if os.environ.get("TEST_HOST") == "pytorch_lightning":
    import pytorch_lightning as L
else:
    import lightning.pytorch as L
from recorder import make_recorder
from torchmetrics.text import Perplexity
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

VOCAB = 96


class Rows(Dataset):
    """Right-padded rows of random tokens with unequal lengths; labels ignore the padding."""

    def __init__(self, n: int, length: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            ids = torch.randint(2, VOCAB, (length,), generator=rng)
            mask = (torch.arange(length) < torch.randint(3, length + 1, (), generator=rng)).long()
            self.rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.rows[i]


def cut_to_longest(rows: list) -> dict:
    """Collate to the longest row of the batch, as most collators do: the length changes from batch to batch."""
    batch = torch.utils.data.default_collate(rows)
    longest = int(batch["attention_mask"].sum(1).max())
    return {key: value[:, :longest] for key, value in batch.items()}


class Model(L.LightningModule):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        torch.manual_seed(0)
        drop = args.dropout
        if args.model == "gpt2":
            config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=args.layers, n_head=4)
            config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = drop
            config.bos_token_id = config.eos_token_id = None
            config.tie_word_embeddings = args.tied
            self.model = GPT2LMHeadModel(config)
        else:
            config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=args.layers)
            config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
            config.tie_word_embeddings, config.attention_dropout = args.tied, drop
            self.model = LlamaForCausalLM(config)
        if args.checkpointing:
            self.model.gradient_checkpointing_enable()
        self.perplexity = Perplexity(ignore_index=-100)
        self.seen: list = []

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        out = self.model(**batch)
        self.perplexity.update(out.logits[:, :-1], batch["labels"][:, 1:])
        self.log("val_loss", out.loss, prog_bar=True)
        self.log("val_ppl", self.perplexity)
        self.seen.append(out.loss.detach())

    def on_validation_epoch_end(self) -> None:
        self.log("mean_seen", torch.stack(self.seen).mean(), sync_dist=True)
        self.seen.clear()

    def configure_optimizers(self) -> dict:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        if self.args.optimizer == "sgd":
            optimizer = torch.optim.SGD(groups, lr=self.args.lr, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(groups, lr=self.args.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--model", default="llama")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=9)
    parser.add_argument("--changing", action="store_true")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=-1)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--clip", type=float, default=None)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--shuffle", action="store_true")
    parser.add_argument("--like-replicas", action="store_true", help="the order in which replicas see rows together")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--trainer", default="{}", help="more Trainer arguments, as json")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--save", default=None)
    return parser.parse_args()


def main(model_class: type = Model) -> None:
    args = parse()
    L.seed_everything(1, verbose=False)
    train = Rows(args.rows, args.length, 1)
    val = Rows(16, args.length, 2)
    # Lightning shuffles replicas' training data by a DistributedSampler of its own, seeded with the global seed.
    sampler = DistributedSampler(train, num_replicas=1, rank=0, seed=1) if args.like_replicas else None
    loader = DataLoader(
        train,
        batch_size=args.batch_size,
        shuffle=args.shuffle,
        sampler=sampler,
        collate_fn=cut_to_longest if args.changing else None,
    )
    trainer = L.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs if args.max_steps < 0 else -1,
        max_steps=args.max_steps,
        precision=args.precision,
        gradient_clip_val=args.clip,
        accumulate_grad_batches=args.accumulate,
        callbacks=[make_recorder(L, args.out)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        num_sanity_val_steps=0,
        default_root_dir=os.path.dirname(args.out),
        **{"enable_checkpointing": False, **json.loads(args.trainer)},
    )
    model = model_class(args)
    trainer.fit(model, loader, DataLoader(val, batch_size=args.batch_size), ckpt_path=args.resume)
    if args.save:
        trainer.save_checkpoint(args.save)


if __name__ == "__main__":
    main()
