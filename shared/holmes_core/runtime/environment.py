# SPDX-License-Identifier: Apache-2.0
"""The one place that writes to ``os.environ``, for libraries that can be told in no other way.

- ``GLOO_SOCKET_IFNAME``: gloo has no per-group option for the interface; it reads the variable while a group is made.
  Written around that call only, and put back.
- The ``NCCL_*`` variables of `holmes_core.plan.environment`: NCCL reads them once per process, at its first
  communicator. Written before it and left, since the communicators live as long as the process. A variable that the
  user has set is never changed.
- ``MASTER_ADDR``, ``MASTER_PORT``: where torch's ``env://`` rendezvous looks; written only where the host framework
  knows them and the environment does not.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["gloo_interface", "set_missing"]

_GLOO = "GLOO_SOCKET_IFNAME"


@contextmanager
def gloo_interface(name: str | None) -> Iterator[None]:
    """Bind gloo groups made inside to an interface; None leaves the choice to gloo and the user's environment."""
    if not name:
        yield
        return
    before = os.environ.get(_GLOO)
    os.environ[_GLOO] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GLOO]
        else:
            os.environ[_GLOO] = before


def set_missing(variables: Mapping[str, str]) -> dict[str, str]:
    """Set variables that are not set yet, for the rest of the process; return those that were written."""
    written = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(written)
    return written
