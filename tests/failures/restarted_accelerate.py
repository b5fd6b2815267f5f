# SPDX-License-Identifier: Apache-2.0
"""The same as restarted_lightning.py with Accelerate: saves its state every second step, loads the newest."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

from holmes_core.runtime.checkpoint_latest import latest_checkpoint

OUT, RANK, STEP = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return {"loss": torch.nn.functional.mse_loss(self.head(x), labels)}


set_seed(5)
accelerator = Accelerator(cpu=True)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
rng = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(64, 4, generator=rng), torch.randn(64, 1, generator=rng))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
step = 0
newest = latest_checkpoint(OUT / "saved")
if newest is not None:
    accelerator.load_state(str(newest))
    step = int(newest.name.split("-")[1])
for x, y in accelerator.skip_first_batches(loader, step):
    if FIRST and int(os.environ["RANK"]) == RANK and step == STEP:
        os.kill(os.getpid(), signal.SIGKILL)
    output = model(x=x, labels=y)
    accelerator.backward(output["loss"])
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if accelerator.is_main_process:
        with (OUT / "losses.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "loss": float(output["loss"]), "first": FIRST}) + "\n")
    if step % 2 == 0:
        accelerator.save_state(str(OUT / "saved" / f"step-{step}"))
    if step == 10:
        break
accelerator.end_training()
