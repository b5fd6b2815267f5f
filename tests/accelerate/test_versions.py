# SPDX-License-Identifier: Apache-2.0
"""Releases of Accelerate: which are refused, which are warned of, and that the tested one is among the supported."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holmes_accelerate.refusals import NEWEST, OLDEST, check_version
from holmes_core.errors import ConfigError
from tests.accelerate.test_launch import YAML, prepared
from tests.lightning.farm import ROOT

# What a rank sees whose environment has another Accelerate: the number is all that is read of it.
OTHER = """
import accelerate
accelerate.__version__ = "{version}"
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
print(type(accelerator).__name__)
"""


@pytest.mark.parametrize("version", ["0.34.2", "1.9.0", "1.9.1.dev0"])
def test_older_ones_are_refused_by_name(version: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(version)) as error:
        check_version(version)
    assert f'pip install "accelerate>={OLDEST[0]}.{OLDEST[1]}"' in str(error.value)


@pytest.mark.parametrize("version", ["1.10.0", "1.10.0rc1", "1.15.0", "1.15.3"])
def test_tested_ones_are_silent(version: str) -> None:
    assert check_version(version) is None


@pytest.mark.parametrize("version", ["1.16.0", "1.100.0.dev0", "2.0"])
def test_newer_ones_are_a_warning(version: str) -> None:
    line = check_version(version)
    assert line is not None
    assert version in line
    assert "\n" not in line


def test_the_numbers_are_those_of_the_project() -> None:
    (pinned,) = re.findall(r"^accelerate==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert tuple(map(int, pinned)) == NEWEST
    (oldest,) = re.findall(r'"accelerate>=(\d+)\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert tuple(map(int, oldest)) == OLDEST
    script = (ROOT / "tests" / "accelerate" / "versions.sh").read_text()
    (releases,) = re.findall(r"RELEASES=\((1[\d. ]+)\)", script)
    minors = {int(release.split(".")[1]) for release in releases.split()}
    assert minors == set(range(OLDEST[1], NEWEST[1] + 1))


def test_in_a_process(run_script: Any, tmp_path: Any) -> None:
    (tmp_path / "holmes.yaml").write_text(YAML.replace("pp: 2", "pp: 1"))
    for version, words in (("1.9.0", ["ConfigError", "accelerate>="]), ("1.99.0", ["1.99.0 is newer", "HolmesAcc"])):
        (tmp_path / "probe.py").write_text(OTHER.format(version=version))
        run = run_script(["probe.py"], env={"HOLMES_CONFIG": "holmes.yaml"})
        assert (run.returncode != 0) == (version == "1.9.0"), run.output
        for word in words:
            assert word in run.output


def test_the_launcher_refuses_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import accelerate

    monkeypatch.setattr(accelerate, "__version__", "1.9.0")
    with pytest.raises(ConfigError, match=r"Accelerate 1\.9\.0"):
        prepared(tmp_path, monkeypatch, YAML)
