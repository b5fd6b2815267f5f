# SPDX-License-Identifier: Apache-2.0
"""Small trainings in which one rank fails in a given way, at a given step and place; run on every rank by a farm."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.lightning.farm import Context


def fail(how: str) -> None:
    """Do to this process what `how` says."""
    print(f"fails at {time.time():.3f}\n", end="", flush=True)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "kill_group":  # the rank and its watchdog, as when a host goes down
        import psutil

        for child in psutil.Process().children():
            child.kill()
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "exit":
        os._exit(7)
    elif how == "exit0":
        os._exit(0)
    elif how == "memory":
        raise MemoryError("the batch does not fit")
    elif how == "raise":
        raise ValueError("the user's own mistake")
    else:
        raise AssertionError(how)


class Rows(Dataset):
    """Random rows; reading one of batch `at` fails on the given rank."""

    def __init__(self, how: str, rank: int, me: int, at: int, batch: int) -> None:
        rng = torch.Generator().manual_seed(3)
        self.x, self.y = torch.randn(64, 4, generator=rng), torch.randn(64, 1, generator=rng)
        self.fails = how if rank == me else ""
        self.at, self.batch = at, batch

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        if self.fails and i // self.batch == self.at:
            fail(self.fails)
        return self.x[i], self.y[i]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Script(L.LightningModule):
    def __init__(self, how: str, at: int, mine: bool, place: str, slow: float) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Model()
        self.how, self.at, self.mine, self.place, self.slow = how, at, mine, place, slow

    def training_step(self, batch: Any, i: int) -> Any:
        if self.mine and self.place == "step" and self.trainer.global_step == self.at:
            if self.slow:
                time.sleep(self.slow)
            else:
                fail(self.how)
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Breaks(L.Callback):
    def __init__(self, how: str, at: int) -> None:
        self.how, self.at = how, at

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            fail(self.how)


def lightning(
    ctx: Context,
    *,
    how: str = "",
    rank: int = -1,
    at: int = 2,
    place: str = "step",
    slow: float = 0.0,
    workers: int = 0,
) -> dict[str, Any]:
    """Train eight steps with Lightning; `rank` fails in `place` at step `at`, or is slow there for `slow` seconds."""
    mine = ctx.rank == rank
    me = ctx.rank if place == "loader" else -2
    loader = DataLoader(Rows(how, rank, me, at, 8), batch_size=8, num_workers=workers, persistent_workers=workers > 0)
    callbacks = [Breaks(how, at)] if mine and place == "callback" else []
    trainer = L.Trainer(
        strategy="holmes", accelerator="cpu", devices=ctx.world, max_epochs=1, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Script(how, at, mine, place, slow)
    trainer.fit(model, loader)
    return {"loss": float(trainer.callback_metrics["loss"])}


def accelerate(ctx: Context, *, how: str = "", rank: int = -1, at: int = 2, place: str = "step") -> dict[str, Any]:
    """The same as a loop of Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(5)
    mine = ctx.rank == rank
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = Rows(how, rank, ctx.rank if place == "loader" else -2, at, 8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=8))
    for step, (x, y) in enumerate(loader):
        if mine and place == "step" and step == at:
            fail(how)
        output = model(x=x, labels=y)
        accelerator.backward(output["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": float(output["loss"])}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()

    def forward(self, x: Any, labels: Any) -> Any:
        y = self.model(x)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


class Sleeps(nn.Module):
    """Passes on what comes; takes longer from a step on."""

    def __init__(self, seconds: float, slow: float, after: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seconds, self.slow, self.after, self.calls = seconds, slow, after, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        time.sleep(self.slow if self.calls > self.after else self.seconds)
        return self.linear(x)


def slows_down(ctx: Context, *, rank: int, after: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps of two micro-batches; from step `after` on, `rank` computes five times as long."""
    torch.manual_seed(5)
    model = Script("", -1, False, "", 0.0)
    slow = 0.02 if ctx.rank == rank else 0.004
    model.model.layers = nn.ModuleList(Sleeps(0.004, slow, 2 * after) for _ in range(4))
    rng = torch.Generator().manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4, generator=rng), torch.randn(64, 1, generator=rng))
    trainer = L.Trainer(
        strategy="holmes", accelerator="cpu", devices=ctx.world, max_steps=steps, max_epochs=-1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(data, batch_size=8))
    return {"loss": float(trainer.callback_metrics["loss"])}
