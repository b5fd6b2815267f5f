# SPDX-License-Identifier: Apache-2.0
"""Filling of meta models: the same weights for every layout, no garbage, through the engine, within a memory limit.

The file is also the script that the tests with several processes run (`main`).
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # transformers imports it, and it sets an environment variable
import torch.distributed as dist
from torch import nn

from holmes_core.errors import HolmesError
from holmes_core.runtime.chain import find_chain
from holmes_core.runtime.lazy import lazy_loading
from holmes_core.runtime.materialize import MaterializeReport, materialize, materialize_whole, needs_materialize
from holmes_core.runtime.split import decide_stages, drop_absent

transformers = pytest.importorskip("transformers")

AutoModel = transformers.AutoModelForCausalLM
CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4},
    "gemma2": {"head_dim": 8},
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "bloom": {"n_layer": 5, "n_head": 4},
}


def on_meta(family: str) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]})
    with torch.device("meta"):
        return AutoModel.from_config(config)


def fill_stages(build: Callable[[], nn.Module], stages: int, seed: int = 7) -> dict[str, torch.Tensor]:
    """Fill every stage of a model in turn, as its rank would; returns all real tensors, checked where stages share."""
    found: dict[str, torch.Tensor] = {}
    blocks = len(find_chain(build()).blocks)
    sizes = [blocks // stages + (s < blocks % stages) for s in range(stages)]
    for stage in range(stages):
        root = build()
        chain = find_chain(root)
        where = decide_stages(root, chain, sizes)
        local = {name: stage in stages_of for name, stages_of in where.items()}
        if stages > 1:
            drop_absent(root, chain, local)
        torch.manual_seed(stage)  # whatever the state is
        before = torch.get_rng_state()
        materialize(root, local=local, device=CPU, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        for name, param in root.named_parameters(remove_duplicate=False):
            assert param.is_meta != local[name], name
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
            if not tensor.is_meta:
                assert tensor.isfinite().all(), name
                assert torch.equal(tensor, found.setdefault(name, tensor)), name
    return found


@pytest.mark.parametrize("family", list(FAMILIES))
def test_same_weights_for_every_layout(family: str) -> None:
    one = fill_stages(lambda: on_meta(family), 1)
    for stages in (2, 4):
        parts = fill_stages(lambda: on_meta(family), stages)
        assert parts.keys() == one.keys()
        assert all(torch.equal(parts[name], tensor) for name, tensor in one.items())
    other = fill_stages(lambda: on_meta(family), 1, seed=8)
    assert any(not torch.equal(other[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize("family", list(FAMILIES))
def test_initialised_as_without_meta(family: str) -> None:
    """Each tensor has the distribution that ordinary construction gives it; buffers and constants are equal."""
    torch.manual_seed(0)
    reference = AutoModel.from_config(transformers.AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]}))
    model = on_meta(family)
    materialize_whole(model)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in reference.named_parameters()]
    found = dict([*model.named_parameters(), *model.named_buffers()])
    for name, expected in [*reference.named_parameters(), *reference.named_buffers()]:
        n, tensor = expected.numel(), found[name]
        if isinstance(expected, nn.Parameter) and n > 1 and expected.std() > 0:
            assert abs(tensor.mean() - expected.mean()) < 6 * expected.std() / n**0.5, name
            assert abs(tensor.std() / expected.std() - 1) < 6 / n**0.5, name
        else:
            assert torch.equal(tensor, expected), name


class Plain(nn.Module):
    """A model without transformers."""

    def __init__(self, buffer_device: str | None = None, broken: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.MultiheadAttention(16, 2)) for _ in range(4)
        )
        self.head = nn.Linear(16, 50)
        if broken:
            self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("mask", torch.ones(3, 3, device=buffer_device).tril(), persistent=False)


def test_reset_parameters_without_transformers() -> None:
    def build() -> nn.Module:
        with torch.device("meta"):
            return Plain("cpu")

    one = fill_stages(build, 1)
    for stages in (2, 4):
        parts = fill_stages(build, stages)
        assert all(torch.equal(parts[name], tensor) for name, tensor in one.items())
    assert torch.equal(one["mask"], torch.ones(3, 3).tril())
    assert torch.equal(one["blocks.3.1.running_var"], torch.ones(16))


def test_what_no_code_writes_is_an_error() -> None:
    with torch.device("meta"):
        root = Plain(broken=True)
    with pytest.raises(HolmesError, match=r"root module \(Plain\): scale, mask") as caught:
        materialize_whole(root)
    assert "reset_parameters" in str(caught.value)


def test_what_is_real_stays() -> None:
    """A real module beside a meta one is not touched, by transformers' root-level initialisation neither."""
    root = nn.ModuleDict({"model": on_meta("gpt2"), "head": nn.Linear(3, 3)})
    root["model"].transformer.h[0].attn.c_proj = transformers.pytorch_utils.Conv1D(32, 32)
    kept = {name: p for name, p in root.named_parameters() if not p.is_meta}
    assert len(kept) == 4
    values = {name: p.detach().clone() for name, p in kept.items()}
    report = materialize_whole(root)
    assert all(torch.equal(root.get_parameter(name), value) for name, value in values.items())
    assert not set(report.initialised) & set(kept)
    assert materialize_whole(root) == MaterializeReport()  # nothing is left to do


