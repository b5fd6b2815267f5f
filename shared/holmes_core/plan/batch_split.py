# SPDX-License-Identifier: Apache-2.0
"""Into how many micro-batches a replica's batch is split."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from holmes_core.errors import ConfigError

if TYPE_CHECKING:
    from holmes_core.plan.layout import Layout

__all__ = ["check_microbatches", "default_num_microbatches", "runs"]


def default_num_microbatches(batch_size: int, layout: Layout) -> int:
    """Return how many micro-batches a replica's batch is split into; never more than it has samples.

    ``num_microbatches`` or ``micro_batch_size`` decide where given. Otherwise 1 without a pipeline, else about 2 per
    pp rank: the smallest count from 2*pp to 4*pp that divides the batch evenly (equal shapes), else the largest from
    pp to 2*pp, else 2*pp. The count is then moved to the nearest one that the schedule can run.

    Args:
        batch_size: Samples in one replica's batch.
        layout: The layout.

    Returns:
        A number of micro-batches the schedule accepts.

    Raises:
        ConfigError: The batch has too few samples for the schedule.
    """
    if batch_size < 1:
        raise ConfigError(
            seen=f"a batch of {batch_size} samples", where="data loader", do="use drop_last or larger batches"
        )
    pp = layout.pp
    if layout.num_microbatches is not None:
        count = layout.num_microbatches
    elif layout.micro_batch_size is not None:
        count = math.ceil(batch_size / layout.micro_batch_size)
    elif pp == 1:
        count = 1
    else:
        near = [*range(2 * pp, 4 * pp + 1), *range(2 * pp - 1, pp - 1, -1)]
        count = next((number for number in near if batch_size % number == 0), 2 * pp)
    count = min(count, batch_size)
    fits = [number for number in range(1, batch_size + 1) if runs(number, layout)]
    if fits:
        return min(fits, key=lambda number: (number < count, abs(number - count)))
    raise ConfigError(
        seen=f"a batch of {batch_size} samples for schedule {layout.schedule} with {layout.num_stages} stages",
        where="data loader",
        means=f"{layout.schedule} needs at least {layout.num_stages} micro-batches of at least one sample",
        do=f"use batches of {layout.num_stages} or more samples, or schedule: 1f1b",
    )


def runs(count: int, layout: Layout) -> bool:
    """Tell whether torch's schedule accepts a number of micro-batches (pipelining/schedules.py, the constructors)."""
    if layout.schedule == "dualpipev":
        return count >= layout.num_stages
    if layout.schedule in ("interleaved_1f1b", "interleaved_zb"):
        return count % max(1, count // layout.pp) == 0
    return True


def check_microbatches(layout: Layout) -> None:
    """Refuse a number of micro-batches that the schedule cannot run.

    Raises:
        ConfigError: It names the nearest that can be run.
    """
    count = layout.num_microbatches
    if count is None or runs(count, layout):
        return
    near = sorted(range(1, count + 4 * layout.num_stages), key=lambda number: (abs(number - count), number))
    fits = sorted([number for number in near if runs(number, layout)][:2])
    raise ConfigError(
        seen=f"num_microbatches {count} with schedule {layout.schedule}, pp {layout.pp}",
        where="HolmesConfig.num_microbatches",
        means=f"{layout.schedule} works in rounds of about pp micro-batches, all of one length"
        if layout.schedule != "dualpipev"
        else f"dualpipev needs at least as many micro-batches as stages ({layout.num_stages})",
        do=f"use num_microbatches {' or '.join(map(str, fits))}",
    )
