# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT-2 on text files with Hugging Face Accelerate.

An ordinary Accelerate script, without a word about Holmes in it. The yaml decides:

    accelerate launch --config demo.yaml pretrain_gpt.py             # two clusters on this machine, a few minutes
    python pretrain_gpt.py --cpu                                     # the same script in one process
    accelerate launch --config holmes.yaml pretrain_gpt.py --size 124m --data texts/*.txt    # 4 machines of 8 GPUs
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForCausalLM, get_cosine_schedule_with_warmup

SIZES = {
    "tiny": {"n_layer": 2, "n_embd": 64, "n_head": 2},
    "demo": {"n_layer": 6, "n_embd": 192, "n_head": 6},
    "124m": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "1.5b": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}


class Bytes(Dataset):
    """Text files as sequences of bytes: no tokenizer to download."""

    def __init__(self, files: list[Path], length: int, limit: int) -> None:
        text = bytearray()
        for file in files:
            text += file.read_bytes()[: limit - len(text)]
        self.rows = torch.frombuffer(text, dtype=torch.uint8)[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = self.rows[i].long()
        return {"input_ids": row, "labels": row}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, nargs="*", default=[], help="text files (default: Python's standard library)")
    add("--max-bytes", type=int, default=1_000_000, help="use this much text at most (default: %(default)s)")
    add("--size", choices=SIZES, default="demo", help="(default: %(default)s)")
    add("--seq-len", type=int, default=128, help="bytes per sequence (default: %(default)s)")
    add("--batch-size", type=int, default=16, help="sequences per replica and call (default: %(default)s)")
    add("--accumulate", type=int, default=1, help="calls per optimizer step (default: %(default)s)")
    add("--max-steps", type=int, default=60, help="optimizer steps (default: %(default)s)")
    add("--lr", type=float, default=1e-3, help="(default: %(default)s)")
    add("--eval-every", type=int, default=20, help="steps between evaluations (default: %(default)s)")
    add("--out", type=Path, default=Path("outputs/accelerate"), help="(default: %(default)s)")
    add("--resume", type=Path, help="a folder that this script saved, OUT/checkpoint")
    add("--cpu", action="store_true", help="on the CPU, for a run in one process")
    return parser.parse_args()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> tuple[float, float]:
    """Return loss and the share of bytes that are guessed right."""
    model.eval()
    losses, right, count = [], 0, 0
    for batch in loader:
        output = model(**batch)
        guesses, labels = output.logits[:, :-1].argmax(-1), batch["labels"][:, 1:]
        losses.append(accelerator.gather_for_metrics(output.loss.repeat(len(labels))))
        guesses, labels = accelerator.gather_for_metrics((guesses, labels.contiguous()))
        right += int((guesses == labels).sum())
        count += labels.numel()
    model.train()
    return float(torch.cat(losses).mean()), right / count


def main() -> None:
    args = parse()
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, cpu=args.cpu)
    set_seed(1)
    files = args.data or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    data = Bytes(files, args.seq_len, args.max_bytes)
    held = max(1, min(64, len(data) // 10))
    train, held_out = torch.utils.data.random_split(data, [len(data) - held, held])
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True, drop_last=True)
    eval_loader = DataLoader(held_out, batch_size=args.batch_size)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=256, n_positions=args.seq_len, bos_token_id=0, eos_token_id=0, **SIZES[args.size]
    )
    model = AutoModelForCausalLM.from_config(config)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))
    # Accelerate steps a scheduler once per replica: it is made for the steps of all of them.
    total = args.max_steps * accelerator.num_processes
    scheduler = get_cosine_schedule_with_warmup(optimizer, total // 10, total)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    step, epoch, skip = 0, 0, 0
    if args.resume:
        accelerator.load_state(args.resume)
        step = int((args.resume / "step.txt").read_text())
        epoch, skip = divmod(step * args.accumulate, len(train_loader))
    start, first_step = time.monotonic(), step
    while step < args.max_steps:
        set_seed(100 + epoch)  # the order of an epoch depends on its number only: a resumed run finds its place
        loader = accelerator.skip_first_batches(train_loader, skip) if skip else train_loader
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            if step % args.eval_every == 0 or step == args.max_steps:
                mean = accelerator.gather(loss.detach()).mean().item()
                eval_loss, right = evaluate(accelerator, model, eval_loader)
                accelerator.print(
                    f"step {step:5d}: train loss {mean:.3f}, held-out loss {eval_loss:.3f}"
                    f" ({eval_loss / math.log(2):.2f} bits per byte), {right:.1%} of the bytes right"
                )
            if step == args.max_steps:
                break
        epoch, skip = epoch + 1, 0
    rows = (step - first_step) * args.accumulate * args.batch_size * accelerator.num_processes
    accelerator.print(f"{rows * args.seq_len / (time.monotonic() - start):.0f} bytes per second")
    accelerator.save_state(args.out / "checkpoint")
    if accelerator.is_main_process:
        (args.out / "checkpoint" / "step.txt").write_text(str(step))
    accelerator.unwrap_model(model).save_pretrained(  # on every rank: each holds a part
        args.out / "model", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.print(f"wrote {args.out / 'model'} and {args.out / 'checkpoint'}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
