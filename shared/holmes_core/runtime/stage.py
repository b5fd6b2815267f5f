# SPDX-License-Identifier: Apache-2.0
"""A pipeline stage that runs the user's step, on torch.distributed.pipelining.

Differences from `PipelineStage`: shapes are agreed per micro-batch, not once (batches of other lengths, a smaller
last batch); every edge and direction has a process group of its own, so each can use the network that its two ranks
share; stages below which nothing is trained exchange no gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from holmes_core.errors import HolmesError
from holmes_core.runtime.boundary import Boundary
from holmes_core.runtime.intercept import Window
from holmes_core.runtime.torch_compat import stage_backward, stage_backward_input
from holmes_core.runtime.weights import WeightsBackward, WeightsTogether
from holmes_core.runtime.wire import WHOLE, Wire

__all__ = ["Edge", "HolmesStage", "StageBody"]

_HEADER_BYTES = 1024
_MAX_CACHED_SHAPES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """One direction of a pipeline edge, seen from this rank."""

    peer: int  # global rank
    group: dist.ProcessGroup
    count: Callable[[dist.ProcessGroup, Tensor], None] = lambda group, tensor: None  # told what is sent
    wire: Wire = WHOLE


class StageBody(nn.Module):
    """What torch sees as the stage's submodule: its parameters, and one call per micro-batch.

    Args:
        run: Called with (stage window, micro-batch index, received activation, its boundary); returns the output
            tensor and, except on the last stage, its boundary.
        parameters: The parameters that this stage trains or holds.
    """

    def __init__(
        self,
        run: Callable[[Window, int, Tensor | None, Boundary | None], tuple[Tensor, Boundary | None]],
        parameters: Callable[[], list[nn.Parameter]],
    ) -> None:
        super().__init__()
        self._run = run
        self._held = parameters

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Iterate over the stage's own parameters (the module itself owns none)."""
        return iter(self._held())

    def forward(
        self, window: Window, index: int, received: Tensor | None, boundary: Boundary | None
    ) -> tuple[Tensor, Boundary | None]:
        """Run one micro-batch."""
        return self._run(window, index, received, boundary)


