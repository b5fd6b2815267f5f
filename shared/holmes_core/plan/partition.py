# SPDX-License-Identifier: Apache-2.0
"""How many blocks each stage holds. No block is ever dropped: the sum is always the model's."""

from __future__ import annotations

from collections.abc import Sequence

from holmes_core.errors import ConfigError

__all__ = ["check_layers_per_stage", "equal_partition"]


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
