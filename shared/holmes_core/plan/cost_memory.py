# SPDX-License-Identifier: Apache-2.0
"""What a rank's parameters need at each moment of a step, in bytes. Prediction.

    computing   weights, gradients, states of the optimizer; activations on top (plan/cost.py)
    summing     the same, and flat copies of the gradients
    stepping    the gradients of the parameters that this replica owns, and the optimizer's temporaries
    handing out the same gradients, and flat copies of all parameters

All of it is in proportion to the parameters of the rank.

On processors a heap occupies more than is in use. glibc gives what is freed back to the system only from the top of
its heap; what is freed below, between tensors that stay, it keeps. (Tensors of 32 MiB and more are mapped one by one
and leave no holes.) On GPUs the reserve of ``USABLE_MEMORY`` stands for the same.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["HEAP", "PRECISIONS", "ParameterBytes", "heap_factor"]

# Bytes per parameter: weights, gradients, optimizer states (Adam's two moments), autocast's copies.
PRECISIONS: dict[str, tuple[int, int, int, int]] = {
    "bf16-mixed": (4, 4, 8, 2),
    "bf16-true": (2, 2, 4, 0),
    "32-true": (4, 4, 8, 0),
}


#: Resident bytes for each byte in use. With glibc 2.36, GPT-2 of 27 M parameters, pp 2 x dp 2: 1.5, as the peak against
#: that of the same steps with every tensor mapped by itself; pp 4 x dp 1: 1.3 to 1.4, against what is counted.
HEAP = 1.45
_MAPPED = 32 << 20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX


def heap_factor(block_parameters: int, value_bytes: int) -> float:
    """Return how much a processor's heap holds of what is in use, by the largest matrix of a block (a third of it)."""
    return 1.0 if block_parameters * value_bytes / 3 >= _MAPPED else HEAP


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes per parameter.

    Args:
        weights: Of the parameter.
        gradients: Of its gradient, times the part of the parameters that is trained.
        states: Of AdamW's two moments, times the same part.
        casts: Of autocast's copies.
        gloo: Whether gloo sums gradients (processors) and not NCCL.
        heap: Bytes that are occupied for each of them.
    """

    weights: float
    gradients: float
    states: float
    casts: float
    gloo: bool = False
    heap: float = 1.0

    @classmethod
    def of(cls, precision: str, *, trainable: float = 1.0, gloo: bool = False, heap: float = 1.0) -> ParameterBytes:
        """Return those of a precision (a key of PRECISIONS)."""
        weights, gradients, states, casts = PRECISIONS[precision]
        return cls(
            weights=weights,
            gradients=gradients * trainable,
            states=states * trainable,
            casts=casts,
            gloo=gloo,
            heap=heap,
        )

    def static(self, dp: int, *, sharded: bool) -> float:
        """What is there while the rank computes."""
        # On processors gradients that every replica gets are summed in the same place each time.
        home = self.gradients if self.gloo and dp > 1 and not sharded else 0.0
        states = self.states / (dp if sharded else 1)
        return self.heap * (self.weights + self.gradients + self.casts + states + home)

    def ending(self, dp: int, *, sharded: bool) -> float:
        """The most that the end of a step needs besides `static`."""
        moments = self._summing(dp, sharded), self._stepping(dp, sharded), self._handing_out(dp, sharded)
        return self.heap * max(moments)

    def _summing(self, dp: int, sharded: bool) -> float:
        # One flat copy of everything leaves; with gloo each owner besides receives every other replica's copy of what
        # it owns (runtime/data_parallel.py).
        if dp == 1 or (self.gloo and not sharded):
            return 0.0
        return self.gradients * (1 + ((dp - 1) / dp if self.gloo and sharded else 0))

    def _stepping(self, dp: int, sharded: bool) -> float:
        # On GPUs torch's AdamW takes the square roots of all second moments at once ("foreach" is its default there);
        # on processors it goes parameter by parameter.
        owned = 1 / dp if sharded else 1.0
        roots = 0.0 if self.gloo else self.states / 2 * owned
        return roots - self._dropped(dp, sharded)

    def _handing_out(self, dp: int, sharded: bool) -> float:
        return self.weights - self._dropped(dp, sharded) if dp > 1 and sharded else 0.0

    def _dropped(self, dp: int, sharded: bool) -> float:
        """Gradients that are gone once their owners have the sums."""
        return self.gradients * (1 - 1 / dp) if sharded else 0.0
