# SPDX-License-Identifier: Apache-2.0
"""The `holmes lab` command: run, up, down, show."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from holmes_core.errors import ConfigError, HolmesError
from holmes_core.lab.job import Finished, Interrupted, run_job
from holmes_core.lab.network import Traffic
from holmes_core.lab.session import Lab
from holmes_core.lab.spec import LabSpec
from holmes_core.lab.spec_file import load_spec
from holmes_core.lab.state import LabState, list_labs, remove, remove_leftovers

__all__ = ["main"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(words: list[str]) -> int:
    """Run `holmes lab WORDS`; return the exit status."""
    # Split here: argparse would take options of the command for ours, or ours for the command's.
    cut = words.index("--") if "--" in words else len(words)
    given = _parser().parse_args(words[:cut])
    given.command = words[cut + 1 :]
    try:
        with _interruptible(), warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            return int(given.run(given))
    except Interrupted as interrupt:
        return 128 + interrupt.signum
    except HolmesError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="holmes lab",
        description="Clusters with unequal networks on this Linux machine: each host is a network namespace, with real "
        "links of given rates and a /sys of its own. Needs root and iproute2.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run",
        usage="holmes lab run [OPTIONS] FILE|NAME -- CMD [ARGS ...]",
        help="run a job: one process per rank, in a new lab (FILE) or in one that is up (NAME)",
        description="Build the lab of FILE, start CMD as every rank of a job, take the lab down, and show the bytes "
        "of each interface. With the NAME of a lab that is up, use that one.",
    )
    run.add_argument("--torchrun", action="store_true", help="one torchrun per host; CMD is a script and its arguments")
    run.add_argument("--hosts", metavar="A,B", help="start only the ranks of these hosts or clusters")
    run.add_argument("--name", default="", metavar="NAME", help="name of the new lab")
    run.add_argument("--env", action="append", default=[], metavar="K=V", help="set a variable for all ranks")
    run.add_argument("--counters", metavar="FILE", help="write the bytes of each interface as JSON")
    run.add_argument("--grace", type=float, default=5.0, metavar="S", help="seconds to end in, once a rank has failed")
    run.add_argument("--timeout", type=float, metavar="S", help="end the job after so many seconds, with status 124")
    run.add_argument("lab", metavar="FILE|NAME", help="yaml file of a lab, or the name of one that is up")
    run.set_defaults(run=_run)

    up = commands.add_parser("up", help="build a lab that stays until it is taken down")
    up.add_argument("--name", default="", metavar="NAME", help="name of the lab (default: from the file's name)")
    up.add_argument("file", metavar="FILE", help="yaml file of a lab")
    up.set_defaults(run=_up)

    down = commands.add_parser("down", help="end all processes of a lab and remove it")
    which = down.add_mutually_exclusive_group(required=True)
    which.add_argument("--all", action="store_true", help="all labs of this machine, those of running commands, too")
    which.add_argument("name", nargs="?", metavar="NAME", help="name of the lab")
    down.set_defaults(run=_down)

    show = commands.add_parser("show", help="list the labs that are up, or the hosts of one")
    show.add_argument("--json", action="store_true", help="for programs")
    show.add_argument("name", nargs="?", metavar="NAME", help="name of the lab")
    show.set_defaults(run=_show)
    return parser


def _run(given: argparse.Namespace) -> int:
    if not given.command:
        raise ConfigError(
            seen="no command", where="holmes lab run", do="write it after the lab: FILE -- CMD [ARGS ...]"
        )
    env = dict(_variable(text) for text in given.env)
    with ExitStack() as stack:
        if os.path.exists(given.lab) or given.lab.endswith((".yaml", ".yml")):
            lab = stack.enter_context(Lab.up(load_spec(given.lab), name=given.name or _name_from(given.lab)))
        else:
            lab = Lab.attach(given.lab)
        stack.callback(_ignore_signals)  # runs first: the lab is taken down undisturbed
        finished = run_job(
            lab,
            given.command,
            hosts=_hosts(lab.spec, given.hosts),
            torchrun=given.torchrun,
            env=env,
            grace=given.grace,
            timeout=given.timeout,
        )
        _report(lab, finished, given.counters)
    return finished.returncode


def _up(given: argparse.Namespace) -> int:
    lab = Lab.up(load_spec(given.file), name=given.name or _name_from(given.file), keep=True)
    print(lab.name)
    _print_hosts(lab)
    print(f"\nholmes lab run {lab.name} -- CMD        holmes lab down {lab.name}")
    return 0


def _down(given: argparse.Namespace) -> int:
    remove_leftovers()
    labs = {state.name: state for state in list_labs()}
    if not given.all and given.name not in labs:
        there = f"there are: {', '.join(labs)}" if labs else "no lab is up"
        raise ConfigError(seen=f"no lab {given.name!r}", do=f"name one that is up; {there}")
    for state in labs.values() if given.all else [labs[given.name]]:
        remove(state)
        print(f"{state.name} is down")
    return 0


def _show(given: argparse.Namespace) -> int:
    for name in remove_leftovers():
        print(f"removed {name}: its owner is gone", file=sys.stderr)
    if given.name is None:
        labs = list_labs()
        if given.json:
            print(json.dumps([state.to_json() for state in labs], indent=1))
        elif not labs:
            print("no lab is up")
        else:
            _print_labs(labs)
        return 0
    lab = Lab.attach(given.name)
    if given.json:
        counters = _counters_json(lab.counters())
        print(json.dumps({**lab.state.to_json(), "namespaces": lab.state.namespaces, "hosts": counters}, indent=1))
    else:
        _print_hosts(lab)
    return 0


def _report(lab: Lab, finished: Finished, path: str | None) -> None:
    from holmes_core.lab.tables import print_traffic

    print_traffic(lab.spec, finished.traffic, seconds=finished.seconds)
    if path is not None:
        data = {
            "lab": lab.name,
            "returncode": finished.returncode,
            "failed": finished.failed,
            "seconds": round(finished.seconds, 3),
            "hosts": _counters_json(finished.traffic),
        }
        Path(path).write_text(json.dumps(data, indent=1) + "\n")


def _counters_json(traffic: Mapping[str, Mapping[str, Traffic]]) -> dict[str, dict[str, dict[str, int]]]:
    return {host: {nic: value.to_json() for nic, value in nics.items()} for host, nics in traffic.items()}


def _print_labs(labs: Sequence[LabState]) -> None:
    from holmes_core.lab.tables import print_labs

    print_labs(labs)


def _print_hosts(lab: Lab) -> None:
    from holmes_core.lab.tables import print_hosts

    print_hosts(lab)


def _hosts(spec: LabSpec, text: str | None) -> list[str]:
    clusters = {cluster.name: cluster.hosts for cluster in spec.clusters}
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    return [host for name in names for host in clusters.get(name, (name,))]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"\w+", name):
        raise ConfigError(seen=f"--env {text}", where="holmes lab run", do="write --env NAME=VALUE")
    return name, value


def _name_from(path: str) -> str:
    """A name that tells the file; `Lab.up` completes it."""
    return (re.sub(r"[^A-Za-z0-9]+", "-", Path(path).stem).strip("-")[:30] or "lab") + "-"


@contextmanager
def _interruptible() -> Iterator[None]:
    before = {signum: signal.signal(signum, _interrupt) for signum in _SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _interrupt(signum: int, _: FrameType | None) -> None:
    raise Interrupted(signum)


def _ignore_signals() -> None:
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"holmes lab: {message}", file=sys.stderr)
