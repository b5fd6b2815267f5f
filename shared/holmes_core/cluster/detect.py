# SPDX-License-Identifier: Apache-2.0
"""Find out what this host has: every RDMA port, every interface, every accelerator, and what follows for a job."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from holmes_core.cluster.assemble import assemble
from holmes_core.cluster.facts import HostFacts
from holmes_core.cluster.interfaces import read_nets
from holmes_core.cluster.links import Link, system_links
from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.pci import gpu_names, read_gpus, unregistered_cards
from holmes_core.cluster.rdma import read_cxi, read_rdma

__all__ = ["READ_VARIABLES", "detect_host", "read_host"]

#: What a host tells the others about its environment (names that start with one of these).
READ_VARIABLES = ("NCCL_", "GLOO_", "FI_", "OFI_", "HOLMES_FABRIC")


def detect_host(
    *,
    host: str,
    sysfs: Path | None = None,
    dev: Path | None = None,
    addresses: Callable[[], Sequence[Link] | None] | None = None,
    env: Mapping[str, str] | None = None,
) -> Inventory:
    """Look at this host, from inside the process that will train: a container sees less than its host.

    Args:
        host: Its name in the job.
        sysfs: What stands for /sys; None takes HOLMES_SYSFS, else /sys.
        dev: What stands for /dev; None takes HOLMES_DEV, else /dev where ``sysfs`` is the real one. Device files are
            not judged where a tree of another machine has none.
        addresses: Where addresses and up-states come from; None asks the operating system. It returns None to say
            that the tree is about another machine.
        env: The process's environment; ``os.environ`` when None.

    Returns:
        The inventory. Nothing on the host can make this raise: what cannot be read is said in it.
    """
    env = os.environ if env is None else env
    root = sysfs or Path(env.get("HOLMES_SYSFS") or "/sys")
    if dev is None:
        named = env.get("HOLMES_DEV")
        dev = Path(named) if named else Path("/dev") if root == Path("/sys") else None
    facts = read_host(root, dev, (addresses or system_links)())
    if root == Path("/sys") and facts.gpus:
        names = gpu_names()
        for gpu in facts.gpus:
            gpu.name = names.get(gpu.pci, "")
    return assemble(
        host, facts, environment={name: value for name, value in env.items() if name.startswith(READ_VARIABLES)}
    )


def read_host(sysfs: Path, dev: Path | None, links: Sequence[Link] | None) -> HostFacts:
    """Read a tree that stands for /sys; see ``detect_host``."""
    ports = read_rdma(sysfs, dev) + read_cxi(sysfs, dev)
    nets = read_nets(sysfs, links)
    gpus = read_gpus(sysfs, ports)
    ports += unregistered_cards(sysfs, ports, nets)
    return HostFacts(ports=ports, nets=nets, gpus=gpus)
