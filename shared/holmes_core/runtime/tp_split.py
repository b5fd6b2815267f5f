# SPDX-License-Identifier: Apache-2.0
"""Carries the layout out on modules: cuts parameters, wraps forwards, sets the head counts of one rank."""

from __future__ import annotations

from typing import Any

from torch import nn

from holmes_core.runtime.shard import SHARD_ATTRIBUTE, TensorShard, get_shard
from holmes_core.runtime.tp_analysis import vocabulary_shard
from holmes_core.runtime.tp_collectives import TensorParallelContext
from holmes_core.runtime.tp_modules import (
    AttentionCall,
    Column,
    ColumnGather,
    EdgeIn,
    EdgeOut,
    EmbeddingCall,
    ExpertsCall,
    HeadCall,
    LoraDropout,
    NormGather,
    NormSum,
    RegionCall,
    RegionState,
    Row,
    RowSplit,
    Wrapper,
)
from holmes_core.runtime.tp_regions import Region, Site

__all__ = ["ConfigView", "can_gather", "split_embedding", "split_head", "split_region", "unwrap"]

#: Attribute that keeps the head counts and widths of the whole module while it is split.
_WHOLE = "_holmes_whole_attributes"


class ConfigView:
    """A model's config with the head counts of one rank, for attention modules that read them in their forward.

    Everything else is read from and written to the real config, which other modules share.
    """

    def __init__(self, config: Any, values: dict[str, int]) -> None:
        """Show ``values`` in front of ``config``."""
        self.__dict__["_config"] = config
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> Any:
        """Return the local value where there is one."""
        if name.startswith("__") or "_values" not in self.__dict__:
            raise AttributeError(name)
        values = self.__dict__["_values"]
        return values[name] if name in values else getattr(self.__dict__["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Write to the real config."""
        setattr(self.__dict__["_config"], name, value)


def _shard_tensor(owner: nn.Module, name: str, shard: TensorShard, context: TensorParallelContext) -> None:
    """Replace the data of a parameter or buffer by this rank's part, once (a tied parameter has two owners)."""
    tensor = getattr(owner, name)
    if get_shard(tensor) is not None:
        return
    part = shard.take(tensor.detach(), context.rank, context.size)
    if isinstance(tensor, nn.Parameter):
        # Same object: optimizers and ties hold on to it.
        tensor.grad = None
        tensor.data = part
        setattr(tensor, SHARD_ATTRIBUTE, shard)
    else:
        setattr(part, SHARD_ATTRIBUTE, shard)
        owner._buffers[name] = part


def _set_forward(module: nn.Module, wrapper: Wrapper) -> None:
    module.forward = wrapper


def _wrapper(site: Site, state: RegionState) -> Wrapper:
    if site.role == "norm_gather":
        return NormGather(site.module, state, site.dim, site.full)
    kinds: dict[str, type[Wrapper]] = {
        "column": Column,
        "row": Row,
        "edge_in": EdgeIn,
        "edge_out": EdgeOut,
        "lora_dropout": LoraDropout,
        "norm_sum": NormSum,
    }
    return kinds[site.role](site.module, state)


def split_region(region: Region, context: TensorParallelContext, *, gathered: bool = False) -> None:
    """Split one region, in place.

    Args:
        region: The region.
        context: The tensor-parallel group.
        gathered: Split the weights only: outputs of the first layers are joined, and what lies between them and the
            last layer is computed whole on every rank. For modules whose own code insists on the full width.
    """
    for owner, name, shard in region.shards:
        _shard_tensor(owner, name, shard, context)
    if gathered:
        for site in region.sites:
            # Nothing in between is split, so each layer stands for itself: a state of its own.
            state = RegionState(site.module, context)
            if site.role == "column":
                _set_forward(site.module, ColumnGather(site.module, state, site.sections))
            elif site.role == "row":
                _set_forward(site.module, RowSplit(site.module, state))
        return
    state = RegionState(region.module, context)
    for site in region.sites:
        _set_forward(site.module, _wrapper(site, state))
    region.module.__dict__[_WHOLE] = dict(region.attributes)
    for name, value in region.attributes.items():
        setattr(region.module, name, value // context.size)
    if region.config:
        values: dict[str, Any] = {name: value // context.size for name, value in region.config.items()}
        region.module.__dict__["config"] = ConfigView(region.module.config, values)
    if region.kind == "experts":
        _set_forward(region.module, ExpertsCall(region.module, state))
    elif region.kind == "attention":
        _set_forward(region.module, AttentionCall(region.module, state, region.heads))
    else:
        _set_forward(region.module, RegionCall(region.module, state))


def can_gather(region: Region) -> bool:
    """Whether a region can be split with its inside computed whole: only its linear layers may be split."""
    linear = {id(site.module) for site in region.sites if site.role in ("column", "row")}
    return region.kind != "experts" and all(id(owner) in linear for owner, _, _ in region.shards)


def split_embedding(embedding: nn.Embedding, context: TensorParallelContext) -> None:
    """Split a token embedding by vocabulary, in place."""
    known = get_shard(embedding.weight)  # cut already where it is tied to the head
    shard = known or vocabulary_shard(embedding.weight.shape)
    _shard_tensor(embedding, "weight", shard, context)
    _set_forward(embedding, EmbeddingCall(embedding, RegionState(embedding, context), shard.full_shape[0]))


def split_head(head: nn.Linear, context: TensorParallelContext) -> None:
    """Split an output head by vocabulary, in place; its caller still sees all logits."""
    known = get_shard(head.weight)
    shard = known or vocabulary_shard(head.weight.shape)
    _shard_tensor(head, "weight", shard, context)
    if head.bias is not None:
        _shard_tensor(head, "bias", vocabulary_shard(shard.full_shape[:1]), context)
    _set_forward(head, HeadCall(head, RegionState(head, context), shard.full_shape[0]))


def unwrap(root: nn.Module) -> None:
    """Let every module compute as it did before it was split; its parameters are merged by the caller.

    Args:
        root: The model, changed in place.
    """
    for module in root.modules():
        # A self-check that waits for a block's first call stands in front of the wrappers, and has an `inner`, too.
        while (inner := getattr(module.__dict__.get("forward"), "inner", None)) is not None:
            if getattr(inner, "__func__", None) is type(module).forward:
                del module.__dict__["forward"]
            else:
                module.forward = inner
        for name, value in module.__dict__.pop(_WHOLE, {}).items():
            setattr(module, name, value)
        config = module.__dict__.get("config")
        if isinstance(config, ConfigView):
            module.__dict__["config"] = config.__dict__["_config"]
