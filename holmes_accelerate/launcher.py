# SPDX-License-Identifier: Apache-2.0
"""``accelerate launch --config holmes.yaml train.py``: the launcher's half.

A holmes.yaml is a file of ``accelerate config`` with a section ``holmes_config:``. Accelerate stops at keys it does not
know, so it is given a copy without them; the workers find the file itself in ``HOLMES_CONFIG``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import accelerate
import yaml

from holmes_accelerate.refusals import check_version
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.runtime.environment import set_missing

__all__ = ["launch", "teach"]

_SECTION = "holmes_config"
_PER_MACHINE = "processes_per_machine"
_DEFAULTS: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "mixed_precision": "no",
    "num_machines": 1,
    "machine_rank": 0,
    "main_training_function": "main",
    "same_network": True,
    "rdzv_backend": "static",
}


def teach(module: ModuleType) -> None:
    """Let ``accelerate.commands.launch`` understand ``--config`` and the section.

    Args:
        module: That module; its functions are replaced, before others import them from it.
    """
    make_parser: Callable[..., Any] = module.launch_command_parser
    run: Callable[..., Any] = module.launch_command

    def launch_command_parser(subparsers: Any = None) -> Any:
        parser = make_parser(subparsers=subparsers)
        parser.add_argument("--config", dest="config_file", default=None, help="The same as --config_file (Holmes).")
        return parser

    def launch_command(args: Any) -> Any:
        prepared = _prepare(args)
        if prepared is None:
            return run(args)
        try:
            return run(args)
        finally:
            os.unlink(prepared)

    module.launch_command_parser = launch_command_parser  # type: ignore[attr-defined]
    module.launch_command = launch_command  # type: ignore[attr-defined]


def _prepare(args: Any) -> str | None:
    """Turn a holmes.yaml into arguments that Accelerate knows; returns the path of the copy, None without one."""
    path = args.config_file
    given = _read(path)
    if given is None or _SECTION not in given:
        return None
    check_version(accelerate.__version__)
    config = HolmesConfig.load(kwargs={"config": path}, env={})  # wrong keys are found here, not on every rank
    del given[_SECTION]
    per_machine = given.pop(_PER_MACHINE, None)
    rest = {**_DEFAULTS, **given}
    _refuse_engines(rest, path)
    if per_machine is not None:
        _uneven(rest, per_machine, args, path)
    if args.num_processes is None and int(rest.get("num_processes") or -1) < 1:
        counted = [n or 1 for n in (config.pp, config.dp, config.tp)]
        rest["num_processes"] = counted[0] * counted[1] * counted[2]
    # The launcher that starts one process per rank with torchrun; on the CPU, too.
    rest["distributed_type"] = "MULTI_GPU"
    set_missing({"HOLMES_CONFIG": os.path.abspath(path)})
    if os.environ["HOLMES_CONFIG"] != os.path.abspath(path):
        raise ConfigError(
            seen=f"HOLMES_CONFIG={os.environ['HOLMES_CONFIG']} in the environment, and --config {path}",
            where="accelerate launch",
            do="unset HOLMES_CONFIG",
        )
    if rest.get("use_cpu") or getattr(args, "cpu", False) or getattr(args, "use_cpu", False):
        set_missing({"ACCELERATE_USE_CPU": "true"})  # this launcher would not tell the workers
        rest["use_cpu"], args.cpu = True, False
    handle, copy = tempfile.mkstemp(prefix="holmes_", suffix=".yaml")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        yaml.safe_dump(rest, file)
    args.config_file = copy
    return copy


def _read(path: Any) -> dict[str, Any] | None:
    if not path or not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except (yaml.YAMLError, UnicodeDecodeError):
        return None  # Accelerate says what is wrong with it
    return data if isinstance(data, dict) else None


def _refuse_engines(rest: dict[str, Any], path: str) -> None:
    for key in ("deepspeed_config", "fsdp_config", "megatron_lm_config", "parallelism_config"):
        if rest.get(key):
            raise ConfigError(
                seen=f"{key} beside {_SECTION}",
                where=f"file {path}",
                means="both would split the same model",
                do=f"remove {key}; Holmes's own degrees are pp, dp and tp",
            )


def _uneven(rest: dict[str, Any], per_machine: Any, args: Any, path: str) -> None:
    """Machines with different numbers of GPUs: Accelerate divides a total evenly, so tell it a total that fits."""
    machine = int(args.machine_rank if args.machine_rank is not None else rest["machine_rank"])
    if not isinstance(per_machine, list) or not all(isinstance(n, int) and n > 0 for n in per_machine):
        raise ConfigError(
            seen=f"{_PER_MACHINE}: {per_machine!r}", where=f"file {path}", do="give a list of numbers, like [8, 2]"
        )
    if not 0 <= machine < len(per_machine):
        raise ConfigError(
            seen=f"machine_rank {machine} and {_PER_MACHINE}: {per_machine}",
            where=f"file {path}",
            do="give --machine_rank from 0, and one number for each machine",
        )
    rest["num_machines"] = len(per_machine)
    rest["num_processes"] = per_machine[machine] * len(per_machine)


_USAGE = """usage: holmes launch holmes.yaml [OPTIONS] SCRIPT [ARGS ...]

Start an Accelerate script on this machine as `accelerate launch --config holmes.yaml` does, also where torch's autoload
is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0). OPTIONS are those of `accelerate launch`: --num_processes, --machine_rank,
--main_process_ip, ... The script's own arguments follow it. `holmes config` writes a holmes.yaml.
"""


def launch(words: Sequence[str]) -> int:
    """``holmes launch holmes.yaml train.py ARGS``: the same without torch's autoload.

    The workers run the script through `holmes_core.run_script`, which makes Holmes known in each of them.

    Args:
        words: The yaml, options of ``accelerate launch``, the script and its arguments.

    Returns:
        The exit status.
    """
    words = list(words)
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0 if words else 2
    if not words[0].startswith("-"):
        words.insert(0, "--config")
    import accelerate.commands.launch as module

    from holmes_accelerate.registry import patch_launch

    patch_launch(module)
    parser = module.launch_command_parser()
    args = parser.parse_args(words)
    if args.module or args.no_python:
        raise ConfigError(
            seen="--module or --no_python", where="holmes launch", do="give the path of a Python file as the script"
        )
    if not os.path.isfile(str(args.config_file)):
        raise ConfigError(
            seen=f"there is no file {args.config_file!r}", where="holmes launch", do="write one with `holmes config`"
        )
    args.training_script_args = [args.training_script, *args.training_script_args]
    args.training_script, args.module = "holmes_core.run_script", True
    module.launch_command(args)
    return 0
