# SPDX-License-Identifier: Apache-2.0
"""Read small system files that may be missing, unreadable or odd: nothing here raises."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["entries", "link_name", "natural", "number", "pci_address", "read"]

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]", re.IGNORECASE)
_LIMIT = 65536  # bytes; a sysfs file has one page


def read(path: Path) -> str:
    """Return a file's text without surrounding white space; empty if it cannot be read."""
    try:
        if not path.is_file():  # a FIFO or device in a hand-made tree would block
            return ""
        with path.open("rb") as file:
            text = file.read(_LIMIT).decode("utf-8", errors="replace")
        return text.replace("\0", "").strip()
    except (OSError, ValueError):
        return ""


def number(path: Path, base: int = 10) -> int | None:
    """Return a file's content as an integer; None if it is not one."""
    try:
        return int(read(path), base)
    except ValueError:
        return None


def entries(path: Path) -> list[str]:
    """Return the names in a directory, ``x2`` before ``x10``; none if it cannot be listed."""
    try:
        return sorted(os.listdir(path), key=natural)
    except OSError:
        return []


def link_name(path: Path) -> str:
    """Return the last part of what a link points to; empty if it is no link."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return ""


def pci_address(path: Path) -> str:
    """Return the PCI address of a device directory: its own, or that of the nearest PCI device above it."""
    try:
        real = os.path.realpath(path)
    except (OSError, ValueError):
        return ""
    parts = [part for part in real.split(os.sep) if _PCI.fullmatch(part)]
    if parts:
        return parts[-1].lower()
    found = re.search(r"^PCI_SLOT_NAME=(\S+)", read(path / "uevent"), re.MULTILINE)
    return found[1].lower() if found and _PCI.fullmatch(found[1]) else ""


def natural(text: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which ``mlx5_2`` comes before ``mlx5_10``."""
    return tuple(
        (0, int(part)) if part.isdecimal() and part.isascii() else (1, part)
        for part in re.split(r"([0-9]+)", text)
        if part
    )
