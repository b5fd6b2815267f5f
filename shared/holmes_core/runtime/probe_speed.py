# SPDX-License-Identifier: Apache-2.0
"""How fast one rank computes: blocks, head, the model around them, optimizer, copies, small operations.

The block runs in a copy of the model with four blocks and a small vocabulary, so that a model of any size can be
measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from holmes_core.cluster.probe import RankSpeed
from holmes_core.errors import ConfigError
from holmes_core.runtime.chain import find_chain
from holmes_core.runtime.model_facts import hugging_face_model

__all__ = ["StepHint", "measure_speed"]

#: A control group's processor quota comes in slices of up to 100 ms: shorter measurements see bursts or pauses.
_WINDOW = 0.2
_WINDOWS, _FEW_WINDOWS = 8, 5  # of passes; of what varies less, or takes longer than `_LONGEST`
_LONGEST = 1.0  # seconds for one size of micro-batch
_SMALL_VOCABULARY, _BLOCKS = 8192, 4
_MOST_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHint:
    """What is known of a step before the first batch has come.

    Args:
        batch: Samples of one replica's batch; None: not known.
        seq: Tokens of one sample; None: what the model was made for, at most 4096.
        precision: Lightning's or Accelerate's name, for autocast; None: none.
    """

    batch: int | None = None
    seq: int | None = None
    precision: str | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """The type that autocast computes in."""
        if self.precision in ("bf16-mixed", "bf16"):
            return torch.bfloat16
        return torch.float16 if self.precision in ("16-mixed", "fp16") else None


def measure_speed(root: nn.Module, *, device: torch.device, hint: StepHint, samples: int, seq: int) -> RankSpeed:
    """Measure what this rank takes for one block of a model and for what surrounds the blocks.

    Args:
        root: The user's module, whole or on the meta device; not changed.
        device: This rank's device.
        hint: Precision.
        samples: Samples of a micro-batch.
        seq: Tokens of a sample.

    Returns:
        The times; rank, host and memory are left to the caller.

    Raises:
        Exception: Whatever the model raises when a small copy of it is made or run.
    """
    samples = min(samples, _MOST_SAMPLES)
    sync = torch.cuda.synchronize if device.type == "cuda" else _nothing
    context = torch.autocast(device.type, hint.autocast) if hint.autocast else nullcontext()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.enable_grad(), context:
        found = hugging_face_model(root)
        if found is None:
            return _matrix_products(root, device, samples * seq, samples, sync)
        copy, vocabulary = _small_copy(found[1], device)
        blocks = find_chain(copy).blocks
        words = copy.config.get_text_config().vocab_size

        def run(count: int) -> Callable[[], Any]:
            ids = torch.randint(0, words, (count, seq), device=device)
            return lambda: copy(input_ids=ids, labels=ids).loss

        many, fastest = _times(run(samples), blocks, sync)
        around = min(many[2], _around(copy, blocks, torch.randint(0, words, (samples, seq), device=device), sync))
        one = _times(run(1), blocks, sync)[0] if samples > 1 else many
        optimizer = _optimizer_seconds(blocks[-1], sync)
        copied = _copy_seconds(blocks[-1], sync)
        operation = _operation_seconds(device, sync)
    forward, backward, _, after = (_line(a, b, samples) for a, b in zip(one, many, strict=True))
    return RankSpeed(
        rank=0,
        host="",
        samples=samples,
        forward=forward[0],
        backward=backward[0],
        forward_fixed=forward[1],
        backward_fixed=backward[1],
        head_forward=(many[2] - around) * vocabulary / samples,
        head_backward=after[0] * vocabulary,
        head_fixed=after[1] * vocabulary,
        around=around,
        operation=operation,
        optimizer=optimizer,
        copied=copied,
        fastest=fastest / samples,
    )


def _line(one: float, many: float, samples: int) -> tuple[float, float]:
    """Return seconds for each sample, and besides, from a pass of one sample and a pass of many."""
    slope = (many - one) / (samples - 1) if samples > 1 else many
    # Noise may turn the line: then all of it is taken to grow with the batch.
    slope = slope if 0 < slope <= many / samples else many / samples
    return slope, max(0.0, many - samples * slope)


def _usual(times: Sequence[float]) -> float:
    """The median: training is disturbed as much as these windows are."""
    return statistics.median(times)


def _nothing() -> None:
    pass


def _small_copy(model: nn.Module, device: torch.device) -> tuple[Any, float]:
    """Return the model with four blocks and at most 8192 words, and how many times as large its vocabulary is."""
    config: Any = type(model.config).from_dict(model.config.to_dict())  # type: ignore[union-attr, operator]
    text = config.get_text_config()
    text.num_hidden_layers = min(_BLOCKS, text.num_hidden_layers)
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[-text.num_hidden_layers :]
    words = text.vocab_size
    text.vocab_size = min(words, _SMALL_VOCABULARY)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(text, name, None), int) and getattr(text, name) >= text.vocab_size:
            setattr(text, name, None)
    config.use_cache = text.use_cache = False
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    with torch.device("cpu"):
        copy = type(model)(config)
    return copy.to(device=device, dtype=max(set(dtypes), key=dtypes.count)).train(), words / text.vocab_size


def _times(
    run: Callable[[], Any], blocks: Sequence[nn.Module], sync: Callable[[], None]
) -> tuple[tuple[float, float, float, float], float]:
    """Return the seconds of a forward and a backward pass in one block, and of both outside the blocks.

    And of both in one block in the fastest window.

    Taken within passes of the whole copy: a block that runs alone again and again finds its weights in the cache, and
    the difference of two measurements would mostly be their noise.
    """
    began = 0.0
    inside = [0.0, 0.0]

    def enter(*_: Any) -> None:
        nonlocal began
        sync()
        began = time.perf_counter()

    def leave(direction: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            sync()
            inside[direction] += time.perf_counter() - began

        return hook

    handles = []
    for block in blocks:
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave(0))]
        handles += [block.register_full_backward_pre_hook(enter), block.register_full_backward_hook(leave(1))]
    windows: list[tuple[float, float, float, float]] = []
    try:
        start = time.perf_counter()
        _one_pass(run, sync)  # the first one allocates, loads kernels and chooses algorithms
        while len(windows) < _WINDOWS and (
            len(windows) < _FEW_WINDOWS or time.perf_counter() - start < _LONGEST
        ):
            inside[:] = [0.0, 0.0]
            there, back, count = 0.0, 0.0, 0
            while there + back < _WINDOW:
                f, b = _one_pass(run, sync)
                there, back, count = there + f, back + b, count + 1
            if not inside[1]:  # hooks see positional arguments only: without any, the usual ratio
                inside[1] = min(back, 2 * inside[0])
            outside = max(0.0, there - inside[0]), max(0.0, back - inside[1])
            each = count * len(blocks)
            windows.append((inside[0] / each, inside[1] / each, outside[0] / count, outside[1] / count))
    finally:
        for handle in handles:
            handle.remove()
    forward, backward, before, after = (_usual(values) for values in zip(*windows, strict=True))
    return (forward, backward, before, after), min(window[0] + window[1] for window in windows)


def _passes(run: Callable[[], Any], sync: Callable[[], None]) -> tuple[float, float, float]:
    """Return the seconds of a forward and of a backward pass, and of both in the fastest window."""
    windows: list[tuple[float, float]] = []
    _one_pass(run, sync)
    while len(windows) < _WINDOWS:
        there, back, count = 0.0, 0.0, 0
        while there + back < _WINDOW:
            f, b = _one_pass(run, sync)
            there, back, count = there + f, back + b, count + 1
        windows.append((there / count, back / count))
    forward, backward = (_usual(values) for values in zip(*windows, strict=True))
    return forward, backward, min(there + back for there, back in windows)


def _one_pass(run: Callable[[], Any], sync: Callable[[], None]) -> tuple[float, float]:
    sync()
    begin = time.perf_counter()
    out = run()
    out = out[0] if isinstance(out, tuple) else out
    sync()
    middle = time.perf_counter()
    out.backward(torch.ones_like(out))
    sync()
    return middle - begin, time.perf_counter() - middle


def _optimizer_seconds(block: nn.Module, sync: Callable[[], None]) -> float:
    params = [p for p in block.parameters() if p.grad is not None]
    optimizer = torch.optim.AdamW(params, lr=0.0)
    optimizer.step()
    times: list[float] = []
    for _ in range(_FEW_WINDOWS):
        spent, count = 0.0, 0
        while spent < _WINDOW / 4:
            sync()
            begin = time.perf_counter()
            optimizer.step()
            sync()
            spent, count = spent + time.perf_counter() - begin, count + 1
        times.append(spent / count)
    return _usual(times) / sum(p.numel() for p in params)


@torch.no_grad()
def _operation_seconds(device: torch.device, sync: Callable[[], None]) -> float:
    """Seconds of a small operation called from Python: what everything takes that is no arithmetic."""
    one = torch.ones(8, device=device)
    times: list[float] = []
    for _ in range(_FEW_WINDOWS):
        count = 0
        sync()
        begin = time.perf_counter()
        while (spent := time.perf_counter() - begin) < _WINDOW / 8:
            for _ in range(100):
                one.add_(1.0)
            count += 100
        times.append(spent / count)
    return _usual(times)


def _around(model: nn.Module, blocks: Sequence[nn.Module], ids: Tensor, sync: Callable[[], None]) -> float:
    """Seconds that a forward pass takes outside of the blocks, without head and loss: what every stage runs, too."""
    body = getattr(model, "base_model", model)
    if body is model:
        return 0.0
    began, inside = 0.0, 0.0

    def enter(*_: Any) -> None:
        nonlocal began
        sync()
        began = time.perf_counter()

    def leave(*_: Any) -> None:
        nonlocal inside
        sync()
        inside += time.perf_counter() - began

    handles = [
        handle for b in blocks for handle in (b.register_forward_pre_hook(enter), b.register_forward_hook(leave))
    ]
    times: list[float] = []
    try:
        for _ in range(_FEW_WINDOWS):
            spent, count, inside = 0.0, 0, 0.0
            while spent < _WINDOW / 4:
                sync()
                begin = time.perf_counter()
                body(input_ids=ids)
                sync()
                spent, count = spent + time.perf_counter() - begin, count + 1
            times.append(max(0.0, spent - inside) / count)
    finally:
        for handle in handles:
            handle.remove()
    return _usual(times)


@torch.no_grad()
def _copy_seconds(block: nn.Module, sync: Callable[[], None]) -> float:
    """Seconds per byte to put a block's gradients into one flat tensor and back, as summing them over ranks does."""
    grads = [p.grad for p in block.parameters() if p.grad is not None]
    size = sum(grad.nbytes for grad in grads)
    times: list[float] = []
    for _ in range(_FEW_WINDOWS):
        spent, count = 0.0, 0
        while spent < _WINDOW / 8:
            sync()
            begin = time.perf_counter()
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            start = 0
            for grad in grads:
                grad.copy_(flat[start : start + grad.numel()].view_as(grad))
                start += grad.numel()
            sync()
            spent, count = spent + time.perf_counter() - begin, count + 1
        times.append(spent / count)
    return _usual(times) / (2 * size)


def _matrix_products(
    root: nn.Module, device: torch.device, rows: int, samples: int, sync: Callable[[], None]
) -> RankSpeed:
    """A model of an unknown kind: the products of its block's matrices, which take most of its time."""
    block = find_chain(root).blocks[-1]
    matrices = [
        torch.randn(p.shape, dtype=p.dtype, device=device).requires_grad_() for p in block.parameters() if p.dim() == 2
    ]
    if not matrices:
        raise ConfigError(seen=f"{type(block).__name__} has no matrices", do="give cluster_speeds")
    inputs = [torch.randn(rows, m.shape[1], dtype=m.dtype, device=device).requires_grad_() for m in matrices]

    def run() -> Tensor:
        return torch.stack([(x @ m.t()).sum() for x, m in zip(inputs, matrices, strict=True)]).sum()

    forward, backward, fastest = (seconds / samples for seconds in _passes(run, sync))
    return RankSpeed(rank=0, host="", samples=samples, forward=forward, backward=backward, fastest=fastest)
