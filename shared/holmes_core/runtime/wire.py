# SPDX-License-Identifier: Apache-2.0
"""How a boundary tensor crosses an edge between clusters: in fewer bytes than it has.

The ranks of a tensor-parallel group hold the same boundary tensor. Over a fast link each hands on its own; over a slow
one each sends its share, and the receivers gather the rest from each other, over the link inside their host
(scatter-gather, Narayanan et al. 2021, section 4.1). Under autocast a tensor may travel in the dtype of the compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.runtime.boundary import Boundary

__all__ = ["WHOLE", "Wire"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The form of tensors on one edge, the same at both of its ends.

    Args:
        group: The tensor-parallel group whose ranks send and receive a share each; None: each sends all.
        compute_dtype: Whether tensors travel in the autocast dtype of the step that made them, where there is one.
    """

    group: dist.ProcessGroup | None = None
    compute_dtype: bool = False

    def dtype(self, boundary: Boundary) -> torch.dtype:
        """Return the dtype on the wire."""
        narrower = boundary.compute if self.compute_dtype else None
        return boundary.dtype if narrower is None or narrower.itemsize >= boundary.dtype.itemsize else narrower

    def buffer(self, boundary: Boundary, device: torch.device) -> Tensor:
        """Return an empty tensor for what this rank receives."""
        dtype = self.dtype(boundary)
        if self.group is None:
            return torch.empty(boundary.shape, dtype=dtype, device=device)
        return torch.empty(self._share(boundary.shape), dtype=dtype, device=device)

    def pack(self, tensor: Tensor, boundary: Boundary) -> Tensor:
        """Return what this rank sends of a tensor (of the boundary's shape and dtype)."""
        tensor = tensor.detach().to(self.dtype(boundary))
        if self.group is None:
            return tensor.contiguous()
        size, flat = self._share(boundary.shape), tensor.reshape(-1)
        start = dist.get_rank(self.group) * size
        part = flat[start : start + size]
        return torch.nn.functional.pad(part, (0, size - part.numel())) if part.numel() < size else part.contiguous()

    def unpack(self, received: Tensor, boundary: Boundary) -> Tensor:
        """Return the tensor of the boundary's shape and dtype. Collective over the group, where there is one."""
        if self.group is not None:
            whole = received.new_empty(received.numel() * dist.get_world_size(self.group))
            dist.all_gather_into_tensor(whole, received, group=self.group)
            received = whole[: torch.Size(boundary.shape).numel()].view(boundary.shape)
        return received.to(boundary.dtype)

    def _share(self, shape: Sequence[int]) -> int:
        return -(-torch.Size(shape).numel() // dist.get_world_size(self.group))


#: Everything, as it is.
WHOLE = Wire()
