# SPDX-License-Identifier: Apache-2.0
"""Loops in the shapes of Accelerate's examples: a BERT classifier and what scripts do around one; no word of Holmes.

python shapes.py OUT TRAIT [--resume FOLDER]: rank by rank it writes OUT/rank<r>.json and, from the main process,
OUT/weights.pt.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import (
    ProfileKwargs,
    find_executable_batch_size,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    set_seed,
)
from torch.utils.data import DataLoader, Dataset
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

WORDS = 40


class Pairs(Dataset):
    """Sentences of random words; the class is the parity of the first."""

    def __init__(self, n: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 12, (n,), generator=rng).tolist()
        self.rows = [torch.randint(1, WORDS, (length,), generator=rng) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.rows[i]


def collate(rows: list[torch.Tensor]) -> BatchEncoding:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.stack([row[0] % 2 for row in rows])
    mask = (ids > 0).long()
    return BatchEncoding({"input_ids": ids, "token_type_ids": 0 * ids, "attention_mask": mask, "labels": labels})


def make_model() -> torch.nn.Module:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


class Notes(GeneralTracker):
    """A tracker of the script's own: everything it is told, in a file."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.lines = file, []

    @property
    def tracker(self) -> Any:
        return self.lines

    @on_main_process
    def store_init_configuration(self, values: dict) -> None:
        self.lines.append(values)

    @on_main_process
    def log(self, values: dict, step: int | None = None, **kwargs: Any) -> None:
        self.lines.append({**values, "step": step})
        self.file.write_text(json.dumps(self.lines))


class Run:
    """One training, as the examples write it."""

    def __init__(
        self, accelerator: Accelerator, record: dict, *, batch: int = 8, rows: int = 30, seed: int = 1
    ) -> None:
        self.accelerator, self.record = accelerator, record
        model = make_model().to(accelerator.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = DataLoader(Pairs(rows, seed), batch_size=batch, shuffle=True, collate_fn=collate, drop_last=True)
        test = DataLoader(Pairs(11, 2), batch_size=4, collate_fn=collate)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 3 * len(train))
        self.model, self.optimizer, self.train, self.test, self.schedule = accelerator.prepare(
            model, optimizer, train, test, schedule
        )

    def step(self, batch: BatchEncoding) -> float:
        batch.to(self.accelerator.device)
        with self.accelerator.accumulate(self.model):
            loss = self.model(**batch).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.record["losses"].append(loss.item())
        return loss.item()

    def evaluate(self) -> None:
        self.model.eval()
        right = rows = 0
        for batch in self.test:
            with torch.no_grad():
                logits = self.model(**batch).logits
            guesses, labels = self.accelerator.gather_for_metrics((logits.argmax(dim=-1), batch["labels"]))
            right, rows = right + int((guesses == labels).sum()), rows + len(labels)
        self.record["eval"].append([right, rows, float(logits.double().sum())])

    def epoch(self) -> None:
        self.model.train()
        for batch in self.train:
            self.step(batch)
        self.evaluate()


def folds(accelerator: Accelerator, record: dict, args: argparse.Namespace) -> Run:
    """Cross validation: one model after the other."""
    for fold in range(3):
        set_seed(fold)
        run = Run(accelerator, record, seed=fold)
        run.epoch()
        if fold < 2:
            accelerator.free_memory()
    return run


def memory(accelerator: Accelerator, record: dict, args: argparse.Namespace) -> Run:
    """The batch is halved until it fits."""

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> Run:
        accelerator.free_memory()
        record["sizes"].append(batch_size)
        set_seed(3)
        run = Run(accelerator, record, batch=batch_size)
        run.model.train()
        for batch in run.train:
            run.step(batch)
            if batch_size > 4:
                raise RuntimeError("CUDA out of memory.")
        run.evaluate()
        return run

    record["sizes"] = []
    return train()


def stopping(accelerator: Accelerator, record: dict, args: argparse.Namespace) -> Run:
    """Early stopping, decided by each process for all."""
    run = Run(accelerator, record)
    run.model.train()
    for index, batch in enumerate(run.train):
        run.step(batch)
        if index == 1 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    record["stopped"] = index
    run.evaluate()
    return run


