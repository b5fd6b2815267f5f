# SPDX-License-Identifier: Apache-2.0
"""Small models as users write them, with the traps that a pipeline has to survive or refuse; run inside workers."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, BLOCKS = 40, 16, 5


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(F.gelu(self.up(self.norm(mixed))))


class Gpt(nn.Module):
    """A GPT with an untied head, a raw position table and a learned scalar."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.randn(32, DIM) * 0.1)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def embed(self, ids: Tensor) -> Tensor:
        return self.tok(ids) + self.pos[: ids.shape[1]]

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.embed(ids))) * self.scale)


class ScaledBetween(Gpt):
    """Does something to the hidden state between blocks, with a parameter."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x * self.scale) * 0.9
        return x


class PositionEveryBlock(Gpt):
    """Hands a raw parameter to every block."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.pos[: x.shape[1]])
        return x


class Checkpointed(Gpt):
    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    reentrant = True


class CheckpointedPairs(Gpt):
    def body(self, x: Tensor) -> Tensor:
        for i in range(0, len(self.blocks), 2):
            x = checkpoint(lambda y, i=i: nn.Sequential(*self.blocks[i : i + 2])(y), x, use_reentrant=False)
        return x


class SharedModule(Gpt):
    """Blocks of different stages share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[4].up = self.blocks[0].up


class HiddenStates(nn.Module):
    """A transformers model asked for the output of every block."""

    def __init__(self) -> None:
        super().__init__()
        from tests.models import zoo

        self.model = zoo.build("llama")

    def forward(self, ids: Tensor) -> Tensor:
        output = self.model(input_ids=ids, output_hidden_states=True)
        return output.logits + output.hidden_states[1].mean(-1, keepdim=True)


class NoGradBody(Gpt):
    """A frozen feature extractor: right, and without gradient, as in one process."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().body(x)


class HandTied(Gpt):
    """The head reads the embedding's weight without calling a module."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.body(self.embed(ids))), self.tok.weight) * self.scale


class Named(nn.Module):
    """No list: blocks with names, called in the order of registration."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.one, self.two, self.three, self.four = Block(), Block(), Block(), Block()
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.four(self.three(self.two(self.one(self.tok(ids))))))


class Wrapper(nn.Module):
    """As a LightningModule: backbone and head side by side, loss weight a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.8))
        self.backbone = Gpt()
        self.backbone.head = nn.Identity()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.backbone(ids)) / self.temperature


def sequential() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, DIM), Block(), Block(), Block(), nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB))


# ---- models that a pipeline must refuse, and would run with wrong numbers


class FirstResidual(Gpt):
    """The embeddings come back at the end."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) + 0.5 * x


