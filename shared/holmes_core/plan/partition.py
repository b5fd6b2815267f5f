# SPDX-License-Identifier: Apache-2.0
"""How many blocks each stage holds. No block is ever dropped: the sum is always the model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import pairwise

from holmes_core.errors import ConfigError

__all__ = ["check_layers_per_stage", "equal_partition", "fill_stages", "paper_partition", "self_adapting_partition"]


def equal_partition(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Split blocks as evenly as whole blocks allow.

    Blocks left over go to the middle stages first, then to the first stage (it also holds the embedding),
    and to the last stage last (it also holds the head and the loss).

    Args:
        num_blocks: Blocks of the model.
        num_stages: Stages of the pipeline.

    Returns:
        Blocks per stage in pipeline order; they differ by at most one and sum to num_blocks.

    Raises:
        ConfigError: There are fewer blocks than stages.
    """
    if num_stages < 1 or num_blocks < num_stages:
        raise ConfigError(
            seen=f"{num_blocks} blocks for {num_stages} stages",
            where="layers_per_stage",
            means="at least one stage would hold no block",
            do=f"use at most {max(num_blocks, 1)} stages (smaller pp or virtual_stages), "
            "or say which stages hold none with layers_per_stage",
        )
    base, extra = divmod(num_blocks, num_stages)
    last = num_stages - 1
    middle = sorted(range(1, last), key=lambda stage: (abs(2 * stage - last), stage))
    first_to_last = [*middle, 0, last] if last else [0]
    chosen = set(first_to_last[:extra])
    return tuple(base + (stage in chosen) for stage in range(num_stages))