def eval_mode(accelerator: Accelerator, record: dict, args: argparse.Namespace) -> Run:
    """Nobody says model.train(): a model from from_pretrained stays in eval mode. Evaluation keeps gradients on."""
    run = Run(accelerator, record)
    run.model.eval()
    for batch in run.train:
        run.step(batch)
    logits = [run.model(**batch).logits for batch in run.test]
    record["eval"].append([0, len(logits), sum(float(x.detach().double().sum()) for x in logits)])
    return run


def checkpoints(accelerator: Accelerator, record: dict, args: argparse.Namespace) -> Run:
    """By step and by epoch; a resumed run skips what was done."""
    run = Run(accelerator, record)
    first = skip = 0
    if args.resume:
        accelerator.load_state(args.resume)
        kind, _, number = os.path.basename(args.resume).partition("_")
        done = int(number) if kind == "step" else (int(number) + 1) * len(run.train)
        first, skip = divmod(done, len(run.train))
    for epoch in range(first, 3):
        run.model.train()
        set_seed(50 + epoch)  # the order of a resumed epoch is that of the whole one
        loader, skipped = (accelerator.skip_first_batches(run.train, skip), skip) if skip else (run.train, 0)
        skip = 0
        for index, batch in enumerate(loader, epoch * len(run.train) + skipped + 1):
            run.step(batch)
            if index % 2 == 0:
                accelerator.save_state(str(args.out / f"step_{index}"))
        run.evaluate()
        accelerator.save_state(str(args.out / f"epoch_{epoch}"))
    return run


def tracking(accelerator: Accelerator, record: dict, args: argparse.Namespace) -> Run:
    """A tracker and the profiler."""
    accelerator.init_trackers("run", {"lr": 0.1})
    run = Run(accelerator, record)
    for epoch in range(2):
        with accelerator.profile() as profile:
            run.epoch()
        record["profiled"] = len(profile.key_averages()) > 0
        accelerator.log({"loss": record["losses"][-1], "eval": record["eval"][-1][0]}, step=epoch)
    accelerator.wait_for_everyone()
    record["notes"] = json.loads((args.out / "notes.json").read_text())
    return run


def functions(accelerator: Accelerator, record: dict, args: argparse.Namespace) -> Run:
    """Collectives of accelerate.utils, without the accelerator."""
    run = Run(accelerator, record)
    run.epoch()
    mine = accelerator.process_index
    record["functions"] = [
        gather(torch.tensor([mine, 10 + mine])).tolist(),
        gather_object([f"r{mine}"]),
        float(reduce(torch.tensor(1.0 + mine), reduction="sum")),
        float(reduce(torch.tensor(1.0 + mine))),
        pad_across_processes(torch.ones(1 + mine), pad_index=-1).tolist(),
    ]
    return run


TRAITS = [folds, memory, stopping, eval_mode, checkpoints, tracking, functions]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("trait", choices=[trait.__name__ for trait in TRAITS])
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--resume", default=None)
    args = parser.parse_args()
    options: dict[str, Any] = {"gradient_accumulation_steps": args.accumulate}
    if args.trait == "tracking":
        options |= {"log_with": Notes(args.out / "notes.json"), "kwargs_handlers": [ProfileKwargs(activities=["cpu"])]}
    accelerator = Accelerator(**options)
    set_seed(7)
    record: dict[str, Any] = {"losses": [], "eval": [], "processes": accelerator.num_processes}
    run = next(trait for trait in TRAITS if trait.__name__ == args.trait)(accelerator, record, args)
    state = accelerator.get_state_dict(run.model)
    if accelerator.is_main_process:
        torch.save(state, args.out / "weights.pt")
    rank = int(os.environ.get("RANK", "0"))
    (args.out / f"rank{rank}.json").write_text(json.dumps(record))
    accelerator.end_training()


if __name__ == "__main__":
    main()
