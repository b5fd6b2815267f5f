# SPDX-License-Identifier: Apache-2.0
"""Scripts of both hosts that train, save and load; each as people write it."""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tests.accelerate.scenarios import started_for_holmes
from tests.lightning.farm import Context
from tests.lightning.scenarios import Rows, make_module


def loader() -> DataLoader:
    return DataLoader(Rows(24, 1), batch_size=4)


def by_lightning(
    context: Context,
    *,
    model: str = "gpt2",
    steps: int = 2,
    resume: str | None = None,
    save: str | None = None,
    strategy: str = "holmes",
    precision: str = "32-true",
    during: str | None = None,
    fits: int = 1,
    **trainer: Any,
) -> dict[str, Any]:
    """Train; save `during` the run at each step, and `save` after it."""
    torch.manual_seed(3)
    module = make_module(L, {"model": model, "layers": 4})
    losses: list[float] = []

    class Note(L.Callback):
        def on_train_batch_end(self, owner: Any, module: Any, outputs: Any, *_: Any) -> None:
            losses.append(float(outputs["loss"]))
            if during:
                owner.save_checkpoint(during)
                print(f"saved {owner.global_step}\n", end="", flush=True)

    made = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=context.world if strategy != "auto" else 1,
        max_steps=steps,
        max_epochs=-1,
        precision=precision,
        callbacks=[Note(), *trainer.pop("callbacks", [])],
        default_root_dir=str(context.out),
        **{
            "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
            "logger": False, **trainer,
        },
    )  # fmt: skip
    done = []
    for _ in range(fits):
        made.fit(module, loader(), ckpt_path=resume)
        done.append((losses[sum(len(one) for one, _ in done) :], made.global_step))
        made.fit_loop.epoch_loop.max_steps += 1  # for the next fit
    if save:
        made.save_checkpoint(save)
    return {"losses": losses, "step": made.global_step, "fits": done}


def from_hub_folder(context: Context, *, folder: str, save: str) -> None:
    """Load a Hugging Face directory, take a step that changes nothing, save."""

    class Module(L.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "model"):
                self.model = AutoModelForCausalLM.from_pretrained(folder)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        strategy="holmes", accelerator="cpu", devices=context.world, max_steps=1, logger=False, **quiet,
        default_root_dir=str(context.out),
    )  # fmt: skip
    trainer.fit(Module(), loader())
    trainer.save_checkpoint(save)


