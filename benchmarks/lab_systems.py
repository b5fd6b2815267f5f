# SPDX-License-Identifier: Apache-2.0
"""What one rank runs in lab_throughput.py: the same GPT, batch and data under Holmes and under its peers.

Every function trains for `steps` steps and reports the end of each to `after_step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: What one step took: its end on this rank's clock; under Holmes also, summed since the start: seconds this rank
#: computed, bytes it sent to other clusters (to anybody, where there is one cluster only), and those of them that are
#: sums of gradients or parameters.
Note = tuple[float, float, int, int]
NOTES: list[Note] = []
#: Called after each step, with its note in NOTES: may wait.
WAIT: list[Callable[[], None]] = []
#: The head has as many weights as a block: a pipeline of two stages can be cut evenly.
LENGTH, VOCAB, LAYERS, WIDTH, HEADS = 128, 5376, 11, 448, 7
RANKS = 4
SIZE = f"A GPT-2 of 29 M parameters ({LAYERS} blocks, tied embedding)"


def model(*, tied: bool = True) -> Any:
    """Return a GPT-2 of 29 M parameters, the same on every rank."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, tie_word_embeddings=tied,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def rows(count: int) -> Any:
    """Return random sequences: input_ids and labels."""
    import torch

    ids = torch.randint(0, VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": r, "labels": r} for r in ids]


def optimizer(params: Any) -> Any:
    """Return the optimizer of every system."""
    import torch

    return torch.optim.AdamW(params, lr=1e-4)


def after_step(engine: Any = None) -> None:
    """Write down what a step took.

    Args:
        engine: Holmes' engine, or None.
    """
    from holmes_core.runtime.watchdog import Watchdog

    now = time.perf_counter()
    compute, across = 0.0, []
    if engine is not None and (watch := Watchdog.running()) is not None:
        compute = watch.pulse.times(watch.pulse.values())[3]
        topology, axes = engine.plan.topology, {group.name: group.axis for group in engine.plan.groups}
        across = [
            (axes.get(name, "shared"), sent)
            for name, ranks, sent in engine.groups.traffic.rows()
            if len(topology.clusters) == 1 or len({topology.cluster_index(rank) for rank in ranks}) > 1
        ]
    NOTES.append((now, compute, sum(n for _, n in across), sum(n for axis, n in across if axis == "dp")))
    for wait in WAIT:
        wait()


def lightning(strategy: Any, *, batch: int, steps: int, shard: Callable[[Any, Any], None] | None = None) -> None:
    """Train with Lightning.

    Args:
        strategy: The Trainer's strategy.
        batch: Sequences per replica and step.
        steps: Steps.
        shard: Called in configure_model with the model and the strategy's mesh.
    """
    import lightning.pytorch as L
    import torch

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model()

        def configure_model(self) -> None:
            if shard is not None and not NOTES:
                shard(self.model, self.device_mesh)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return optimizer(self.parameters())

        def on_train_batch_end(self, *_: Any) -> None:
            after_step(getattr(self.trainer.strategy, "_engine", None))

    loader = torch.utils.data.DataLoader(rows(batch * RANKS * (steps + 1)), batch_size=batch)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, num_nodes=RANKS, max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)


