# SPDX-License-Identifier: Apache-2.0
"""What split backward passes leave for later: the gradients of a stage's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holmes_core.runtime.torch_compat import accumulator_of, stage_backward_weight

__all__ = ["WeightsBackward", "WeightsTogether"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsTogether:
    """Which weights' parts are done together at the end of a stage's work (see `schedule.trailing_weights`).

    Args:
        micro_batches: Whose: they are done with the last of them.
        pause: A part of the parameters is done with this one already, since another stage's backward comes in between.
        part: Which part, of their elements.
    """

    micro_batches: frozenset[int] = frozenset()
    pause: int | None = None
    part: float = 1.0


class WeightsBackward:
    """Adds the gradients that split backward passes have left, the last parameters' first.

    In that order they travel to other replicas.

    Args:
        params: The stage's parameters.
        parts: Of each micro-batch, in order, the groups of parameters that torch has left.
        accumulated: Told of each parameter whose gradient has got all that this stage adds.
        first: Parameters that come before all others: another stage adds to their gradients, too.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        parts: Sequence[Sequence[dict[str, Any]]],
        accumulated: Callable[[nn.Parameter], None],
        first: Collection[nn.Parameter] = (),
    ) -> None:
        self._params, self._accumulated, self._first = list(params), accumulated, first
        self._place = {accumulator_of(param): index for index, param in enumerate(self._params)}
        groups = [group for part in parts for group in part]
        self._left = Counter(self._place[node] for group in groups for node in group["params"])
        self._groups = sorted(groups, key=self._rank)
        self._done, self._total = 0, sum(self._size(group) for group in groups)

    def _rank(self, group: dict[str, Any]) -> tuple[bool, int]:
        places = [self._place[node] for node in group["params"]]
        return not any(self._params[place] in self._first for place in places), -max(places)

    def _size(self, group: dict[str, Any]) -> int:
        params = [self._params[self._place[node]] for node in group["params"]]
        return sum(param.numel() for param in params if param not in self._first)

    def run(self, part: float = 1.0) -> None:
        """Go on until a part of it all is done, counted in elements of parameters that are not `first`."""
        while self._groups and (part == 1.0 or self._done < part * self._total):
            group = self._groups.pop(0)
            self._done += self._size(group)
            places = [self._place[node] for node in group["params"]]
            mine = [self._params[place] for place in places]
            stage_backward_weight(iter(mine), [group])
            self._left.subtract(places)
            for place, param in zip(places, mine, strict=True):
                if not self._left[place]:
                    self._accumulated(param)

    def unused(self) -> list[nn.Parameter]:
        """The parameters to whose gradients nothing is added."""
        return [param for place, param in enumerate(self._params) if place not in self._left]
