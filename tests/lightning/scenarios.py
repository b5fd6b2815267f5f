# SPDX-License-Identifier: Apache-2.0
"""Lightning scripts as people write them, run on every rank by `farm.Farm`; each returns what the test compares."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset
from torchmetrics.text import Perplexity
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.lightning.farm import Context

VOCAB, LENGTH = 64, 9


class Rows(Dataset):
    """Right-padded rows of random tokens; labels ignore the padding. `augment` changes a token at random."""

    def __init__(self, n: int, seed: int, augment: bool = False) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.augment, self.rows = augment, []
        for _ in range(n):
            ids = torch.randint(2, VOCAB, (LENGTH,), generator=rng)
            mask = (torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (), generator=rng)).long()
            self.rows.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict:
        row = dict(self.rows[i])
        if self.augment:
            row["input_ids"] = row["input_ids"].clone()
            row["input_ids"][0] = int(torch.randint(2, VOCAB, ()))
            row["input_ids"][1] = random.randrange(2, VOCAB)
            row["input_ids"][2] = int(np.random.randint(2, VOCAB))
        return row


class Stream(IterableDataset):
    """The same rows as a stream that knows no length; replicas take every dp-th row."""

    def __init__(self, rows: Rows, replicas: int, replica: int) -> None:
        self.rows, self.replicas, self.replica = rows, replicas, replica

    def __iter__(self) -> Any:
        return iter([self.rows[i] for i in range(self.replica, len(self.rows), self.replicas)])


class ReplicaBatches:
    """A batch sampler of the user's own that asks the Trainer for its replica."""

    def __init__(self, n: int, batch_size: int, dp: int) -> None:
        self.n, self.batch_size, self.dp, self.trainer = n, batch_size, dp, None

    def __iter__(self) -> Any:
        replica = self.trainer.distributed_sampler_kwargs["rank"]
        for start in range(0, self.n, self.batch_size):
            yield list(range(start, start + self.batch_size))[replica :: self.dp]

    def __len__(self) -> int:
        return self.n // self.batch_size


def make_module(host: Any, o: dict[str, Any]) -> Any:
    """Return the LightningModule, of the Lightning that is asked for."""

    class Model(host.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            if o.get("model", "llama") == "gpt2":
                config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=o["layers"], n_head=4)
                config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = o.get("dropout", 0.0)
                config.bos_token_id = config.eos_token_id = None
                self.model = GPT2LMHeadModel(config)
            else:
                config = LlamaConfig(
                    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=o["layers"]
                )
                config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
                config.attention_dropout = o.get("dropout", 0.0)
                self.model = LlamaForCausalLM(config)
            if o.get("checkpointing"):
                self.model.gradient_checkpointing_enable()
            if o.get("freeze") is not None:
                for name, p in self.named_parameters():
                    if any(word in name for word in o["freeze"]):
                        p.requires_grad_(False)
            if o.get("lora"):
                peft = importlib.import_module("peft")
                names = ["c_attn"] if o.get("model") == "gpt2" else ["q_proj", "v_proj"]
                config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=names, lora_dropout=0.0)
                self.model = peft.get_peft_model(self.model, config)
            self.perplexity, self.by_hand = Perplexity(ignore_index=-100), Perplexity(ignore_index=-100)
            self.outputs: list = []
            self.hand: list[float] = []
            self.steps = 0

        def training_step(self, batch: dict, batch_idx: int) -> Any:
            loss = self.model(**batch).loss
            self.log("train_loss", loss, prog_bar=True, sync_dist=True)
            self.log("train_epoch_loss", loss, on_step=False, on_epoch=True)
            if o.get("fail") and self.fails_now(batch_idx):
                return self.fail(loss)
            return loss

        def fails_now(self, batch_idx: int) -> bool:
            return batch_idx == 1 and int(os.environ.get("RANK", "0")) in o["fail"]["ranks"]

        def fail(self, loss: Any) -> Any:
            if o["fail"]["how"] == "raise":
                raise ValueError("the user's own mistake")
            if o["fail"]["how"] == "none":
                return None
            self.log(f"only_on_{os.environ['RANK']}", 1.0)
            return loss

        def validation_step(self, batch: dict, batch_idx: int) -> None:
            out = self.model(**batch)
            self.perplexity.update(out.logits[:, :-1], batch["labels"][:, 1:])
            self.by_hand.update(out.logits[:, :-1], batch["labels"][:, 1:])
            self.log("val_loss", out.loss, prog_bar=True, sync_dist=True)
            self.log("val_ppl", self.perplexity)
            self.outputs.append(out.loss.detach())

        def on_validation_epoch_end(self) -> None:
            self.hand.append(float(self.by_hand.compute()))
            self.by_hand.reset()
            self.log("mean_seen", torch.stack(self.outputs).mean(), sync_dist=True)
            self.outputs.clear()

        def test_step(self, batch: dict, batch_idx: int) -> None:
            self.log("test_loss", self.model(**batch).loss, sync_dist=True)

        def predict_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
            return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.argmax(-1)

        def on_after_backward(self) -> None:
            self.steps += 1
            if self.steps == o.get("inf_at"):
                for name, p in self.named_parameters():
                    if "layers.0." in name and p.grad is not None:
                        p.grad.fill_(math.inf)

        def configure_optimizers(self) -> Any:
            decay = [p for p in self.parameters() if p.ndim > 1]
            rest = [p for p in self.parameters() if p.ndim <= 1]
            groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
            if o.get("optimizer") == "sgd":
                optimizer: Any = torch.optim.SGD(groups, lr=o.get("lr", 0.05), momentum=0.9)
            else:
                optimizer = torch.optim.AdamW(groups, lr=o.get("lr", 3e-3), eps=1e-4)
            schedulers = torch.optim.lr_scheduler
            if o.get("schedulers") == "epoch":
                by_epoch = schedulers.StepLR(optimizer, 1, gamma=0.7)
                plateau = schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
                return [optimizer], [
                    {"scheduler": by_epoch, "interval": "epoch"},
                    {"scheduler": plateau, "monitor": "val_loss", "interval": "epoch"},
                ]
            by_step = schedulers.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_step, "interval": "step"}}

    return Model()


