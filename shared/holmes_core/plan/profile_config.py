# SPDX-License-Identifier: Apache-2.0
"""Read a model's shape from its transformers configuration (config.json), without weights and without torch.

Most of a shape is in the keys, which differ in spelling only. What families build in without a key (biases, norms,
ties) is in one table; for a family that is not in it the keys decide, and the profile says what was assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holmes_core.errors import ConfigError
from holmes_core.plan.profile import BlockShape, ModelProfile, ModelShape, profile_of_shape

__all__ = ["profile_of_config", "shape_of_config"]

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num")
_FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_POSITIONS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERT_FFN = ("moe_intermediate_size", "expert_intermediate_size")
_LEFT_OUT = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What a family builds in. A string is the key that decides, with ``!`` before one that defaults to true."""

    gated: bool = True
    norm: str = "rms"  # rms: a weight; layer: weight and bias; weight: a layer norm without bias; none
    norms: int = 2
    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    qk_norm: str = ""  # head: one head wide; full: all heads wide
    positions: int = -1  # learned positions beyond max_position_embeddings; -1: none are learned
    embedding_norm: bool = False
    head_bias: bool = False
    tied: bool = False
    router_bias: bool = False
    sinks: bool = False


_GPT = _Family(gated=False, norm="layer", qkv_bias=True, out_bias=True, mlp_bias=True)
_PLAIN = _Family(qkv_bias=False, out_bias=False, mlp_bias=False)


_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "granite": _Family(),
    "mistral": _PLAIN,
    "ministral": _PLAIN,
    "mixtral": _PLAIN,
    "phi3": _PLAIN,
    "qwen2": replace(_PLAIN, qkv_bias=True),
    "qwen2_moe": replace(_PLAIN, qkv_bias=True),
    "qwen3": _Family(qk_norm="head", mlp_bias=False),
    "qwen3_moe": _Family(qk_norm="head", mlp_bias=False),
    "gemma": _Family(tied=True, mlp_bias=False),
    "gemma2": _Family(tied=True, norms=4, mlp_bias=False),
    "gemma3_text": _Family(tied=True, norms=4, qk_norm="head", mlp_bias=False),
    "olmo": _Family(norm="none", mlp_bias=False),
    "olmo2": _Family(qk_norm="full", mlp_bias=False),
    "cohere": _Family(norm="weight", norms=1, tied=True, mlp_bias=False),
    "stablelm": replace(_PLAIN, norm="layer", qkv_bias="use_qkv_bias"),
    "starcoder2": _Family(
        gated=False, norm="layer", qkv_bias="!use_bias", out_bias="!use_bias", mlp_bias="!use_bias", tied=True
    ),
    "gpt2": replace(_GPT, positions=0, tied=True),
    "gpt_bigcode": replace(_GPT, positions=0, tied=True),
    "gpt_neox": replace(_GPT, qkv_bias="!attention_bias", out_bias="!attention_bias"),
    "gptj": replace(_GPT, norms=1, qkv_bias=False, out_bias=False, head_bias=True),
    "opt": replace(_GPT, positions=2, tied=True),
    "bloom": replace(_GPT, embedding_norm=True, tied=True),
    "phi": replace(_GPT, norms=1, head_bias=True),
    "falcon": replace(_GPT, norms=1, qkv_bias="bias", out_bias="bias", mlp_bias="bias", tied=True),
    "deepseek_v2": _PLAIN,
    "deepseek_v3": _PLAIN,
    "gpt_oss": _Family(mlp_bias=True, router_bias=True, sinks=True),
}


def profile_of_config(
    config: Mapping[str, Any], *, seq: int = 0, value_bytes: int = 2, stream_bytes: int = 0, name: str = ""
) -> ModelProfile:
    """Profile a model from its configuration.

    Args:
        config: The content of config.json.
        seq: Tokens of one sample; 0 takes the longest that the configuration names, at most 4096.
        value_bytes: Bytes of one activation.
        stream_bytes: Bytes of one value of the residual stream; 0: as many as an activation.
        name: For people; empty takes the configuration's own.

    Returns:
        The profile.

    Raises:
        ConfigError: The configuration does not describe a transformer decoder.
    """
    shape = shape_of_config(config, name=name)
    seq = seq or min(shape.positions or 2048, 4096)
    return profile_of_shape(shape, seq=seq, value_bytes=value_bytes, stream_bytes=stream_bytes)


