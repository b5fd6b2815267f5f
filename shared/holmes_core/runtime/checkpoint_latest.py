# SPDX-License-Identifier: Apache-2.0
"""Find the newest checkpoint that can be trusted, of either kind, for a run that goes on by itself."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint_files import MANIFEST, damaged, read_manifest

__all__ = ["check_checkpoint", "check_file", "latest_checkpoint"]

_PARTS = (".safetensors", ".bin", ".pt", ".distcp", ".pkl")
_FILES = (".ckpt", ".pt", ".pth")
_OF_TRAINER = "trainer_state.json"  # transformers.Trainer writes it last


def check_file(path: Path, *, contents: bool = True) -> None:
    """Check that a file of torch.save is whole: its table of contents, and the checksum of every record.

    torch itself compares no checksum when it loads.

    Raises:
        HolmesError: It is not.
    """
    try:
        with zipfile.ZipFile(path) as file:
            wrong = file.testzip() if contents else None
    except FileNotFoundError:
        raise HolmesError(
            seen=f"there is no {path}", where="reading a checkpoint", do="check the path; every rank must see the file"
        ) from None
    except Exception as error:  # zipfile raises many kinds on damaged files
        raise damaged(path, f"cannot be read as a file of torch.save: {error!r}") from error
    if wrong is not None:
        raise damaged(path, f"record {wrong} differs from what was written")


def check_checkpoint(path: Path | str, *, contents: bool = True) -> None:
    """Raise HolmesError if a checkpoint, folder or file, is incomplete or damaged.

    Args:
        path: The checkpoint.
        contents: Read everything and compare checksums; otherwise only names and sizes.
    """
    path = Path(path)
    if not path.is_dir():
        check_file(path, contents=contents)
    elif (path / MANIFEST).exists() or not (path / _OF_TRAINER).exists():
        read_manifest(path).check(path, contents=contents)
    else:  # nothing says which files there must be; each by itself tells whether it was cut short
        for file in sorted(path.iterdir()):
            if file.suffix == ".safetensors":
                _check_tensors(file)
            elif file.suffix in (".pt", ".pth", ".bin") and _first_byte(file) in (b"P", b""):
                check_file(file, contents=contents)


def _first_byte(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(1)


def _check_tensors(path: Path) -> None:
    """Raise HolmesError where a safetensors file has another size than its header says."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = os.fstat(file.fileno()).st_size
            header = json.loads(file.read(min(length, size)))
        ends = [about["data_offsets"][1] for name, about in header.items() if name != "__metadata__"]
        if 8 + length + max(ends, default=0) != size:
            raise ValueError(f"{size:,} bytes, {8 + length + max(ends, default=0):,} were written")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError) as error:
        raise damaged(path, f"cannot be read as safetensors: {error}") from error


def latest_checkpoint(
    folder: Path | str, *, contents: bool = True, say: Callable[[str], None] | None = None
) -> Path | None:
    """Return the newest good checkpoint in a folder or below it; torn and damaged ones are skipped with a line.

    Knows files of ``trainer.save_checkpoint``, sharded folders, folders of ``Accelerator.save_state`` and of
    transformers.Trainer. Ask on one rank, and tell the others: each call may read a whole checkpoint.

    Args:
        folder: Where checkpoints are saved.
        contents: Compare checksums; otherwise only names and sizes.
        say: Takes the lines; standard error when None.

    Returns:
        Its path, or None where there is none.
    """
    say = _say if say is None else say
    found: list[tuple[float, str, Path]] = []
    for path in _candidates(Path(folder), say):
        try:
            check_checkpoint(path, contents=False)
            found.append((_saved_at(path), str(path), path))
        except (HolmesError, OSError) as error:
            say(f"holmes: skipping checkpoint {path}: {_reason(error)}")
    for _, _, path in sorted(found, reverse=True):
        try:
            if contents:
                check_checkpoint(path)
            return path
        except (HolmesError, OSError) as error:
            say(f"holmes: skipping checkpoint {path}: {_reason(error)}")
    return None


def _candidates(folder: Path, say: Callable[[str], None]) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    names = {entry.name for entry in entries}
    for entry in entries:
        path = Path(entry.path)
        if entry.is_symlink():  # ModelCheckpoint(save_last="link"): what it points to is found by itself
            continue
        hidden, _, ending = entry.name.rpartition(".")
        if entry.name.startswith(".") and ending == "saving":
            say(f"holmes: skipping checkpoint {path}: saving it was interrupted, or goes on now")
        elif entry.name.startswith(".") and ending == "replaced":
            if hidden[1:] not in names:  # the one before, where a job was killed between two renames
                yield path
        elif entry.is_dir():
            inside = os.listdir(path)
            if MANIFEST in inside or _OF_TRAINER in inside or any(name.endswith(_PARTS) for name in inside):
                yield path
            else:
                yield from _candidates(path, say)
        elif entry.name.endswith(_FILES):
            yield path


def _saved_at(path: Path) -> float:
    if (path / MANIFEST).exists():
        return read_manifest(path).saved_at
    return (path / _OF_TRAINER if path.is_dir() else path).stat().st_mtime


def _reason(error: Exception) -> str:
    return error.seen if isinstance(error, HolmesError) else str(error)


def _say(line: str) -> None:
    print(f"{line}\n", end="", file=sys.stderr)