class EveryBlockReadsEmbeddings(Gpt):
    def body(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = block(x + 0.1 * first)
        return x


class SkipConnections(Gpt):
    """A U-Net: late blocks read the output of early ones."""

    def body(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            if i >= 3:
                x = x + kept.pop()
            x = block(x)
            if i < 2:
                kept.append(x)
        return x


class Buffered(Gpt):
    """Outputs of blocks are written into one tensor, from which the head reads."""

    def body(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(len(self.blocks), *x.shape)
        for i, block in enumerate(self.blocks):
            x = block(x)
            buffer[i] = x
        return buffer.mean(0)


class AuxBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.aux_loss: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.aux_loss = x.square().mean()
        return x


class AuxAttribute(Gpt):
    """Blocks keep an auxiliary loss, which the step adds up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AuxBlock() for _ in range(BLOCKS)])


class SharingBlock(Block):
    def forward(self, x: Tensor, shared: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x + shared.get("state", torch.zeros(())))
        shared["state"] = x.mean(1, keepdim=True)
        return x


class SharedDict(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([SharingBlock() for _ in range(BLOCKS)])

    def body(self, x: Tensor) -> Tensor:
        shared: dict[str, Tensor] = {}
        for block in self.blocks:
            x = block(x, shared)
        return x


class WritingBlock(Block):
    def forward(self, x: Tensor, total: Tensor) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        total += x.mean()
        return x


class SharedTensor(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([WritingBlock() for _ in range(BLOCKS)])

    def body(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            x = block(x, total)
        return x + total


class PairBlock(Block):
    def forward(self, x: Tensor, state: Any = None) -> Any:  # type: ignore[override]
        x = super().forward(x if state is None else x + state[0])
        return x, [x.mean(1, keepdim=True)]


class StateList(Gpt):
    """Each block takes the list that the one before returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PairBlock() for _ in range(BLOCKS)])

    def body(self, x: Tensor) -> Tensor:
        state = None
        for block in self.blocks:
            x, state = block(x, state)
        return x


class ReadsEmbedding(Gpt):
    """Branches on the values of the embeddings."""

    def body(self, x: Tensor) -> Tensor:
        return super().body(x) * (2.0 if bool(x.mean() > 0) else 1.0)


class Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        ctx.save_for_backward(x)
        ctx.blocks = blocks
        for block in blocks:
            x = block(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = y = x.detach().requires_grad_()
            for block in ctx.blocks:
                y = block(y)
            torch.autograd.backward(y, grads[0])
        return leaf.grad, None


class InFunction(Gpt):
    def body(self, x: Tensor) -> Tensor:
        return Reversible.apply(x, self.blocks)


class Twice(Gpt):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + super().forward(ids.flip(1))


class LayerDrop(Gpt):
    def body(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i != 1:
                x = block(x)
        return x


# ---- steps


def data(rows: int = 5, length: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
    lengths = torch.randint(2, length + 1, (rows,), generator=generator)
    lengths[0] = length
    labels = ids.roll(-1, 1).masked_fill(torch.arange(length)[None] >= lengths[:, None], -100)
    return dict(ids=ids, labels=labels)


def token_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Mean over label tokens, labels aligned with logits."""
    return F.cross_entropy(model(part["ids"]).flatten(0, 1), part["labels"].flatten())


def sum_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(part["ids"]).flatten(0, 1), part["labels"].flatten(), reduction="sum")


def sample_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Mean over samples of each sample's mean."""
    losses = F.cross_entropy(model(part["ids"]).transpose(1, 2), part["labels"], reduction="none")
    return (losses.sum(1) / (part["labels"] != -100).sum(1)).mean()


def unfit_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Negatives within the batch: no weighted mean of parts."""
    pooled = model(part["ids"]).mean(1)
    return F.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))


def aux_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    loss = token_loss(model, part)
    return loss + 0.1 * sum(block.aux_loss for block in model.blocks)  # type: ignore[operator, union-attr]


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = globals()[name]()
        with torch.no_grad():
            for param in model.parameters():
                if param.ndim == 1:
                    param.add_(0.1 * torch.randn_like(param))
    return model


def run(
    rank: int,
    name: str,
    config: dict[str, Any],
    loss: str = "token_loss",
    rows: int = 5,
    freeze: tuple[str, ...] = (),
    trace: bool = False,
    mistake: str = "",
) -> dict[str, Any]:
    """Compare a model of this file with one process."""
    from tests.models.pipeline import Job, compare

    def prepare(model: nn.Module) -> None:
        for key, param in model.named_parameters():
            if key.startswith(freeze or ("-",)):
                param.requires_grad_(False)

    return compare(
        Job(
            build=lambda: build(name),
            batch=lambda replica: data(rows, seed=replica),
            step=lambda model: lambda part, index: globals()[loss](model, part),
            logits=lambda model, part: model(part["ids"]),
            prepare=prepare,
            config={"num_microbatches": 3, **config},
            trace=trace,
            mistake=globals().get(mistake),
        )
    )


# ---- deliberate mistakes: each must fail the comparison


def drop_received_gradient(engine: Any) -> None:
    """Every stage but the last takes zeros for the gradient of its output."""
    for stage in engine.stages:
        plain = stage.backward_one_chunk

        def backward(index: int, stage: Any = stage, plain: Any = plain, **kwargs: Any) -> None:
            if index in stage._grads_out:
                stage._grads_out[index].zero_()
            plain(index, **kwargs)

        stage.backward_one_chunk = backward


def equal_weights(engine: Any) -> None:
    """Micro-batches count alike, whatever tokens they hold."""
    engine._weights = lambda batches: [1.0 / len(batches)] * len(batches)


def own_shared_gradients(engine: Any) -> None:
    """Gradients of shared parameters are not summed over stages."""
    engine.gradients._shared = []


def steps(rank: int, name: str, config: dict[str, Any], shapes: list[tuple[int, int]], loss: str) -> dict[str, Any]:
    """Train on batches of changing shapes with SGD; returns the largest differences from one process."""
    from tests.models.pipeline import make_engine

    model, alone = build(name), build(name)
    engine = make_engine(model, config)
    step = globals()[loss]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    worst, counts = 0.0, []
    for number, (rows, length) in enumerate(shapes):
        batch = data(rows, length, seed=number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        result = engine.train(lambda part, index: step(model, part), batch)
        counts.append(result.num_microbatches)
        engine.reduce_gradients()
        right = step(alone, batch)
        right.backward()
        if result.loss is not None:
            worst = max(worst, abs(float(result.loss) - float(right.detach())) / float(right.detach()))
        for optimizer in optimizers:
            optimizer.step()
        engine.broadcast_parameters()
    reference = dict(alone.named_parameters())
    weights = max(float((p - reference[n]).detach().abs().max()) for n, p in engine.parameters().items())
    engine.release()
    return dict(loss=worst, weights=weights, counts=counts)


def left_early(rank: int, config: dict[str, Any], model: str) -> dict[str, int]:
    """Train a batch; return how many buckets had left when, and how many should have.

    ``begin`` and ``end``: before the first and the last stage of this rank were done; ``one_stage``: those with
    parameters of one stage only; ``done``: when all stages were; ``all``: of how many; ``late``: the place of those
    with parameters of several stages; ``embedded``: when the embedding's stage was done, or -1.
    """
    from tests.models.pipeline import make_engine

    engine = make_engine(build(model), {"check_loss": False, **config})
    parallel = engine.gradients.data_parallel
    seen: list[int] = []

    embedded: list[int] = []

    def completing(stage: int | None) -> None:
        if stage is None:
            seen.append(parallel._launched)
        at = parallel._completing
        parallel.completing(stage)
        if stage is None and at == 0:
            embedded.append(parallel._launched)

    params = engine.parameters()
    on_one = {params[e.name] for e in engine.entries if e.local and len(e.stages) == 1}
    on_one &= {param for param, stages in engine._stages_of.items() if len(stages) == 1}
    early = [on_one.issuperset(chain(*bucket.parts.values())) for bucket in parallel._buckets]

    for stage in engine.stages:
        stage.completing = completing
    engine.train(lambda part, _: token_loss(engine.root, part), data(rows=8), completes=True)
    in_the_end = parallel._launched
    engine.reduce_gradients()
    engine.release()
    return dict(
        begin=seen[0], end=seen[-1], one_stage=sum(early), done=in_the_end, all=len(parallel._buckets),
        late=[*early, False].index(False), embedded=embedded[0] if embedded else -1, stages=len(engine.local_stages),
    )  # fmt: skip


def trimmed_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
    """Cuts the sequence behind the longest row: the activation's shape depends on values."""
    longest = int((part["labels"] != -100).sum(1).max())
    return token_loss(model, {key: value[:, :longest] for key, value in part.items()})


def empty_rows(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    """A batch whose last micro-batch has no label token at all."""
    from tests.models.pipeline import Job, compare

    def batch(replica: int) -> dict[str, Tensor]:
        made = data(6)
        made["labels"][4:] = -100
        return made

    return compare(
        Job(
            build=lambda: build("Gpt"),
            batch=batch,
            step=lambda model: lambda part, index: token_loss(model, part),
            config={"num_microbatches": 3, **config},
        )
    )


def classifier(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    """A Llama with a sequence-classification head, which pools at the last token that is no padding."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from tests.models.pipeline import Job, compare

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return LlamaForSequenceClassification(
                LlamaConfig(
                    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
                    num_key_value_heads=2, pad_token_id=0, num_labels=3, initializer_range=0.2, use_cache=False,
                )
            )  # fmt: skip

    def batch(replica: int) -> dict[str, Tensor]:
        made = data(5)
        mask = (made["labels"] != -100).long()
        return dict(input_ids=made["ids"].clamp_min(1) * mask, attention_mask=mask, labels=torch.arange(5) % 3)

    return compare(
        Job(
            build=make,
            batch=batch,
            step=lambda model: lambda part, index: model(**part).loss,
            logits=lambda model, part: model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits,
            config={"num_microbatches": 3, **config},
        )
    )


def checkpointed_llama(rank: int, config: dict[str, Any]) -> dict[str, Any]:
    from tests.models import zoo
    from tests.models.pipeline import Job, compare

    recomputed: list[int] = []

    def watch(engine: Any) -> None:
        engine.chain.blocks[-1].self_attn.register_forward_hook(lambda *_: recomputed.append(1))

    found = compare(
        Job(
            build=lambda: zoo.build("llama"),
            batch=lambda replica: zoo.batch("llama", batch=4),
            step=lambda model: lambda part, index: model(**part).loss,
            prepare=lambda model: model.gradient_checkpointing_enable(),
            mistake=watch,
            config={"num_microbatches": 2, "check_loss": False, **config},
        )
    )
    return found | {"calls": len(recomputed)}