def make_recorder(host: Any, o: dict[str, Any]) -> Any:
    """Return the callback that keeps what the tests compare."""

    class Recorder(host.Callback):
        def __init__(self) -> None:
            self.record: dict[str, Any] = {
                k: [] for k in ("losses", "norms", "rates", "events", "batches", "validation", "scales")
            }
            self.record["epoch_ends"] = []

        def on_before_zero_grad(self, *_: Any) -> None:
            self.record["events"].append("zero_grad")

        def on_before_backward(self, *_: Any) -> None:
            self.record["events"].append("before_backward")

        def on_after_backward(self, *_: Any) -> None:
            self.record["events"].append("after_backward")

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.record["events"].append("optimizer_step")
            self.record["rates"].append(optimizer.param_groups[0]["lr"])
            whole = getattr(trainer.strategy, "gradient_norm", None)
            if whole is not None:
                self.record["norms"].append(float(whole()))
            else:
                squares = [p.grad.float().square().sum() for p in module.parameters() if p.grad is not None]
                self.record["norms"].append(math.sqrt(float(torch.stack(squares).sum())))

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.record["events"].append("batch_start")
            self.record["batches"].append(batch["input_ids"].clone())
            if o.get("kill") and batch_idx == 1 and trainer.global_rank == o["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.record["losses"].append(float(outputs["loss"]))
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if scaler is not None:
                self.record["scales"].append(scaler.get_scale())
            if trainer.global_step in o.get("save_at", ()) and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
                trainer.save_checkpoint(Path(o["folder"]) / f"at{trainer.global_step}.ckpt")

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict) -> None:
            if o.get("unsafe"):  # what scripts keep: only loads with weights_only=False
                checkpoint["own"] = argparse.Namespace(x=1)

        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                self.record["events"].append("validation_end")
                self.record["validation"].append({k: float(v) for k, v in trainer.callback_metrics.items()})

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            self.record["events"].append("epoch_end")
            if o.get("save_epoch_ends"):
                trainer.save_checkpoint(Path(o["folder"]) / f"epoch{trainer.current_epoch}.ckpt")

    return Recorder()


DEFAULTS: dict[str, Any] = {
    "strategy": "holmes", "layers": 4, "rows": 32, "batch_size": 8, "epochs": 1, "max_steps": -1, "dp": 1,
    "shuffle": False, "workers": 0, "host": "lightning.pytorch", "precision": "32-true", "trainer": {},
}  # fmt: skip


