# SPDX-License-Identifier: Apache-2.0
"""`python -m holmes_core.run_script train.py ARGS`: run a script with Holmes registered, also without torch's autoload.

`holmes run` starts this; so can any launcher: `torchrun ... -m holmes_core.run_script train.py ARGS`.

The script sees what `python train.py ARGS` would show it: `sys.argv`, `__file__`, `sys.path[0]`, `__name__`. One thing
differs: `__main__.__spec__` names `holmes_core.run_again`. Lightning starts its other local processes by
`python -m <that name> ARGS` (lightning/fabric/strategies/launchers/subprocess_script.py, `_basic_subprocess_cmd`), and
multiprocessing imports the main module under that name in spawned workers; without it both would run the bare script,
where "holmes" is unknown. The path of the script reaches `run_again` in the environment variable HOLMES_RUN_SCRIPT: a
module name cannot carry it, and ARGS are the script's own. This is the only variable written here.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from holmes_core.autoload import activate

__all__ = ["SCRIPT_VARIABLE", "main", "run_script"]

SCRIPT_VARIABLE = "HOLMES_RUN_SCRIPT"
_AGAIN = "holmes_core.run_again"


def run_script(script: str, args: list[str]) -> None:
    """Run `script` as `__main__` in this process.

    Args:
        script: Path of a Python file.
        args: The script's own arguments.
    """
    path = os.path.abspath(script)
    with io.open_code(path) as file:  # before anything changes: a missing file is the caller's error
        code = compile(file.read(), path, "exec")
    activate()
    os.environ[SCRIPT_VARIABLE] = path

    module = ModuleType("__main__")
    module.__file__ = path
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    module.__spec__ = ModuleSpec(_AGAIN, None, origin=path)
    # Pickle looks classes of the script up in sys.modules["__main__"], so the script's module has to be that one.
    sys.modules["__main__"] = module
    sys.argv = [script, *args]
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(path)  # was the working directory, because of `python -m`
    exec(code, vars(module))


def main() -> None:
    """Run the script named on the command line."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m holmes_core.run_script SCRIPT [ARGS ...]")
    run_script(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
