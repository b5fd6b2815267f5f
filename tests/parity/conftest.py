# SPDX-License-Identifier: Apache-2.0
"""Processes that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.runner import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    worlds = Worlds()
    yield worlds
    worlds.close()
