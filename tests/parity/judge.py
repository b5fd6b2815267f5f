# SPDX-License-Identifier: Apache-2.0
"""Compare what the ranks saw with one process, and with each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.parity.cases import SINGLE, V_SCHEDULES, Case

__all__ = ["Verdict", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Largest differences (losses and norms relative, weights absolute), and what is out of tolerance."""

    loss: float
    norm: float
    weight: float
    problems: tuple[str, ...]


def _relative(found: float, expected: float) -> float:
    difference = abs(found - expected) / max(abs(expected), 1e-12)
    return difference if difference == difference else float("inf")


def judge(case: Case, ranks: Sequence[dict[str, Any]]) -> Verdict:
    """Compare; `Verdict.problems` is empty where everything agrees."""
    _, dp, tp = case.degrees
    alone = ranks[0]["alone"]
    problems: list[str] = []
    loss = norm = 0.0
    for index, expected in enumerate(alone["losses"]):
        for part in range(tp):
            parts = [r["losses"][index] for r in ranks if r["place"][2] == part and r["losses"][index] is not None]
            if len(parts) != dp:
                problems.append(f"loss {index}: {len(parts)} replicas report one, not {dp}")
                continue
            loss = max(loss, _relative(sum(parts), expected))
    for step, expected in enumerate(alone["norms"]):
        norm = max([norm, *(_relative(rank["norms"][step], expected) for rank in ranks)])
    differences = {name: d for rank in ranks for name, d in rank["weight_differences"].items()}
    for rank in ranks:
        for name, difference in rank["weight_differences"].items():
            differences[name] = max(differences[name], difference if difference == difference else float("inf"))
    weight = max(differences.values())
    limit = case.tolerance
    if not loss <= limit.loss:
        problems.append(f"loss differs by {loss:.1e} > {limit.loss:.0e}")
    if not norm <= limit.norm:
        problems.append(f"norm differs by {norm:.1e} > {limit.norm:.0e}")
    if not weight <= limit.weight:
        worst = max(differences, key=lambda name: differences[name])
        problems.append(f"weight {worst} differs by {weight:.1e} > {limit.weight:.0e}")
    if alone["moved"] < 10 * limit.weight and case.optimizer == "sgd" and case.precision == "fp32":
        problems.append(f"vacuous: training moved the weights only by {alone['moved']:.1e}")
    problems += [f"order: {text}" for rank in ranks for text in rank["unordered"][:1]]
    problems += _copies(case, ranks)
    return Verdict(loss=loss, norm=norm, weight=weight, problems=tuple(problems))


def _copies(case: Case, ranks: Sequence[dict[str, Any]]) -> list[str]:
    """Every parameter is equal on all ranks that hold it, after every step: replicas, tied stages, whole copies."""
    for step in range(case.steps):
        held: dict[str, dict[str, list[int]]] = {}
        for number, rank in enumerate(ranks):
            for name, digest in rank["digests"][step].items():
                held.setdefault(name, {}).setdefault(digest, []).append(number)
        different = {name: list(values.values()) for name, values in held.items() if len(values) > 1}
        if different:
            name, where = next(iter(different.items()))
            return [f"copies of {name} and {len(different) - 1} others differ after step {step}: on ranks {where}"]
    apart = case.degrees[0] > 1 and case.schedule not in V_SCHEDULES
    if case.tied and apart and (case.schedule in SINGLE or case.stages > 1) and not ranks[0]["shared"]:
        return ["copies: the tied weight is not on two stages"]
    return []
