# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a LLaMA on instructions and responses with transformers.Trainer, whole or with LoRA.

An ordinary Trainer script, without a word about Holmes in it. The yaml decides:

    accelerate launch --config two.yaml finetune_llama.py            # a small random model, two processes, CPU
    accelerate launch --config two.yaml finetune_llama.py --lora
    accelerate launch --config holmes.yaml finetune_llama.py --model DIR --data my.jsonl --bf16

The data is one JSON object per line with "instruction" and "response". Only the bytes of the response are learned.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

SHIPPED = Path(__file__).resolve().parents[1] / "lightning" / "data" / "instructions.jsonl"
PROMPT = "### Instruction:\n{instruction}\n\n### Response:\n"
END, PAD = 256, 257


class Pairs(Dataset):
    """Prompt and response as tokens of a tokenizer, or as bytes without one; the prompt is not learned."""

    def __init__(self, file: Path, tokenizer: object | None, length: int) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False)["input_ids"] if tokenizer else list(text.encode())

        end = tokenizer.eos_token_id if tokenizer else END
        self.rows = []
        for line in file.read_text(encoding="utf-8").splitlines():
            pair = json.loads(line)
            prompt, response = encode(PROMPT.format(**pair)), [*encode(pair["response"]), end]
            ids = (prompt + response)[:length]
            self.rows.append({"input_ids": ids, "labels": ([-100] * len(prompt) + response)[:length]})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return self.rows[i]


def collate(rows: list[dict[str, list[int]]], pad: int) -> dict[str, torch.Tensor]:
    """Pad to the longest row of the batch."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": pad, "labels": -100}
    batch = {k: torch.tensor([row[k] + [v] * (longest - len(row[k])) for row in rows]) for k, v in fill.items()}
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
    return batch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face model directory (default: a small random LLaMA on bytes)")
    add("--data", type=Path, default=SHIPPED, help="a jsonl file (default: the one that ships)")
    add("--lora", action="store_true", help="train LoRA adapters only")
    add("--length", type=int, default=192, help="longest row in tokens (default: %(default)s)")
    add("--batch-size", type=int, default=8, help="rows per replica and call (default: %(default)s)")
    add("--accumulate", type=int, default=2, help="calls per optimizer step (default: %(default)s)")
    add("--epochs", type=float, default=2.0)
    add("--max-steps", type=int, default=-1)
    add("--lr", type=float, default=1e-3)
    add("--bf16", action="store_true")
    add("--out", type=Path, default=Path("outputs/finetune"))
    add("--resume", action="store_true", help="go on from the newest checkpoint in OUT")
    return parser.parse_args()


def main() -> None:
    args = parse()
    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else None
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model)
    else:
        sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
        tokens = {"vocab_size": 258, "bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD}
        model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, max_position_embeddings=512, **sizes, **tokens))
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    rows = Pairs(args.data, tokenizer, args.length)
    held = range(0, len(rows), 10)
    pad = tokenizer.pad_token_id if tokenizer and tokenizer.pad_token_id is not None else END
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.out),
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            num_train_epochs=args.epochs,
            max_steps=args.max_steps,
            learning_rate=args.lr,
            warmup_steps=5,
            max_grad_norm=1.0,
            bf16=args.bf16,
            logging_steps=2,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=2,
            load_best_model_at_end=True,
            report_to="none",
            remove_unused_columns=False,
        ),
        train_dataset=torch.utils.data.Subset(rows, [i for i in range(len(rows)) if i not in held]),
        eval_dataset=torch.utils.data.Subset(rows, list(held)),
        data_collator=lambda batch: collate(batch, pad),
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    result = trainer.evaluate()  # on every rank
    if trainer.is_world_process_zero():
        print(f"held-out loss {result['eval_loss']:.3f}")
    trainer.save_model(str(args.out / "model"))


if __name__ == "__main__":
    main()
