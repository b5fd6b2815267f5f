# SPDX-License-Identifier: Apache-2.0
"""Runs the script of `holmes_core.run_script` once more, in another process: `python -m holmes_core.run_again ARGS`.

Nobody types this. Lightning's launcher does (name `__main__`), and multiprocessing, which imports the main module of
its parent into a spawned worker (name `__mp_main__`) and then unpickles the script's functions and classes from it.
"""

import os
import runpy
import sys

from holmes_core.autoload import activate
from holmes_core.run_script import SCRIPT_VARIABLE, run_script

if __name__ in ("__main__", "__mp_main__"):
    script = os.environ.get(SCRIPT_VARIABLE)
    if script is None:
        sys.exit(f"holmes_core.run_again needs {SCRIPT_VARIABLE}; to run a script use `holmes run SCRIPT [ARGS ...]`")
    if __name__ == "__main__":
        run_script(script, sys.argv[1:])
    else:
        activate()
        globals().update(runpy.run_path(script, run_name=__name__))
