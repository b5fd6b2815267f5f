# SPDX-License-Identifier: Apache-2.0
"""The model zoo: one tiny random model per transformers causal-LM family, built without any download.

Families that share one forward (llama and its many twins) are listed too: each is a separate modeling file that may
drift. A few entries are variants of one model type ("llama-tied", "opt-350m"): the part before "-" or the explicit
``model_type`` names the type. Weights are drawn wide and constants are perturbed (see ``build``), so that a dropped
block, norm or position embedding changes the loss by far more than rounding.

``describe`` looks at a model from outside, with hooks only, and says what a pipeline splitter has to know about it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # a first forward imports it, which sets TORCHINDUCTOR_CACHE_DIR: better here than inside a test
from torch import nn
from torch.utils._pytree import tree_flatten

VOCAB = 96
BLOCKS = 5

# fmt: off
# What every tiny config asks for; a name that a config class does not know is left out for that class.
COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=BLOCKS, num_attention_heads=4, num_key_value_heads=2,
    head_dim=8, intermediate_size=48, max_position_embeddings=64, use_cache=False, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, attention_dropout=0.0, hidden_dropout=0.0, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0, dropout=0.0, residual_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, activation_dropout=0.0, classifier_dropout=0.0, layerdrop=0.0, num_experts=4,
    num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, initializer_range=0.2,
    init_std=0.2,
)

S, F, L = "sliding_attention", "full_attention", "linear_attention"
MIXED = dict(layer_types=[S, S, F, S, F], sliding_window=4)
MLA = dict(kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_key_value_heads=4)
INDEXED = dict(index_topk=4, index_head_dim=16, index_n_heads=2)
DELTA = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4)
MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_expand=2, mamba_chunk_size=4)
BERT = dict(is_decoder=True)
SEQ2SEQ = dict(d_model=32, encoder_layers=2, decoder_layers=BLOCKS, encoder_ffn_dim=48, decoder_ffn_dim=48,
               encoder_attention_heads=4, decoder_attention_heads=4)
SPARSE1 = dict(mlp_layer_types=["dense", *["sparse"] * 4])
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Family:
    """One row of the zoo.

    model_type: the transformers model type; config: what differs from COMMON (a None value drops the common one).
    padding: right padding with an attention_mask is supported. causal: False for an encoder-decoder.
    unused: substrings of names of parameters that get no gradient in a plain causal-LM step.
    shifted: logits at t are scored against the label at t + 1 (False: against the label at t; the caller shifts).
        Exactly the families with False ignore num_items_in_batch, too.
    split: what a cut between two blocks has to carry; ``verdict(describe(model))`` finds the same.
        plain    the hidden state alone.
        carries  the hidden state and other things that each block returns and the next one takes.
        context  the hidden state; blocks also read what a module with parameters made before them, without gradient
                 (keep that module everywhere).
        aux      the hidden state; the loss also needs something of every block (router logits).
        breaks   more: see notes.
    notes: why, and what else surprises somebody who splits the model (shape of the activation, unused outputs).
    """

    name: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    padding: bool = True
    causal: bool = True
    unused: tuple[str, ...] = ()
    shifted: bool = True
    split: str = "plain"
    notes: str = ""

    @property
    def available(self) -> bool:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        return self.model_type in CONFIG_MAPPING_NAMES

    def build(self, *, seed: int = 0, **config_overrides: Any) -> nn.Module:
        """The model in train mode, its weights a function of ``seed`` alone; the global RNG is left as it was."""
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        config_class = CONFIG_MAPPING[self.model_type]
        known = _config_fields(config_class)
        values = {k: v for k, v in COMMON.items() if k in known}
        values |= {k: v for k, v in self.config.items() if v is not None}
        for key in (k for k, v in self.config.items() if v is None):
            values.pop(key, None)
        if callable(nested := values.pop("nested", None)):
            values |= nested()
        values |= config_overrides
        auto = transformers.AutoModelForCausalLM if self.causal else transformers.AutoModelForSeq2SeqLM
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            model = auto.from_config(config_class(**values))
            _perturb_constants(model)
        return model.train()


def _config_fields(config_class: type) -> set[str]:
    import inspect

    return set(inspect.signature(config_class.__init__).parameters) | set(config_class.attribute_map)


def _perturb_constants(model: nn.Module) -> None:
    """Norm weights of 1, biases of 0 and zero-initialised gates hide mistakes: give each a little noise."""
    with torch.no_grad():
        for param in model.parameters():
            if param.is_floating_point() and param.numel() > 1 and bool((param == param.flatten()[0]).all()):
                param.add_(0.05 * torch.randn_like(param))


FAMILIES: dict[str, Family] = {}


def _add(
    name: str,
    model_type: str | None = None,
    /,
    *,
    padding: bool = True,
    causal: bool = True,
    unused: tuple[str, ...] = (),
    shifted: bool = True,
    split: str = "plain",
    notes: str = "",
    **config: Any,
) -> None:
    family = Family(
        name=name,
        model_type=model_type or name,
        config=config,
        padding=padding,
        causal=causal,
        unused=unused,
        shifted=shifted,
        split=split,
        notes=notes,
    )
    if family.available:
        FAMILIES[name] = family


# fmt: off
# ---- one block list, one stream, nothing else
for _name in (
    "llama", "arcee", "apertus", "apertus1p5_text", "bitnet", "cwm", "exaone4", "ernie4_5", "gemma", "glm", "glm4",
    "helium", "hunyuan_v1_dense", "hyperclovax", "iquestcoder", "jais2", "ministral", "ministral3", "mistral",
    "nemotron", "olmo", "olmo2", "persimmon", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm",
    "starcoder2", "vaultgemma", "diffllama", "doge", "gpt_neox", "gpt_neox_japanese", "nanochat", "cohere",
    "modernbert-decoder",
):
    _add(_name)
_add("llama-tied", "llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
_add("llama-eager", "llama", attn_implementation="eager")
_add("qwen2-sliding", "qwen2", use_sliding_window=True, tie_word_embeddings=True, **MIXED)
_add("stablelm-parallel", "stablelm", use_parallel_residual=True, use_qkv_bias=True, qk_layernorm=True)
_add("gpt_neox-sequential", "gpt_neox", use_parallel_residual=False, tie_word_embeddings=True)
_add("granite", embedding_multiplier=6.0, logits_scaling=4.0, residual_multiplier=0.5, attention_multiplier=0.2)
for _name in ["gemma2", "gemma3_text", "olmo3", "cohere2", "lfm3", "mellum", "granite_swa"]:
    _add(_name, **({} if _name == "lfm3" else MIXED))
_add("minicpm3", **MLA, head_dim=None, scale_emb=3, scale_depth=1.4, dim_model_base=16)
_add("youtu", **MLA, head_dim=None)

# ---- learned or sinusoidal positions beside the token embedding
for _name in ["gpt2", "gpt-sw3", "gpt_bigcode", "openai-gpt", "biogpt"]:
    _add(_name)
_add("gpt2-untied", "gpt2", tie_word_embeddings=False, scale_attn_by_inverse_layer_idx=True)
_add("gpt_neo", notes="blocks also return attention weights nobody uses",
     attention_types=[[["global", "local"], 2], [["global"], 1]], window_size=4)
_add("opt", ffn_dim=48, word_embed_proj_dim=32)
_add("opt-350m", "opt", ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False)
_add("xglm", d_model=32, ffn_dim=48, num_layers=BLOCKS, attention_heads=4)
_add("ctrl", dff=48)
_add("bert", **BERT)
_add("roberta", **BERT)
_add("bert-generation", **BERT)
_add("roberta-prelayernorm", **BERT)
_add("roformer", split="context", notes="sinusoidal embed_positions (no gradient) go to every block as an argument",
     **BERT, unused=("embed_positions",))
_add("camembert", **BERT)
_add("data2vec-text", **BERT)
_add("electra", embedding_size=16, **BERT)
_add("ernie", **BERT)
_add("megatron-bert", **BERT)
_add("xlm-roberta", **BERT)
_add("xlm-roberta-xl", **BERT)
_add("rembert", input_embedding_size=16, output_embedding_size=24, **BERT)
_add("big_bird", attention_type="original_full", unused=("pooler",), **BERT)
_add("xmod", default_language="en_XX", **BERT)
_add("roc_bert", pronunciation_vocab_size=32, pronunciation_embed_dim=16, shape_vocab_size=32, shape_embed_dim=16,
     **BERT)

# ---- rotary, alibi and parallel residuals of the older kind
_add("gptj", rotary_dim=4)
_add("codegen", rotary_dim=4)
_add("bloom", notes="blocks also return attention weights nobody uses",
     n_head=4, n_layer=BLOCKS)
_add("mpt", notes="blocks also return attention weights nobody uses",
     d_model=32, n_heads=4, n_layers=BLOCKS, max_seq_len=64, expansion_ratio=2)
_add("falcon", ffn_hidden_size=64)
_add("falcon-40b", "falcon", new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=64)
_add("falcon-alibi", "falcon", alibi=True, bias=True, multi_query=False, parallel_attn=False, ffn_hidden_size=64)

# ---- mixtures of experts
for _name in (
    "mixtral", "qwen3_moe", "olmoe", "flex_olmo", "phimoe", "granitemoe", "jetmoe", "minimax_m2", "cohere2_moe",
):
    _add(_name)
_add("mixtral-router-loss", "mixtral", output_router_logits=True, router_aux_loss_coef=0.1,
     split="aux", notes="auxiliary loss over the router logits of every block")
_add("qwen2_moe", shared_expert_intermediate_size=24)
_add("gpt_oss", **MIXED)
_add("granitemoe_swa", **MIXED)
_add("granitemoeshared", shared_intermediate_size=24)
_add("hunyuan_v1_moe", moe_topk=2)
_add("ernie4_5_moe", unused=("e_score_correction_bias",))
_add("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)
_add("exaone_moe", **MIXED, **SPARSE1)
_add("llama4_text", intermediate_size_mlp=48, interleave_moe_layer_step=2)
_add("deepseek_v2", **MLA, head_dim=None, first_k_dense_replace=1, n_shared_experts=1)
_add("deepseek_v3", **MLA, head_dim=None, first_k_dense_replace=1, n_group=2, topk_group=1)
_add("sarvam_mla", **{**MLA, "q_lora_rank": None}, head_dim=None)
_add("axk1", **MLA, **SPARSE1, head_dim=None, n_group=2, topk_group=1)
_add("glm4_moe_lite", **MLA, **SPARSE1, head_dim=None)
_add("longcat_flash", **MLA, head_dim=8, num_layers=BLOCKS, ffn_hidden_size=48, expert_ffn_hidden_size=24, moe_topk=2,
     zero_expert_num=2)
for _name in ["glm4_moe", "sarvam_moe", "solar_open", "hy_v3"]:
    _add(_name, **({"first_k_dense_replace": 1} if _name != "hy_v3" else {}))
_add("dots1", n_shared_experts=1, first_k_dense_replace=1, **MIXED)
_add("afmoe", num_dense_layers=1, unused=("expert_bias",), **MIXED)
_add("mimo_v2_flash", v_head_dim=8, **MIXED, **SPARSE1)
_add("minimax_m3_vl_text", dense_intermediate_size=48, shared_intermediate_size=24, rotary_dim=8, **SPARSE1,
     index_n_heads=2, index_head_dim=8, index_block_size=4, index_topk_blocks=2)
_add("laguna", shared_expert_intermediate_size=24, unused=("e_score_correction_bias",), **MIXED, **SPARSE1,
     num_attention_heads_per_layer=[4] * BLOCKS)
_add("flint", shared_expert_intermediate_size=24, mlp_only_layers=[0], **MIXED)
_add("kolibri1", shared_expert_intermediate_size=24, **MIXED)
_add("dbrx", d_model=32, n_heads=4, n_layers=BLOCKS, max_seq_len=64, emb_pdrop=0.0, num_key_value_heads=None,
     nested=lambda: _dbrx())
_add("beam", **MIXED, **SPARSE1, n_group=2, topk_group=1)
_add("zaya", split="carries", notes="router states flow from block to block, with gradient",
     num_experts_per_tok=1, router_hidden_size=16)

# ---- sparse attention with an index
_add("axk2", unused=("indexer",), **MLA, **SPARSE1, **INDEXED, head_dim=None, gated_norm_rank=4)
_add("deepseek_v32", unused=("indexer",), **MLA, **SPARSE1, **INDEXED, head_dim=None, n_group=2, topk_group=1)
_add("glm_moe_dsa", split="carries", notes="top-k indices (int32, no gradient) flow from block to block",
     unused=("indexer",), **MLA, **SPARSE1, **INDEXED, head_dim=None,
     indexer_types=["full", "shared", "full", "shared", "shared"])
_add("dots3_note_text", **MLA, **SPARSE1, **INDEXED, head_dim=None, shared_experts_intermediate_size=24,
     sliding_window=4, layer_types=["indexed_attention", S, "indexed_attention", S, S],
     **{f"swa_{k}": v for k, v in MLA.items()}, swa_num_attention_heads=4, swa_head_dim=16, unused=("indexer",))

# ---- state space, recurrent and hybrid
_add("mamba", state_size=8, padding=True)
_add("mamba-fp32-residual", "mamba", state_size=8, residual_in_fp32=True)
_add("falcon_mamba", state_size=8)
_add("mamba2", state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=4)
_add("jamba", attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4)
_add("bamba", attn_layer_indices=[1, 3], **MAMBA2)
_add("granitemoehybrid", **MAMBA2, layer_types=[L, F, L, F, L], shared_intermediate_size=24)
_add("falcon_h1", mamba_d_ssm=64, **MAMBA2)
_add("nemotron_h", layers_block_type=[L, "moe", F, "mlp", L], num_hidden_layers=None, ssm_state_size=8,
     mamba_num_heads=4, mamba_head_dim=16, n_groups=1, chunk_size=4, moe_shared_expert_intermediate_size=24)
_add("recurrent_gemma", lru_width=32, attention_window_size=4, block_types=["recurrent", "recurrent", "attention"])
_add("rwkv", attention_hidden_size=32, padding=True)
_add("xlstm", notes="blocks also return recurrent states nobody uses",
     num_heads=4, num_blocks=BLOCKS, qk_dim_factor=1.0)
_add("lfm2", block_auto_adjust_ff_dim=False, full_attn_idxs=[1, 3])
_add("lfm2_moe", layer_types=["conv", F, "conv", F, "conv"], num_dense_layers=1)
_add("minimax", layer_types=[L, F, L, F, L], block_size=4)
_add("qwen3_next", layer_types=[L, F, L, F, L], shared_expert_intermediate_size=24, **DELTA)
_add("qwen3_5_text", layer_types=[L, F, L, F, L], **DELTA)
_add("qwen3_5_moe_text", layer_types=[L, F, L, F, L], shared_expert_intermediate_size=24, **DELTA)
_add("olmo_hybrid", layer_types=[L, F, L, F, L], **DELTA)
_add("lara_mini", layer_types=[L, S, L, F, S], sliding_window=4, shared_expert_intermediate_size=24, **DELTA)
_add("kimi_linear", **{**MLA, "q_lora_rank": None}, **SPARSE1, head_dim=None, layer_types=[L, L, F, L, F],
     linear_head_dim=8, linear_num_heads=4, num_experts_per_token=2)
_add("bailing_hybrid", **{**MLA, "q_lora_rank": None}, **SPARSE1, head_dim=None, layer_types=[L, L, F, L, F],
     linear_head_dim=8, linear_num_heads=4, num_experts_per_token=2, num_expert_group=2, topk_group=1)

# ---- peculiar: more than one stream, values reused later, shared blocks, loops
_add("gemma3n_text", split="breaks",
     notes="activation is (streams, batch, seq, hidden); inputs per block from the embeddings; shared keys and values",
     intermediate_size=[48] * BLOCKS, layer_types=[S, F, S, F, S], sliding_window=4, num_kv_shared_layers=2,
     hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB, laurel_rank=8,
     activation_sparsity_pattern=[0.0] * BLOCKS)
_add("gemma4_text", split="breaks",
     notes="per-layer inputs from the embeddings; late blocks read earlier blocks' keys and values",
     layer_types=[S, F, S, F, F], sliding_window=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
     vocab_size_per_layer_input=VOCAB, per_layer_config={})
_add("gemma4_unified_text", split="breaks", notes="late blocks read earlier blocks' keys and values",
     layer_types=[S, F, S, F, F], sliding_window=4, num_kv_shared_layers=2, per_layer_config={})
_add("zamba", split="breaks",
     notes="every hybrid block reads the token embeddings; hybrid blocks share one transformer",
     attention_hidden_size=64, attention_head_dim=16, num_key_value_heads=4, mamba_d_state=8, mamba_dt_rank=4,
     layers_block_type=[L, "hybrid", L, "hybrid", L])
_add("zamba2", split="breaks",
     notes="every hybrid block reads the token embeddings; hybrid blocks share one transformer",
     layers_block_type=[L, "hybrid", L, "hybrid", L], num_key_value_heads=4, mamba_d_state=8, n_mamba_heads=4,
     chunk_size=4, head_dim=None, num_mem_blocks=1, adapter_rank=4)
_add("deepseek_v4", notes="activation is (batch, seq, streams, hidden); blocks take input_ids", unused=("indexer",),
     q_lora_rank=16, num_key_value_heads=1, qk_rope_head_dim=4, o_groups=2, o_lora_rank=8, hc_mult=2,
     hc_sinkhorn_iters=4, index_n_heads=2, index_head_dim=8, index_topk=2, sliding_window=4,
     compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
     mlp_layer_types=["hash_moe", *["moe"] * 4])
_add("hy_v4", split="carries",
     notes="activation is (batch, seq, streams, hidden); top-k indices flow from block to block",
     unused=("indexer",), **MLA, **SPARSE1, **INDEXED, head_dim=None, hc_mult=2,
     indexer_types=["full", "shared", "full", "shared", "shared"])
QWEN4 = dict(
    layer_types=[L, "indexed_attention", L, "indexed_attention", L], shared_expert_intermediate_size=24, hc_count=2,
    hc_lowrank=4, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=4,
    indexer_compress_ratio=2, unused=("indexer",), **DELTA,
)
_add("qwen4_exp_text", **QWEN4)
_add("qwen4_exp_text-ngram", "qwen4_exp_text",
     notes="activation is (batch, seq, streams * hidden); a block takes input_ids", **QWEN4, ple_layer_ids=[3],
     ple_embed_dim=32, ple_conv_kernel_size=4, heads_per_ngram=2, ngram_vocab_size_base=50,
     make_ngram_vocab_size_divisible_by=2, split_ngram_parts=1)
_add("inkling_text", d_rel=4, rel_extent=16, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
     sliding_window_size=4, n_shared_experts=1)
_add("inkling2_text", split="breaks", notes="blocks and final_input mix the outputs of all earlier groups of blocks",
     d_rel=4, rel_extent=16, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
     sliding_window_size=4, n_layers_per_attn_res_block=2, unpadded_vocab_size=VOCAB)
_add("inkling2_loop_text", split="breaks",
     notes="blocks 1-3 run twice, with message_input between; earlier outputs are mixed in", d_rel=4, rel_extent=16,
     swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8, sliding_window_size=4,
     n_layers_per_attn_res_block=1, unpadded_vocab_size=VOCAB, loop_layer_index_start=1, loop_layer_index_end=4,
     loop_num_passes=2, loop_gate_rank=4)
_add("hrm_text", split="breaks", notes="two stacks, each called several times, alternating",
     num_layers_per_stack=2, H_cycles=2, L_cycles=2, L_bp_cycles=[2])
_add("dory", split="breaks", notes="blocks 1-3 run twice, with a norm between",
     layer_types=[S, F, S, F, S], sliding_window=4, n_input_layers=1, n_recurrent_layers=3, n_output_layers=1)
_add("xlm", shifted=False, split="breaks", notes="no block module: four parallel lists, interleaved by the model",
     emb_dim=32, n_layers=BLOCKS, n_heads=4, n_langs=1, embed_init_std=0.2, causal_lm=True)
_add("xlnet", shifted=False, notes="activation is (seq, batch, hidden)",
     d_model=32, n_layer=BLOCKS, n_head=4, d_inner=48, unused=("mask_emb", "r_s_bias", "seg_embed"))
_add("cpmant", shifted=False, split="breaks",
     notes="the learned position bias goes to every block; prompt tokens lengthen the sequence inside the model",
     dim_head=8, dim_ff=48, prompt_length=4, prompt_types=4, segment_types=4, position_bias_num_buckets=16,
     position_bias_max_distance=32, dropout_p=0.0)
_add("reformer", split="breaks",
     notes="two reversible streams in one autograd.Function over all blocks; no gradient graph between blocks",
     attn_layers=["local"] * BLOCKS, attention_head_size=8, feed_forward_size=48, axial_pos_embds=False,
     local_attn_chunk_length=16, local_attention_probs_dropout_prob=0.0, is_decoder=True, num_hidden_layers=None,
     max_position_embeddings=64, unused=("lm_head.bias",))
_add("fuyu", nested=lambda: dict(text_config=dict(COMMON_TEXT, model_type="persimmon")),
     unused=("vision_embed_tokens",))

# ---- decoders of encoder-decoders, and two whole ones
for _name in (
    "bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "mvp", "bigbird_pegasus",
):
    _sinusoidal = ("embed_positions",) if _name in ("marian", "pegasus") else ()
    _add(_name, **SEQ2SEQ, shifted=False, unused=("encoder_attn", *_sinusoidal))
_add("trocr", shifted=False, d_model=32, decoder_layers=BLOCKS, decoder_ffn_dim=48, decoder_attention_heads=4,
     unused=("encoder_attn",))
_add("whisper", shifted=False, **SEQ2SEQ, max_target_positions=64, unused=("encoder_attn",), padding=False)
_add("prophetnet", shifted=False, split="context",
     notes="activation is (batch, (1 + ngram) * seq, hidden); the position embedding makes position ids for all",
     num_encoder_layers=2, num_decoder_layers=BLOCKS, num_encoder_attention_heads=4, num_decoder_attention_heads=4,
     encoder_ffn_dim=48, decoder_ffn_dim=48, num_attention_heads=None, unused=("cross_attn",))
_add("t5", shifted=False, split="breaks",
     notes="encoder before the blocks; position bias flows to all",
     causal=False, d_model=32, d_kv=8, d_ff=48, num_layers=BLOCKS, num_heads=4, dropout_rate=0.0,
     decoder_start_token_id=0)
_add("bart-seq2seq", "bart", shifted=False, split="breaks", notes="every decoder block reads the encoder's output",
     causal=False, **SEQ2SEQ)

COMMON_TEXT = {key: COMMON[key] for key in (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "initializer_range", "use_cache",
)}
# fmt: on


def _dbrx() -> dict[str, Any]:
    from transformers.models.dbrx.configuration_dbrx import DbrxAttentionConfig, DbrxFFNConfig

    return dict(
        attn_config=DbrxAttentionConfig(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=DbrxFFNConfig(hidden_size=32, ffn_hidden_size=48, moe_num_experts=4, moe_top_k=2),
    )


def build(name: str, *, seed: int = 0, **config_overrides: Any) -> nn.Module:
    return FAMILIES[name].build(seed=seed, **config_overrides)


def batch(name: str, *, batch: int = 3, seq: int = 9, pad: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, labels; rows after the first are right-padded unequally, with label -100 there."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(3, VOCAB, (batch, seq), generator=generator)
    mask = torch.ones_like(input_ids)
    if pad and FAMILIES[name].padding:
        for row in range(1, batch):
            mask[row, max(2, seq - 1 - row) :] = 0
    input_ids = input_ids.masked_fill(mask == 0, 0)
    return dict(input_ids=input_ids, attention_mask=mask, labels=input_ids.masked_fill(mask == 0, -100))


# ---------------------------------------------------------------------------------------------- looking at a model


@dataclass
class _Call:
    path: str
    inputs: dict[str, Any]
    output: Any = None


def describe(model: nn.Module, inputs: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """What a splitter has to know about ``model``, found by running it once with hooks .

    blocks / n_blocks: path and length of the main block list (the largest ModuleList whose items are called).
    other_lists: further ModuleLists with called items outside the main one.
    calls: block indices in calling order. hidden: how a block receives the hidden state.
    returns: structure of what blocks return. args: names of what else they receive.
    chained: each block's hidden state *is* a tensor that the block called before it returned.
    flow: inputs other than the hidden state that an earlier block returned.
    grad_inputs: inputs that carry gradient and come from no block (per-layer embeddings, first residual, ...).
    containers: lists or mappings handed from block to block that grow on the way.
    outer_inputs: inputs that are the output of a module with parameters called before the blocks.
    before / between / after: outermost modules called outside the blocks; a star marks those without parameters.
    order: modules with parameters whose calling order differs from their registration order.
    """
    inputs = dict(inputs) if inputs is not None else _default_batch()
    trace = _Trace(model)
    outputs = trace.run(inputs)
    blocks = trace.blocks
    result: dict[str, Any] = dict(
        blocks=trace.list_path,
        n_blocks=len(blocks),
        other_lists=trace.other_lists,
        calls=[],
        hidden=None,
        returns=[],
        args=[],
        chained=False,
        flow=[],
        grad_inputs=[],
        containers=[],
        outer_inputs=[],
        before=[],
        between=[],
        after=[],
        order=[],
    )
    if blocks:
        _describe_blocks(trace, result)
    result["tied"] = _tied(model)
    loss = outputs.loss
    result["loss"] = float(loss.detach())
    if loss.requires_grad:
        loss.backward()
    result["no_grad"] = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.zero_grad(set_to_none=True)
    result["outputs"] = list(outputs)
    return result


def _default_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone())


def _describe_blocks(trace: _Trace, result: dict[str, Any]) -> None:
    calls = [(trace.blocks[e.path], e) for e in trace.events if e.path in trace.blocks]
    result["calls"] = [index for index, _ in calls]
    result["returns"] = sorted({_structure(e.output) for _, e in calls})
    names: set[str] = set()
    flow: set[str] = set()
    grads: set[str] = set()
    outer: set[str] = set()
    chained = True
    made = {
        _storage(t)
        for e in trace.events
        if e.path not in trace.blocks and trace.has_params(e.path)
        for t in _tensors(e.output)
    }
    returned: dict[int, int] = {}
    for position, (_, event) in enumerate(calls):
        hidden_name, hidden = next(
            ((k, v) for k, v in event.inputs.items() if isinstance(v, torch.Tensor)), (None, None)
        )
        result["hidden"] = result["hidden"] or hidden_name
        previous = _tensors(calls[position - 1][1].output) if position else []
        chained &= not position or any(hidden is t for t in previous)
        for name, value in event.inputs.items():
            if value is None or name == hidden_name:
                continue
            names.add(name)
            for tensor in _tensors(value):
                if tensor is hidden:
                    continue
                if id(tensor) in returned:
                    flow.add(name)
                elif tensor.requires_grad:
                    grads.add(name)
                elif _storage(tensor) in made:
                    outer.add(name)
        returned |= {id(t): position for t in _tensors(event.output)}
    result.update(
        args=sorted(names),
        flow=sorted(flow),
        grad_inputs=sorted(grads),
        outer_inputs=sorted(outer),
        chained=chained,
        containers=sorted(trace.growing),
    )
    where = [i for i, e in enumerate(trace.events) if e.path in trace.blocks]
    outside = [(i, e.path) for i, e in enumerate(trace.events) if e.path not in trace.blocks]

    def named(paths: list[str]) -> list[str]:
        return [p if trace.has_params(p) else p + "*" for p in dict.fromkeys(paths)]

    result["before"] = named([p for i, p in outside if i < where[0]])
    result["between"] = named([p for i, p in outside if where[0] < i < where[-1]])
    result["after"] = named([p for i, p in outside if i > where[-1]])
    called = list(
        dict.fromkeys(p if p not in trace.blocks else trace.list_path for p in (e.path for e in trace.events))
    )
    called = [p for p in called if trace.has_params(p)]
    registered = [n for n, _ in trace.model.named_modules() if n in set(called)]
    result["order"] = called if called != registered else []


class _Trace:
    """One forward, recorded at the outermost modules that neither contain the block list nor lie inside one another."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.events: list[_Call] = []
        self.blocks: dict[str, int] = {}
        self.list_path: str | None = None
        self.other_lists: list[str] = []
        self.growing: set[str] = set()

    def has_params(self, path: str) -> bool:
        return any(True for _ in self.modules[path].parameters())

    def run(self, inputs: Mapping[str, Any]) -> Any:
        called: list[str] = []
        with contextlib.ExitStack() as stack:
            for path, module in self.modules.items():
                handle = module.register_forward_pre_hook(lambda m, a, p=path: called.append(p))
                stack.callback(handle.remove)
            with torch.no_grad():
                self.model(**inputs)
        self._find_blocks(set(called))
        opaque: list[str] = []
        sizes: dict[int, tuple[Any, int]] = {}

        def before(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if not opaque:
                    flat = {f"arg{i}": v for i, v in enumerate(args)} | kwargs
                    self.events.append(_Call(path, flat))
                    if path in self.blocks:
                        for name, value in flat.items():
                            if not isinstance(value, (MutableSequence, MutableMapping)):
                                continue
                            if sizes.setdefault(id(value), (value, len(value)))[1] != len(value):
                                self.growing.add(name)
                opaque.append(path)

            return hook

        def after(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                opaque.pop()
                if not opaque:
                    self.events[-1].output = output

            return hook

        steps = self.list_path.split(".") if self.list_path else []
        ancestors = {".".join(steps[:i]) for i in range(len(steps) + 1)}  # the block list and what contains it
        with contextlib.ExitStack() as stack:
            for path, module in self.modules.items():
                if path not in ancestors:
                    stack.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(after(path), with_kwargs=True).remove)
            return self.model(**inputs)

    def _find_blocks(self, called: set[str]) -> None:
        lists = {
            path: module
            for path, module in self.modules.items()
            if isinstance(module, nn.ModuleList)
            and len(module) > 1
            and any(f"{path}.{i}" in called for i in range(len(module)))
        }
        outer = {p: m for p, m in lists.items() if not any(p.startswith(q + ".") for q in lists)}
        if not outer:
            return
        size = {p: sum(w.numel() for w in m.parameters()) for p, m in outer.items()}
        self.list_path = max(size, key=lambda p: size[p])
        self.blocks = {f"{self.list_path}.{i}": i for i in range(len(outer[self.list_path]))}
        self.other_lists = sorted(p for p in outer if p != self.list_path)


def verdict(found: Mapping[str, Any]) -> str:
    """What ``Family.split`` says, from what ``describe`` found."""
    once_in_order = found["calls"] == list(range(found["n_blocks"])) and found["chained"]
    if (
        not once_in_order
        or found["grad_inputs"]
        or found["containers"]
        or "encoder_last_hidden_state" in found["outputs"]
    ):
        return "breaks"
    if "aux_loss" in found["outputs"]:
        return "aux"
    if found["outer_inputs"]:
        return "context"
    return "carries" if found["flow"] else "plain"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def _structure(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{'tensor' if value.is_floating_point() else str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(_structure(v) for v in value)})"
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{k}: {_structure(v)}' for k, v in value.items())})"
    return str(value) if value is None else type(value).__name__


def _tied(model: nn.Module) -> list[tuple[str, ...]]:
    """Names of parameters that are one object, beyond the first name."""
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]
