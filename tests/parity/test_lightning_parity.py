# SPDX-License-Identifier: Apache-2.0
"""A user's script trains alike under strategy="auto" and strategy="holmes": losses, norms, validation, weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.lightning_cases import SCRIPTS, ScriptCase, compare, words_of


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.slow else ()) for case in SCRIPTS]
)
def test_script_trains_alike(case: ScriptCase, tmp_path: Path, run_script: Callable[..., Any]) -> None:
    outs = {holmes: tmp_path / ("holmes" if holmes else "alone") for holmes in (False, True)}
    for holmes, out in outs.items():
        words, environment = words_of(case, out, holmes=holmes)
        run_script(words, env=environment, timeout=400).check()
    row = compare(case, outs[False], outs[True])
    assert not row["problems"], row
