# SPDX-License-Identifier: Apache-2.0
"""Which module of a language model is split how over tensor-parallel ranks, read from names, shapes and attributes.

Two sources, in this order: the plan that a transformers model carries (``tp_plan``), and the two rules that hold for
every decoder (Redco, arXiv:2310.16355): in attention the q, k, v projections split by output and the output projection
by input; in the MLP the up projections split by output and the down projection by input. Between the two the ranks
compute independently: that stretch is a *region*. A part that fits neither stays whole on every rank, which is exact
and only slower, and the reason is reported.

Nothing here touches weights or processes: a model on the meta device gives the same answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any, cast

from torch import nn

from holmes_core.runtime.tp_regions import Linear, Region, Site, add_shard, as_linear

__all__ = [
    "DOWN",
    "FUSED",
    "HEAD_NAMES",
    "KEY",
    "OUTPUT",
    "QUERY",
    "UP",
    "VALUE",
    "read_block",
]

QUERY = frozenset({"q_proj", "query", "q", "wq", "q_lin", "query_proj", "to_q"})
KEY = frozenset({"k_proj", "key", "k", "wk", "k_lin", "key_proj", "to_k"})
VALUE = frozenset({"v_proj", "value", "v", "wv", "v_lin", "value_proj", "to_v"})
FUSED = frozenset({"c_attn", "query_key_value", "qkv_proj", "Wqkv", "wqkv", "qkv", "W_pack", "attn_qkv"})
OUTPUT = frozenset({"o_proj", "out_proj", "dense", "c_proj", "wo", "out", "o", "out_lin", "to_out", "proj"})
# fmt: off
UP = frozenset({
    "gate_proj", "up_proj", "gate_up_proj", "fc1", "fc_in", "c_fc", "w1", "w3", "wi", "wi_0", "wi_1", "dense_h_to_4h",
    "up", "gate", "lin1", "linear1", "fc", "fc_1", "fc_2", "gate_and_up_proj", "input_linear", "w12",
})
DOWN = frozenset({
    "down_proj", "fc2", "fc_out", "c_proj", "w2", "wo", "dense_4h_to_h", "down", "lin2", "linear2", "proj", "proj_out",
    "output_linear",
})
# fmt: on
HEAD_NAMES = frozenset({"lm_head", "embed_out", "output_projection", "head", "output", "unembed", "decoder"})

_QUERY_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "num_q_heads", "nheads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_kv_head", "kv_n_heads", "n_head_kv")
_HEAD_DIM = ("head_dim", "head_size", "attention_head_size", "dim_per_head", "d_head", "attn_head_size")
_WIDTHS = ("split_size", "embed_dim", "hidden_size", "all_head_size", "inner_dim", "n_embd", "d_model", "kv_dim")
_MLP_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_dim")
_COLUMN_STYLES = frozenset({"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"})
_ROW_STYLES = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise"})


class Unsplittable(Exception):
    """Why one part of a model stays whole on every rank."""


# -------------------------------------------------------------------------------------------------------- attention


def _integer(source: object, names: Sequence[str]) -> int | None:
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _geometry(attention: nn.Module, config: Any, q_out: int | None, o_in: int) -> tuple[int, int]:
    """Return (query heads, head dimension)."""
    head_dim = _integer(attention, _HEAD_DIM)
    heads = _integer(attention, _QUERY_HEADS)
    if heads is None and head_dim is not None and o_in % head_dim == 0:
        heads = o_in // head_dim
    if heads is None:
        heads = _integer(config, _QUERY_HEADS)
    if heads is None:
        raise Unsplittable(f"the number of heads is not among its attributes ({', '.join(_QUERY_HEADS)})")
    if o_in % heads or (q_out is not None and q_out % heads):
        raise Unsplittable(f"{heads} heads do not divide its width {o_in if o_in % heads else q_out}")
    return heads, o_in // heads


def _attention(
    name: str,
    attention: nn.Module,
    linears: dict[str, Linear],
    styles: dict[str, str],
    config: Any,
    *,
    is_block: bool,
    taken: frozenset[str],
) -> Region | None:
    """Read an attention module; None when the module is none."""

    def pick(names: Collection[str]) -> Linear | None:
        found = [linear for child, linear in linears.items() if child in names]
        return found[0] if len(found) == 1 else None

    q, k, v, fused, out = pick(QUERY), pick(KEY), pick(VALUE), pick(FUSED), pick(OUTPUT)
    if (fused is None and (q is None or k is None or v is None)) or out is None:
        return None
    if hasattr(attention, "kv_lora_rank"):
        raise Unsplittable("latent attention (kv_lora_rank) shares one key among all heads")
    if getattr(attention, "slow_but_exact", False) and getattr(attention, "pretraining_tp", 1) > 1:
        raise Unsplittable("slow_but_exact reads slices of the whole weight")
    if getattr(attention, "is_cross_attention", False):
        raise Unsplittable("cross attention")
    region = Region(kind="attention", name=name, module=attention)
    config = getattr(attention, "config", config)
    heads, head_dim = _geometry(attention, config, q.n_out if q else None, out.n_in)
    if fused is not None:
        key_heads, blocks = _fused(attention, fused, heads, head_dim, config, region)
        used = {fused.child, out.child}
    else:
        q, k, v = cast("tuple[Linear, Linear, Linear]", (q, k, v))
        key_dim = _integer(attention, _HEAD_DIM) or head_dim
        key_heads = _integer(attention, _KEY_HEADS) or (k.n_out // key_dim)
        if k.n_out % key_heads or v.n_out % key_heads:
            raise Unsplittable(f"{key_heads} key-value heads do not divide the outputs of {k.child} and {v.child}")
        for linear in (q, k, v):
            linear.column((linear.n_out,), region)
        used, blocks = {q.child, k.child, v.child, out.child}, False
    for child, linear in linears.items():
        if child in used or child in taken:
            continue
        if is_block:
            continue
        if styles.get(child) in _COLUMN_STYLES and linear.n_out % heads == 0:
            linear.column((linear.n_out,), region)  # an output gate, say: one value per head and feature
        else:
            raise Unsplittable(f"its linear layer {child} is not known")
    out.row(region)
    region.heads = heads
    region.must_divide |= {"heads": heads, "kv_heads": key_heads}
    if not is_block:
        _inside_attention(attention, region, linears, heads, key_heads, head_dim)
    widths = () if blocks else _WIDTHS
    for attribute, value in vars(attention).items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        counts = attribute in (*_QUERY_HEADS, *_KEY_HEADS) and value in (heads, key_heads)
        if counts or (attribute in widths and value in (heads * head_dim, key_heads * head_dim)):
            region.attributes[attribute] = value
    reads = _names_read(type(attention))
    if "config" in reads and config is getattr(attention, "config", None):
        for attribute in (*_QUERY_HEADS, *_KEY_HEADS):
            value = getattr(config, attribute, None)
            if attribute in reads and isinstance(value, int) and value in (heads, key_heads):
                region.config[attribute] = value
    return region


def _fused(
    attention: nn.Module, fused: Linear, heads: int, head_dim: int, config: Any, region: Region
) -> tuple[int, bool]:
    """Split a fused q, k, v projection; return (key-value heads, whether its layout is in fixed blocks)."""
    total, rest = divmod(fused.n_out, head_dim)
    key_heads, odd = divmod(total - heads, 2)
    if rest or odd or key_heads < 1:
        raise Unsplittable(f"{fused.child} has {fused.n_out} outputs, which are no q, k, v of {heads} x {head_dim}")
    blocks = _integer(attention, ("mp_num",))
    if blocks is not None:  # CodeGen: [q | v | k] once per block of heads
        fused.column((fused.n_out,), region)
        region.must_divide["blocks"] = blocks
        return key_heads, True
    by_head = fused.child == "query_key_value" or (
        getattr(attention, "multi_query", None) is False and type(attention).__name__.startswith("GPTBigCode")
    )
    if by_head:  # q, k, v of one (group of) head after those of the other
        fused.column((fused.n_out,), region)
    else:
        fused.column((heads * head_dim, key_heads * head_dim, key_heads * head_dim), region)
    return key_heads, False


def _inside_attention(
    attention: nn.Module, region: Region, linears: dict[str, Linear], heads: int, key_heads: int, head_dim: int
) -> None:
    """Find out what the other parameters of an attention module are used on."""
    for child, module in attention.named_children():
        shapes = {tuple(p.shape) for p in module.parameters()}
        if child in linears or not shapes:
            continue
        norms = getattr(module, "norms", None)
        if isinstance(norms, nn.ModuleList) and len(norms) in (heads, key_heads):
            region.sites.append(Site(module=module, role="norm_gather", dim=1, full=len(norms)))
        elif shapes == {(head_dim,)}:
            region.sites.append(Site(module=module, role="norm_sum"))
        elif len(shapes) == 1 and next(iter(shapes)) in {(heads * head_dim,), (key_heads * head_dim,)}:
            region.sites.append(Site(module=module, role="norm_gather", dim=-1, full=next(iter(shapes))[0]))
        elif len(shapes) == 1 and next(iter(shapes)) in {(heads, head_dim), (key_heads, head_dim)}:
            for parameter, _ in module.named_parameters(recurse=False):
                add_shard(region, module, parameter, 0, (next(iter(shapes))[0],))
        else:
            raise Unsplittable(f"parameters of its part {child} have shapes {sorted(shapes)}, which are not understood")
    for parameter, tensor in attention.named_parameters(recurse=False):
        dims = [dim for dim, size in enumerate(tensor.shape) if size == heads]
        if len(dims) != 1:
            raise Unsplittable(f"its parameter {parameter} has shape {tuple(tensor.shape)}, no dimension of heads")
        add_shard(region, attention, parameter, dims[0], (heads,))
    for buffer, values in attention.named_buffers(recurse=False):
        dims = [dim for dim, size in enumerate(values.shape) if size == heads]
        if ("slope" in buffer or "alibi" in buffer) and len(dims) == 1:
            add_shard(region, attention, buffer, dims[0], (heads,))


def _names_read(kind: type) -> frozenset[str]:
    """Return the attribute names that a class's methods read (its constructor excepted)."""
    names: set[str] = set()
    for name, value in vars(kind).items():
        function = inspect.unwrap(value) if callable(value) else None
        code = getattr(function, "__code__", None)
        if name != "__init__" and code is not None:
            names.update(code.co_names)
    for base in kind.__bases__:
        if base is not nn.Module and issubclass(base, nn.Module):
            names |= _names_read(base)
    return frozenset(names)


