# SPDX-License-Identifier: Apache-2.0
"""Checkpoints get their name in one step once they are complete, and nothing that no save wrote is ever deleted."""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint_files import MANIFEST, read_manifest, sync_folder

__all__ = ["put_in_place", "remove", "replaced_path", "retire", "saving_path"]

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # linux/fcntl.h


def saving_path(path: Path) -> Path:
    """Where a checkpoint is while it is written."""
    return path.parent / f".{path.name}.saving"


def replaced_path(path: Path) -> Path:
    """Where the checkpoint before is for a moment, on file systems that cannot exchange two names."""
    return path.parent / f".{path.name}.replaced"


def put_in_place(temporary: Path, path: Path, *, replace: bool = False) -> None:
    """Give a complete checkpoint its name; the one that had the name before goes away only then.

    What else is in a folder of that name stays: files that a script has put into a checkpoint move to the new one. A
    folder that is no checkpoint is not replaced but written into, file by file and the manifest last.

    Args:
        temporary: The checkpoint, on the same file system.
        path: Its name.
        replace: Somebody has asked for it: whatever has the name goes away.

    Raises:
        HolmesError: It is a file, and a folder of other things has its name.
    """
    others = path.is_dir() and not path.is_symlink() and not (path / MANIFEST).exists() and any(path.iterdir())
    if others and not replace:
        if temporary.is_file():
            raise HolmesError(
                seen=f"{path} is a folder, and no checkpoint",
                where="saving a checkpoint",
                means="it would have to be deleted for the file",
                do="give the name of a file, or remove the folder",
            )
        _write_into(temporary, path)
    elif temporary.is_file() and (path.is_file() or not os.path.lexists(path)):
        os.replace(temporary, path)
    elif not os.path.lexists(path):
        os.rename(temporary, path)
    elif _exchange(temporary, path):
        sync_folder(path.parent)
        retire(temporary, path)
    else:
        before = replaced_path(path)
        retire(before, path)
        os.rename(path, before)
        os.rename(temporary, path)
        sync_folder(path.parent)
    sync_folder(path.parent)
    retire(replaced_path(path), path)


def _write_into(temporary: Path, path: Path) -> None:
    """Move a checkpoint's files into a folder that has others; complete once the manifest is there."""
    names = [p.relative_to(temporary) for p in sorted(temporary.rglob("*")) if not p.is_dir()]
    for name in sorted(names, key=lambda name: name == Path(MANIFEST)):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        if name == Path(MANIFEST):
            sync_folder(path)
        shutil.move(temporary / name, path / name)
    sync_folder(path)
    remove(temporary)


def retire(old: Path, path: Path) -> None:
    """Remove a checkpoint that another has replaced; files that no save wrote move to that one."""
    if path.is_dir() and old.is_dir() and not old.is_symlink():
        with suppress(HolmesError):  # a torn one: what is in it was never whole
            ours = {*read_manifest(old).files, MANIFEST}
            for file in sorted(old.rglob("*")):
                name = file.relative_to(old)
                if not file.is_dir() and name.as_posix() not in ours and not os.path.lexists(path / name):
                    (path / name).parent.mkdir(parents=True, exist_ok=True)
                    os.rename(file, path / name)
    remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names of one file system change places in one step, where it can."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def remove(path: Path) -> None:
    """Remove a checkpoint, a folder or a file, if it is there; its manifest first, so that no torn one looks whole."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path)
        else:
            path.unlink()
