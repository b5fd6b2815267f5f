# SPDX-License-Identifier: Apache-2.0
"""Weights and optimizer states of split jobs against those of one process.

Processes are started once for two ranks and once for four; inside, one case after the other runs on all ranks. Each
test then reads its case's line.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from holmes_core.cluster.topology import build_topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import HolmesError
from holmes_core.plan.layout import ModelFacts
from holmes_core.plan.plan import make_plan
from holmes_core.runtime import state
from holmes_core.runtime.chain import find_chain
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.process_groups import ProcessGroups
from holmes_core.runtime.shard import get_shard
from holmes_core.runtime.tensor_parallel import apply_tensor_parallel

pytest.importorskip("transformers")

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2-dp2": (4, {"pp": 2, "dp": 2, "num_microbatches": 2}),
    "pp2-tp2": (4, {"pp": 2, "tp": 2, "num_microbatches": 2}),
    "zbv-pp2": (2, {"pp": 2, "schedule": "zbv", "num_microbatches": 4}),
    # Rank 0 is not the one that joins the parts.
    "tp2-turned": (2, {"tp": 2, "rank_order": (1, 0)}),
    "dp2-whole-states": (2, {"dp": 2, "sharding": "none"}),
}
WORDS = 97  # odd: with tensor parallelism the last rank has a padding row
#: Weights after four steps, of which two after a restart: SGD is linear in rounding errors, AdamW amplifies them.
TOLERANCE = {"sgd": 1e-5, "adamw": 1e-4}


# ---- models and optimizers -------------------------------------------------------------------------------------------
def gpt2(seed: int = 0) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    settings = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "use_cache": False, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=5, n_head=4, **settings))


def llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, use_cache=False, **sizes))


class Block(nn.Module):
    """A block with buffers of every kind and a state of its own."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.rand(3) > index / 5)
        self.register_buffer("table", torch.rand(2, 3), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 2, dtype=torch.bfloat16))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, value: dict[str, int]) -> None:
        assert value == {"version": 3}

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """A chain with modules around it whose buffers change on one stage only."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.stem = nn.BatchNorm1d(6)
        self.blocks = nn.ModuleList(Block(i) for i in range(4))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor([2.0]))  # one element, of shape (1,)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        self.steps += 1
        return (self.head(self.norm(x)) * self.scale).square().mean()


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "llama": llama}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Groups with and without decay, in an order that is not the model's.

    A large eps: the bias of keys has no gradient but rounding errors, which AdamW blows up to whole steps.
    """
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "lr": 2e-3}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.01)  # has states before the first step, frozen ones included


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


def make(model: str, optimizer: str, seed: int = 0) -> nn.Module:
    """Build a model; for AdamW with a frozen matrix in its first block."""
    made = MODELS[model](seed)
    if optimizer == "adamw":
        next(p for p in made.parameters() if p.dim() == 2 and p.shape[0] != WORDS).requires_grad_(False)
    return made


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (4, 7), generator=generator)
    mask = (torch.arange(7)[None] < torch.randint(3, 8, (4, 1), generator=generator)).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# ---- training in a layout, and in one process ------------------------------------------------------------------------
