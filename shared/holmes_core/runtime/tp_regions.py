# SPDX-License-Identifier: Apache-2.0
"""What a tensor-parallel split is made of: regions, the modules in them that are wrapped, and linear maps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from holmes_core.runtime.shard import TensorShard

__all__ = ["Linear", "Region", "Role", "Site", "add_shard", "as_linear"]

Role = Literal["column", "row", "norm_sum", "norm_gather", "lora_dropout", "edge_in", "edge_out"]
"""What a module's forward must do besides its own work; tp_modules.py has one wrapper for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One module whose forward is wrapped."""

    module: nn.Module
    role: Role
    sections: tuple[int, ...] = ()
    """For ``column``: the sections of the output features."""
    dim: int = -1
    """For ``norm_gather``: the dimension that the region splits."""
    full: int = 0
    """For ``norm_gather``: the size of that dimension on one process."""


@dataclass(slots=True, kw_only=True)
class Region:
    """A stretch of the model in which every rank computes its own part."""

    kind: Literal["attention", "mlp", "experts"]
    name: str
    module: nn.Module
    sites: list[Site] = field(default_factory=list)
    shards: list[tuple[nn.Module, str, TensorShard]] = field(default_factory=list)
    """(owner, parameter or buffer name, layout)."""
    attributes: dict[str, int] = field(default_factory=dict)
    """Integer attributes of ``module`` that count heads or widths: the full value; each is divided by the ranks."""
    config: dict[str, int] = field(default_factory=dict)
    """The same for values that the module's forward reads from its config."""
    heads: int = 0
    """Number of query heads (attention)."""
    must_divide: dict[str, int] = field(default_factory=dict)
    """Name -> number that the tensor-parallel size must divide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear map, possibly inside a LoRA adapter, whichever way its weight lies."""

    child: str
    outer: nn.Module  # what the parent calls; differs from base under a LoRA adapter
    base: nn.Module
    transposed: bool  # weight is (in, out)
    lora: tuple[tuple[nn.Module, nn.Module, nn.Module | None], ...] = ()  # (A, B, dropout) per adapter

    @property
    def weight(self) -> Tensor:
        """Its weight, without adapters."""
        weight = self.base.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def out_dim(self) -> int:
        """The dimension of the weight that counts outputs."""
        return 1 if self.transposed else 0

    @property
    def n_in(self) -> int:
        """Number of inputs."""
        return int(self.weight.shape[1 - self.out_dim])

    @property
    def n_out(self) -> int:
        """Number of outputs."""
        return int(self.weight.shape[self.out_dim])

    def column(self, sections: tuple[int, ...], region: Region) -> None:
        """Split by output."""
        add_shard(region, self.base, "weight", self.out_dim, sections)
        if getattr(self.base, "bias", None) is not None:
            add_shard(region, self.base, "bias", 0, sections)
        region.sites.append(Site(module=self.base, role="column", sections=sections))
        for _, up, _ in self.lora:
            add_shard(region, up, "weight", 0, sections)
            if getattr(up, "bias", None) is not None:
                add_shard(region, up, "bias", 0, sections)
            region.sites.append(Site(module=up, role="column", sections=sections))
        region.sites.append(Site(module=self.outer, role="edge_in"))

    def row(self, region: Region) -> None:
        """Split by input. A bias stays whole: it is added once, after the sum over the ranks."""
        add_shard(region, self.base, "weight", 1 - self.out_dim, (self.n_in,))
        region.sites.append(Site(module=self.base, role="row"))
        for down, _, dropout in self.lora:
            add_shard(region, down, "weight", 1, (self.n_in,))
            region.sites.append(Site(module=down, role="row"))
            if dropout is not None:
                region.sites.append(Site(module=dropout, role="lora_dropout"))
        region.sites.append(Site(module=self.outer, role="edge_out"))


def add_shard(region: Region, owner: nn.Module, name: str, dim: int, sections: tuple[int, ...]) -> None:
    """Note that a parameter or buffer of a region is split along a dimension."""
    tensor = getattr(owner, name)
    region.shards.append((owner, name, TensorShard(dim=dim, full_shape=tuple(tensor.shape), sections=sections)))


def as_linear(child: str, module: nn.Module) -> Linear | None:
    """Read a linear map, possibly inside a LoRA adapter; None for anything else."""
    base = module
    lora: list[tuple[nn.Module, nn.Module, nn.Module | None]] = []
    inner = getattr(module, "base_layer", None)
    if isinstance(inner, nn.Module):
        downs, ups = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
        if not isinstance(downs, nn.ModuleDict) or not isinstance(ups, nn.ModuleDict):
            return None
        if getattr(module, "lora_variant", None):  # DoRA and others read the whole weight
            return None
        dropouts = getattr(module, "lora_dropout", {})
        for key in downs:
            dropout = dropouts[key] if key in dropouts else None  # noqa: SIM401 - a ModuleDict has no get
            lora.append((downs[key], ups[key], dropout if isinstance(dropout, nn.Dropout) else None))
        base = inner
    weight = getattr(base, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        return None
    transposed = type(base).__name__ == "Conv1D" and hasattr(base, "nf")
    if not transposed and not (isinstance(base, nn.Linear) and weight.shape == (base.out_features, base.in_features)):
        return None
    return Linear(child=child, outer=module, base=base, transposed=transposed, lora=tuple(lora))