def accelerate(*, batch: int, steps: int, **options: Any) -> None:
    """Train with a loop of Accelerate's; `options` go to Accelerator. Under Holmes nothing here changes."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, **options)
    loader = torch.utils.data.DataLoader(rows(batch * RANKS * (steps + 1)), batch_size=batch)
    network = model()
    network, optim, loader = accelerator.prepare(network, optimizer(network.parameters()), loader)
    for one in loader:
        loss = network(**one).loss
        accelerator.backward(loss)
        optim.step()
        optim.zero_grad()
        after_step(getattr(vars(network).get("_holmes_call_mode"), "engine", None))
        if len(NOTES) == steps:
            break


def composed(*, batch: int, steps: int, microbatches: int, reshard: bool) -> None:
    """Train with torch.distributed.pipelining and FSDP2 put together as torchtitan does: mesh (pp, dp), rank order.

    The head has a weight of its own: torch's pipelining does not sum the gradients of tied ones. That is less traffic.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("pp", "dp"))
    whole = model(tied=False)
    stage_index = mesh["pp"].get_local_rank()
    gpt, cut = whole.transformer, (LAYERS + 1) // 2

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.ModuleList([gpt.wte, gpt.wpe]) if stage_index == 0 else None
            self.blocks = nn.ModuleList(gpt.h[:cut] if stage_index == 0 else gpt.h[cut:])
            self.head = nn.ModuleList([gpt.ln_f, whole.lm_head]) if stage_index == 1 else None

        def forward(self, x: Any) -> Any:
            if self.embed is not None:
                x = self.embed[0](x) + self.embed[1](torch.arange(x.shape[1]))
            for block in self.blocks:
                x = block(x)
                x = x[0] if isinstance(x, tuple) else x
            return x if self.head is None else self.head[1](self.head[0](x))

    part = Part()
    for block in part.blocks:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshard)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=reshard)
    optim = optimizer(part.parameters())

    def loss_of(logits: Any, ids: Any) -> Any:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    stage = PipelineStage(part, stage_index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)
    data = rows(batch * (steps + 1) * 2)[mesh["dp"].get_local_rank() :: 2]
    for step in range(steps):
        ids = torch.stack([r["input_ids"] for r in data[step * batch : (step + 1) * batch]])
        schedule.step(*([ids] if stage_index == 0 else []), target=ids if stage_index == 1 else None)
        optim.step()
        optim.zero_grad()
        after_step()
    dist.destroy_process_group()


def shard_blocks(reshard: bool) -> Callable[[Any, Any], None]:
    """Return what shards a GPT with FSDP2, block by block."""

    def shard(network: Any, mesh: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        for block in network.transformer.h:
            fully_shard(block, mesh=mesh["data_parallel"], reshard_after_forward=reshard)
        fully_shard(network, mesh=mesh["data_parallel"], reshard_after_forward=reshard)

    return shard


def train(kind: str, options: dict[str, Any], *, batch: int, steps: int) -> None:
    """Be one rank of a system.

    Args:
        kind: Which.
        options: Of the system; for Holmes they are in its configuration already, `replicas` among them is used here.
        batch: Sequences of the whole job per step.
        steps: Steps.
    """
    import torch

    torch.set_num_threads(1)
    own = batch // options.get("replicas", RANKS)
    if kind == "holmes":
        lightning("holmes", batch=own, steps=steps)
    elif kind in ("holmes_accelerate", "accelerate_ddp"):
        handlers = []
        if "bucket_cap_mb" in options:
            from accelerate import DistributedDataParallelKwargs

            handlers = [DistributedDataParallelKwargs(bucket_cap_mb=options["bucket_cap_mb"])]
        accelerate(batch=own, steps=steps, kwargs_handlers=handlers)
    elif kind == "accelerate_fsdp2":
        from accelerate import FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"],
            reshard_after_forward=options["reshard"],
        )  # fmt: skip
        accelerate(batch=own, steps=steps, fsdp_plugin=plugin)
    elif kind == "composed":
        composed(batch=own, steps=steps, microbatches=options["microbatches"], reshard=options["reshard"])
    elif kind == "ddp":
        from lightning.pytorch.strategies import DDPStrategy

        more = {"bucket_cap_mb": options["bucket_cap_mb"], "gradient_as_bucket_view": True}
        lightning(DDPStrategy(process_group_backend="gloo", **more), batch=own, steps=steps)
    elif kind == "fsdp2":
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend="gloo")
        lightning(strategy, batch=own, steps=steps, shard=shard_blocks(options["reshard"]))
    else:
        raise ValueError(kind)
