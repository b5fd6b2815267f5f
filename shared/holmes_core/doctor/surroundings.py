# SPDX-License-Identifier: Apache-2.0
"""What this process finds around it besides networks: limits, names, versions, container. Never slow, no torch."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from holmes_core.cluster.value import Value

__all__ = ["Surroundings", "look_around"]

_PACKAGES = ("holmes-parallel", "torch", "lightning", "accelerate", "transformers")
_PLUGINS = ("libnccl-net-ofi.so", "libnccl-net.so", "librccl-net.so", "libnccl-net-aws-ofi.so")
# Where the installers of aws-ofi-nccl put it; NCCL finds it there only through the loader's configuration.
_PLUGIN_PLACES = ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu", "/opt/aws-ofi-nccl/lib")
_NAME_WAIT = 2.0  # seconds; a name server that is away takes longer than anybody wants to wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings(Value):
    """What was found.

    Args:
        hostname: The host's own name.
        own_addresses: What it resolves to; empty if it does not.
        name_answered: Whether the resolver answered in time.
        memlock: Limit on locked memory in bytes; -1 is unlimited, None unknown.
        shared_memory: Size of /dev/shm in bytes; None if there is none.
        container: Which container this is (``docker``, ``podman``, ``kubernetes``); empty outside.
        master: MASTER_ADDR; empty if not set.
        master_addresses: What it resolves to.
        several_hosts: Whether a launcher says that the job has other hosts.
        plugin: Path of a NCCL network plugin that the ranks would find; empty if none.
        versions: Package -> version, of those installed.
        clock_synchronised: Whether the kernel's clock is kept in step; None if nothing tells.
    """

    hostname: str = ""
    own_addresses: tuple[str, ...] = ()
    name_answered: bool = True
    memlock: int | None = None
    shared_memory: int | None = None
    container: str = ""
    master: str = ""
    master_addresses: tuple[str, ...] = ()
    several_hosts: bool = False
    plugin: str = ""
    versions: tuple[tuple[str, str], ...] = ()
    clock_synchronised: bool | None = None


def look_around(env: Mapping[str, str] | None = None) -> Surroundings:
    """Look around, in about as long as a name takes to resolve.

    Args:
        env: The process's environment; ``os.environ`` when None.
    """
    env = os.environ if env is None else env
    name = socket.gethostname()
    own, answered = _resolve(name)
    master = env.get("MASTER_ADDR", "")
    return Surroundings(
        hostname=name,
        own_addresses=own,
        name_answered=answered,
        memlock=_memlock(),
        shared_memory=_size(Path("/dev/shm")),
        container=_container(env),
        master=master,
        master_addresses=_resolve(master)[0] if master else (),
        several_hosts=_several_hosts(env),
        plugin=_plugin(env),
        versions=_versions(),
        clock_synchronised=_clock(),
    )


def _resolve(name: str) -> tuple[tuple[str, ...], bool]:
    """Resolve in a thread: the resolver cannot be told to give up."""
    answer: list[tuple[str, ...]] = []

    def ask() -> None:
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answer.append(tuple(dict.fromkeys(str(entry[4][0]).split("%")[0] for entry in found)))
        except (OSError, UnicodeError):
            answer.append(())

    thread = threading.Thread(target=ask, name="holmes-resolve", daemon=True)
    thread.start()
    thread.join(_NAME_WAIT)
    return (answer[0], True) if answer else ((), False)


def _memlock() -> int | None:
    try:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    except (OSError, ValueError):
        return None
    return -1 if soft == resource.RLIM_INFINITY else soft


def _size(path: Path) -> int | None:
    try:
        return shutil.disk_usage(path).total
    except OSError:
        return None


def _container(env: Mapping[str, str]) -> str:
    if env.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    for path, name in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"), ("/.singularity.d", "apptainer")):
        if os.path.exists(path):
            return name
    return ""


def _several_hosts(env: Mapping[str, str]) -> bool:
    def number(name: str) -> int:
        text = env.get(name, "")
        return int(text) if text.isdecimal() and len(text) < 10 else 0

    return number("SLURM_NNODES") > 1 or number("WORLD_SIZE") > number("LOCAL_WORLD_SIZE") > 0


def _plugin(env: Mapping[str, str]) -> str:
    for place in (*env.get("LD_LIBRARY_PATH", "").split(":"), *_PLUGIN_PLACES):
        for name in _PLUGINS if place else ():
            if os.path.exists(os.path.join(place, name)):
                return os.path.join(place, name)
    return ""


def _versions() -> tuple[tuple[str, str], ...]:
    found = []
    for name in (*_PACKAGES, "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def _clock() -> bool | None:
    """Ask the kernel, which every NTP or PTP daemon tells; reading needs no rights. (adjtimex(2), TIME_ERROR)."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, with modes = 0: read only
    try:
        state = ctypes.CDLL(None).adjtimex(buffer)
    except (OSError, AttributeError):
        return None
    return None if state < 0 else state != 5
