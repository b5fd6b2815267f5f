# SPDX-License-Identifier: Apache-2.0
"""Small pieces of scripts that use an Accelerator, run on every rank; each returns what the test looks at."""

from __future__ import annotations

import copy
import gc
import random
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

from tests.lightning.farm import ROOT, Context

sys.path.insert(0, str(ROOT / "tests" / "scripts" / "accelerate"))
from loop import Rows, make_model


def prepare(accelerator: Any = None, *, lr: float = 0.1, rows: int = 8, batch: int = 4, **options: Any) -> Any:
    accelerator = accelerator or Accelerator(**options)
    set_seed(7)
    model = make_model("gpt2", 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(Rows(rows, 1, True), batch_size=batch)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def what_is_known_of_a_step(context: Context) -> str:
    accelerator, *_ = prepare(dataloader_config=DataLoaderConfiguration(split_batches=True))
    return " ".join(accelerator._mode.engine.plan.reasons)


def error_of(function: Any) -> str:
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def losses(context: Context) -> dict[str, Any]:
    """What can be done with losses before backward; the norm after each."""
    accelerator, model, optimizer, loader = prepare()
    first, second = list(loader)
    norms: dict[str, float] = {}

    def measure(name: str) -> None:
        norms[name] = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
        optimizer.zero_grad()

    accelerator.backward(model(**first).loss)
    measure("plain")
    (model(**first).loss * 0.25).backward()
    measure("quarter")
    (model(**first).loss - 0.5 * model(**second).loss).backward()
    measure("difference")
    loss = model(**first).loss
    (loss * loss).backward()
    measure("square")
    model(**second)  # never differentiated: its gradients are dropped
    accelerator.backward(model(**first).loss)
    measure("dropped")
    with accelerator.no_sync(model), getattr(model, "no_sync", nullcontext)():  # as of DistributedDataParallel
        accelerator.backward(model(**first).loss)
    accelerator.backward(model(**second).loss)
    measure("two")
    items = int((first["labels"][:, 1:] != -100).sum() + (second["labels"][:, 1:] != -100).sum())
    for batch in (first, second):
        accelerator.backward(model(**batch, num_items_in_batch=items).loss)
    measure("items")
    one = {k: v for k, v in first.items() if k != "labels"}
    a, b = model(**one).logits, model(**{k: v for k, v in second.items() if k != "labels"}).logits
    (a.square().mean() + 2 * b.square().mean()).backward()  # two open forwards
    measure("open")
    ids, mask, labels = first["input_ids"], first["attention_mask"], first["labels"]
    output = model(ids, attention_mask=mask, labels=labels, return_dict=False)
    output[0].backward()
    measure("tuple")
    return norms


def ahead(context: Context) -> dict[str, Any]:
    """Each habit for a few steps: gradients as they are when the optimizer has stepped, and the buckets that left early
    by the end of each backward."""
    found: dict[str, Any] = {}
    habits = ["plain", "accumulate", "scaled", "zero_first", "zeroed_in_place", "dropped", "changed", "by_hand"]
    for habit in [*habits, "own_loss", "two_forwards"]:
        accelerator = Accelerator(gradient_accumulation_steps=2 if habit == "accumulate" else 1)
        accelerator.gradient_accumulation_steps = 2 if habit == "accumulate" else 1  # settings outlive an Accelerator
        accelerator, model, optimizer, loader = prepare(accelerator, rows=48)
        parallel = model._holmes_call_mode.engine.gradients.data_parallel
        early: list[int] = []
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                if habit in ("own_loss", "two_forwards"):
                    labels = batch.pop("labels")
                    loss = torch.nn.functional.cross_entropy(model(**batch).logits.flatten(0, 1), labels.flatten())
                    if habit == "two_forwards":
                        loss = loss + model(**batch).logits.square().mean()
                    accelerator.backward(loss)
                    early.append(parallel._launched)
                    optimizer.step()
                    optimizer.zero_grad()
                    continue
                loss = model(**batch).loss
                if habit == "scaled":
                    loss = loss * (1.0 + index + accelerator.process_index)
                if habit == "zero_first":
                    optimizer.zero_grad()
                if habit == "zeroed_in_place":
                    optimizer.zero_grad(set_to_none=False)
                if habit == "dropped" and index == 2:
                    early.append(parallel._launched)
                    continue
                accelerator.backward(loss)
                early.append(parallel._launched)
                if habit == "changed" and index > 1:
                    for param in model.parameters():
                        if param.grad is not None:
                            param.grad *= 0.5
                if habit == "by_hand" and index % 2 == 0:
                    continue
                optimizer.step()
                assert not parallel.left, "gradients of the step before are kept"
                if not habit.startswith("zero"):
                    optimizer.zero_grad()
        found[habit] = {"early": early, "weights": accelerator.get_state_dict(model)}
        accelerator.free_memory()
    return found if context.rank == 0 else {name: run["early"] for name, run in found.items()}


def precisions(context: Context) -> dict[str, str]:
    """In which type a script gets what a model computed in 16 bit."""
    accelerator, model, _, loader = prepare(mixed_precision="bf16")
    batch = next(iter(loader))
    labels = batch.pop("labels")
    found = {"training": str(model(**batch).logits.dtype)}
    loss = model(**batch, labels=labels).loss
    accelerator.backward(loss)
    found["loss"] = str(loss.dtype)
    model.eval()
    found["eval, differentiable"] = str(model(**batch).logits.dtype)
    with torch.no_grad():
        found["eval"] = str(model(**batch).logits.dtype)
    return found


def parts(accelerator: Any) -> dict[str, float]:
    """Calls of a part of a model, outputs that nobody can look into: differences of two steps to those made by hand."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
            self.rate = 0.0

        def forward(self, x: torch.Tensor) -> Any:
            for block in self.blocks:
                x = nn.functional.dropout(block(x).tanh(), self.rate)
            return lambda: x  # neither a tensor nor a container

    def called(net: Any, x: Any) -> Any:
        return net(x)().square().mean()

    def inner(net: Any, x: Any) -> Any:
        return net.blocks[1](net.blocks[0](x)).square().mean()

    def replayed(net: Any, x: Any) -> Any:
        """The whole model is recomputed, with random numbers in it."""
        net.rate = 0.5
        torch.manual_seed(3)
        return checkpoint(lambda y: net(y)(), x, use_reentrant=False).square().mean()

    found: dict[str, float] = {}
    for function in (called, inner, replayed):
        model = Net()
        alone = Net()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        alone.load_state_dict(model.state_dict())
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        size = accelerator.num_processes
        rows = torch.randn(2, size, 6, 4, generator=torch.Generator().manual_seed(5))
        for step in range(2):
            accelerator.backward(function(model, rows[step, accelerator.process_index]))
            engine = model._holmes_call_mode.engine
            assert engine.gradients.data_parallel._launched, "gradients have left"
            assert engine.batches_seen == (0 if function is inner else step + 1), "what is recomputed is no new batch"
            optimizer.step()
            optimizer.zero_grad()
            sum(function(alone, part) / size for part in rows[step]).backward()
            plain.step()
            plain.zero_grad()
        whole = model.state_dict()
        found[function.__name__] = max(float((whole[k] - v).abs().max()) for k, v in alone.state_dict().items())
        accelerator.free_memory()
    return found


def habits_of_one_rank(context: Context, *, habits: bool = True) -> dict[str, Any]:
    """What one replica does and the other does not; what is refused; a model whose parts go on in another."""
    accelerator, model, optimizer, loader = prepare(rows=16)
    parallel = model._holmes_call_mode.engine.gradients.data_parallel
    first, second = list(loader)
    found: dict[str, Any] = {"early": []}

    def look() -> None:
        logits = model(**first).logits
        torch.autograd.grad(logits.square().mean(), list(model.parameters())[:2])
        model(**second)

    def step(calls: int = 1, looks: bool = False) -> None:
        for index in range(calls):
            accelerator.backward(model(**(second if index else first)).loss / calls)
        found["early"].append(parallel._launched > 0)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        if looks:
            look()
        optimizer.step()
        optimizer.zero_grad()

    step()
    if habits and context.rank == 0:
        look()
    step(looks=habits and context.rank == 0)
    step(calls=1 + context.rank)  # batches of one replica are cut in two
    step()
    found["weights"] = model.state_dict()
    found["norm"] = float(sum(v.double().square().sum() for v in found["weights"].values()))
    model.transformer.wte.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    found["inside"] = error_of(lambda: accelerator.backward(model(**first).loss))
    return found


def optimizers_that_come_and_go(context: Context) -> int:
    """How many of twenty optimizers, each made where the one before was, are followed by the model."""
    _, model, *_ = prepare()
    followed = 0
    for _ in range(20):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model._holmes_call_mode.adopt(optimizer)
        followed += len(optimizer._optimizer_step_pre_hooks)
        del optimizer
        gc.collect()
    return followed


def parts_by_themselves(context: Context) -> dict[str, float]:
    return parts(Accelerator())


def gradients_of_ones_own(context: Context) -> dict[str, Any]:
    """Hooks that change gradients as they come, gradients that the script puts there, a closure."""
    accelerator, model, optimizer, loader = prepare()
    batch = next(iter(loader))

    def halve(param: Any) -> None:
        param.grad.mul_(0.5)

    hooks = [param.register_post_accumulate_grad_hook(halve) for param in model.parameters()]
    for _ in range(2):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    params = [p for p in model.parameters() if p.requires_grad]
    for param, grad in zip(params, torch.autograd.grad(model(**batch).loss, params), strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.step()  # once more with the same gradients
    optimizer.zero_grad()
    found = {"closure": error_of(lambda: optimizer.optimizer.step(lambda: model(**batch).loss))}
    return {**found, "weights": accelerator.get_state_dict(model)}


def parts_that_go_on(context: Context) -> dict[str, Any]:
    """Unfrozen too late; and a model that holds parts of one that was prepared before."""
    accelerator, model, optimizer, loader = prepare()
    batch = next(iter(loader))
    late = nn.Parameter(torch.zeros(()))
    model.register_parameter("late", late)
    accelerator.backward(model(**batch).loss + late)
    found: dict[str, Any] = {"late": error_of(optimizer.step)}
    del model.late
    model.zero_grad()
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    model.zero_grad()
    accelerator.free_memory()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([block.mlp for block in model.transformer.h])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    around = Around()
    alone = copy.deepcopy(around)
    around, optimizer = accelerator.prepare(around, torch.optim.SGD(around.parameters(), lr=0.5))
    found["hooks"] = [len(p._post_accumulate_grad_hooks or {}) for p in around.parameters()]
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    rows = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        accelerator.backward(around(rows[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        (sum(alone(part).square().mean() for part in rows) / 2).backward()
        plain.step()
        plain.zero_grad()
    whole = around.state_dict()
    found["difference"] = max(float((whole[k] - v).abs().max()) for k, v in alone.state_dict().items())
    return found


def whole_calls(context: Context) -> dict[str, Any]:
    """What a script may do with calls of a model in one piece, and the same by hand: both replicas' rows, one model."""
    from holmes_core.runtime import data_parallel

    data_parallel.BUCKET_BYTES = 1  # each gradient leaves by itself, as early as it can
    accelerator, model, optimizer, loader = prepare(rows=16)
    alone = make_model("gpt2", 2)
    alone.load_state_dict(model.state_dict())
    alone.train(model.training)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    batches = list(DataLoader(Rows(16, 1, True), batch_size=4))  # the first and the third are replica 0's
    size = accelerator.num_processes
    own = list(loader)
    differences: dict[str, float] = {}

    def chain(net: Any, pair: Any) -> Any:
        """What one call returns goes into the next."""
        logits = net(**{k: v for k, v in pair[0].items() if k != "labels"}).logits
        embedded = logits.softmax(-1) @ net.transformer.wte.weight
        return net(inputs_embeds=embedded, labels=pair[1]["labels"]).loss

    def logits(net: Any, pair: Any) -> Any:
        output = net(**pair[0])
        return output.loss + 0.1 * output.logits.square().mean()

    def shared(net: Any, pair: Any) -> Any:
        """A parameter used twice, and recomputed each time in a backward of its own."""
        x = net.transformer.wte.weight[:8]
        for _ in range(2):
            x = checkpoint(net.transformer.h[0].mlp, x, use_reentrant=True)
        return net(**pair[0]).loss + x.square().mean()

    def compare(name: str) -> None:
        whole = accelerator.get_state_dict(model)
        if context.rank == 0:
            differences[name] = max(float((whole[k] - v).abs().max()) for k, v in alone.state_dict().items())

    def norm_of_sum(name: str) -> None:
        """Clipped after each of two backwards, as scripts do that forget `if accelerator.sync_gradients`."""
        for index in range(2):
            accelerator.backward(model(**own[index]).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1e9)
            for replica in range(size):
                (alone(**batches[index * size + replica]).loss / size).backward()
        optimizer.step()
        plain.step()
        compare(name)

    for function in (logits, chain, shared, logits):
        optimizer.zero_grad()
        plain.zero_grad()
        accelerator.backward(function(model, own[:2]))
        for replica in range(size):
            (function(alone, batches[replica::size][:2]) / size).backward()
        optimizer.step()
        plain.step()
        compare(function.__name__)
    optimizer.zero_grad()
    plain.zero_grad()
    norm_of_sum("norms")
    output = model(**own[0])
    accelerator.free_memory()
    differences.update(parts(Accelerator()))
    return {"differences": differences, "logits": list(output.logits.shape), "type": type(output).__name__}


def log_probabilities(context: Context) -> dict[str, Any]:
    """A trainer that gives labels, asks for their log-probabilities and makes the loss of them itself, as TRL does."""
    from transformers import GPT2Config, GPT2LMHeadModel

    class Model(GPT2LMHeadModel):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            fused = kwargs.pop("fused_lm_head", False)
            if not fused:
                return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
            logits = super().forward(input_ids, attention_mask=attention_mask, **kwargs).logits
            chosen = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])
            return {"log_probabilities": chosen[..., 0]}

    set_seed(7)
    accelerator = Accelerator()
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
    model = Model(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(12, 1, True), batch_size=4))
    model.train()
    found: dict[str, Any] = {"losses": [], "norms": [], "plain": 0.0}
    for batch in loader:
        kept = batch["labels"][:, 1:] != -100
        values = model(**batch, fused_lm_head=True)["log_probabilities"]
        loss = -(values * kept).sum() / kept.sum()
        accelerator.backward(loss)
        found["losses"].append(float(loss.detach()))
        found["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    found["plain"] = float(model(**batch, fused_lm_head=False).loss.detach())
    return found


def frozen_half(context: Context) -> dict[str, Any]:
    """Modules without a loss inside, positional arguments, dropout, eval without no_grad."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 8)
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4)])
            self.outer = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            for block in self.blocks:
                x = block(x)
            return self.outer(x)

    set_seed(3)
    accelerator = Accelerator()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    x, y = torch.randn(6, 6), torch.randint(0, 3, (6,))
    found = []
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    model.eval()
    logits = model(x)
    return {"losses": found, "logits": logits.detach(), "grad": logits.requires_grad, "lr": scheduler.get_last_lr()}


def refusals(context: Context) -> dict[str, str]:
    accelerator, model, optimizer, loader = prepare()
    batch = next(iter(loader))
    output = model(**batch)
    found = {"logits": error_of(lambda: output.logits), "has": str(hasattr(output, "logits"))}
    output["loss"].backward()
    again = model(**batch).loss
    again.backward(retain_graph=True)
    found["twice"] = error_of(lambda: again.backward())
    found["part"] = error_of(lambda: accelerator.clip_grad_norm_(list(model.parameters())[:1], 1.0))
    found["generate"] = error_of(lambda: model.generate(batch["input_ids"]))
    found["second"] = error_of(lambda: accelerator.prepare(nn.Linear(2, 2)))
    found["local_sgd"] = error_of(lambda: LocalSGD(accelerator, model, 4))
    found["norm"] = error_of(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))
    found["lbfgs"] = error_of(lambda: accelerator.prepare(torch.optim.LBFGS(model.parameters())))
    optimizer.zero_grad()
    return found


def settings_refused(context: Context) -> dict[str, str]:
    from accelerate import DataLoaderConfiguration
    from accelerate.state import AcceleratorState
    from accelerate.utils import ParallelismConfig

    found = {}
    for name, options in {
        "inductor": {"dynamo_backend": "inductor"},
        "fp16": {"mixed_precision": "fp16"},
        "dispatch_batches": {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
        "parallelism_config": {"parallelism_config": ParallelismConfig()},
    }.items():
        AcceleratorState._reset_state()  # settings are kept from one Accelerator to the next
        found[name] = error_of(lambda options=options: Accelerator(**options))
    return found


def saved_by_one(context: Context) -> str:
    """The main process alone saves: after the time limit it is told why that cannot be."""
    accelerator, model, _, _ = prepare()
    if not accelerator.is_main_process:
        import time

        time.sleep(12)
        return ""
    return error_of(lambda: model.save_pretrained(context.out / "model"))


def replicas(context: Context) -> dict[str, Any]:
    """Collectives over two replicas."""
    accelerator, model, _, loader = prepare(rows=11, batch=2)
    d = accelerator.process_index
    found: dict[str, Any] = {"index": d, "processes": accelerator.num_processes, "last": accelerator.is_last_process}
    found["gather"] = accelerator.gather(torch.tensor([d, 10 + d])).tolist()
    found["scalar"] = accelerator.gather(torch.tensor(float(d))).tolist()
    found["nested"] = [t.tolist() for t in accelerator.gather({"a": torch.tensor([d])}).values()]
    found["sum"] = float(accelerator.reduce(torch.tensor(1.0 + d)))
    found["mean"] = float(accelerator.reduce(torch.tensor(1.0 + d), "mean"))
    found["max"] = float(accelerator.reduce(torch.tensor(1.0 + d), "max"))
    found["pad"] = accelerator.pad_across_processes(torch.ones(1 + d, 2), pad_index=-1).tolist()
    found["objects"] = accelerator.gather_for_metrics([f"r{d}"])
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        found["part"] = part
    if context.rank == context.world - 1:
        accelerator.set_trigger()
    found["trigger"] = [accelerator.check_trigger(), accelerator.check_trigger()]
    model.eval()
    rows = []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch["input_ids"][:, :3]).tolist()
    found["rows"] = rows
    found["expected"] = [row["input_ids"][:3].tolist() for row in Rows(11, 1, True).rows]
    found["uneven"] = error_of(lambda: accelerator.join_uneven_inputs([model]).__enter__())
    return found


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.rows = Rows(n, 1, True).rows

    def __iter__(self) -> Any:
        for row in self.rows:
            row = dict(row)
            row["input_ids"] = row["input_ids"].clone()
            row["input_ids"][0] = random.randrange(2, 60)  # different on every rank
            yield row


def streams(context: Context) -> dict[str, Any]:
    """Random data that every rank would draw differently, from a stream; and what is skipped of it."""
    accelerator, *_ = prepare()
    random.seed(context.rank)
    loader = accelerator.prepare(DataLoader(Stream(8), batch_size=2))
    rows = [batch["input_ids"][:, 0].tolist() for batch in loader]
    skipped = [batch["input_ids"][:, 0].tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    return {"rows": rows, "skipped": len(skipped), "again": skipped, "replica": accelerator.process_index}


def plugin(context: Context) -> dict[str, Any]:
    """The spellings in code, without HOLMES_CONFIG."""
    from holmes_accelerate import HolmesAccelerator, HolmesPlugin

    settings = HolmesPlugin(pp=2, num_microbatches=2, print_plan=False)
    accelerator = Accelerator(kwargs_handlers=[settings])
    same = HolmesAccelerator(holmes_plugin=settings)
    _, model, optimizer, loader = prepare(same)
    loss = model(**next(iter(loader))).loss
    same.backward(loss)
    optimizer.step()
    return {"kinds": [type(accelerator).__name__, type(same).__name__], "loss": float(loss)}


def clipped_by_torch(context: Context) -> list[str]:
    """A norm over one rank's part is no norm of the model: the script is told, once it steps."""
    accelerator, model, optimizer, loader = prepare()
    found = []
    for clip in (accelerator.clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        for batch in loader:
            accelerator.backward(model(**batch).loss)
        clip(model.parameters(), 1.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        found.append(" ".join(str(w.message) for w in caught))
    return found


def warm_optimizer(context: Context) -> dict[str, Any]:
    """An optimizer that has stepped before it is prepared keeps its state; EMA-like access afterwards."""
    set_seed(7)
    accelerator = Accelerator()
    model = make_model("gpt2", 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {k: torch.stack([row[k] for row in Rows(4, 1, True).rows]) for k in ("input_ids", "labels")}
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(2):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": float(loss), "steps": {float(s["step"]) for s in optimizer.state_dict()["state"].values()}}


def torch_loop(context: Context, *, settings: dict[str, Any]) -> dict[str, Any]:
    """`holmes_core.parallelize` in a loop of one's own, or no Holmes at all where there are no settings."""
    import holmes_core

    torch.manual_seed(7)
    model = make_model("llama", 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    run = holmes_core.parallelize(model, optimizer, {**settings, "print_plan": False}) if settings else None
    rows = Rows(16, 1, False).rows
    found: dict[str, Any] = {"losses": [], "norms": [], "early": []}
    for start in range(0, 16, 4):
        mine = rows[start : start + 4]
        if run is not None:
            mine = mine[run.replica * (4 // run.dp) : (run.replica + 1) * (4 // run.dp)]
        batch = {k: torch.stack([row[k] for row in mine]) for k in mine[0]}
        loss = model(**batch).loss
        loss.backward()
        found["early"].append(bool(run) and run.engine.gradients.data_parallel._launched > 0)
        clip = run.clip_grad_norm_(0.5) if run else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss.detach()))
        found["norms"].append(float(clip))
    state = run.state_dict() if run else model.state_dict()
    if context.rank == 0:
        found["weights"] = state
    return found


def fabric(context: Context, *, strategy: str, rows: int = 12) -> dict[str, Any]:
    """A Fabric loop with clipping, evaluation and a checkpoint."""
    import lightning as L

    warnings.simplefilter("ignore")
    fabric = L.Fabric(strategy=strategy, devices=context.world, accelerator="cpu")
    fabric.launch()
    fabric.seed_everything(7)
    model = make_model("gpt2", 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(Rows(rows, 1, True), batch_size=4))
    found: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(2):
        model.train()
        for index, batch in enumerate(loader):
            with fabric.no_backward_sync(model, enabled=index % 2 == 0):
                loss = model(**batch).loss
                fabric.backward(loss)
            if strategy == "holmes":
                launched = fabric.strategy._mode.engine.gradients.data_parallel._launched
                found.setdefault("early", []).append(launched > 0)
            found["losses"].append(float(loss.detach()))
            if index % 2:
                found["norms"].append(float(fabric.clip_gradients(model, optimizer, max_norm=0.5)))
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["logits"] = model(**batch).logits
    fabric.save(context.out / "ckpt.pt", {"model": model, "optimizer": optimizer, "step": 3})
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(context.out / "ckpt.pt", state)
    found["step"] = state["step"]
    if context.rank == 0:
        found["weights"] = torch.load(context.out / "ckpt.pt", weights_only=True)["model"]
    return found
