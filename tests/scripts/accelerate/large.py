# SPDX-License-Identifier: Apache-2.0
"""Load a pretrained model, train a little of it for one step, and report the memory that took; no word of Holmes.

python large.py OUT FOLDER [--copy]: writes OUT/rank<r>.json with the loss and the peak, in bytes, of memory that is not
a file's (a limit on a job counts it; pages of a mapped file can be dropped at any time).
"""

from __future__ import annotations

import argparse
import json
import os
import threading
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM


def anonymous() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak(threading.Thread):
    """Watches the memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_at = self.most = anonymous()
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, anonymous())

    def used(self) -> int:
        self.over.set()
        return max(self.most, anonymous()) - self.start_at


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--copy", action="store_true")
    args = parser.parse_args()
    accelerator = Accelerator()
    peak = Peak()
    peak.start()
    model = AutoModelForCausalLM.from_pretrained(args.folder).to(accelerator.device)
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
        if args.copy:
            param.data = param.data.clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    ids = torch.arange(16).view(2, 8)
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    used = peak.used()
    # Into the directory that the others have loaded from.
    accelerator.unwrap_model(model).save_pretrained(args.folder, is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    model.eval()
    with torch.no_grad():
        after = float(model(input_ids=ids, labels=ids).loss)
    rank = int(os.environ.get("RANK", "0"))
    (args.out / f"rank{rank}.json").write_text(json.dumps({"peak": used, "loss": loss.item(), "after": after}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