def test_parameters_stay_the_objects_they_were() -> None:
    """An optimizer that was made before the filling trains; ties and frozen parameters stay."""
    model = on_meta("gpt2")
    model.transformer.wpe.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    materialize_whole(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.transformer.wpe.weight.requires_grad
    before = model.lm_head.weight.detach().clone()
    ids = torch.arange(12).view(2, 6)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    assert not torch.equal(before, model.lm_head.weight)


def test_a_parameter_that_is_held_elsewhere_is_replaced() -> None:
    """torch cannot exchange a tensor's inside while a weak reference holds it."""
    import weakref

    model = on_meta("gpt2")
    held = weakref.ref(model.transformer.wte.weight)
    materialize_whole(model)
    assert held() is not model.transformer.wte.weight
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not model.lm_head.weight.is_meta


# ---- several processes -------------------------------------------------------------------------------------------
def make_groups(world: int, blocks: int) -> tuple[Any, Any, Any]:
    from holmes_core.cluster.topology import build_topology
    from holmes_core.config import HolmesConfig
    from holmes_core.plan.layout import ModelFacts
    from holmes_core.plan.plan import make_plan
    from holmes_core.runtime.process_groups import ProcessGroups

    config = HolmesConfig(pp=world)
    plan = make_plan(config, build_topology(config, ["h"] * world), ModelFacts(num_blocks=blocks))
    return config, plan, ProcessGroups(plan, rank=dist.get_rank(), device=CPU, timeout=60)


def split_and_fill(root: nn.Module, world: tuple[Any, Any, Any]) -> tuple[Any, MaterializeReport]:
    from holmes_core.runtime.engine import Engine

    assert needs_materialize(root)
    config, plan, groups = world
    engine = Engine(root=root, chain=find_chain(root), plan=plan, config=config, groups=groups, device=CPU)
    engine.split()
    local = {alias: entry.local for entry in engine.entries for alias in entry.aliases}
    report = materialize(root, local=local, device=CPU, seed=0)
    engine.build()
    return engine, report


def logits_case(folder: Path) -> None:
    """Logits of two stages filled from checkpoints equal one process, family by family."""
    world = make_groups(dist.get_world_size(), BASE["num_hidden_layers"])
    for family in FAMILIES:
        with lazy_loading():
            model = AutoModel.from_pretrained(folder / family)
        engine, _ = split_and_fill(model, world)
        ids = torch.arange(24).view(4, 6) % 96
        found = engine.evaluate(lambda b, i, m=model: m(**b, use_cache=False).logits, [{"input_ids": ids}])
        if engine.holds_last:
            with torch.no_grad():
                expected = AutoModel.from_pretrained(folder / family)(input_ids=ids).logits
            print(f"{family} {float((found[0] - expected).abs().max())}", flush=True)
        dist.barrier()


@pytest.mark.timeout(300)
def test_logits_through_the_engine(run_script: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for family in FAMILIES:
        model = AutoModel.from_config(transformers.AutoConfig.for_model(family, **{**BASE, **FAMILIES[family]}))
        for param in model.parameters():
            param.data.add_(torch.randn_like(param) * 0.05)
        # GPT-2 is saved without its head: the names lack the prefix
        (model.base_model if family == "gpt2" else model).save_pretrained(tmp_path / family)
    output = run_script([__file__, "logits", tmp_path], nproc=2, timeout=280).check()
    words = [line.split() for line in output.splitlines()]
    errors = {line[0]: float(line[1]) for line in words if line and line[0] in FAMILIES}
    assert errors.keys() == FAMILIES.keys()
    assert max(errors.values()) < 1e-6, errors


BIG = {**BASE, "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
SHARE = 0.8  # of the model; a tenth of it are stacks of threads, which count and are never touched


def status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Peak:
    """The highest RssAnon while it is open, above what it was."""

    def __enter__(self) -> Peak:
        self.start = self.highest = status("RssAnon")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.stop.wait(0.005):
            self.highest = max(self.highest, status("RssAnon"))

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.thread.join()
        self.used = max(self.highest, status("RssAnon")) - self.start


def warm_up(ids: torch.Tensor) -> None:
    """Let torch and transformers set up whatever they set up once."""
    small = AutoModel.from_config(transformers.AutoConfig.for_model("llama", **BASE))
    small(input_ids=ids, labels=ids).loss.backward()


def limit_memory(folder: Path) -> int:
    """Allow this process 80 % of a checkpoint more than it has; returns the checkpoint's size."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit = status("VmData") + int(SHARE * size)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    return size


def whole_case(folder: Path) -> None:
    """A control: our own loading, of the whole model, which really takes the memory."""
    warm_up(torch.arange(16).view(2, 8))
    limit_memory(folder)
    with lazy_loading():
        model = AutoModel.from_pretrained(folder)
    print("built", flush=True)
    materialize_whole(model)


def memory_case(folder: Path) -> None:
    """Load, split, fill and train one step under a limit that the whole model does not fit in."""
    ids = torch.arange(16).view(2, 8)
    warm_up(ids)
    world = make_groups(dist.get_world_size(), BIG["num_hidden_layers"])  # gloo's threads have stacks, which count
    dist.barrier()
    size = limit_memory(folder)
    found: dict[str, Any] = {"plain": "fits"}
    try:
        AutoModel.from_pretrained(folder)  # maps the weights privately writable, which counts in full
    except Exception as error:
        found["plain"] = str(error)
    with Peak() as peak:
        start = time.perf_counter()
        with lazy_loading():
            model = AutoModel.from_pretrained(folder)
        found["lazy_seconds"] = time.perf_counter() - start
        for name, param in model.named_parameters():
            param.requires_grad_("norm" in name or "q_proj" in name)  # gradients of all would need the room again
        start = time.perf_counter()
        engine, report = split_and_fill(model, world)
        found["fill_seconds"] = time.perf_counter() - start
        result = engine.train(lambda b, i: model(**b, use_cache=False).loss, {"input_ids": ids, "labels": ids})
        engine.reduce_gradients()
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    found.update(peak=peak.used, filled=report.bytes, size=size)
    if result.loss is not None:
        found["loss"] = float(result.loss)
    (folder / f"found.{dist.get_rank()}").write_text(json.dumps(found))


@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA and /proc are Linux's")
def test_a_model_that_one_rank_cannot_hold(run_script: Any, tmp_path: Path) -> None:
    """386 MB, two ranks with room for 80 % of it: plain loading fails, lazy loading and a step of training pass."""
    with torch.device("meta"):
        model = AutoModel.from_config(transformers.AutoConfig.for_model("llama", **BIG))
    materialize_whole(model)
    model.save_pretrained(tmp_path)
    ids = torch.arange(16).view(2, 8)
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss)
    del model
    whole = run_script([__file__, "whole", tmp_path], timeout=250)
    assert whole.returncode != 0
    assert "built" in whole.output
    assert "memory" in whole.output.lower()
    run_script([__file__, "memory", tmp_path], nproc=2, timeout=300).check()
    found = [json.loads((tmp_path / f"found.{rank}").read_text()) for rank in range(2)]
    size = found[0]["size"]
    assert size > 380e6
    for rank in found:
        assert "memory" in rank["plain"].lower(), rank["plain"]
        assert rank["filled"] < 0.52 * size
        assert rank["peak"] < 0.65 * size  # with activations and gradients
    assert found[0]["filled"] + found[1]["filled"] == pytest.approx(size, rel=0.02)  # embedding: on both
    loss = next(rank["loss"] for rank in found if "loss" in rank)
    assert loss == pytest.approx(expected, rel=1e-5)


def main() -> None:
    torch.set_num_threads(1)
    case, folder = sys.argv[1], Path(sys.argv[2])
    if case == "whole":
        whole_case(folder)
        return
    dist.init_process_group("gloo")
    try:
        {"logits": logits_case, "memory": memory_case}[case](folder)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
