# SPDX-License-Identifier: Apache-2.0
"""transformers.Trainer as people use it; knows nothing of Holmes. python trainer.py OUT [--options]."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

sys.path.insert(0, str(Path(__file__).parent))
from loop import Rows, make_model


class Record(TrainerCallback):
    """Keeps what the Trainer logs."""

    def __init__(self) -> None:
        self.logs: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.logs.append({"step": state.global_step, **logs})


class Ragged(Rows):
    """Rows without their padding; the collator pads a batch to its longest."""

    def __getitem__(self, i: int) -> dict:
        row = super().__getitem__(i)
        return {name: value[: row["attention_mask"].sum()] for name, value in row.items()}


def pad(rows: list[dict]) -> dict:
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    padded = torch.nn.utils.rnn.pad_sequence
    return {k: padded([row[k] for row in rows], batch_first=True, padding_value=v) for k, v in fill.items()}


def pack(rows: list[dict]) -> dict:
    """Each row holds two texts: positions start again in its middle, and no token sees the other text."""
    ids = torch.stack([row["input_ids"] for row in rows])
    half = ids.shape[1] // 2
    positions = torch.arange(ids.shape[1]).remainder(half).expand_as(ids)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


def metrics(prediction) -> dict:
    guesses, labels = prediction.predictions[:, :-1], prediction.label_ids[:, 1:]
    return {"right": int((guesses == labels)[labels != -100].sum()), "rows": len(labels)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--resume", default=None)
    parser.add_argument("--again", action="store_true", help="evaluate before training, and train twice")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rows", choices=["padded", "ragged", "packed"], default="padded")
    parser.add_argument("--set", nargs="*", default=[], help="name=JSON value of TrainingArguments")
    args = parser.parse_args()
    set_seed(7)
    model = make_model(args.model, 4, args.dropout)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        target = ["c_attn"] if args.model == "gpt2" else ["q_proj", "v_proj"]
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=target, task_type="CAUSAL_LM"))
    more = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    options = {
        "output_dir": str(args.out / "trainer"), "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": args.accumulate, "num_train_epochs": 2, "learning_rate": 0.05, "optim": "sgd",
        "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "warmup_steps": 2, "max_grad_norm": 0.5, "use_cpu": True,
    }  # fmt: skip
    recorder = Record()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**{**options, **more}),
        train_dataset=Ragged(44, 1, True) if args.rows == "ragged" else Rows(44, 1, args.rows == "padded"),
        eval_dataset=Rows(11, 2, True),
        compute_metrics=metrics,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        callbacks=[recorder],
        data_collator={"padded": None, "ragged": pad, "packed": pack}[args.rows],
    )
    if args.again:
        trainer.evaluate()
        model.to(trainer.args.device)
        trainer.train()
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(str(args.out / "final"))
    keep = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_right", "eval_rows")
    record = {"logs": [{k: log[k] for k in keep if k in log} for log in recorder.logs]}
    record["best"] = trainer.state.best_model_checkpoint and Path(trainer.state.best_model_checkpoint).name
    record["global_step"] = trainer.state.global_step
    rank = int(os.environ.get("RANK", "0"))
    (args.out / f"rank{rank}.json").write_text(json.dumps(record))
    if rank == 0:
        from safetensors.torch import load_file

        name = "adapter_model.safetensors" if args.lora else "model.safetensors"
        torch.save(load_file(args.out / "final" / name), args.out / "weights.pt")


if __name__ == "__main__":
    main()