def kept(context: Context, *, folder: str) -> list[list[str]]:
    """ModelCheckpoint that keeps few: names after each run, the second from `ckpt_path="last"`."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    found = []
    for steps in (4, 6):
        callback = ModelCheckpoint(
            folder, filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max", save_last=True
        )
        resume = "last" if steps == 6 else None
        result = by_lightning(
            context, steps=steps, resume=resume, callbacks=[callback], enable_checkpointing=True, model="llama"
        )
        found.append([*sorted(os.listdir(folder)), f"step {result['step']}", str(len(result["losses"]))])
    return found


def unchanged(
    context: Context, *, folder: str | None, steps: int, resume: str | None = None, logger: bool = False, fits: int = 1
) -> list[tuple[int, int]]:
    """A script that saves each step and does not say where to go on: steps done and reached by each fit."""
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    more = {"logger": CSVLogger(context.out)} if logger else {}
    result = by_lightning(
        context, steps=steps, resume=resume, callbacks=[callback], enable_checkpointing=True, fits=fits, **more
    )
    return [(len(losses), step) for losses, step in result["fits"]]


def by_accelerate(
    context: Context, *, model: str = "gpt2", steps: int = 2, resume: str | None = None, save: str | None = None,
    plain: bool = False, automatic: str | None = None, end: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Train and save with Accelerate, with Holmes or (`plain`) without."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if not plain:
        started_for_holmes()
    settings = ProjectConfiguration(automatic, automatic_checkpoint_naming=True, total_limit=2) if automatic else None
    accelerator = Accelerator(project_config=settings)
    made = make_module(L, {"model": model, "layers": 4}).model
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    made, optimizer, scheduler, data = accelerator.prepare(made, optimizer, scheduler, loader())
    if resume is not None:
        accelerator.load_state(resume or None)
    losses = []
    for step, batch in enumerate(data):
        if step == steps:
            break
        loss = made(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if automatic:
            accelerator.save_state()
    if save:
        accelerator.save_state(save)
    if end:
        accelerator.end_training()
    elif not plain:
        accelerator.finish_saving()
    return {"losses": losses, "rate": scheduler.get_last_lr()}


def by_fabric(
    context: Context, *, steps: int = 2, resume: str | None = None, save: str | None = None
) -> dict[str, Any]:
    """Train with a Fabric loop, load before and save after it."""
    fabric, made, optimizer = _fabric(context.world)
    kept = {"model": made, "optimizer": optimizer, "step": 0}
    if resume is not None:
        fabric.load(resume, kept)
    losses = []
    for _, batch in zip(range(steps), fabric.setup_dataloaders(loader()), strict=False):
        loss = made(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if save:
        fabric.save(save, {**kept, "step": kept["step"] + len(losses)})
    return {"losses": losses, "step": kept["step"]}


@functools.cache
def _fabric(world: int) -> tuple[Any, Any, Any]:
    """One per process: Fabric makes the job's process groups, and one pipeline trains one model."""
    torch.manual_seed(3)
    fabric = L.Fabric(strategy="holmes", devices=world, accelerator="cpu")
    fabric.launch()
    model = make_module(L, {"model": "gpt2", "layers": 4}).model
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return fabric, model, optimizer


def train(context: Context, host: str, save: Path) -> None:
    """Train one step and save."""
    if host == "lightning":
        by_lightning(context, steps=1, save=str(save))
    elif host == "fabric":
        by_fabric(context, steps=1, save=str(save))
    else:
        by_accelerate(context, steps=1, save=str(save), end=False)  # it closes the job's group


def killed(context: Context, *, folder: str, host: str, rank: int, event: str, word: str) -> None:
    """Save twice under one name; `rank` is killed in the second save, where Python reports `event` about `word`."""
    path = Path(folder) / "a.ckpt"
    train(context, host, path)

    def end(what: str, arguments: tuple[Any, ...]) -> None:
        if what == event and any(word in str(argument) for argument in arguments):
            os.kill(os.getpid(), signal.SIGKILL)

    if context.rank == 0:
        (Path(folder) / "digest").write_text(digest(path))
    if context.rank == rank:
        sys.addaudithook(end)
    train(context, host, path)


def full(context: Context, *, folder: str, host: str, word: str | None, during: bool = False) -> dict[str, Any]:
    """Save, let the disk fill up (`word`: when a file of that name is opened), save again; what each rank was told."""
    train(context, host, Path(folder) / "a.ckpt")
    deadline = time.monotonic() + 30
    while not (Path(folder) / "a.ckpt").exists() and time.monotonic() < deadline:  # in the background
        time.sleep(0.05)

    def fill(what: str = "open", arguments: tuple[Any, ...] = (word,)) -> None:
        ballast = Path(folder) / "ballast"
        if what == "open" and str(word) in str(arguments[0]) and not ballast.exists():
            stat = os.statvfs(folder)
            ballast.write_bytes(bytes(max(0, stat.f_bavail * stat.f_frsize - 12_000)))

    if word is not None:
        sys.addaudithook(fill)
    elif context.rank == 0:
        word = "open"
        fill("open", ("open",))
    start, told = time.monotonic(), ""
    try:
        if during:
            by_lightning(context, steps=3, during=str(Path(folder) / "b.ckpt"))
        else:
            train(context, host, Path(folder) / "b.ckpt")
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return {"told": told, "seconds": time.monotonic() - start}


def digest(folder: Path) -> str:
    """Return a hash of all bytes under a path."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in files)).hexdigest()
