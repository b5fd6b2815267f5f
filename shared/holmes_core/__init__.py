# SPDX-License-Identifier: Apache-2.0
"""The core of Holmes: cluster detection, planning and the 3D-parallel runtime. Knows neither Lightning nor Accelerate.

Nothing is imported here: `import torch` itself loads `holmes_core.autoload`, so every line here is paid by every torch
program of the environment.
"""

__all__ = ["__version__", "parallelize"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import `parallelize`, and torch with it, when it is asked for."""
    if name == "parallelize":
        from holmes_core.runtime.parallelize import parallelize

        return parallelize
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
