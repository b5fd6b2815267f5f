# SPDX-License-Identifier: Apache-2.0
"""Labs for tests: marked `lab`, skipped with the reason where this machine cannot build one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holmes_core.lab.session import Lab, why_not
from holmes_core.lab.spec import LabSpec
from holmes_core.lab.spec_file import parse_spec

TWO = {
    "clusters": [{"name": "a", "kind": "infiniband", "hosts": 2}, {"name": "b", "kind": "roce", "hosts": 2}],
    "cpu": "none",  # tests wait for processes to start, nothing here is timed
}


@pytest.fixture(scope="session")
def _reason() -> str:
    return why_not()


@pytest.fixture(autouse=True)
def _skip_without_root(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("lab") and (reason := request.getfixturevalue("_reason")):
        pytest.skip(reason)


@pytest.fixture
def two() -> LabSpec:
    """Two clusters of two hosts without CPU quotas."""
    return parse_spec(TWO)


@pytest.fixture
def make_lab(_reason: str) -> Iterator[Callable[..., Lab]]:
    """Return a function that builds a lab from keys of a spec; labs are taken down after the test."""
    labs: list[Lab] = []

    def make(name: str = "", *, keep: bool = False, **keys: object) -> Lab:
        labs.append(Lab.up(parse_spec({**TWO, **keys}), name=name or "test-", keep=keep))
        return labs[-1]

    yield make
    for lab in labs:
        lab.down()
        names = (lab.state.switch, *lab.state.namespaces.values())
        assert not [name for name in names if Path("/run/netns", name).exists()], "network namespaces are left behind"


@pytest.fixture
def output_of() -> Callable[..., str]:
    """Return a function that runs Python code on a host to its end and returns what it printed."""

    def run(lab: Lab, host: str, code: str, *args: str) -> str:
        import subprocess

        process = lab.start(host, [sys.executable, "-I", "-S", "-c", code, *args], output=subprocess.PIPE)
        text = process.communicate(timeout=30)[0].decode()
        assert process.returncode == 0, text
        return text

    return run
