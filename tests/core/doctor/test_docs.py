# SPDX-License-Identifier: Apache-2.0
"""The page of the command lists every finding that the code can make, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import holmes_core.doctor
from holmes_core.doctor.host import _WARNINGS
from holmes_core.doctor.logs.rules_ranks import _SIGNALS
from holmes_core.doctor.logs.rules_socket import _BY_ERROR

PAGE = Path(__file__).parents[3] / "docs/cli/doctor.md"


def test_every_finding_is_on_the_page() -> None:
    sources = "\n".join(path.read_text() for path in Path(holmes_core.doctor.__path__[0]).rglob("*.py"))
    known = set(re.findall(r'\bid="([a-z0-9-]+)"', sources)) | {"interface-list", "hca-list", "environment", "hosts"}
    known |= set(re.findall(r'id="([a-z-]+)" if .* else "[a-z-]+"', sources)) | {"interface-list-modifier"}
    known |= {name for _, name, *_ in _WARNINGS} | {name for name, *_ in _BY_ERROR.values()}
    known |= {f"rank-{name}" for name, *_ in _SIGNALS.values()}
    page = PAGE.read_text()
    listed = {
        name
        for row in re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
        for name in re.findall(r"`([a-z0-9-]+)`", row)
    }
    listed |= set(
        re.findall(r"`([a-z-]+)`", page[page.index("With several inventories") : page.index("## What it cannot")])
    )
    listed -= {"ibstat"}
    assert known - listed == set()
    assert {name for name in listed if not name.startswith("-")} - known == set()