class Job:
    """A model trained in a layout."""

    def __init__(self, model: nn.Module, settings: dict[str, Any], optimizer: Callable[..., Any] | None = None) -> None:
        config = HolmesConfig(**settings)
        chain = find_chain(model)
        topology = build_topology(config, ["h"] * dist.get_world_size())
        plan = make_plan(config, topology, ModelFacts(num_blocks=len(chain.blocks)))
        cpu = torch.device("cpu")
        groups = ProcessGroups(plan, rank=dist.get_rank(), device=cpu, timeout=60)
        self.model = model
        self.engine = Engine(root=model, chain=chain, plan=plan, config=config, groups=groups, device=cpu)
        self.engine.split()
        if plan.layout.tp > 1:
            absent = [m for m in model.modules() if any(p.is_meta for p in m.parameters(recurse=False))]
            absent += [b for b in chain.blocks if all(p.is_meta for p in b.parameters())]
            apply_tensor_parallel(model, blocks=chain.blocks, block_prefix=chain.path, group=groups.tp, skip=absent)
        self.engine.build()
        self.optimizer = optimizer(model) if optimizer is not None else None

    def train(self, steps: Iterable[int]) -> None:
        assert self.optimizer is not None
        for step in steps:
            self.optimizer.zero_grad()
            self.engine.train(lambda mb, i: self.model(**mb).loss, batch(10 * step + self.engine.place.dp))
            self.engine.reduce_gradients()
            self.optimizer.step()
            self.engine.broadcast_parameters()

    def save(self) -> dict[str, Any]:
        return {
            "model": state.full_state_dict(self.engine),
            "optimizer": state.full_optimizer_state(self.engine, self.optimizer),
        }

    def load(self, saved: dict[str, Any]) -> None:
        assert state.load_state_dict(self.engine, saved["model"]) == ([], [])
        state.load_optimizer_state(self.engine, self.optimizer, saved["optimizer"])


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], dp: int) -> None:
    for step in steps:
        batches = [batch(10 * step + replica) for replica in range(dp)]
        optimizer.zero_grad()
        model(**{key: torch.cat([b[key] for b in batches]) for key in batches[0]}).loss.backward()
        optimizer.step()


def shared(value: Any, name: str) -> Any:
    """Write rank 0's value to a file that all ranks read, memory-mapped."""
    path = Path(os.environ["HOLMES_TEST_FOLDER"]) / name
    if dist.get_rank() == 0:
        torch.save(value, path)
    dist.barrier()
    return torch.load(path, mmap=True, weights_only=True)


def tensors_of(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in tensors_of(inner, f"{path}/{key}").items()}
    return {path: value}


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Same keys in the same order; tensors bit-equal, or within a tolerance relative to the tensor's largest value."""
    found, expected = tensors_of(found), tensors_of(expected)
    assert list(found) == list(expected)
    for key, value in expected.items():
        if not isinstance(value, Tensor):
            assert found[key] == value, key
            continue
        assert found[key].shape == value.shape, key
        assert found[key].dtype == value.dtype, key
        assert found[key].device.type == "cpu", key
        if tolerance and value.is_floating_point() and value.numel():
            error = (found[key] - value).abs().max().item()
            assert error <= tolerance * max(value.abs().max().item(), 1e-2), f"{key} differs by {error}"
        else:
            assert torch.equal(found[key], value), key


def raises(call: Callable[[], Any]) -> str:
    with pytest.raises(HolmesError) as caught:
        call()
    return str(caught.value)


# ---- cases: each runs on all ranks of a layout -----------------------------------------------------------------------
def case_continues(model: str, optimizer: str, settings: dict[str, Any]) -> None:
    """Save in the layout, go on alone; save alone, go on in the layout; both as if never stopped."""
    job = Job(make(model, optimizer), settings, OPTIMIZERS[optimizer])
    dp, root, tolerance = job.engine.plan.layout.dp, dist.get_rank() == 0, TOLERANCE[optimizer]
    alone = make(model, optimizer)
    alone_optimizer = OPTIMIZERS[optimizer](alone)
    job.train(range(2))
    train_alone(alone, alone_optimizer, range(2), dp)
    saved = job.save()
    halfway = {"model": alone.state_dict(), "optimizer": alone_optimizer.state_dict()}
    assert list(saved["model"]) == list(halfway["model"])
    assert all(saved["model"][key].shape == value.shape for key, value in halfway["model"].items())
    assert all(saved["model"][key].is_meta != root for key in saved["model"])
    assert saved["optimizer"]["param_groups"] == halfway["optimizer"]["param_groups"]
    if root:
        assert_same(saved["model"], halfway["model"], tolerance)
        # AdamW's second moment is quadratic in gradients that are tiny against the largest; its mean is what counts.
        assert_same(saved["optimizer"]["state"], halfway["optimizer"]["state"], 10 * tolerance)
        storages = [{t.untyped_storage().data_ptr() for t in s["model"].values()} for s in (saved, halfway)]
        assert len(storages[0]) == len(storages[1]), "tied tensors share storage"
    else:
        assert saved["optimizer"]["state"] == {}
    from_layout = shared(saved, f"{model}-{optimizer}")
    from_alone = shared(halfway, f"{model}-{optimizer}-alone")

    # Bit-equal into a model of other weights, and out again.
    again = Job(make(model, optimizer, seed=1), settings, OPTIMIZERS[optimizer])
    again.load(from_layout)
    out = again.save()
    if root:
        assert_same(out, from_layout)

    # The layout goes on from one process's state, with keys as JSON would have them.
    further = Job(make(model, optimizer, seed=2), settings, OPTIMIZERS[optimizer])
    numbered = {str(index): value for index, value in from_alone["optimizer"]["state"].items()}
    further.load({**from_alone, "optimizer": {**from_alone["optimizer"], "state": numbered}})
    before = {key: value.clone() for key, value in tensors_of(from_alone).items() if isinstance(value, Tensor)}

    train_alone(alone, alone_optimizer, range(2, 4), dp)
    for continued in (again, further):
        continued.train(range(2, 4))
        out = continued.save()
        if root:
            assert_same(out["model"], alone.state_dict(), tolerance)
    assert all(torch.equal(tensors_of(from_alone)[key], value) for key, value in before.items()), "loaded state changed"

    # One process goes on from the layout's state.
    fresh = make(model, optimizer, seed=3)
    fresh_optimizer = OPTIMIZERS[optimizer](fresh)
    fresh.load_state_dict(from_layout["model"])
    fresh_optimizer.load_state_dict(from_layout["optimizer"])
    train_alone(fresh, fresh_optimizer, range(2, 4), dp)
    assert_same(fresh.state_dict(), alone.state_dict(), tolerance)


