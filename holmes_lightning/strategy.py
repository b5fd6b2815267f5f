# SPDX-License-Identifier: Apache-2.0
"""HolmesStrategy: Lightning's hooks on one side, the engine on the other. No parallelism logic lives here.

Lightning exists twice, as ``lightning.pytorch`` and as ``pytorch_lightning``; a strategy of one is refused by the
other, so the class is made per namespace.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Optional, Union

__all__ = ["make_strategy_class"]


@functools.lru_cache(maxsize=None)
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
            config: Optional[str] = None,
            pp: Optional[int] = None,
            dp: Optional[int] = None,
            tp: Optional[int] = None,
            clusters: Optional[list[dict[str, Any]]] = None,
            cluster_file: Optional[str] = None,
            num_microbatches: Optional[int] = None,
            micro_batch_size: Optional[int] = None,
            schedule: Optional[str] = None,
            virtual_stages: Optional[int] = None,
            layers_per_stage: Optional[Union[list[int], str]] = None,
            split_points: Optional[list[str]] = None,
            placement: Optional[dict[str, str]] = None,
            sharding: Optional[str] = None,
            loss_weight: Optional[str] = None,
            check_loss: Optional[bool] = None,
            dynamic_shapes: Optional[bool] = None,
            init: Optional[str] = None,
            rank_order: Optional[list[int]] = None,
            last_stage_on_rank_zero: Optional[bool] = None,
            timeout: Optional[float] = None,
            print_plan: Optional[bool] = None,
            weights_only: Optional[bool] = None,
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