def shape_of_config(config: Mapping[str, Any], *, name: str = "") -> ModelShape:
    """Read the shape of a model from its configuration.

    Raises:
        ConfigError: A size that every decoder has is missing or no positive number.
    """
    assumptions: list[str] = []
    outer = config
    for key in _LEFT_OUT:
        if isinstance(config.get(key), Mapping):
            config = {"tie_word_embeddings": outer.get("tie_word_embeddings", False), **config[key]}
            assumptions.append(f"only the language model ({key}) is counted")
            break
    kind = str(config.get("model_type") or "")
    family = _FAMILIES.get(kind) or _guess(config, kind, assumptions)
    hidden, layers = _size(config, _HIDDEN), _size(config, _LAYERS)
    vocab = _size(config, ("vocab_size",))
    blocks = tuple(_block(config, family, kind, hidden, index) for index in range(layers))
    tied = config.get("tie_word_embeddings", family.tied)
    if "tie_word_embeddings" not in config and kind not in _FAMILIES:
        assumptions.append("embedding and head are not tied (tie_word_embeddings is not given)")
    norm = _norm(family, hidden)
    positions = next((int(config[key]) for key in _POSITIONS if _is_size(config.get(key))), 0)
    embedding = vocab * hidden + (norm if family.embedding_norm else 0)
    if family.positions >= 0:
        embedding += (positions + family.positions) * hidden
    return ModelShape(
        name=name or str(outer.get("_name_or_path") or outer.get("model_type") or "model"),
        blocks=blocks,
        vocab=vocab,
        embedding_parameters=embedding,
        head_parameters=vocab * hidden + (vocab if family.head_bias else 0),
        final_norm_parameters=norm,
        tied=bool(tied),
        positions=positions,
        assumptions=tuple(assumptions),
    )


def _guess(config: Mapping[str, Any], kind: str, assumptions: list[str]) -> _Family:
    """What the keys say of a family that is not in the table."""
    gated = "rms_norm_eps" in config or _activation(config) in ("silu", "swish", "swiglu")
    taken = "gated feed-forward and RMS norms" if gated else "plain feed-forward, layer norms, biases"
    assumptions.append(f"model_type {kind or 'missing'!r} is not in the table: {taken}")
    return _Family() if gated else _GPT


