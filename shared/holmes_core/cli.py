# SPDX-License-Identifier: Apache-2.0
"""The `holmes` command: one function per subcommand, everything imported when it is needed.

`holmes --help` answers at once: this file imports argparse and nothing else that takes time.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

__all__ = ["main"]

_USAGE = "holmes COMMAND [ARGS ...]    (holmes COMMAND --help for each)"


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; return the exit status.

    Args:
        argv: The words after `holmes`; None takes them from the command line.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="holmes",
        usage=_USAGE,
        description="Train across clusters with unequal networks.",
        epilog="commands:\n" + "\n".join(f"  {name:<10}{text}" for name, (text, _) in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    if not words:
        parser.print_help()
        return 2
    command = parser.parse_args(words[:1]).command
    if command in _COMMANDS:
        return _COMMANDS[command][1](words[1:])
    from holmes_core.errors import did_you_mean

    problem = f"unknown command `{command}`{did_you_mean(command, _COMMANDS)}. See `holmes --help`."
    print(f"holmes: {problem}", file=sys.stderr)
    return 2


def _run(words: list[str]) -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="holmes run",
        usage="holmes run [-n N] [--config holmes.yaml] [--cluster cluster.yaml] SCRIPT [ARGS ...]",
        description=(
            'Run a training script in which strategy="holmes" is known, also where torch\'s autoload is off. Without '
            "-n one process is started, and Lightning starts the others by itself. To start processes on several hosts "
            "use your own launcher: torchrun ... -m holmes_core.run_script SCRIPT [ARGS ...]"
        ),
    )
    parser.add_argument("-n", type=_positive, metavar="N", help="start N processes on this host, with torchrun")
    parser.add_argument("--config", type=_file, metavar="FILE", help="what Holmes shall do; sets HOLMES_CONFIG")
    parser.add_argument("--cluster", type=_file, metavar="FILE", help="which hosts there are; sets HOLMES_CLUSTER")
    parser.add_argument("script", type=_file, metavar="SCRIPT", help="the Python file to run")
    # REMAINDER leaves the script's own options alone, those with the same names as ours included.
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="passed to the script as they are")
    given = parser.parse_args(words)

    environment = dict(os.environ)
    for variable, path in (("HOLMES_CONFIG", given.config), ("HOLMES_CLUSTER", given.cluster)):
        if path is not None:
            environment[variable] = os.path.abspath(path)  # the script may change its working directory
    command = [sys.executable]
    if given.n is not None:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(given.n)]
    command += ["-m", "holmes_core.run_script", given.script, *given.args]
    # Replace this process: signals, exit status and output are the script's, without a parent that has to relay them.
    os.execve(sys.executable, command, environment)


def _convert(words: list[str]) -> int:
    from holmes_core.convert import main as convert

    return convert(words)


def _lab(words: list[str]) -> int:
    from holmes_core.lab.command import main as lab

    return lab(words)


def _detect(words: list[str]) -> int:
    from holmes_core.detect_command import main as detect

    return detect(words)


def _topology(words: list[str]) -> int:
    from holmes_core.topology_command import main as topology

    return topology(words)


def _launch(words: list[str]) -> int:
    from holmes_accelerate.launcher import launch

    return launch(words)


def _config(words: list[str]) -> int:
    from holmes_accelerate.config_file import main as config

    return config(words)


def _probe(words: list[str]) -> int:
    from holmes_core.probe_command import main as probe

    return probe(words)


def _doctor(words: list[str]) -> int:
    from holmes_core.doctor.command import main as doctor

    return doctor(words)


def _plan(words: list[str]) -> int:
    from holmes_core.plan.search_command import main as plan

    return plan(words)


def _simulate(words: list[str]) -> int:
    from holmes_core.plan.simulate_command import main as simulate

    return simulate(words)


def _version(words: list[str]) -> int:
    argparse.ArgumentParser(prog="holmes version", description="Print the versions that matter.").parse_args(words)
    from importlib.metadata import PackageNotFoundError, version

    print(f"python {sys.version.split()[0]}")
    for name in ("holmes-parallel", "torch", "lightning", "pytorch-lightning", "accelerate", "transformers"):
        try:
            print(name, version(name))
        except PackageNotFoundError:
            print(name, "not installed")
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, 1 or more")
    return int(text)


def _file(text: str) -> str:
    if not os.path.isfile(text):
        raise argparse.ArgumentTypeError(f"there is no file {text!r} in {os.getcwd()}")
    return text


_COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "run": ("run a training script, as one process or N", _run),
    "convert": ("write a Lightning checkpoint as a Hugging Face model directory", _convert),
    "launch": ("start an Accelerate script on this machine, by its holmes.yaml", _launch),
    "config": ("write a holmes.yaml for `accelerate launch` and `holmes launch`", _config),
    "detect": ("what this host's networks are, and what a job can use of them", _detect),
    "topology": ("the clusters of a job: who shares a fabric with whom, and why", _topology),
    "probe": ("measure a job's ranks with a model's own block, and the links between its hosts", _probe),
    "doctor": ("what is wrong: with this host, with other hosts, or by the logs of a job", _doctor),
    "plan": ("find the fastest layout for a model on declared clusters", _plan),
    "simulate": ("replay a step: times, memory, bytes per link, a timeline", _simulate),
    "lab": ("clusters with unequal networks on this Linux machine, to try things in", _lab),
    "version": ("print the versions that matter", _version),
}

if __name__ == "__main__":
    sys.exit(main())
