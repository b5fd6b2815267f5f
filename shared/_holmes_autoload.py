# SPDX-License-Identifier: Apache-2.0
"""What `import torch` calls: the shield between torch and Holmes.

torch loads every entry point of the group `torch.backends` at the end of `import torch`, and turns any exception
into a RuntimeError (torch/__init__.py, `_import_device_backends`). A broken Holmes would so break every torch
program of the environment. Nothing inside `holmes_core` can prevent that when `holmes_core` itself cannot be
imported (half-uninstalled, a syntax error, an unreadable file), so the entry point is this module: it stands alone,
imports nothing of Holmes outside the `try`, and turns every failure into a warning.

Off: HOLMES_AUTOLOAD=0 (Holmes only), or TORCH_DEVICE_BACKEND_AUTOLOAD=0 (torch calls no entry point at all).
"""

import contextlib
import os
import warnings

__all__ = ["activate"]


def activate() -> None:
    """Install Holmes's import hook; never raise."""
    if os.environ.get("HOLMES_AUTOLOAD", "1") == "0":
        return
    try:
        from holmes_core.autoload import activate as install

        install()
    except Exception as error:
        # Under `-W error` the warning itself is an exception: it must not reach torch either.
        with contextlib.suppress(Warning):
            warnings.warn(
                f"Holmes is installed but cannot be loaded: {type(error).__name__}: {error}. torch goes on without it, "
                'and strategy="holmes" will be unknown. Repair it with `pip install --force-reinstall --no-deps '
                "holmes-parallel`, remove it with `pip uninstall holmes-parallel`, or set HOLMES_AUTOLOAD=0.",
                RuntimeWarning,
                stacklevel=2,
            )
