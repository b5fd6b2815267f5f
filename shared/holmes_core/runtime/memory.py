# SPDX-License-Identifier: Apache-2.0
"""How much memory this host has left."""

from __future__ import annotations

import os

__all__ = ["available_bytes", "fits_in_memory"]


def available_bytes() -> int:
    """Memory that new data may take on this host without swapping, in bytes (Linux: MemAvailable)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def fits_in_memory(size: int, processes: int) -> bool:
    """Whether `processes` processes of this host may each take `size` bytes: at most half of what is left."""
    return size * processes <= available_bytes() // 2
