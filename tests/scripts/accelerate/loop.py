# SPDX-License-Identifier: Apache-2.0
"""A training loop in the shape of Accelerate's own examples; knows nothing of Holmes.

python loop.py OUT [--options]: rank by rank it writes OUT/rank<r>.json and, from the main process, OUT/weights.pt.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

VOCAB, LENGTH = 64, 10


class Rows(Dataset):
    """Right-padded rows of random tokens."""

    def __init__(self, n: int, seed: int, padded: bool) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.rows = []
        for _ in range(n):
            ids = torch.randint(2, VOCAB, (LENGTH,), generator=rng)
            length = int(torch.randint(4, LENGTH + 1, (), generator=rng)) if padded else LENGTH
            mask = (torch.arange(LENGTH) < length).long()
            self.rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        return self.rows[i]


def make_model(kind: str, layers: int, dropout: float = 0.0) -> torch.nn.Module:
    common = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
    if kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
        return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_head=2, n_embd=32, n_positions=16, **rates, **common))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, max_position_embeddings=16, **sizes, **common))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=44)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--clip_value", type=float, default=0.0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--mixed_precision", default=None)
    parser.add_argument("--own_loss", action="store_true")
    parser.add_argument("--by_hand", action="store_true")
    parser.add_argument("--order", default="model,optimizer,train,eval,scheduler")
    parser.add_argument("--separately", action="store_true")
    parser.add_argument("--unpadded", action="store_true")
    parser.add_argument("--in_order", action="store_true")
    parser.add_argument("--save_at", type=int, default=-1)
    parser.add_argument("--resume", type=Path, default=None)
    parser.add_argument("--config", default=None)  # a script's own option of the launcher's name
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=1 if args.by_hand else args.accumulate, mixed_precision=args.mixed_precision
    )
    set_seed(7)
    model = make_model(args.model, args.layers)
    # A plain process that stands for several replicas takes their batches at once, and as many scheduler steps.
    replicas = 1 if os.environ.get("HOLMES_CONFIG") else int(os.environ.get("REPLICAS", "1"))
    batch = args.batch * replicas
    train = DataLoader(Rows(args.rows, 1, not args.unpadded), batch_size=batch, shuffle=not args.in_order)
    evaluation = DataLoader(Rows(11, 2, True), batch_size=args.batch)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    made = torch.optim.SGD(groups, lr=0.2) if args.optimizer == "sgd" else torch.optim.AdamW(groups, lr=1e-3)
    steps = args.epochs * -(-args.rows // args.batch) // args.accumulate
    objects = {"model": model, "optimizer": made, "train": train, "eval": evaluation}
    objects["scheduler"] = get_linear_schedule_with_warmup(made, 2, steps)
    order = args.order.split(",")
    if args.separately:
        ready = {name: accelerator.prepare(objects[name]) for name in order}
    else:
        ready = dict(zip(order, accelerator.prepare(*[objects[name] for name in order]), strict=True))
    model, optimizer, scheduler = ready["model"], ready["optimizer"], ready["scheduler"]
    record: dict = {"losses": [], "norms": [], "rates": [], "rows": [], "eval": []}
    record["processes"] = accelerator.num_processes

    def train_step(batch: dict) -> None:
        if args.own_loss:
            labels = batch.pop("labels")
            logits = model(**batch).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = model(**batch).loss
        if args.by_hand:
            loss = loss / args.accumulate
        accelerator.backward(loss)
        record["losses"].append(accelerator.gather(loss.detach()).mean().item())
        record["rows"].append(batch["input_ids"][:, 0].tolist())

    def step_optimizer() -> None:
        if accelerator.sync_gradients:
            if args.clip_value:
                accelerator.clip_grad_value_(model.parameters(), args.clip_value)
            elif args.clip:
                record["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), args.clip)))
        optimizer.step()
        for _ in range(replicas):
            scheduler.step()
        optimizer.zero_grad()
        record["rates"].append(scheduler.get_last_lr()[0])

    first_epoch, skip = 0, 0
    if args.resume is not None:
        accelerator.load_state(args.resume)
        done = int((args.resume / "done.txt").read_text())
        first_epoch, skip = divmod(done, len(ready["train"]))
    seen = first_epoch * len(ready["train"]) + skip
    for epoch in range(first_epoch, args.epochs):
        model.train()
        set_seed(100 + epoch)
        loader = ready["train"]
        if skip:
            loader, skip = accelerator.skip_first_batches(loader, skip), 0
        for index, batch in enumerate(loader):
            if args.by_hand:
                train_step(batch)
                if (index + 1) % args.accumulate == 0:
                    step_optimizer()
            else:
                with accelerator.accumulate(model):
                    train_step(batch)
                    step_optimizer()
            seen += 1
            if seen == args.save_at:
                accelerator.save_state(args.out / "checkpoint")
                if accelerator.is_main_process:
                    (args.out / "checkpoint" / "done.txt").write_text(str(seen))
        model.eval()
        right, count, losses = 0, 0, []
        for batch in ready["eval"]:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(len(batch["input_ids"]))))
            guesses, labels = accelerator.gather_for_metrics(
                (outputs.logits.argmax(-1)[:, :-1].contiguous(), batch["labels"][:, 1:].contiguous())
            )
            right += int((guesses == labels).sum())
            count += len(labels)
        record["eval"].append([right, count, torch.cat(losses).mean().item()])
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        args.out / "model", is_main_process=accelerator.is_main_process, save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    state = accelerator.get_state_dict(model)
    accelerator.save_model(model, args.out / "saved")
    if accelerator.is_main_process:
        torch.save(state, args.out / "weights.pt")
    rank = int(os.environ.get("RANK", "0"))
    (args.out / f"rank{rank}.json").write_text(json.dumps(record))
    accelerator.end_training()


if __name__ == "__main__":
    main()
