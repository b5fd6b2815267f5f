# SPDX-License-Identifier: Apache-2.0
"""Finding: one thing that is wrong (or worth knowing), in the shape of every Holmes error, and their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from holmes_core.cluster.value import Value

__all__ = ["SEVERITIES", "Finding", "Severity", "exit_status", "in_order"]

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Value):
    """One result.

    Args:
        id: Stable name for scripts (``gid-index``, ``unequal-hcas``).
        severity: ``error`` stops or will stop a job, ``warning`` costs speed or may stop it, ``note`` is a fact.
        seen: What was observed, with names and numbers.
        means: Why it matters.
        do: What to do; empty where nothing is to be done.
        where: Places, the first one first: ``nccl.log:12``, ``host node-a``, ``rank 3``.
        likelihood: 0 to 100: how sure it is that this is the cause; decides the order within a severity.
        symptom: It follows from something else: a rank that only lost its connection to the one that failed.
    """

    id: str
    severity: Severity
    seen: str
    means: str
    do: str = ""
    where: tuple[str, ...] = ()
    likelihood: int = 50
    symptom: bool = False


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return findings most likely first; those that are equal keep their order, which is that of the evidence."""
    return tuple(sorted(findings, key=lambda one: (SEVERITIES.index(one.severity), -one.likelihood)))


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if anything is wrong, else 0. A note is nothing wrong."""
    return int(any(finding.severity != "note" for finding in findings))
