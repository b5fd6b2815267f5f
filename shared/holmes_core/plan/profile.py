# SPDX-License-Identifier: Apache-2.0
"""ModelProfile: what each block of a model weighs, computes and keeps. Arithmetic on shapes; no weights, no torch.

Conventions: a multiply-add is 2 FLOPs; a backward pass computes twice what its forward pass does; attention scores are
counted in full, as PaLM (Chowdhery et al. 2022, appendix B) and Megatron-LM (Narayanan et al. 2021, appendix) do,
although kernels for causal masks skip half of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from holmes_core.cluster.value import Value
from holmes_core.plan.layout import ModelFacts

__all__ = ["BlockProfile", "BlockShape", "ModelProfile", "ModelShape", "profile_of_shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape(Value):
    """The shape of one transformer block.

    Args:
        hidden: Width of the residual stream.
        heads: Attention heads.
        kv_heads: Key/value heads.
        qk_dim: Width of one head's query and key.
        v_dim: Width of one head's value.
        ffn: Width of the dense feed-forward layer; 0 if there is none.
        gated: Whether feed-forward layers have a gate beside the up projection.
        experts: Routed experts; 0 in a dense block.
        active_experts: Routed experts that one token visits.
        expert_ffn: Width of one expert.
        shared_ffn: Width of the feed-forward layer that all tokens visit beside their experts; 0 if none.
        attention_parameters: Matrix elements of the attention's projections.
        vector_parameters: Elements of biases, norms and other vectors that every token uses.
        expert_vector_parameters: Elements of the biases of one expert.
        router_parameters: Elements of the router and of the gate of the shared layer.
        window: Tokens one token attends to, where fewer than all; 0: all.
        float_norms: Whether norms keep a float32 copy of their input (RMS norms written in Python do).
        ffn_kept: How many tensors as wide as the feed-forward layer are kept: 4 if gated (gate, its activation, up,
            their product), 2 if plain (the projection and its activation), 1 for ReLU (its result says all).
        qk_norms: Whether queries and keys are normed.
    """

    hidden: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    ffn: int = 0
    gated: bool = True
    experts: int = 0
    active_experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    attention_parameters: int
    vector_parameters: int = 0
    expert_vector_parameters: int = 0
    router_parameters: int = 0
    window: int = 0
    float_norms: bool = True
    ffn_kept: int = 4
    qk_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape(Value):
    """The shape of a whole model.

    Args:
        name: For people.
        blocks: The main list of blocks.
        vocab: Rows of the embedding.
        embedding_parameters: Elements of token and position embeddings and their norm.
        head_parameters: Elements of the head's matrix and bias, counted also where the matrix is the embedding's.
        final_norm_parameters: Elements of the norm before the head.
        tied: Whether head and embedding share their matrix.
        positions: Longest sequence the model was made for; 0: not said.
        assumptions: What the configuration does not say and was assumed.
    """

    name: str
    blocks: tuple[BlockShape, ...]
    vocab: int
    embedding_parameters: int
    head_parameters: int
    final_norm_parameters: int
    tied: bool
    positions: int = 0
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile(Value):
    """One block at one sequence length.

    Args:
        parameters: All of them.
        active_parameters: Those that one token uses (fewer in a mixture of experts).
        forward_flops: Of one sample.
        attention_flops: Those of them that scores and their weighted sum take.
        activation_bytes: Of one sample, kept from its forward to its backward pass.
        whole_bytes: Those of them that each tensor-parallel rank keeps in full (norms and their results).
        boundary_bytes: Of one sample, handed to the next block; all that is kept where the block is recomputed.
    """

    parameters: int
    active_parameters: int
    forward_flops: float
    attention_flops: float
    activation_bytes: int
    whole_bytes: int
    boundary_bytes: int

    @property
    def backward_flops(self) -> float:
        """Of one sample: gradients of inputs and of weights, each as much as the forward pass."""
        return 2 * self.forward_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile(Value):
    """A model at one sequence length and precision: its blocks, and what surrounds them.

    Args:
        name: For people.
        seq: Tokens of one sample.
        value_bytes: Bytes of one activation (2 for bf16).
        stream_bytes: Bytes of one value of the residual stream (4 under autocast: its sums stay in float32).
        blocks: The main list of blocks.
        embedding_parameters: On the first stage.
        head_parameters: On the last stage: head (also where tied: the stage holds a copy) and final norm.
        tied_parameters: Those of the head that are the embedding's; 0 if not tied.
        head_forward_flops: Of one sample.
        head_activation_bytes: Of one sample: logits, their float32 copy and log-probabilities.
        num_heads: Attention heads.
        num_kv_heads: Key/value heads.
        vocab_size: Rows of the embedding.
        assumptions: What the configuration does not say and was assumed.
    """

    name: str
    seq: int
    value_bytes: int = 2
    stream_bytes: int = 2
    blocks: tuple[BlockProfile, ...]
    embedding_parameters: int
    head_parameters: int
    tied_parameters: int
    head_forward_flops: float
    head_activation_bytes: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    assumptions: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """All parameters of the model, shared ones once."""
        ends = self.embedding_parameters + self.head_parameters - self.tied_parameters
        return ends + sum(block.parameters for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        ends = self.embedding_parameters + self.head_parameters - self.tied_parameters
        return ends + sum(block.active_parameters for block in self.blocks)

    @property
    def forward_flops(self) -> float:
        """Of one sample."""
        return self.head_forward_flops + sum(block.forward_flops for block in self.blocks)

    @property
    def flops(self) -> float:
        """Forward and backward pass of one sample; recomputation is no part of it (this is what MFU counts)."""
        return 3 * self.forward_flops

    @property
    def boundary_bytes(self) -> int:
        """Of one sample: what one stage sends to the next."""
        return self.blocks[0].boundary_bytes

    @property
    def reduced_bytes(self) -> int:
        """Of one sample: what one all-reduce of tensor parallelism sums, a projection's result."""
        return self.boundary_bytes // self.stream_bytes * self.value_bytes

    @property
    def uniform(self) -> bool:
        """Whether all blocks are alike."""
        return all(block == self.blocks[0] for block in self.blocks)

    def facts(self) -> ModelFacts:
        """Return what the layout's checks need."""
        return ModelFacts(
            num_blocks=len(self.blocks),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            vocab_size=self.vocab_size,
            tied=self.tied_parameters > 0,
        )


