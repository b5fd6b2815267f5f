# SPDX-License-Identifier: Apache-2.0
"""How a boundary tensor crosses an edge between clusters: in fewer bytes than it has.

The ranks of a tensor-parallel group hold the same boundary tensor. Over a fast link each hands on its own; over a slow
one each sends its share, and the receivers gather the rest from each other, over the link inside their host
(scatter-gather, Narayanan et al. 2021, section 4.1). Under autocast a tensor may travel in the dtype of the compute,
and anywhere as 8-bit integers with one scale per block of elements (block-wise quantisation, Dettmers et al. 2022,
section 2.1, with linear steps). Both change what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.runtime.boundary import Boundary

__all__ = ["WHOLE", "Wire", "dequantise", "quantise"]

#: Elements that share a scale: 4 bytes for 256, 1.6 %.
BLOCK = 256


def quantise(flat: Tensor) -> Tensor:
    """Return a tensor as bytes: an integer in -127 ... 127 per element, then a float32 scale per block of `BLOCK`.

    Args:
        flat: One dimension, floating-point. A block with a value that is not finite comes back without finite values.
    """
    padded = torch.nn.functional.pad(flat.float(), (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(dim=1, keepdim=True) / 127
    steps = (padded / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([steps.view(-1).view(torch.uint8), scales.view(-1).view(torch.uint8)])


def dequantise(received: Tensor, numel: int) -> Tensor:
    """Return the `numel` elements that `quantise` wrote, in float32."""
    blocks = -(-numel // BLOCK)
    steps = received[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    scales = received[blocks * BLOCK :].view(torch.float32).view(blocks, 1)
    return (steps * scales).view(-1)[:numel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The form of tensors on one edge, the same at both of its ends.

    Args:
        group: The tensor-parallel group whose ranks send and receive a share each; None: each sends all.
        form: `HolmesConfig.wire_dtype`: as they are (``same``), in the autocast dtype of the step that made them, where
            there is one (``compute``), or quantised (``int8``).
    """

    group: dist.ProcessGroup | None = None
    form: str = "same"

    def dtype(self, boundary: Boundary) -> torch.dtype:
        """Return the dtype of elements on the wire, before they are quantised."""
        narrower = boundary.compute if self.form == "compute" else None
        return boundary.dtype if narrower is None or narrower.itemsize >= boundary.dtype.itemsize else narrower

    def buffer(self, boundary: Boundary, device: torch.device) -> Tensor:
        """Return an empty tensor for what this rank receives."""
        if self.form == "int8":
            blocks = -(-self._share(boundary.shape) // BLOCK)
            return torch.empty(blocks * (BLOCK + 4), dtype=torch.uint8, device=device)
        shape = boundary.shape if self.group is None else (self._share(boundary.shape),)
        return torch.empty(shape, dtype=self.dtype(boundary), device=device)

    def pack(self, tensor: Tensor, boundary: Boundary) -> Tensor:
        """Return what this rank sends of a tensor (of the boundary's shape and dtype)."""
        part = tensor.detach().to(self.dtype(boundary))
        if self.group is not None:
            size, flat = self._share(boundary.shape), part.reshape(-1)
            start = dist.get_rank(self.group) * size
            part = flat[start : start + size]
            if part.numel() < size:
                part = torch.nn.functional.pad(part, (0, size - part.numel()))
        return quantise(part.reshape(-1)) if self.form == "int8" else part.contiguous()

    def unpack(self, received: Tensor, boundary: Boundary) -> Tensor:
        """Return the tensor of the boundary's shape and dtype. Collective over the group, where there is one."""
        if self.form == "int8":
            received = dequantise(received, self._share(boundary.shape)).to(boundary.dtype)
            received = received.view(boundary.shape) if self.group is None else received
        if self.group is not None:
            whole = received.new_empty(received.numel() * dist.get_world_size(self.group))
            dist.all_gather_into_tensor(whole, received, group=self.group)
            received = whole[: torch.Size(boundary.shape).numel()].view(boundary.shape)
        return received.to(boundary.dtype)

    def _share(self, shape: Sequence[int]) -> int:
        return -(-torch.Size(shape).numel() // (1 if self.group is None else dist.get_world_size(self.group)))


#: Everything, as it is.
WHOLE = Wire()