def fit(ctx: Context, **options: Any) -> dict[str, Any]:
    """Train, and validate, test, predict and save as the options say."""
    o = DEFAULTS | {"folder": str(ctx.out)} | options
    host = importlib.import_module(o["host"])
    host.seed_everything(1, workers=True, verbose=False)
    train, val = Rows(o["rows"], 1, o.get("augment", False)), Rows(16, 2)
    # Lightning orders the rows of replicas by a DistributedSampler of its own, seeded with the global seed.
    like = o.get("like_replicas") and DistributedSampler(train, num_replicas=1, rank=0, seed=1, shuffle=True)
    made: dict[str, Any] = {"batch_size": o["batch_size"] // o["dp"], "num_workers": o["workers"]}
    if o["workers"]:
        made["persistent_workers"] = bool(o.get("persistent"))
    if o.get("stream"):
        loader = DataLoader(Stream(train, o["dp"], o.get("replica", {}).get(str(ctx.rank), 0)), **made)
    elif o.get("replica_rows"):  # rows of the batch split over replicas in order: the batches of one process
        loader = DataLoader(train, batch_sampler=ReplicaBatches(len(train), o["batch_size"], o["dp"]))
    else:
        loader = DataLoader(train, shuffle=o["shuffle"] and not like, sampler=like or None, **made)
    val_loader = DataLoader(val, batch_size=8 // o["dp"])
    recorder = make_recorder(host, o)
    callbacks = [recorder]
    callbacks_of = importlib.import_module(f"{o['host']}.callbacks")
    for name, arguments in o.get("callbacks", {}).items():
        callbacks.append(getattr(callbacks_of, name)(**arguments))
    plugins = []
    if o["precision"] == "16-mixed":
        precision = importlib.import_module(f"{o['host']}.plugins").MixedPrecision
        plugins = [precision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=256.0))]
    logger: Any = False
    if o.get("csv"):
        loggers = importlib.import_module(f"{o['host']}.loggers")
        logger = loggers.CSVLogger(o["folder"], name="csv", version="0", flush_logs_every_n_steps=1)
    trainer = host.Trainer(
        strategy=o["strategy"],
        accelerator="cpu",
        devices=1 if o["strategy"] == "auto" else ctx.world,
        max_epochs=o["epochs"] if o["max_steps"] < 0 else -1,
        max_steps=o["max_steps"],
        callbacks=callbacks,
        logger=logger,
        default_root_dir=o["folder"],
        **({"plugins": plugins} if plugins else {"precision": o["precision"]}),
        **{
            "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
            "num_sanity_val_steps": 0, "log_every_n_steps": 1,
            **o["trainer"],
        },
    )  # fmt: skip
    if o.get("replica_rows"):
        loader.batch_sampler.trainer = trainer
    model = make_module(host, o)
    found: dict[str, Any] = {"rank": ctx.rank, "folder": o["folder"]}
    if o.get("clip_by_stage"):
        from holmes_core.runtime.engine import Engine

        def own(engine: Any) -> torch.Tensor:
            return torch.stack([p.grad.norm() for p in engine.parameters().values() if p.grad is not None]).norm()

        Engine.gradient_norm = own
    for verb in o.get("before", ()):
        found[f"before_{verb}"] = _evaluate(trainer, verb, model, val_loader)
    start = {} if "weights_only" not in o else {"weights_only": o["weights_only"]}
    trainer.fit(model, loader, None if o.get("no_val") else val_loader, ckpt_path=o.get("resume"), **start)
    found |= recorder.record
    found |= {"global_step": trainer.global_step, "epoch": trainer.current_epoch, "hand": model.hand}
    found["logged"] = {k: float(v) for k, v in trainer.logged_metrics.items()}
    found["callback_metrics"] = {k: float(v) for k, v in trainer.callback_metrics.items()}
    if trainer.checkpoint_callback is not None:
        checkpoints = trainer.checkpoint_callback
        found["best"] = Path(checkpoints.best_model_path).name
        found["kept"] = sorted(Path(p).name for p in checkpoints.best_k_models)
    found["sampler"] = trainer.distributed_sampler_kwargs
    for verb in o.get("after", ()):
        found[f"after_{verb}"] = _evaluate(trainer, verb, model, val_loader)
    if o.get("save"):
        trainer.save_checkpoint(o["save"])
    found["weights"] = {k: v.detach().float().clone() for k, v in model.state_dict().items() if not v.is_meta}
    found["trainable"] = [n for n, p in model.named_parameters() if p.requires_grad]
    if o.get("load_into_new"):
        new = make_module(host, o)
        new.load_state_dict(torch.load(o["save"], weights_only=True)["state_dict"])
        found["loaded_new"] = {k: v.float() for k, v in new.state_dict().items()}
    return found


