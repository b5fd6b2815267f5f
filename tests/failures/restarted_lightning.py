# SPDX-License-Identifier: Apache-2.0
"""A Lightning script; one rank is killed at a step of the first attempt. Usage: SCRIPT OUT RANK STEP [PAUSE]."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

OUT, RANK, STEP = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
PAUSE = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0" and os.environ.get("SLURM_RESTART_COUNT", "0") == "0"


class Script(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = torch.nn.Linear(4, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: Any, _: int) -> Any:
        if FIRST and self.global_rank == RANK and self.trainer.global_step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PAUSE)
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Writes(L.Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_rank == 0:
            line = {"step": trainer.global_step, "loss": float(trainer.callback_metrics["loss"]), "first": FIRST}
            with (OUT / "losses.jsonl").open("a") as file:
                file.write(json.dumps({**line, "world": trainer.world_size}) + "\n")


L.seed_everything(1, verbose=False)
rng = torch.Generator().manual_seed(3)
loader = DataLoader(
    TensorDataset(torch.randn(64, 4, generator=rng), torch.randn(64, 1, generator=rng)), batch_size=4, shuffle=True
)
SAYS = "SAYS_NOTHING" not in os.environ  # whether the script itself wants to go on from its last checkpoint
saves = ModelCheckpoint(dirpath=OUT / "saved", every_n_train_steps=2, save_last=SAYS)
trainer = L.Trainer(
    strategy="holmes", accelerator="cpu", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")), max_steps=10, callbacks=[saves, Writes()],
    logger=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(Script(), loader, ckpt_path="last" if SAYS else None)