def case_everywhere(settings: dict[str, Any]) -> None:
    """Without training, the whole weights on every rank are bit-equal to the model before the split."""
    for build in MODELS.values():
        whole = build().state_dict()
        job = Job(build(), settings)
        assert_same(state.full_state_dict(job.engine, everywhere=True), whole)
        unique = {t.data_ptr(): t.numel() * t.element_size() for t in whole.values()}
        assert state.model_bytes(job.engine) == sum(unique.values())
        copies = state.full_state_dict(job.engine)
        if dist.get_rank() == 0:
            for value in copies.values():
                value.zero_()
        assert_same(state.full_state_dict(job.engine, everywhere=True), whole)


def case_strict(settings: dict[str, Any]) -> None:
    job = Job(llama(), settings)
    whole, other = llama().state_dict(), llama(seed=1).state_dict()
    key = "model.layers.3.mlp.up_proj.weight"
    lacking = {k: v for k, v in other.items() if k != key}
    message = raises(lambda: state.load_state_dict(job.engine, lacking))
    assert "1 missing keys" in message
    assert key in message
    more = {f"new.{i}": torch.ones(1) for i in range(9)}
    message = raises(lambda: state.load_state_dict(job.engine, {**whole, **more}))
    assert "9 unexpected keys" in message
    assert "'new.0'" in message
    assert "and 4 more" in message
    for strict in (True, False):
        changed = {**whole, key: torch.zeros(25, 16)}
        message = raises(lambda: state.load_state_dict(job.engine, changed, strict=strict))  # noqa: B023
        assert "(25, 16) in the state, (24, 16) in the model" in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = state.load_state_dict(job.engine, {**lacking, "new": torch.ones(1)}, strict=False)
    assert found == ([key], ["new"])
    found = state.full_state_dict(job.engine, everywhere=True)
    assert_same(found, {**other, key: whole[key]})


def case_optimizer_errors(settings: dict[str, Any]) -> None:
    job = Job(llama(), settings, lambda model: torch.optim.Adafactor(model.parameters()))
    alone = llama()
    alone_optimizer = torch.optim.Adafactor(alone.parameters())
    train_alone(alone, alone_optimizer, range(1), job.engine.plan.layout.dp)
    job.train(range(1))
    if job.engine.plan.layout.tp > 1:
        for call in (
            lambda: state.full_optimizer_state(job.engine, job.optimizer),  # on all ranks: none is left waiting
            lambda: state.load_optimizer_state(job.engine, job.optimizer, alone_optimizer.state_dict()),
        ):
            message = raises(call)
            assert "Adafactor keeps a state of shape" in message
            assert "tp=1" in message
    else:
        found = state.full_optimizer_state(job.engine, job.optimizer)
        if dist.get_rank() == 0:
            assert_same(found["state"], alone_optimizer.state_dict()["state"], 1e-3)
    other = torch.optim.SGD([{"params": [p]} for p in alone.parameters()], lr=1.0)
    message = raises(lambda: state.load_optimizer_state(job.engine, job.optimizer, other.state_dict()))
    assert "parameter groups" in message


