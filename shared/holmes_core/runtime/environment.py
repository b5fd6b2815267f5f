# SPDX-License-Identifier: Apache-2.0
"""The one place that writes to ``os.environ``, for libraries that can be told in no other way.

- ``GLOO_SOCKET_IFNAME``: gloo has no per-group option for the interface; it reads the variable while a group is made.
  Written around that call, and put back; in a job of several hosts it then names the interface between hosts for
  groups that others make.
- The ``NCCL_*`` variables of `holmes_core.plan.environment`: NCCL reads them once per process, at its first
  communicator. Written before it and left, since the communicators live as long as the process. A variable that the
  user has set is never changed.
- ``MASTER_ADDR``, ``MASTER_PORT``: where torch's ``env://`` rendezvous looks; written only where the host framework
  knows them and the environment does not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from holmes_core.errors import HolmesError

__all__ = ["gloo_interface", "require_ofi_plugin", "set_missing"]

_GLOO = "GLOO_SOCKET_IFNAME"


def require_ofi_plugin(host: str, load: Callable[[str], object] = ctypes.CDLL) -> None:
    """Refuse to start where NCCL's libfabric plugin cannot be loaded: NCCL itself would fall back to sockets silently.

    Args:
        host: This host, for the message.
        load: Loads a shared library or raises OSError.

    Raises:
        HolmesError: None of the plugin's names can be loaded.
    """
    named = os.environ.get("NCCL_NET_PLUGIN", "ofi")
    names = [named] if "/" in named or named.endswith(".so") else [f"libnccl-net-{named}.so", "libnccl-net.so"]
    failures = []
    for name in names:
        try:
            load(name)
            return
        except OSError as error:
            failures.append(str(error))
    raise HolmesError(
        seen=f"NCCL's libfabric plugin cannot be loaded: {'; '.join(failures)}",
        where=f"host {host}",
        means="EFA, Slingshot and Omni-Path are reached through it only; without it NCCL would use slow sockets "
        "and not say so",
        do="install aws-ofi-nccl for this NCCL and put its folder into LD_LIBRARY_PATH, or name the library with "
        "NCCL_NET_PLUGIN; to train over Ethernet on purpose declare the cluster with kind: ethernet",
    )


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
