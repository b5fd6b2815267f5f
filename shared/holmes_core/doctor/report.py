# SPDX-License-Identifier: Apache-2.0
"""Findings as text for a person and as JSON for a script."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holmes_core.doctor.finding import SEVERITIES, Finding, exit_status

__all__ = ["print_findings", "to_json"]

_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}


def print_findings(
    findings: Sequence[Finding], *, silence: str = "", notes: bool = True, file: TextIO | None = None
) -> None:
    """Print findings, most likely first.

    Args:
        findings: In order.
        silence: What to say where nothing is wrong.
        notes: Also what is no fault.
        file: Where to; a file that is not a terminal gets plain text, 100 columns wide.
    """
    console = Console(file=file, highlight=False)
    plain = None if console.is_terminal else io.StringIO()
    if plain is not None:
        console = Console(file=plain, highlight=False, width=100)
    number = 0
    for finding in findings:
        if finding.severity == "note" and not notes:
            continue
        number += 1
        console.print(
            Text(f"{number}. ").append(finding.severity, style=_STYLES[finding.severity]).append(f"  {finding.id}")
        )
        parts = Table.grid(padding=(0, 2))
        parts.add_column(style="dim", no_wrap=True)
        parts.add_column(overflow="fold")
        for label, text in (
            ("seen", finding.seen),
            ("where", ", ".join(finding.where)),
            ("means", finding.means),
            ("do", finding.do),
        ):
            if text:
                parts.add_row(label, Text(text))
        console.print(Padding(parts, (0, 0, 0, 3)))
        console.print()
    counts = [(sum(one.severity == kind for one in findings), kind) for kind in SEVERITIES]
    if exit_status(findings):
        words = [f"{count} {kind}{'s' if count > 1 else ''}" for count, kind in counts if count]
        console.print(Text(", ".join(words) + ". The first finding is the most likely cause."))
    else:
        console.print(Text(silence or "Nothing is wrong that Holmes knows."))
    if plain is not None:  # a table fills its lines with blanks
        print("\n".join(line.rstrip() for line in plain.getvalue().splitlines()), file=file)


def to_json(findings: Sequence[Finding], *, read: Mapping[str, str], silence: str = "") -> str:
    """Return findings as JSON: ``findings`` in order, ``read`` (what was looked at), ``status``, ``summary``."""
    status = exit_status(findings)
    data = {
        "findings": [finding.to_json() for finding in findings],
        "read": dict(read),
        "status": status,
        "summary": findings[0].seen if status else silence or "nothing is wrong that Holmes knows",
    }
    return json.dumps(data, indent=2)
