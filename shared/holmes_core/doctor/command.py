# SPDX-License-Identifier: Apache-2.0
"""The `holmes doctor` command: this host, other hosts' inventories, or logs."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from holmes_core.cluster.nic import Gid, Inventory
from holmes_core.doctor.finding import Finding, exit_status, in_order
from holmes_core.errors import ConfigError, HolmesError

__all__ = ["main"]

_LARGEST_OUTPUT = 4 << 20  # bytes; what tools print about a host is smaller, and a log is not read twice
_LOG_WORDS = ("NCCL INFO", "NCCL WARN", "Traceback (most", "[c10d]", "Gloo ", "torchrun", "UCX ", "libfabric:")


def main(words: list[str]) -> int:
    """Run `holmes doctor WORDS`; return 0 if nothing is wrong, 1 if something is, 2 if the call was."""
    parser = argparse.ArgumentParser(
        prog="holmes doctor",
        description="Say what is wrong and what to do. Without FILE: check this host, as this process sees it (run "
        "it inside the job's container and with the job's variables). With FILE: read logs (NCCL, gloo, torchrun, "
        "libfabric, UCX, SLURM, the kernel), or tools' outputs and inventories of hosts. Exit status: 0 nothing "
        "wrong, 1 findings, 2 usage.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="logs, best of all ranks (.gz too; - is standard input); outputs of ibstat, show_gids, `nvidia-smi topo "
        "-m`, `ip -br addr`, NCCL's topology XML; inventories from `holmes detect --json`, one per host",
    )
    parser.add_argument(
        "--sysfs", type=Path, metavar="DIR", help="what stands for /sys: a copy of the host's, for its GIDs"
    )
    parser.add_argument(
        "--dev", type=Path, metavar="DIR", help="what stands for /dev; not judged with --sysfs without it"
    )
    parser.add_argument("--gids", type=Path, metavar="FILE", help="the host's GID table, as show_gids prints it")
    parser.add_argument(
        "--host", default="", metavar="NAME", help="the name of the host that --sysfs, --gids are about"
    )
    parser.add_argument("--no-notes", action="store_true", help="print errors and warnings only")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(words)
    try:
        findings, read, silence = _examine(given)
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2
    from holmes_core.doctor.report import print_findings, to_json

    try:
        if given.json:
            print(to_json(findings, read=read, silence=silence))
        else:
            print_findings(findings, silence=silence, notes=not given.no_notes)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough; what is left must not fail at exit, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_status(findings)


def _examine(given: argparse.Namespace) -> tuple[Sequence[Finding], dict[str, str], str]:
    outputs, logs = _sorted_files(given.files)
    hosts = _inventories(given, outputs)
    read = {name: "host" for name in outputs} | {name: "log" for name in logs}
    found: list[Finding] = []
    silence = ""
    if logs:
        more, silence = _read_logs(given, logs, hosts)
        found += more
    if hosts and not (logs and given.sysfs):
        found += _check_hosts(hosts, outputs)
    if not logs and not hosts:
        found += _check_here(given)
        read[given.host or socket.gethostname()] = "this host"
    return in_order(found), read, silence


def _sorted_files(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Tell tools' outputs (name -> text) from logs (names)."""
    from holmes_core.cluster.sources import SOURCES

    outputs, logs = {}, []
    for name in names:
        if name == "-":
            logs.append(name)
            continue
        path = Path(name)
        if not path.is_file():
            there = "that is a directory" if path.is_dir() else "there is no such file"
            raise ConfigError(seen=f"{name}: {there}", where="FILE", do="name logs or outputs; - is standard input")
        text = ""
        if path.suffix != ".gz" and path.stat().st_size <= _LARGEST_OUTPUT:
            text = path.read_bytes().decode("utf-8-sig", errors="replace")
        known = any(matches(text) for matches, _ in SOURCES.values()) if text.strip() else False
        inventory = text.lstrip().startswith("{") and '"nics"' in text
        if inventory or (known and not any(word in text for word in _LOG_WORDS)):
            outputs[name] = text
        else:
            logs.append(name)
    return outputs, logs