def check_layers_per_stage(layers_per_stage: Sequence[int], *, num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Check a user's split.

    The first and the last stage may hold no block (they hold the embedding and the head); a stage between them
    may only where the model has fewer blocks than there are stages.

    Raises:
        ConfigError: Wrong length, wrong sum, or an empty stage in the middle.
    """
    shown = ",".join(map(str, layers_per_stage))
    where = "HolmesConfig.layers_per_stage"
    fitting = ",".join(map(str, equal_partition(num_blocks, num_stages))) if num_blocks >= num_stages else None
    do = f"for example layers_per_stage {fitting}" if fitting else "use fewer stages"
    if len(layers_per_stage) != num_stages:
        seen = f"layers_per_stage {shown} has {len(layers_per_stage)} entries, the pipeline has {num_stages} stages"
        raise ConfigError(seen=seen, where=where, do=f"give one number per stage, {do}")
    if sum(layers_per_stage) != num_blocks or min(layers_per_stage) < 0:
        seen = f"layers_per_stage {shown} sums to {sum(layers_per_stage)}, the model has {num_blocks} blocks"
        raise ConfigError(seen=seen, where=where, do=f"place every block once, {do}")
    empty = [stage for stage in range(1, num_stages - 1) if layers_per_stage[stage] == 0]
    if empty and num_blocks >= num_stages:
        raise ConfigError(
            seen=f"layers_per_stage {shown} leaves stage {empty[0]} without a block",
            where=where,
            means="only the first and the last stage have other work (embedding, head)",
            do=f"give stage {empty[0]} a block, {do}",
        )
    return tuple(layers_per_stage)


def paper_partition(num_blocks: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Split blocks in proportion to speed: the rule of Holmes (arXiv 2312.03549), as its published splits show it.

    Each stage gets the floor of its share ``num_blocks * speed / sum of speeds``. Blocks left over go to the slowest
    stages, one each, later ones first (the published splits 16/14 of 30 and 26/22 of 48 blocks at 197 and 160
    TFLOP/s come out so). Then no stage is left empty: it takes a block from the fullest.

    Args:
        num_blocks: Blocks of the model.
        speeds: Speed of each stage in pipeline order, in any unit.

    Returns:
        Blocks per stage; they sum to num_blocks.

    Raises:
        ConfigError: There are fewer blocks than stages, or a speed is not positive.
    """
    _check_stages(num_blocks, speeds)
    total = sum(speeds)
    split = [int(num_blocks * speed / total * (1 + 1e-12)) for speed in speeds]
    slowest = sorted(range(len(speeds)), key=lambda stage: (speeds[stage], -stage))
    for stage in slowest[: num_blocks - sum(split)]:
        split[stage] += 1
    for stage in range(len(split)):
        if split[stage] == 0:
            split[split.index(max(split))] -= 1
            split[stage] = 1
    return tuple(split)


def fill_stages(
    num_blocks: int, block_seconds: Sequence[float], extra: Sequence[float], max_blocks: Sequence[int]
) -> tuple[int, ...] | None:
    """Split blocks that are all alike so that the slowest stage is as fast as possible, then the second slowest, ...

    Each block goes to the stage that is fastest with it. For equal blocks this is exact, and takes L log P steps: the
    planner's search splits thousands of layouts so.

    Args:
        num_blocks: Blocks of the model.
        block_seconds: Seconds one block takes on each stage.
        extra: Seconds each stage takes besides.
        max_blocks: Most blocks of each stage.

    Returns:
        Blocks per stage, each at least 1; None where the limits leave no such split.
    """
    stages = len(block_seconds)
    if num_blocks < stages or min(max_blocks) < 1 or sum(max_blocks) < num_blocks:
        return None
    split = [1] * stages
    heap = [(extra[s] + 2 * block_seconds[s], s) for s in range(stages) if max_blocks[s] > 1]
    heapify(heap)
    for _ in range(num_blocks - stages):
        seconds, stage = heap[0]
        split[stage] += 1
        if split[stage] < max_blocks[stage]:
            heapreplace(heap, (seconds + block_seconds[stage], stage))
        else:
            heappop(heap)
    return tuple(split)


def self_adapting_partition(
    block_costs: Sequence[float],
    speeds: Sequence[float],
    *,
    extra: Sequence[float] | None = None,
    max_blocks: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Split blocks so that the slowest stage is as fast as possible; among such splits, the most even one.

    The exact optimum, by two dynamic programs over (stage, blocks placed): the first minimises the largest stage
    time, the second, within that bound, the sum of squared stage times. Both take P x L^2 steps at most, for P
    stages and L blocks.

    Args:
        block_costs: Cost of each block in model order (FLOPs, or seconds at speed 1).
        speeds: Speed of each stage in pipeline order: cost per unit of time.
        extra: What each stage does besides its blocks, in units of time: embedding, head and loss, its link.
        max_blocks: Most blocks of each stage that fit its memory.

    Returns:
        Blocks per stage, in pipeline order, each at least 1; they sum to ``len(block_costs)``.

    Raises:
        ConfigError: There are fewer blocks than stages, or the blocks do not fit the memory limits.
    """
    num_blocks, stages = len(block_costs), len(speeds)
    _check_stages(num_blocks, speeds)
    extra = extra or [0.0] * stages
    limits = [num_blocks] * stages if max_blocks is None else [min(limit, num_blocks) for limit in max_blocks]
    if min(limits) < 1 or sum(limits) < num_blocks:
        small = limits.index(min(limits))
        raise ConfigError(
            seen=f"memory for {', '.join(map(str, limits))} blocks per stage, the model has {num_blocks}",
            where="layers_per_stage",
            means=f"stage {small} has no room for a block" if limits[small] < 1 else "together they are too few",
            do="use more stages, more tp, smaller micro-batches, recomputation, or a schedule that keeps fewer of them",
        )
    before = [0.0]
    for cost in block_costs:
        before.append(before[-1] + cost)

    def time(stage: int, start: int, stop: int) -> float:
        return extra[stage] + (before[stop] - before[start]) / speeds[stage]

    bound = _chain(num_blocks, limits, time, lambda so_far, here: max(so_far, here), math.inf)[0]
    return _chain(num_blocks, limits, time, lambda so_far, here: so_far + here * here, bound * (1 + 1e-9))[1]


def _check_stages(num_blocks: int, speeds: Sequence[float]) -> None:
    if not speeds or min(speeds) <= 0:
        raise ConfigError(
            seen=f"speeds {list(speeds)}", where="partition", do="give every stage a positive speed, in any one unit"
        )
    if num_blocks < len(speeds):
        equal_partition(num_blocks, len(speeds))  # raises, and says what to do


def _chain(
    num_blocks: int,
    limits: Sequence[int],
    time: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
    bound: float,
) -> tuple[float, tuple[int, ...]]:
    """Return the best value of ``join`` over all splits whose stages stay within ``bound``, and its split."""
    stages = len(limits)
    best: dict[int, float] = {0: 0.0}  # blocks placed so far -> value
    choices: list[dict[int, int]] = []
    for stage in range(stages):
        found: dict[int, float] = {}
        choice: dict[int, int] = {}
        for start, so_far in best.items():
            last = min(start + limits[stage], num_blocks - (stages - 1 - stage))
            for stop in range(start + 1, last + 1):
                here = time(stage, start, stop)
                if here > bound:
                    break  # costs are not negative: more blocks take longer
                value = join(so_far, here)
                if stop not in found or value < found[stop] * (1 - 1e-12):
                    found[stop], choice[stop] = value, start
        best = found
        choices.append(choice)
    ends = [num_blocks]
    for choice in reversed(choices):
        ends.append(choice[ends[-1]])
    ends.reverse()
    return best[num_blocks], tuple(stop - start for start, stop in pairwise(ends))
