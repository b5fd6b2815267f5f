# SPDX-License-Identifier: Apache-2.0
"""`resume: auto`: a script that does not say where to go on does, from the newest checkpoint that is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lightning.farm import Farm, Run

PP2 = {"pp": 2, "num_microbatches": 2, "print_plan": False}
AUTO = {**PP2, "resume": "auto"}


def fit(farm: Farm, config: Any, folder: Path | None, steps: int, world: int = 2, **more: Any) -> Run:
    where = None if folder is None else str(folder)
    return farm.run("tests.checkpoints.hosts:unchanged", world=world, config=config, folder=where, steps=steps, **more)


@pytest.mark.parametrize("kind", ["single", pytest.param("sharded", marks=pytest.mark.slow)])
def test_goes_on_from_the_newest_whole_checkpoint(farm: Farm, tmp_path: Path, kind: str) -> None:
    config, saved = {**AUTO, "checkpoint": kind}, tmp_path / "saved"
    first = fit(farm, config, saved, 3)
    assert first.values == [[(3, 3)]] * 2
    assert f"nothing to go on from in {saved}" in first.logs[0]
    newest = saved / "step=3.ckpt"
    file = newest / "state.pt" if newest.is_dir() else newest
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again = fit(farm, config, saved, 4, fits=2)  # the second fit of a Trainer goes on from the first
    assert again.values == [[(2, 4), (1, 5)]] * 2
    assert again.logs[0].count("resume auto: goes on from") == 1
    assert f"goes on from {saved / 'step=2.ckpt'}" in again.logs[0]
    assert f"skipping checkpoint {newest}" in again.logs[0]


@pytest.mark.slow
def test_what_the_script_says_comes_first(farm: Farm, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    assert fit(farm, {**PP2, "resume": False}, saved, 2).values == [[(2, 2)]] * 2  # yaml reads off as false
    named = fit(farm, AUTO, saved, 3, resume=str(saved / "step=1.ckpt"))
    assert named.values == [[(2, 3)]] * 2
    assert "resume auto" not in named.logs[0]


def test_a_folder_with_a_new_name_for_each_run_is_refused(farm: Farm) -> None:
    found = fit(farm, AUTO, None, 1, world=2, logger=True)
    for log in found.logs:
        assert "use ModelCheckpoint(dirpath=...), or resume: off" in log
