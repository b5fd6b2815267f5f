# SPDX-License-Identifier: Apache-2.0
"""A Lightning script that trains until something fails: says each step. Usage: SCRIPT STEPS WIDTH."""

from __future__ import annotations

import os
import sys
from typing import Any

import lightning.pytorch as L
import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS, WIDTH = int(sys.argv[1]), int(sys.argv[2])


class Script(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        make = torch.nn.Linear
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(make(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(4))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, _: int) -> Any:
        return self(batch[0]).pow(2).mean()

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"step {self.trainer.global_step} done\n", end="", flush=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = L.Trainer(
    strategy="holmes", accelerator="cpu", devices=1, num_nodes=int(os.environ["WORLD_SIZE"]), max_steps=STEPS,
    max_epochs=-1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Script(), DataLoader(TensorDataset(torch.randn(256, WIDTH)), batch_size=16))
