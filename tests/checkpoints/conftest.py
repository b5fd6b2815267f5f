# SPDX-License-Identifier: Apache-2.0
"""One warm process per session, from which the ranks of all runs are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lightning.farm import Farm


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    modules = ("tests.checkpoints.hosts", "tests.checkpoints.ranks", "holmes_lightning.hooks")
    with Farm(tmp_path_factory.mktemp("farm"), *modules, "holmes_accelerate.accelerator") as farm:
        yield farm