def _inventories(given: argparse.Namespace, outputs: dict[str, str]) -> list[Inventory]:
    """One inventory per host from outputs and --gids; a tree of /sys alone."""
    from holmes_core.cluster.sources import inventory_from_files, inventory_from_texts

    found = [
        inventory_from_files([Path(name)], host=given.host if len(outputs) == 1 else "")
        for name, text in outputs.items()
        if text.lstrip().startswith("{")
    ]
    texts = {name: text for name, text in outputs.items() if not text.lstrip().startswith("{")}
    if given.gids is not None:
        try:
            texts[str(given.gids)] = given.gids.read_bytes().decode("utf-8-sig", errors="replace")
        except OSError as error:
            raise ConfigError(
                seen=f"{given.gids}: {error.strerror}", where="--gids", do="name a file with show_gids' output"
            ) from error
    by_host: dict[str, dict[str, str]] = {}
    for name, text in texts.items():
        parts = Path(name).name.split(".")
        by_host.setdefault(given.host or (parts[0] if len(parts) > 2 else ""), {})[name] = text
    found += [inventory_from_texts(mine, host=host or "?") for host, mine in by_host.items()]
    if given.sysfs is not None:
        from holmes_core.cluster.detect import detect_host

        if not (given.sysfs / "class").is_dir():
            raise ConfigError(
                seen=f"{str(given.sysfs)!r} has no class/ in it",
                where="--sysfs",
                do="name a directory that stands for /sys (it holds class/infiniband, class/net, ...)",
            )
        found.append(detect_host(host=given.host or "?", sysfs=given.sysfs, dev=given.dev, addresses=lambda: None))
    return found


def _read_logs(
    given: argparse.Namespace, names: Sequence[str], hosts: Sequence[Inventory]
) -> tuple[Sequence[Finding], str]:
    from holmes_core.doctor.logs.diagnose import diagnose, silence
    from holmes_core.doctor.logs.parts import Case
    from holmes_core.doctor.logs.read import read_lines

    log = read_lines((name, _lines(name)) for name in names)
    inventories = {one.host: one for one in hosts if one.host != "?"}
    here = os.environ.get("HOLMES_HOST") or socket.gethostname()
    if here in log.hosts() and here not in inventories:
        from holmes_core.cluster.detect import detect_host

        inventories[here] = detect_host(host=here)  # the log is about this host: its devices and GIDs are at hand
    unnamed = [one for one in hosts if one.host == "?"]
    if unnamed and len(log.hosts()) == 1:
        inventories[log.hosts()[0]] = unnamed[0]
    gids: dict[str, Sequence[Gid]] = {
        nic.device: nic.gids for one in (*hosts, *inventories.values()) for nic in one.nics if nic.gids
    }
    return diagnose(Case(log=log, inventories=inventories, gids=gids)), silence(log)


def _lines(name: str) -> Iterator[str]:
    from holmes_core.doctor.logs.read import read_file

    try:
        if name == "-":
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
            yield from sys.stdin
        else:
            yield from read_file(Path(name))
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            seen=f"{name}: cannot be read: {error}", where="FILE", do="name a readable text file, or one made by gzip"
        ) from error


def _check_hosts(hosts: Sequence[Inventory], outputs: dict[str, str]) -> Iterable[Finding]:
    from holmes_core.cluster.sources import SOURCES
    from holmes_core.doctor.compare import compare_hosts
    from holmes_core.doctor.host import host_findings

    for inventory in hosts:
        yield from host_findings(inventory)
        if any(SOURCES["ibstat"][0](text) for text in outputs.values()):
            yield from _addressing(inventory)
    if len(hosts) > 1:
        yield from compare_hosts(hosts)


def _addressing(inventory: Inventory) -> Iterator[Finding]:
    names = [nic.device for nic in inventory.nics if nic.kind == "roce"]
    if names:
        yield Finding(
            id="roce-addressing",
            severity="note",
            seen=f"{', '.join(names)}: link layer Ethernet (RoCE)",
            means="such a port is addressed by GID (NCCL_IB_GID_INDEX), never by LID: 'Base lid: 0' and 'Port GUID: "
            "0x0' are normal for it and no fault. ibv_modify_qp with error 19 (No such device) means that a LID "
            "address was used, or a GID index without an entry",
            do="use the index of its RoCE v2 entry with the routable address (`show_gids`)",
            likelihood=60,
        )


def _check_here(given: argparse.Namespace) -> Iterable[Finding]:
    from holmes_core.cluster.detect import detect_host
    from holmes_core.doctor.host import host_findings
    from holmes_core.doctor.process import surroundings_findings
    from holmes_core.doctor.surroundings import look_around

    name = given.host or os.environ.get("HOLMES_HOST") or socket.gethostname()
    inventory = detect_host(host=name, dev=given.dev)
    around = look_around()
    yield from host_findings(inventory, several_hosts=around.several_hosts)
    yield from surroundings_findings(around, inventory)