def case_early_states(settings: dict[str, Any]) -> None:
    """An optimizer that makes states when it is built, for frozen and absent parameters too."""
    job = Job(make("llama", "adamw"), settings, adagrad)
    alone = make("llama", "adamw")
    alone_optimizer = adagrad(alone)
    dp = job.engine.plan.layout.dp
    job.train(range(2))
    train_alone(alone, alone_optimizer, range(2), dp)
    saved = shared(job.save(), "adagrad")
    assert_same(saved["optimizer"]["state"], alone_optimizer.state_dict()["state"], 1e-4)
    again = Job(make("llama", "adamw", seed=1), settings, adagrad)
    again.load(saved)
    again.train(range(2, 4))
    train_alone(alone, alone_optimizer, range(2, 4), dp)
    assert_same(state.full_state_dict(again.engine, everywhere=True), alone.state_dict(), 1e-4)


def case_buffers(settings: dict[str, Any]) -> None:
    """Buffers come from the stage that runs them; restoring brings back those that are not saved, too."""
    torch.manual_seed(5)
    inputs = torch.randn(8, 6)
    job = Job(Net(), {**settings, "loss_weight": "samples", "check_loss": False}, sgd)
    job.engine.train(lambda mb, i: job.model(mb), inputs)
    n, dp = settings.get("num_microbatches", 1), job.engine.plan.layout.dp
    alone = Net()
    for part in inputs.chunk(n):
        alone(part)
    found = state.full_state_dict(job.engine, everywhere=True)
    expected = alone.state_dict()
    assert all(int(found[key]) == n for key in expected if "seen" in key)
    assert_same({k: found[k] for k in expected if "steps" in k or "norm" in k}, {
        k: v for k, v in expected.items() if "steps" in k or "norm" in k}, 1e-5)  # fmt: skip
    if settings.get("schedule") != "zbv":  # where a rank runs two stages, the stem runs twice
        assert_same(found, expected, 1e-5)
    assert job.optimizer is not None
    job.engine.reduce_gradients()
    job.optimizer.step()
    job.engine.broadcast_parameters()
    optimizer_state = state.full_optimizer_state(job.engine, job.optimizer)
    named = [name for name, _ in job.model.named_parameters()]
    if dist.get_rank() == 0:
        kept = {named[i] for i in optimizer_state["state"]}
        assert kept == set(named) - {"frozen"}
        assert optimizer_state["state"][named.index("scale")]["momentum_buffer"].shape == (1,)
    final = state.full_state_dict(job.engine, everywhere=True)
    assert state.restore_whole(job.engine)
    job.engine.release()
    assert_same(job.model.state_dict(), final)
    assert not any(t.is_meta for t in (*job.model.parameters(), *job.model.buffers()))
    fresh = Net()
    assert all(
        torch.equal(a.table, b.table) for a, b in zip(job.model.blocks, fresh.blocks, strict=True)
    ), "buffers that are not saved"
    fresh.load_state_dict(final)
    assert torch.equal(job.model.eval()(inputs), fresh.eval()(inputs))
    assert dp >= 1


def case_restore(settings: dict[str, Any]) -> None:
    """After training every rank has the whole model, which computes like one that was never split."""
    for build in MODELS.values():
        job = Job(build(), settings, sgd)
        job.train(range(1))
        saved = job.save()
        final = state.full_state_dict(job.engine, everywhere=True)
        whole = build(seed=1)
        assert state.restore_whole(job.engine)
        job.engine.release()
        assert_same(job.model.state_dict(), final)
        assert len(list(job.model.parameters())) == len(list(whole.parameters())), "ties"
        for (name, module), (_, expected) in zip(job.model.named_modules(), whole.named_modules(), strict=True):
            assert type(module) is type(expected), name
            assert vars(module).keys() == vars(expected).keys(), name
            numbers = {k: v for k, v in vars(expected).items() if isinstance(v, int)}
            assert {k: v for k, v in vars(module).items() if isinstance(v, int)} == numbers, name
        assert not any(get_shard(p) is not None for p in job.model.parameters())
        whole.load_state_dict(final)
        with torch.no_grad():
            assert torch.equal(job.model(**batch(0)).logits, whole(**batch(0)).logits)
        job.model(**batch(0)).loss.backward()
        later = state.full_optimizer_state(job.engine, job.optimizer)  # Trainer.save_checkpoint after fit
        if dist.get_rank() == 0:
            assert_same(later, saved["optimizer"])