def profile_of_shape(shape: ModelShape, *, seq: int, value_bytes: int = 2, stream_bytes: int = 0) -> ModelProfile:
    """Work out what a model of a shape computes and keeps.

    Args:
        shape: The model.
        seq: Tokens of one sample.
        value_bytes: Bytes of one activation.
        stream_bytes: Bytes of one value of the residual stream, which stages send; 0: as many as an activation.

    Returns:
        The profile.
    """
    stream_bytes = stream_bytes or value_bytes
    known: dict[BlockShape, BlockProfile] = {}
    for block in shape.blocks:
        if block not in known:
            known[block] = _block(block, seq, value_bytes, stream_bytes)
    first = shape.blocks[0]
    matrix = shape.vocab * first.hidden
    return ModelProfile(
        name=shape.name,
        seq=seq,
        value_bytes=value_bytes,
        stream_bytes=stream_bytes,
        blocks=tuple(known[block] for block in shape.blocks),
        embedding_parameters=shape.embedding_parameters,
        head_parameters=shape.head_parameters + shape.final_norm_parameters,
        tied_parameters=matrix if shape.tied else 0,
        head_forward_flops=2.0 * seq * matrix,
        # The loss works in float32: logits, their float32 copy, log-probabilities; and the norm's input.
        head_activation_bytes=seq * (shape.vocab * (value_bytes + 8) + first.hidden * value_bytes),
        num_heads=first.heads,
        num_kv_heads=first.kv_heads,
        vocab_size=shape.vocab,
        assumptions=shape.assumptions,
    )


def _block(shape: BlockShape, seq: int, value_bytes: int, stream_bytes: int) -> BlockProfile:
    matrices = 3 if shape.gated else 2
    dense = matrices * shape.hidden * (shape.ffn + shape.shared_ffn)
    expert = matrices * shape.hidden * shape.expert_ffn + shape.expert_vector_parameters
    always = shape.attention_parameters + dense + shape.router_parameters
    seen = min(seq, shape.window) if shape.window else seq
    attention = 2.0 * seq * seen * shape.heads * (shape.qk_dim + shape.v_dim)
    multiplied = always + shape.active_experts * matrices * shape.hidden * shape.expert_ffn
    kept = _kept_per_token(shape, value_bytes, stream_bytes)
    return BlockProfile(
        parameters=always + shape.vector_parameters + shape.experts * expert,
        active_parameters=always + shape.vector_parameters + shape.active_experts * expert,
        forward_flops=2.0 * seq * multiplied + attention,
        attention_flops=attention,
        activation_bytes=seq * sum(kept),
        whole_bytes=seq * kept[0],
        boundary_bytes=seq * shape.hidden * stream_bytes,
    )


def _kept_per_token(shape: BlockShape, value_bytes: int, stream_bytes: int) -> tuple[int, int]:
    """Bytes that one token leaves for the backward pass (by norms, by the rest); attention keeps no scores.

    Each of the two norms keeps its input and its result, the projections' input (an RMS norm written in Python keeps
    float32, and its result before the weight, too); attention keeps q, k, v and its result; the feed-forward layer
    keeps what its activation and its last projection multiply. No dropout. (Counted like Korthikanti et al. 2022,
    section 4.)
    """
    norms = 2 * shape.hidden * (stream_bytes + value_bytes + (4 if shape.float_norms else 0))
    attention = shape.heads * (shape.qk_dim + 2 * shape.v_dim) + shape.kv_heads * (shape.qk_dim + shape.v_dim)
    width = shape.ffn + shape.shared_ffn + shape.active_experts * shape.expert_ffn
    routed = shape.active_experts * shape.hidden  # each visited expert has its own copy of the token
    normed = (shape.heads + shape.kv_heads) * shape.qk_dim * (4 + value_bytes) if shape.qk_norms else 0
    return norms, normed + value_bytes * (attention + shape.ffn_kept * width + routed)
