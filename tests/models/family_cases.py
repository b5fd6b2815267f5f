# SPDX-License-Identifier: Apache-2.0
"""The case of `test_families.py`, run inside the workers."""

from __future__ import annotations

from typing import Any

from tests.models import zoo
from tests.models.pipeline import Job, compare

#: Gradients may differ by twice this (relative to the largest of their parameter); rounding in float32.
_TOLERANCE = {"camembert": 2.5e-5, "xlm-roberta": 2.5e-5}


def family(rank: int, name: str, layers: tuple[int, ...], microbatches: int = 3) -> dict[str, Any]:
    """One family over `len(layers)` stages, three micro-batches over rows of unequal length."""
    entry = zoo.FAMILIES[name]
    inputs = zoo.batch(name, batch=4)

    def step(model: Any) -> Any:
        return lambda part, index: model(**part).loss

    def build() -> Any:
        # phimoe's router draws experts at random in training; its evaluation mode has gradients, too.
        return entry.build().eval() if name == "phimoe" else entry.build()

    return compare(
        Job(
            build=build,
            batch=lambda replica: inputs,
            step=step,
            logits=lambda model, part: model(input_ids=part["input_ids"], attention_mask=part["attention_mask"]).logits,
            tolerance=_TOLERANCE.get(name, 1e-5),
            config=dict(pp=len(layers), layers_per_stage=layers, num_microbatches=microbatches),
        )
    )