def load(ctx: Context, **options: Any) -> dict[str, Any]:
    """Load a checkpoint as scripts do after training."""
    o = DEFAULTS | options
    kind = type(make_module(L, o))
    model = kind.load_from_checkpoint(o["checkpoint"], weights_only=True)
    return {"weights": {k: v.float() for k, v in model.state_dict().items()}}


def _evaluate(trainer: Any, verb: str, model: Any, loader: Any) -> Any:
    result = getattr(trainer, verb)(model, loader)
    return [dict(r) for r in result] if verb in ("validate", "test") else result


class Blocks(L.LightningModule):
    """A small model without transformers, whose steps can go wrong in every way."""

    def __init__(self, how: str = "", ranks: tuple[int, ...] = (), plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.ranks = how, ranks
        self.first = torch.nn.Linear(4, 8)
        layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)]
        self.blocks = torch.nn.Sequential(*layers) if plain else torch.nn.ModuleList(layers)
        if plain:
            self.blocks = torch.nn.Bilinear(8, 8, 8)
        self.last = torch.nn.Linear(8, 1)
        if how == "manual":
            self.automatic_optimization = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if isinstance(self.blocks, torch.nn.Bilinear):
            x = self.blocks(x, x)
        else:
            for block in self.blocks:
                x = block(x)
        return self.last(x)

    def _here(self, batch_idx: int) -> bool:
        return batch_idx == 1 and torch.distributed.get_rank() in self.ranks

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        if self.how == "raise" and self._here(batch_idx):
            print(f"left at {time.time():.3f}", flush=True)  # what the test measures from
            raise ValueError("the user's own mistake")
        if self.how == "kill" and self._here(batch_idx):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "none_before" and batch_idx == 1:
            return None
        out = self(x)
        if self.how == "none" and batch_idx == 1:
            return None
        if self.how == "twice":
            out = out + self(x + 1)
        loss = F.mse_loss(out, y)
        if self.how == "keys" and self._here(batch_idx):
            self.log("extra", loss)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self(batch[0])
        if self.how == "twice_in_validation":
            out = self(batch[0] + 1)
        self.log("val_loss", F.mse_loss(out, batch[1]))

    def configure_optimizers(self) -> Any:
        if self.how == "several":
            return [torch.optim.SGD(self.first.parameters(), 0.1), torch.optim.SGD(self.last.parameters(), 0.1)]
        if self.how == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        return torch.optim.SGD(self.parameters(), 0.1)


class OwnBackward(Blocks):
    """Overrides what the pipeline never calls."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class Generates(L.LightningModule):
    """Generates text in its validation step."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 8
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: dict, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        self.model.generate(batch["input_ids"][:, :3], max_new_tokens=2, do_sample=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def bad(
    ctx: Context, *, how: str, ranks: tuple[int, ...] = (), callback: str = "", devices: int = 0, nodes: int = 1
) -> dict[str, Any]:
    """Train a small model, which goes wrong as `how` says ("": it does not)."""
    L.seed_everything(1, verbose=False)
    if how == "generate":
        model: Any = Generates()
        loader = DataLoader(Rows(8, 1), batch_size=4)
    else:
        model = OwnBackward() if how == "backward" else Blocks(how, tuple(ranks), plain=how == "no_blocks")
        data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
        loader = DataLoader(data, batch_size=8)
    callbacks: list[Any] = []
    if callback:
        arguments = {"swa_lrs": 0.1} if callback == "StochasticWeightAveraging" else {}
        callbacks.append(getattr(L.callbacks, callback)(**arguments))
    trainer = L.Trainer(
        strategy="holmes", accelerator="cpu", devices=devices or ctx.world, num_nodes=nodes,
        max_epochs=1, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    try:
        trainer.fit(model, loader, loader)
    finally:
        print(f"process group: {torch.distributed.is_initialized()}\n", end="", flush=True)
        print(f"left at {time.time():.3f}", flush=True)
    print(f"done on {trainer.global_rank} of {trainer.world_size}\n", end="", flush=True)
    return {"loss": float(trainer.callback_metrics["train_loss"]), "rank": trainer.global_rank}