class HolmesStage(PipelineStage):
    """One stage of the pipeline on this rank.

    Args:
        body: Runs a micro-batch.
        window: The blocks of this stage.
        num_stages: Stages of the whole pipeline.
        device: This rank's device.
        group: The pipeline column (gloo): it carries descriptions of shapes only.
        forward_in: Where activations come from; None on the first stage and where the stage before is on this rank.
        forward_out: Where activations go.
        backward_in: Where gradients come from.
        backward_out: Where gradients go.
        dynamic_shapes: Describe every activation, not only those of a batch shape not seen before.
    """

    def __init__(
        self,
        *,
        body: StageBody,
        window: Window,
        num_stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        forward_in: Edge | None,
        forward_out: Edge | None,
        backward_in: Edge | None,
        backward_out: Edge | None,
        dynamic_shapes: bool = False,
    ) -> None:
        super().__init__(body, window.stage, num_stages, device, group=group)
        self.window = window
        self.body = body
        self.forward_in, self.forward_out = forward_in, forward_out
        self.backward_in, self.backward_out = backward_in, backward_out
        self.dynamic_shapes = dynamic_shapes
        self.on_backward: Callable[[], Any] | None = None
        #: Told this stage's index when its last backward begins, and None when its gradients are complete.
        self.completing: Callable[[int | None], None] = lambda stage: None
        #: Told a parameter whose gradient a split backward has added to (autograd's own hooks tell of the others).
        self.accumulated: Callable[[nn.Parameter], None] = lambda param: None
        #: Another stage's backward comes before the rest of this stage's last one.
        self.pausing: Callable[[], None] = lambda: None
        #: Parameters to which another stage adds gradients, too.
        self.shared: Collection[nn.Parameter] = ()
        self.weights_together = WeightsTogether()
        self.trace: list[tuple[int, str, int]] | None = None
        self._keys: list[Any] = []
        self._in_known: dict[Any, Boundary] = {}
        self._out_known: dict[Any, Boundary] = {}
        self._header_sends: list[tuple[dist.Work, Tensor]] = []
        self._clear()

    # ---- life of a step ----------------------------------------------------------------------------------------
    def _clear(self) -> None:
        self._activations: dict[int, Tensor] = {}
        self._in_boundary: dict[int, Boundary] = {}
        self._out_boundary: dict[int, Boundary] = {}
        self._grads_out: dict[int, Tensor] = {}  # gradients of this stage's outputs, received
        self._grads_in: dict[int, Tensor | None] = {}  # gradients of its inputs, computed
        self._outputs: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._weight_work: dict[int, tuple[str, Any, Any, Any]] = {}
        self._begun: WeightsBackward | None = None  # what `pause` has interrupted

    def start_step(self, keys: list[Any], *, has_backward: bool) -> None:
        """Prepare for a batch; `keys` describe the shapes of its micro-batches, equal on all ranks of a replica."""
        self._keys = keys
        self.chunks = len(keys)
        self.has_backward = has_backward
        self.clear_runtime_states()
        if len(self._in_known) > _MAX_CACHED_SHAPES:  # emptied at the same step on both ends of every edge
            self._in_known.clear()
        if len(self._out_known) > _MAX_CACHED_SHAPES:
            self._out_known.clear()

    def finish_step(self) -> None:
        """Wait for descriptions still under way and drop what the batch left."""
        for work, _ in self._header_sends:
            work.wait()
        self._header_sends.clear()
        self._clear()

    def clear_runtime_states(self) -> None:
        """Forget the last batch (called by torch's schedules, too)."""
        self._clear()

    @property
    def knows_shapes(self) -> bool:
        """Whether no activation of this batch needs to be described before it can be received."""
        return self.forward_in is None or (not self.dynamic_shapes and all(key in self._in_known for key in self._keys))

    # ---- shapes ------------------------------------------------------------------------------------------------
    def _incoming(self, index: int) -> Boundary:
        key = self._keys[index]
        if not self.dynamic_shapes and key in self._in_known:
            return self._in_known[key]
        assert self.forward_in is not None
        buffer = torch.zeros(_HEADER_BYTES, dtype=torch.uint8)
        dist.recv(buffer, src=self.forward_in.peer, group=self.group)
        boundary = _decode(buffer)
        self._in_known[key] = boundary
        return boundary

    def _announce(self, index: int, boundary: Boundary) -> None:
        key = self._keys[index]
        known = None if self.dynamic_shapes else self._out_known.get(key)
        if known is None:
            self._out_known[key] = boundary
            assert self.forward_out is not None
            buffer = _encode(boundary)
            work = dist.isend(buffer, dst=self.forward_out.peer, group=self.group)
            assert work is not None
            self._header_sends.append((work, buffer))
        elif known != boundary:
            raise HolmesError(
                seen=f"stage {self.stage_index} produced an activation of shape {boundary.shape} ({boundary.dtype})"
                f" for a batch of a shape that gave {known.shape} ({known.dtype}) before",
                where=f"stage {self.stage_index}, micro-batch {index}",
                means="the step cuts or pads by the values of the batch, so its shape does not tell the activation's",
                do="set dynamic_shapes: true (each activation is then described before it is sent)",
            )

    # ---- communication, as torch's schedule runtime asks for it --------------------------------------------------
    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the input of a micro-batch."""
        if self.forward_in is None:
            return []
        boundary = self._incoming(fwd_chunk_id)
        self._in_boundary[fwd_chunk_id] = boundary
        buffer = self.forward_in.wire.buffer(boundary, self.device)
        self._activations[fwd_chunk_id] = buffer
        return [dist.P2POp(dist.irecv, buffer, self.forward_in.peer, self.forward_in.group)]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the output of a micro-batch."""
        if self.forward_out is None:
            return []
        boundary = self._out_boundary[fwd_chunk_id]
        self._announce(fwd_chunk_id, boundary)
        output = self.forward_out.wire.pack(self._outputs[fwd_chunk_id][0], boundary)
        self.forward_out.count(self.forward_out.group, output)
        return [dist.P2POp(dist.isend, output, self.forward_out.peer, self.forward_out.group)]

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradient of this stage's output."""
        if self.backward_in is None or not self.has_backward or not self._out_boundary[bwd_chunk_id].requires_grad:
            return []
        boundary = self._out_boundary[bwd_chunk_id]
        buffer = self.backward_in.wire.buffer(boundary, self.device)
        self._grads_out[bwd_chunk_id] = buffer
        return [dist.P2POp(dist.irecv, buffer, self.backward_in.peer, self.backward_in.group)]

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of this stage's input."""
        if self.backward_out is None or not self.has_backward or not self._in_boundary[bwd_chunk_id].requires_grad:
            return []
        grad = self.get_local_bwd_output(bwd_chunk_id)[0]
        grad = self.backward_out.wire.pack(grad, self._in_boundary[bwd_chunk_id])
        self.backward_out.count(self.backward_out.group, grad)
        return [dist.P2POp(dist.isend, grad, self.backward_out.peer, self.backward_out.group)]

    # ---- hand-over between two stages of one rank (V schedules) --------------------------------------------------
    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Take the input from the stage before, which is on this rank."""
        output, boundary = prev_stage_outputs
        self._activations[mb_index] = output.detach()
        self._in_boundary[mb_index] = boundary

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor, ...]:
        """Return the gradient of this stage's input, zeros where it was not used."""
        boundary = self._in_boundary[mb_index]
        grad = self._grads_in.pop(mb_index, None)
        if grad is None:
            grad = torch.zeros(boundary.shape, dtype=boundary.dtype, device=self.device)
        return (grad,)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradient of the output from the stage after, which is on this rank."""
        grad = next_stage_bwd_outputs[0]
        assert grad is not None
        self._grads_out[mb_index] = grad

    # ---- compute ------------------------------------------------------------------------------------------------
    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any = (), kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        """Run the user's step on one micro-batch."""
        received = boundary = None
        if not self.is_first:
            received = self._activations.pop(fwd_chunk_id)
            boundary = self._in_boundary[fwd_chunk_id]
            if self.forward_in is not None:
                received = self.forward_in.wire.unpack(received, boundary)
            received.requires_grad_(boundary.requires_grad and self.has_backward)
        output, out_boundary = self.body(self.window, fwd_chunk_id, received, boundary)
        if out_boundary is not None:
            self._out_boundary[fwd_chunk_id] = out_boundary
        if self.trace is not None:
            self.trace.append((self.stage_index, "F", fwd_chunk_id))
        if output._is_view() and self.has_backward:  # zero-bubble schedules detach outputs in place
            output = output.clone()
        self._outputs[fwd_chunk_id] = (output, received)
        return output, out_boundary

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute the gradients of one micro-batch, or those of its input only (zero-bubble schedules)."""
        if last_backward:
            self.completing(self.stage_index)
        self._backward(bwd_chunk_id, full_backward)
        if last_backward:
            self.completing(None)

    def _backward(self, bwd_chunk_id: int, full_backward: bool) -> None:
        output, received = self._outputs.pop(bwd_chunk_id)
        if self.trace is not None:
            self.trace.append((self.stage_index, "B" if full_backward else "I", bwd_chunk_id))
        grad = None if self.is_last else self._grads_out.pop(bwd_chunk_id, None)
        if grad is not None and self.backward_in is not None:
            grad = self.backward_in.wire.unpack(grad, self._out_boundary[bwd_chunk_id])
        if not output.requires_grad:
            self._weight_work[bwd_chunk_id] = ("none", None, None, None)
            return
        grads = None if grad is None else (grad,)
        inputs = () if received is None else (received,)
        if full_backward or received is None or not received.requires_grad:
            if not full_backward:  # nothing below wants a gradient: the whole backward is weight work
                self._weight_work[bwd_chunk_id] = ("full", output, grads, inputs)
                return
            self._full_backward(bwd_chunk_id, output, grads, inputs)
            return
        with self._recompute():
            output_grads = None if grads is None else list(grads)
            input_grads, groups = stage_backward_input([output], output_grads, list(inputs), self.body.parameters())
        self._grads_in[bwd_chunk_id] = input_grads[0]
        self._weight_work[bwd_chunk_id] = ("weight", groups, None, None)

    def _full_backward(self, index: int, output: Tensor, grads: Any, inputs: Any) -> None:
        with self._recompute():
            input_grads = stage_backward(output, grads[0] if grads else None, inputs)
        self._grads_in[index] = input_grads[0] if input_grads else None

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute the gradients of the parameters that `backward_one_chunk` left for later."""
        if self.trace is not None:
            self.trace.append((self.stage_index, "W", bwd_chunk_id))
        if bwd_chunk_id in self.weights_together.micro_batches and not last_backward:
            if bwd_chunk_id == self.weights_together.pause:
                self._begin_weights()
            return
        before = [index for index in self._weight_work if index != bwd_chunk_id] if last_backward else []
        works = [(index, *self._weight_work.pop(index)) for index in (*before, bwd_chunk_id) if self._begun is None]
        split = [groups for _, kind, groups, _, _ in works if kind == "weight"]
        if len(split) < len(works):  # one after the other: autograd tells of each gradient that a whole one adds to
            for index, kind, work, grads, inputs in works:
                if last_backward and index == bwd_chunk_id:
                    self.completing(self.stage_index)
                if kind == "full":
                    self._full_backward(index, work, grads, inputs)
                elif kind == "weight":
                    with self._recompute():
                        self._weights_backward([work]).run()
        else:
            if last_backward:
                self.completing(self.stage_index)
            with self._recompute():
                (self._begun or self._weights_backward(split)).run()
            self._begun = None
        if last_backward:
            self.completing(None)

    def _begin_weights(self) -> None:
        """Do a part of what ends this stage's work, then let another stage's backward come."""
        works = list(self._weight_work.values())
        if any(kind != "weight" for kind, *_ in works):
            return
        self._weight_work.clear()
        self._begun = self._weights_backward([groups for _, groups, _, _ in works])
        self.completing(self.stage_index)
        with self._recompute():
            self._begun.run(self.weights_together.part)
        for param in self._begun.unused():
            self.accumulated(param)
        self.pausing()

    def _weights_backward(self, parts: list[list[dict[str, Any]]]) -> WeightsBackward:
        return WeightsBackward(self.body.parameters(), parts, self.accumulated, self.shared)

    def _recompute(self) -> Any:
        assert self.on_backward is not None
        return self.on_backward()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the engine reduces gradients once per optimizer step, not per batch."""


def _encode(boundary: Boundary) -> Tensor:
    text = json.dumps(boundary.to_json()).encode()
    if len(text) > _HEADER_BYTES:
        raise HolmesError(
            seen=f"block {boundary.source!r} returns {len(boundary.extras)} values besides the hidden state",
            means=f"their description does not fit {_HEADER_BYTES} bytes",
            do="return only the hidden state from blocks at stage borders",
        )
    return torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)


def _decode(buffer: Tensor) -> Boundary:
    return Boundary.from_json(json.loads(bytes(buffer.numpy()).decode()))