def case_different_models(settings: dict[str, Any]) -> None:
    job = Job(llama(), settings, sgd)
    if dist.get_rank() == 1:
        job.model.extra = nn.Parameter(torch.zeros(1))
    assert "ranks name different tensors" in raises(lambda: state.full_state_dict(job.engine))


CASES: dict[str, Callable[[dict[str, Any]], None]] = {
    **{
        f"continues {model} {optimizer}": (lambda settings, m=model, o=optimizer: case_continues(m, o, settings))
        for model in MODELS
        for optimizer in OPTIMIZERS
    },
    "everywhere": case_everywhere,
    "strict": case_strict,
    "optimizer errors": case_optimizer_errors,
    "early states": case_early_states,
    "buffers": case_buffers,
    "restore": case_restore,
    "different models": case_different_models,
}
#: Where nothing is different from a layout before, cases are left out.
WANTED = {
    "pp2-dp2": [name for name in CASES if name != "continues llama sgd"],
    "pp2-tp2": [name for name in CASES if name not in ("buffers", "different models")],
    "zbv-pp2": ["continues gpt2 sgd", "continues llama adamw", "everywhere", "early states", "buffers", "restore"],
    "tp2-turned": ["continues gpt2 adamw", "everywhere", "optimizer errors", "restore"],
    "dp2-whole-states": ["continues gpt2 adamw", "restore"],
}


# ---- processes -------------------------------------------------------------------------------------------------------
def lines(ranks: int) -> list[tuple[str, str]]:
    """Return layout and case of everything that runs on this many processes."""
    return [(layout, name) for layout, names in WANTED.items() if LAYOUTS[layout][0] == ranks for name in names]


def worker(rank: int, ranks: int, folder: str) -> None:
    """Run the cases of one number of processes on one rank and write what went wrong."""
    torch.set_num_threads(1)
    os.environ.update(TOKENIZERS_PARALLELISM="false", HOLMES_TEST_FOLDER=folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found: dict[tuple[str, str], str] = {}
    for layout, name in lines(ranks):
        try:
            CASES[name](LAYOUTS[layout][1])
            found[layout, name] = ""
        except (Exception, pytest.fail.Exception) as error:
            found[layout, name] = f"rank {rank}: " + "".join(traceback.format_exception(error))[-3000:]
        torch.save(found, f"{folder}/results.{rank}")
        dist.barrier()  # ends the process where a rank that failed has left the others waiting
    dist.destroy_process_group()


def run_all(ranks: int, seconds: float = 540.0) -> dict[tuple[str, str], str]:
    with tempfile.TemporaryDirectory() as folder:
        processes = mp.spawn(worker, args=(ranks, folder), nprocs=ranks, join=False)
        deadline = time.monotonic() + seconds
        ending = f"not reached within {seconds:.0f} s"
        try:
            while not processes.join(timeout=1) and time.monotonic() < deadline:
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            ending = f"not reached: {error}"  # after the case that says why
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
        files = [Path(folder) / f"results.{rank}" for rank in range(ranks)]
        found = [torch.load(file) if file.exists() else {} for file in files]
    return {line: "\n".join(filter(None, (part.get(line, ending) for part in found))) for line in lines(ranks)}


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], str]:
    """What each case found in each layout; the processes run when the first of their cases is asked for."""
    return {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout, names in WANTED.items() for name in names])
def test_state(layout: str, name: str, outcomes: dict[tuple[str, str], str]) -> None:
    """Each case in each layout."""
    if (layout, name) not in outcomes:
        outcomes.update(run_all(LAYOUTS[layout][0]))
    assert outcomes[layout, name] == "", outcomes[layout, name]
