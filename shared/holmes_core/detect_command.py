# SPDX-License-Identifier: Apache-2.0
"""The `holmes detect` command: what this host, a /sys tree or tools' outputs have, and what follows for a job."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path

from holmes_core.cluster.nic import Inventory
from holmes_core.errors import ConfigError, HolmesError

__all__ = ["main"]


def main(words: list[str]) -> int:
    """Run `holmes detect WORDS`; return the exit status.

    Status 0 says that a job can use this host, 1 that no interface reaches other hosts, 2 that the call was wrong.
    """
    parser = argparse.ArgumentParser(
        prog="holmes detect",
        description="Show this host's network ports, which of them a job can use and why the others not, and what "
        "follows: cluster kind, rails, NCCL's lists. Run it where the job will run (in its container): a container "
        "sees less than its host.",
    )
    parser.add_argument("--sysfs", type=Path, metavar="DIR", help="read another machine's /sys from a directory")
    parser.add_argument("--dev", type=Path, metavar="DIR", help="what stands for /dev (with --sysfs: else not judged)")
    parser.add_argument(
        "--from",
        dest="files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="read files about one host instead: outputs of ibstat, ibstatus, ibdev2netdev, show_gids, "
        "`nvidia-smi topo -m`, `ip -br addr`, NCCL's topology XML, or an inventory from --json",
    )
    parser.add_argument("--host", default="", metavar="NAME", help="the host's name (default: this one's, the file's)")
    parser.add_argument("--all", action="store_true", help="a row for every interface, also those no job could use")
    parser.add_argument("--json", action="store_true", help="print the inventory as JSON, for --from")
    given = parser.parse_args(words)
    if given.files and (given.sysfs or given.dev):
        parser.error("--from reads files, --sysfs a tree: give one of them")
    try:
        inventory = _inventory(given)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if given.json:
        print(json.dumps(inventory.to_json(), indent=2))
    else:
        from holmes_core.report.detect_table import print_inventory

        print_inventory(inventory, everything=given.all)
    return 0 if given.files or given.sysfs or inventory.ethernet else 1


def _inventory(given: argparse.Namespace) -> Inventory:
    if given.files:
        from holmes_core.cluster.sources import inventory_from_files

        return inventory_from_files(given.files, host=given.host)
    from holmes_core.cluster.detect import detect_host

    name = given.host or os.environ.get("HOLMES_HOST") or socket.gethostname()
    if given.sysfs is None:
        return detect_host(host=name, dev=given.dev)
    if not given.sysfs.is_dir():
        raise ConfigError(
            seen=f"no directory {str(given.sysfs)!r}",
            where="--sysfs",
            do="name a directory that stands for /sys (it holds class/infiniband, class/net, ...)",
        )
    if not (given.sysfs / "class").is_dir():
        hint = given.sysfs / "sys"
        raise ConfigError(
            seen=f"{str(given.sysfs)!r} has no class/ in it",
            where="--sysfs",
            do=f"name {hint}" if (hint / "class").is_dir() else "name the directory that stands for /sys itself",
        )
    return detect_host(host=given.host or given.sysfs.name, sysfs=given.sysfs, dev=given.dev, addresses=lambda: None)
