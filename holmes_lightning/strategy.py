# SPDX-License-Identifier: Apache-2.0
"""HolmesStrategy: Lightning's hooks on one side, the engine on the other. No parallelism logic lives here.

Lightning exists twice, as ``lightning.pytorch`` and as ``pytorch_lightning``; a strategy of one is refused by the
other, so the class is made per namespace.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["make_strategy_class"]


@functools.cache
def make_strategy_class(namespace: str) -> type[Any]:
    """Return HolmesStrategy for ``"lightning.pytorch"`` or ``"pytorch_lightning"``."""
    from holmes_lightning.hooks import StrategyHooks

    base = importlib.import_module(f"{namespace}.strategies.parallel").ParallelStrategy

    class HolmesStrategy(StrategyHooks, base):  # type: ignore[misc, valid-type]
        """Pipeline, data and tensor parallel training over clusters with unequal networks.

        All arguments are keywords; each is described at the field of the same name in
        `holmes_core.config.HolmesConfig`. What is left out comes from the file in ``HOLMES_CONFIG``, else Holmes
        chooses.
        """

        _namespace = namespace

        def __init__(
            self,
            *,
            config: str | None = None,
            pp: int | None = None,
            dp: int | None = None,
            tp: int | None = None,
            clusters: list[dict[str, Any]] | None = None,
            cluster_file: str | None = None,
            num_microbatches: int | None = None,
            micro_batch_size: int | None = None,
            schedule: str | None = None,
            run_ahead: int | None = None,
            wire_dtype: str | None = None,
            defer_weights: bool | None = None,
            taper: bool | None = None,
            overlap: bool | None = None,
            overlap_param_gather: bool | None = None,
            virtual_stages: int | None = None,
            layers_per_stage: list[int] | str | None = None,
            partition: str | None = None,
            cluster_speeds: dict[str, float] | None = None,
            plan: str | None = None,
            probe: str | None = None,
            seq_len: int | None = None,
            memory_limit: float | None = None,
            recompute: bool | None = None,
            split_points: list[str] | None = None,
            embedding: str | None = None,
            placement: dict[str, str] | None = None,
            sharding: str | None = None,
            loss_weight: str | None = None,
            check_loss: bool | None = None,
            dynamic_shapes: bool | None = None,
            init: str | None = None,
            rank_order: list[int] | None = None,
            last_stage_on_rank_zero: bool | None = None,
            timeout: float | None = None,
            failure_timeout: float | None = None,
            checkpoint: str | None = None,
            checkpoint_async: bool | None = None,
            resume: str | None = None,
            print_plan: bool | None = None,
            traffic_file: str | None = None,
            weights_only: bool | None = None,
        ) -> None:
            settings = {
                key: value
                for key, value in locals().items()
                if key not in ("self", "weights_only") and not key.startswith("__") and value is not None
            }
            super().__init__()
            self._start(settings, weights_only)

    HolmesStrategy.__module__ = "holmes_lightning"
    HolmesStrategy.__qualname__ = "HolmesStrategy"
    return HolmesStrategy
