# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints: a folder that all ranks write at once, and of which each rank reads what it needs.

    tree = {"state_dict": sharded_state_dict(engine), ...}     # placeholders where tensors will be
    saver.save(path, tree)                                     # all ranks
    tree = load_tree(path)                                     # any layout, also one process
    load_state_dict(engine, tree["state_dict"])                # reads this rank's parts

A folder holds `rank-00000.safetensors`, ... (parts of tensors under canonical names), `state.pt` (everything else, as
rank 0 has it), what the host adds, and last the manifest.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint_dcp import FolderReader, FolderWriter, PartLoadPlanner, PartSavePlanner
from holmes_core.runtime.checkpoint_files import MANIFEST, damaged, storage_error
from holmes_core.runtime.checkpoint_latest import check_checkpoint, check_file, latest_checkpoint
from holmes_core.runtime.checkpoint_parts import (
    Part,
    local_chunks,
    map_tree,
    part_of,
    parts_in,
    placeholder,
    take_references,
    with_references,
)
from holmes_core.runtime.checkpoint_place import remove, retire, saving_path
from holmes_core.runtime.shard import TensorShard
from holmes_core.runtime.state_transfer import raise_together

__all__ = [
    "STATE",
    "Reads",
    "begin",
    "check_checkpoint",
    "check_file",
    "is_archive",
    "is_sharded",
    "latest_checkpoint",
    "load_file",
    "load_tree",
    "load_whole",
    "map_tree",
    "place_of_rank",
    "raise_everywhere",
    "save_parts",
    "staged",
    "tree_bytes",
]

STATE = "state.pt"


def is_sharded(path: Any) -> bool:
    """Whether a path is a folder, as a sharded checkpoint is."""
    return isinstance(path, (str, os.PathLike)) and os.path.isdir(path)


def is_archive(path: Path) -> bool:
    """Whether a file is to be read as one of torch.save (older formats have no checksums); a missing one is."""
    try:
        with open(path, "rb") as file:
            return file.read(1) in (b"P", b"")
    except OSError:
        return True