def _block(config: Mapping[str, Any], family: _Family, kind: str, hidden: int, index: int) -> BlockShape:
    heads = _size(config, _HEADS)
    kv_heads = _size(config, _KV_HEADS, default=1 if config.get("multi_query") else heads)
    if kind == "falcon" and not config.get("new_decoder_architecture"):
        kv_heads = 1 if config.get("multi_query", True) else heads
    ffn = _size(config, _FFN, default=4 * hidden)
    gated, norms = family.gated, family.norms
    if kind == "falcon":
        parallel = config.get("parallel_attn", True)
        both = config.get("new_decoder_architecture") and (config.get("num_ln_in_parallel_attn") or 2) == 2
        norms = 2 if both or not parallel else 1
    if kind == "stablelm" and config.get("use_parallel_residual"):
        norms = 1
    projections = _attention(config, family, hidden, heads, kv_heads)
    shape = _Experts.read(config, family, hidden, ffn, index)
    matrices_out = (2 if gated else 1) * (shape.dense_ffn + shape.shared_ffn)
    vectors = norms * _norm(family, hidden) + projections.vectors
    mlp_bias = _flag(config, family.mlp_bias)
    if mlp_bias and (shape.dense_ffn or shape.shared_ffn):
        vectors += matrices_out + hidden
    return BlockShape(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        qk_dim=projections.qk_dim,
        v_dim=projections.v_dim,
        ffn=shape.dense_ffn,
        gated=gated,
        experts=shape.experts,
        active_experts=shape.active,
        expert_ffn=shape.expert_ffn,
        shared_ffn=shape.shared_ffn,
        attention_parameters=projections.matrices,
        vector_parameters=vectors + (shape.experts if family.router_bias else 0),
        expert_vector_parameters=2 * shape.expert_ffn + hidden if shape.experts and mlp_bias else 0,
        router_parameters=shape.router,
        window=_window(config, index),
        float_norms=family.norm == "rms",
        qk_norms=bool(family.qk_norm),
        ffn_kept=4 if gated else 1 if "relu" in _activation(config) else 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    matrices: int
    vectors: int
    qk_dim: int
    v_dim: int


def _attention(config: Mapping[str, Any], family: _Family, hidden: int, heads: int, kv_heads: int) -> _Attention:
    if _is_size(config.get("kv_lora_rank")):
        return _latent_attention(config, family, hidden, heads)
    head = _size(config, ("head_dim",), default=hidden // heads)
    q, kv = heads * head, kv_heads * head
    vectors = (q + 2 * kv) * _flag(config, family.qkv_bias) + hidden * _flag(config, family.out_bias)
    if family.qk_norm:
        vectors += 2 * head if family.qk_norm == "head" else q + kv
    if config.get("qk_layernorm"):  # phi, stablelm
        vectors += (heads + kv_heads) * head if config.get("model_type") == "stablelm" else 4 * head
    if family.sinks:
        vectors += heads
    return _Attention(matrices=hidden * (2 * q + 2 * kv), vectors=vectors, qk_dim=head, v_dim=head)


def _latent_attention(config: Mapping[str, Any], family: _Family, hidden: int, heads: int) -> _Attention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): queries, keys and values by way of low ranks."""
    rope, nope = _size(config, ("qk_rope_head_dim",)), _size(config, ("qk_nope_head_dim",))
    value, kv_rank = _size(config, ("v_head_dim",)), _size(config, ("kv_lora_rank",))
    q_rank = config.get("q_lora_rank") or 0
    q = heads * (rope + nope)
    matrices = q_rank * (hidden + q) if q_rank else hidden * q
    matrices += hidden * (kv_rank + rope) + kv_rank * heads * (nope + value) + heads * value * hidden
    bias = (q_rank + kv_rank + rope + hidden) if config.get("attention_bias") else 0
    return _Attention(matrices=matrices, vectors=q_rank + kv_rank + bias, qk_dim=rope + nope, v_dim=value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    experts: int = 0
    active: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_ffn: int = 0
    router: int = 0

    @classmethod
    def read(cls, config: Mapping[str, Any], family: _Family, hidden: int, ffn: int, index: int) -> _Experts:
        """The feed-forward part of one block: dense, or experts."""
        experts = _size(config, _EXPERTS, default=0)
        step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1
        step = step if isinstance(step, int) else 1
        dense = (
            experts < 2
            or index in (config.get("mlp_only_layers") or ())
            or index < (config.get("first_k_dense_replace") or 0)
            or ("decoder_sparse_step" in config and (index + 1) % step != 0)
        )
        if dense:
            return cls(dense_ffn=ffn)
        width = _size(config, _EXPERT_FFN, default=ffn)
        shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
        gate = hidden if config.get("shared_expert_intermediate_size") else 0
        active = _size(config, ("num_experts_per_tok", "num_experts_per_token", "moe_k"), default=1)
        return cls(experts=experts, active=active, expert_ffn=width, shared_ffn=shared, router=experts * hidden + gate)


def _window(config: Mapping[str, Any], index: int) -> int:
    size, kinds = config.get("sliding_window"), config.get("layer_types")
    if not _is_size(size) or config.get("use_sliding_window") is False:
        return 0
    if isinstance(kinds, (list, tuple)) and index < len(kinds):
        return int(size or 0) if kinds[index] == "sliding_attention" else 0
    return int(size or 0)


def _activation(config: Mapping[str, Any]) -> str:
    return str(config.get("hidden_act") or config.get("activation_function") or config.get("hidden_activation") or "")


def _norm(family: _Family, width: int) -> int:
    return {"rms": 1, "weight": 1, "layer": 2, "none": 0}[family.norm] * width


def _flag(config: Mapping[str, Any], value: bool | str) -> bool:
    if isinstance(value, bool):
        return value
    return bool(config.get(value.removeprefix("!"), value.startswith("!")))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _size(config: Mapping[str, Any], names: tuple[str, ...], default: int | None = None) -> int:
    for name in names:
        if (value := config.get(name)) is not None:
            if not _is_size(value):
                if default is not None and value == 0:
                    continue
                raise ConfigError(
                    seen=f"{name} is {value!r}", where="model configuration", do=f"give {name} a positive whole number"
                )
            return int(value)
    if default is None:
        raise ConfigError(
            seen=f"no key {' or '.join(names)}",
            where=f"model configuration, model_type {config.get('model_type')!r}",
            means="every decoder has this size; other models (encoders and decoders, images) are not profiled",
            do="give the config.json of a language model",
        )
    return default
