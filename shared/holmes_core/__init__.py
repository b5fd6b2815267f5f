# SPDX-License-Identifier: Apache-2.0
"""The core of Holmes: cluster detection, planning and the 3D-parallel runtime. Knows neither Lightning nor Accelerate.

Nothing is imported here: `import torch` itself loads `holmes_core.autoload`, so every line here is paid by every torch
program of the environment.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