def place_of_rank() -> str:
    """Return this rank and host in words."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return f"rank {rank}, host {os.uname().nodename}"


# ---- saving ---------------------------------------------------------------------------------------------------------
def begin(path: Path, group: dist.ProcessGroup, *, shared: bool = True) -> Path:
    """Make the folder in which a checkpoint is written. Collective over the group.

    Args:
        path: The checkpoint's final name.
        group: All ranks, on the CPU.
        shared: All ranks must see the same folder; otherwise those that do not see it make their own.

    Returns:
        The temporary folder beside it.

    Raises:
        HolmesError: It cannot be made, or ranks do not see it; on all ranks.
    """
    temporary, rank = saving_path(path), dist.get_rank(group)
    mark = temporary / "token"
    message: list[Any] = [uuid.uuid4().hex, None]
    if rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            retire(temporary, path)  # what a save that was killed has left
            temporary.mkdir()
            mark.write_text(message[0])
        except OSError as error:
            message[1] = storage_error(error, path=path, place=place_of_rank())
    dist.broadcast_object_list(message, group=group, group_src=0)
    if message[1] is not None:
        raise message[1]
    try:
        sees = mark.read_text() == message[0]
    except OSError:
        sees = False
    if not sees and not shared:
        temporary.mkdir(parents=True, exist_ok=True)
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, None if sees else place_of_rank(), group=group)
    blind = [place for place in found if place is not None]
    if rank == 0:
        mark.unlink()
    if blind and shared:
        if rank == 0:
            remove(temporary)
        raise HolmesError(
            seen=f"{temporary}, made by rank 0, is not there for: {'; '.join(blind[:8])}",
            where=f"saving {path}",
            means="all ranks of a sharded checkpoint write into one folder; these hosts do not share it",
            do="give a path on a file system that all hosts share, or use checkpoint: single",
        )
    return temporary


def tree_bytes(tree: Any) -> memoryview:
    """Return a tree as torch.save writes it, with names in the place of placeholders."""
    buffer = io.BytesIO()
    torch.save(with_references(tree), buffer)
    return buffer.getbuffer()


def save_parts(
    path: Path,
    temporary: Path,
    parts: Mapping[str, Part],
    *,
    files: Mapping[str, bytes | memoryview],
    group: dist.ProcessGroup | None,
) -> None:
    """Write all ranks' parts and complete the checkpoint. Collective over the group.

    Args:
        path: The checkpoint's final name.
        temporary: What `begin` returned.
        parts: This rank's parts by name; a box that several ranks hold is written once.
        files: More files, of the group's first rank.
        group: All ranks, on the CPU; None without torch.distributed.

    Raises:
        HolmesError: Any rank failed; on all ranks. The temporary folder is gone then, and what had the name before is
            as it was.
    """
    rank = 0 if group is None else dist.get_rank(group)
    writer = FolderWriter(temporary=temporary, path=path, place=place_of_rank(), rank=rank, files=files)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
            dcp_save(
                dict(parts),
                storage_writer=writer,
                planner=PartSavePlanner(),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        if rank == 0:
            remove(temporary)  # gives a full disk its space back
        raise _first_failure(error, f"saving {path}") from None


def _first_failure(error: CheckpointException, where: str) -> HolmesError:
    rank, (cause, _) = min(error.failures.items())
    if isinstance(cause, HolmesError):
        return cause
    return HolmesError(
        seen=f"rank {rank}: {type(cause).__name__}: {cause}",
        where=where,
        do="look at the output of that rank; a checkpoint that was not completed is never used",
    )


# ---- loading --------------------------------------------------------------------------------------------------------
def load_tree(folder: Path | str, *, weights_only: bool = True) -> Any:
    """Return what was saved, with a placeholder in the place of each tensor of model and optimizer; reads no weights.

    Args:
        folder: A sharded checkpoint.
        weights_only: Refuse Python objects, which can run code. False only for files you trust.

    Raises:
        HolmesError: The checkpoint is incomplete or damaged, or holds such objects.
    """
    reader = FolderReader(Path(folder))
    with reader.manifest.open(reader.folder, STATE) as file:
        data = file.read()
    tree = load_bytes(data, reader.folder / STATE, weights_only=weights_only)
    made: dict[str, Tensor] = {}

    def make(name: str) -> Tensor:
        if name not in made:
            stored: Any = reader.metadata.state_dict_metadata.get(name)
            if stored is None:
                raise damaged(reader.folder / MANIFEST, f"has no tensor {name}")
            part = Part(name=name, shape=tuple(stored.size), dtype=stored.properties.dtype, source=reader)
            made[name] = placeholder(part)
        return made[name]

    return take_references(tree, make)


def load_bytes(data: bytes | bytearray, path: Path, *, weights_only: bool = True) -> Any:
    """Return what torch.save made these bytes of.

    Raises:
        HolmesError: They are damaged, or hold Python objects.
    """
    return _unpickle(lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only), path)


def load_file(path: Path, *, weights_only: bool = True) -> Any:
    """Return the content of a file of torch.save, after comparing its checksums; memory-mapped.

    Raises:
        HolmesError: It is damaged, or holds Python objects.
    """
    check_file(path)
    return _unpickle(lambda: torch.load(path, map_location="cpu", weights_only=weights_only, mmap=True), path)


def _unpickle(load: Callable[[], Any], path: Path) -> Any:
    try:
        return load()
    except pickle.UnpicklingError as error:
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line or "allowed" in line), str(error))
        raise HolmesError(
            seen=f"{path} holds more than tensors and plain values: {reason.strip()[:300]}",
            where="reading a checkpoint",
            means="reading Python objects can run code from the file, so it is not done unless you ask for it",
            do="torch.serialization.add_safe_globals([TheClass]) for classes you trust, or weights_only=False in"
            " fit(...) or HolmesStrategy(...) for a file you trust",
        ) from None
    except Exception as error:
        raise damaged(
            path, f"cannot be read by torch.load: {str(error).splitlines()[0] if str(error) else error!r}"
        ) from error


class Reads:
    """Collects what this rank wants of checkpoints, then reads it all at once."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[str, tuple[Any, ...]], tuple[FolderReader, Part]] = {}

    def want(self, part: Part, shard: TensorShard | None = None, rank: int = 0, size: int = 1) -> Tensor:
        """Return the tensor that will hold a part of a stored tensor: all of it, or a tensor-parallel rank's share."""
        chunks = local_chunks(part.shape, shard, rank, size)
        shape = part.shape if shard is None else shard.local_shape(size)
        known = self._wanted.get((part.name, chunks))
        if known is not None:
            assert known[1].tensor is not None
            return known[1].tensor
        tensor = torch.zeros(shape, dtype=part.dtype) if shard is not None else torch.empty(shape, dtype=part.dtype)
        wanted = Part(name=part.name, shape=part.shape, dtype=part.dtype, tensor=tensor, chunks=chunks)
        self._wanted[part.name, chunks] = part.source, wanted
        return tensor

    def run(self) -> None:
        """Read. Not collective.

        Raises:
            HolmesError: The checkpoint is damaged where this rank reads.
        """
        batches: dict[FolderReader, list[dict[str, Part]]] = {}
        for reader, part in self._wanted.values():
            rows = batches.setdefault(reader, [{}])
            row = next((row for row in rows if part.name not in row), None)
            if row is None:
                rows.append(row := {})
            row[part.name] = part
        for reader, rows in batches.items():
            for row in rows:
                try:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")
                        dcp_load(
                            dict(sorted(row.items())), storage_reader=reader, planner=PartLoadPlanner(), no_dist=True
                        )
                except CheckpointException as error:
                    raise _first_failure(error, f"reading {reader.folder}") from None
        self._wanted.clear()

    def run_together(self, group: dist.ProcessGroup, *, skip: bool = False) -> None:
        """Read, and raise on all ranks what one of them meets. Collective over the group.

        Args:
            group: All ranks, on the CPU.
            skip: Read nothing here.
        """
        problem: HolmesError | None = None
        try:
            if not skip:
                self.run()
        except HolmesError as error:
            problem = error
        raise_together(problem, group)


def load_whole(tree: Any) -> Any:
    """Return a tree of `load_tree`, or a part of one, with whole tensors in the place of placeholders."""
    reads = Reads()

    def fetch(value: Any, _: tuple[str, ...]) -> Any:
        part = part_of(value)
        return value if part is None else reads.want(part)

    whole = map_tree(tree, fetch)
    reads.run()
    return whole


def staged(tree: Any) -> dict[str, Part]:
    """Return the parts of a tree with copies of their values on the CPU, which training does not change."""
    made = {}
    for name, part in parts_in(tree).items():
        assert part.tensor is not None
        copy = torch.empty(part.tensor.shape, dtype=part.tensor.dtype)
        copy.copy_(part.tensor.detach())
        made[name] = Part(name=name, shape=part.shape, dtype=part.dtype, tensor=copy, chunks=part.chunks)
    return made


def raise_everywhere(problem: Exception | None) -> None:
    """Raise one rank's problem on all ranks of the job, with the rank and host that had it. Collective."""
    if problem is not None and not isinstance(problem, HolmesError):
        problem = HolmesError(
            seen=f"{type(problem).__name__}: {problem}", where=place_of_rank(), do="look at the output of that rank"
        )
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is not None:
        raise_together(problem, world)
    elif problem is not None:
        raise problem
