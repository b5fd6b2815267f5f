# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on disk: files with checksums, and the manifest that says which there must be.

A checkpoint folder is complete exactly when it holds a manifest, `holmes_checkpoint.json`: every file with its size and
the CRC-32 of each block of 4 MiB, so that a reader of a few rows can check just the blocks it reads. JSON, because a
pickle (as torch.distributed.checkpoint's own `.metadata`) runs code of whoever wrote the file.
"""

from __future__ import annotations

import errno
import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from holmes_core.errors import HolmesError

__all__ = [
    "BLOCK",
    "MANIFEST",
    "BlockSums",
    "CheckedFile",
    "FileEntry",
    "Manifest",
    "as_os_error",
    "damaged",
    "read_manifest",
    "refuse_if_full",
    "seal",
    "storage_error",
    "sync_folder",
    "write_bytes",
]

MANIFEST = "holmes_checkpoint.json"
BLOCK = 4 << 20
_FORMAT = 1
_NOTHING = 1 << 20  # bytes: so little is free where a disk is full


def damaged(path: object, what: str) -> HolmesError:
    """Return the error for a checkpoint that cannot be trusted."""
    return HolmesError(
        seen=f"{path}: {what}",
        where="reading a checkpoint",
        means="the checkpoint is incomplete or was changed after it was written; nothing of it was used",
        do="load another one: holmes_core.runtime.checkpoint.latest_checkpoint(folder) finds the newest good one",
    )


# ---- checksums ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """What a manifest says of a file: bytes, and the CRC-32 of each block."""

    size: int
    sums: tuple[int, ...]

    def __post_init__(self) -> None:
        """Refuse sums that are too few or too many."""
        if self.size < 0 or len(self.sums) != -(-self.size // BLOCK):
            raise ValueError(f"{len(self.sums)} checksums for {self.size} bytes")


class BlockSums:
    """Checksums of bytes as they are written."""

    def __init__(self) -> None:
        self._size, self._crc, self._sums = 0, 0, list[int]()

    def update(self, data: bytes | memoryview) -> None:
        """Add the next bytes."""
        view, start = memoryview(data), 0
        while start < len(view):
            part = view[start : start + BLOCK - self._size % BLOCK]
            self._crc = zlib.crc32(part, self._crc)
            self._size += len(part)
            start += len(part)
            if self._size % BLOCK == 0:
                self._sums.append(self._crc)
                self._crc = 0

    def entry(self) -> FileEntry:
        """Return the sums of all bytes so far."""
        last = [self._crc] if self._size % BLOCK else []
        return FileEntry(size=self._size, sums=(*self._sums, *last))


class CheckedFile:
    """A file whose blocks are compared with their checksums as they are read; a context manager.

    Args:
        path: The file.
        entry: Its size and checksums.

    Raises:
        HolmesError: It is missing, or has another size; later: a block differs.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.path, self._entry = path, entry
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise damaged(path, f"cannot be opened: {error.strerror}") from error
        size = os.fstat(self._file.fileno()).st_size
        if size != entry.size:
            self._file.close()
            raise damaged(path, f"{size:,} bytes, {entry.size:,} were written")

    def read_into(self, view: memoryview, begin: int) -> None:
        """Fill a writable view of bytes from the file, beginning at byte `begin`."""
        end = begin + len(view)
        if begin < 0 or end > self._entry.size:
            raise damaged(self.path, f"bytes {begin:,} to {end:,} of {self._entry.size:,} are asked for")
        scratch = bytearray()
        for block in range(begin // BLOCK, -(-end // BLOCK)):
            first, last = block * BLOCK, min((block + 1) * BLOCK, self._entry.size)
            if begin <= first and last <= end:
                target = view[first - begin : last - begin]
                self._read(target, block)
                continue
            scratch = scratch or bytearray(BLOCK)
            self._read(memoryview(scratch)[: last - first], block)
            start, stop = max(begin, first), min(end, last)
            view[start - begin : stop - begin] = memoryview(scratch)[start - first : stop - first]

    def read(self) -> bytearray:
        """Return all bytes."""
        data = bytearray(self._entry.size)
        self.read_into(memoryview(data), 0)
        return data

    def check(self) -> None:
        """Read all blocks and compare them."""
        scratch = memoryview(bytearray(BLOCK))
        for block in range(len(self._entry.sums)):
            self._read(scratch[: min(BLOCK, self._entry.size - block * BLOCK)], block)

    def _read(self, target: memoryview, block: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._file.fileno(), [target[done:]], block * BLOCK + done)
            except OSError as error:
                raise damaged(self.path, f"cannot be read: {error.strerror}") from error
            if count == 0:
                raise damaged(self.path, "got shorter while it was read")
            done += count
        if zlib.crc32(target) != self._entry.sums[block]:
            first = block * BLOCK
            raise damaged(self.path, f"bytes {first:,} to {first + len(target):,} differ from what was written")

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


# ---- the manifest ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint folder holds."""

    kind: str
    """``sharded`` (tensors in parts) or ``single`` (whole tensors, in the host's own files)."""
    saved_at: float
    """Unix time, to tell which of two checkpoints is newer also after they were copied."""
    files: Mapping[str, FileEntry]
    """Path within the folder -> size and checksums."""
    tensors: Mapping[str, Any] = field(default_factory=dict)
    """Sharded: tensor name -> dtype, shape, chunks of [file, first byte, offsets, sizes]."""

    def write(self, folder: Path) -> None:
        """Write the manifest: from here on the folder counts as complete."""
        body = {
            "format": _FORMAT,
            "kind": self.kind,
            "saved_at": self.saved_at,
            "files": {
                name: [entry.size, "".join(f"{crc:08x}" for crc in entry.sums)] for name, entry in self.files.items()
            },
            "tensors": self.tensors,
        }
        text = json.dumps({"crc32": _crc_of(body), "checkpoint": body})
        write_bytes(folder / MANIFEST, text.encode())

    def open(self, folder: Path, name: str) -> CheckedFile:
        """Open one of the files."""
        if name not in self.files:
            raise damaged(folder / MANIFEST, f"says nothing of file {name!r}")
        return CheckedFile(folder / name, self.files[name])

    def check(self, folder: Path, *, contents: bool) -> None:
        """Raise HolmesError where a file is missing or has another size; with `contents` also where bytes differ."""
        for name in self.files:
            with self.open(folder, name) as file:
                if contents:
                    file.check()


def _crc_of(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def read_manifest(folder: Path) -> Manifest:
    """Read what a folder holds.

    Raises:
        HolmesError: There is no manifest, or it is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise HolmesError(
            seen=f"{folder} holds no {MANIFEST}",
            where="reading a checkpoint",
            means="saving it was interrupted, or no checkpoint was ever written there",
            do="give a folder that a finished save wrote; the earlier checkpoints beside it are intact",
        ) from None
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error
    try:
        whole = json.loads(text)
        body = whole["checkpoint"]
        if _crc_of(body) != whole["crc32"]:
            raise ValueError("its checksum differs")
        if body["format"] != _FORMAT:
            raise ValueError(f"it has format {body['format']!r}; this version of Holmes reads {_FORMAT}")
        files = {}
        for name, (size, sums) in body["files"].items():
            pure = PurePosixPath(name)
            if pure.is_absolute() or ".." in pure.parts or not isinstance(size, int):
                raise ValueError(f"file {name!r} of {size!r} bytes")
            blocks = [sums[at : at + 8] for at in range(0, len(sums), 8)]
            files[name] = FileEntry(size=size, sums=tuple(int(block, 16) for block in blocks))
        return Manifest(
            kind=str(body["kind"]), saved_at=float(body["saved_at"]), files=files, tensors=dict(body["tensors"])
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, f"cannot be read: {error}") from error


def seal(folder: Path, *, kind: str, known: Mapping[str, FileEntry], tensors: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of all files of a folder, those that are not in `known` after reading them back."""
    files = dict(known)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in files:
            sums = BlockSums()
            with open(path, "rb") as file:
                while part := file.read(BLOCK):
                    sums.update(part)
                os.fsync(file.fileno())
            files[name] = sums.entry()
        elif path.is_dir():
            sync_folder(path)
    Manifest(kind=kind, saved_at=time.time(), files=files, tensors=tensors or {}).write(folder)
    sync_folder(folder)


# ---- writing --------------------------------------------------------------------------------------------------------
def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the disk knows the names in a folder (some network file systems refuse; they need no such call)."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def as_os_error(error: Exception, folder: Path) -> OSError:
    """Return why writing failed; torch and safetensors hide what the system said, a full disk among it."""
    if isinstance(error, OSError):
        return error
    if isinstance(error.__context__, OSError):
        return error.__context__
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    with suppress(OSError):
        stat = os.statvfs(folder)
        if stat.f_bavail * stat.f_frsize < _NOTHING:
            return OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({text})", str(folder))
    return OSError(0, text, str(folder))


def storage_error(error: OSError, *, path: Path, place: str, needed: int | None = None) -> HolmesError:
    """Return what a person should read where a checkpoint cannot be written.

    Args:
        error: What the system said.
        path: The checkpoint.
        place: The rank and host that wrote.
        needed: Bytes to write there.
    """
    free = None
    with suppress(OSError):
        at = path if path.exists() else path.parent
        stat = os.statvfs(at)
        free = stat.f_bavail * stat.f_frsize
    sizes = "" if needed is None else f"; {needed:,} bytes are needed"
    sizes += "" if free is None else f", {free:,} are free"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return HolmesError(
        seen=f"{error.strerror or error}: {error.filename or path}{sizes}",
        where=f"saving {path} on {place}",
        means="this checkpoint was not written; the ones before are intact",
        do="free space or remove old checkpoints (ModelCheckpoint(save_top_k=...), total_limit=...), or save elsewhere"
        if full
        else "give a folder that every rank can write to",
    )


def refuse_if_full(folder: Path, path: Path, place: str, needed: int) -> None:
    """Raise HolmesError, before anything is written, where a folder's disk has less room than is needed."""
    stat = os.statvfs(folder)
    if needed > stat.f_bavail * stat.f_frsize:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise storage_error(full, path=path, place=place, needed=needed)