# ---------------------------------------------------------------------------------------------------- MLP, experts


def _mlp(
    name: str, mlp: nn.Module, linears: dict[str, Linear], styles: dict[str, str], *, is_block: bool
) -> Region | None:
    """Read an MLP; None when the module is none."""
    attention = QUERY | KEY | VALUE | FUSED
    has_attention = any(child in attention for child in linears)
    ups: list[Linear] = []
    downs: list[Linear] = []
    sequence = list(linears.values())
    if isinstance(mlp, nn.Sequential) and len(sequence) == 2 and all(child.isdigit() for child in linears):
        ups, downs = sequence[:1], sequence[1:]
    else:
        for child, linear in linears.items():
            style = styles.get(child)
            if child in attention or (has_attention and child in OUTPUT):
                continue
            if style in _COLUMN_STYLES or (style is None and child in UP):
                ups.append(linear)
            elif style in _ROW_STYLES or (style is None and child in DOWN):
                downs.append(linear)
    if not ups or len(downs) != 1:
        return None
    if isinstance(mlp, nn.TransformerEncoderLayer):
        raise Unsplittable("nn.TransformerEncoderLayer has a fast path that reads the weights of its parts itself")
    if getattr(mlp, "slow_but_exact", False) and getattr(mlp, "pretraining_tp", 1) > 1:
        raise Unsplittable("slow_but_exact reads slices of the whole weight")
    down = downs[0]
    width = down.n_in
    region = Region(kind="mlp", name=name, module=mlp, must_divide={"intermediate": width})
    for up in ups:
        if up.n_out not in (width, 2 * width) or up.n_in != ups[0].n_in:
            raise Unsplittable(f"{up.child} gives {up.n_out} features, {down.child} takes {width}")
        up.column((width,) * (up.n_out // width), region)
    down.row(region)
    if not is_block:
        for child, module in mlp.named_children():
            shapes = {tuple(p.shape) for p in module.parameters()}
            if child in linears or not shapes or shapes == {(ups[0].n_in,)} != {(width,)}:
                continue
            if shapes != {(width,)}:
                raise Unsplittable(f"parameters of its part {child} have shapes {sorted(shapes)}, not understood")
            region.sites.append(Site(module=module, role="norm_gather", dim=-1, full=width))
        for attribute, value in vars(mlp).items():
            if attribute in _MLP_WIDTHS and value == width and isinstance(value, int):
                region.attributes[attribute] = value
    return region


def _experts(name: str, module: nn.Module) -> Region | None:
    """Read a module that keeps all experts in two stacked weights (transformers >= 5); None when it is none."""
    parameters = dict(module.named_parameters(recurse=False))
    if not {"gate_up_proj", "down_proj"} <= set(parameters) or parameters["down_proj"].dim() != 3:
        return None
    gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if len(parameters) != 2 or getattr(module, "is_transposed", False):
        raise Unsplittable("experts with biases or transposed weights")
    experts, hidden, width = down.shape
    if tuple(gate_up.shape) != (experts, 2 * width, hidden):
        raise Unsplittable(f"gate_up_proj {tuple(gate_up.shape)} and down_proj {tuple(down.shape)} do not fit")
    region = Region(kind="experts", name=name, module=module, must_divide={"expert intermediate": int(width)})
    add_shard(region, module, "gate_up_proj", 1, (int(width), int(width)))
    add_shard(region, module, "down_proj", 2, (int(width),))
    return region


# -------------------------------------------------------------------------------------------------------- one block


def read_block(
    block: nn.Module, name: str, styles: dict[str, str], config: Any, whole: dict[str, str]
) -> Iterator[Region]:
    """Find the regions of one block.

    Args:
        block: The block.
        name: Its name in the model.
        styles: Module name -> style of the model's own plan.
        config: The model's config, or None.
        whole: Gets module name -> why it stays whole.
    """
    for inner, module in block.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            continue  # its parts belong to the parent's region
        path = f"{name}.{inner}" if inner else name
        linears = {
            child: linear for child, sub in module.named_children() if (linear := as_linear(child, sub)) is not None
        }
        own = {child: styles[f"{path}.{child}"] for child in linears if f"{path}.{child}" in styles}
        is_block = module is block
        taken: frozenset[str] = frozenset()
        try:
            region = _experts(path, module)
            if region is None and linears:
                region = _mlp(path, module, linears, own, is_block=is_block)
                if region is not None:
                    taken = frozenset(child for child in linears if child not in OUTPUT)
            if region is not None:
                yield region
        except Unsplittable as reason:
            whole[path] = str(reason)
        try:
            if linears and (region := _attention(path, module, linears, own, config, is_block=is_block, taken=taken)):
                yield region
        except Unsplittable as reason:
            whole[path] = str(reason)
