# SPDX-License-Identifier: Apache-2.0
"""One warm process per session, from which the ranks of all runs are forked; plain runs are made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.lightning.farm import Farm


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    with Farm(tmp_path_factory.mktemp("farm"), "tests.accelerate.scenarios", "holmes_accelerate.accelerator") as farm:
        yield farm


@pytest.fixture(scope="session")
def plain(farm: Farm) -> Callable[..., dict[str, Any]]:
    """Return a function that runs a script in one process without Holmes, once for each set of arguments."""
    known: dict[Any, dict[str, Any]] = {}

    def run(name: str, *words: str, replicas: int = 1) -> dict[str, Any]:
        key = name, words, replicas
        if key not in known:
            env = {"REPLICAS": str(replicas)}
            (known[key],) = farm.run(
                "tests.accelerate.scenarios:script", name=name, words=list(words), env=env, rank_env=[{}]
            ).values
        return known[key]

    return run
