# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.checkpoint with planners for parts of tensors, and storage without pickles.

Its machinery plans (each part once, spread over the ranks that hold it), cuts stored boxes to wanted ones, and tells
all ranks of a failure on one. What is ours: a planner that says which boxes of which whole tensor a plain local tensor
is, and storage: one safetensors file per rank, in the layout of torch's HuggingFaceStorageReader, and our manifest.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import (
    _validate_global_plan,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint_files import (
    BLOCK,
    MANIFEST,
    BlockSums,
    CheckedFile,
    FileEntry,
    Manifest,
    damaged,
    read_manifest,
    refuse_if_full,
    seal,
    storage_error,
)
from holmes_core.runtime.checkpoint_parts import Chunk, Part
from holmes_core.runtime.checkpoint_place import put_in_place
from holmes_core.runtime.tensor_file import DTYPES

__all__ = ["FolderReader", "FolderWriter", "PartLoadPlanner", "PartSavePlanner"]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PIECE = 64 << 20  # bytes read at once where only some columns are wanted


def _box(chunk: Chunk) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))


def _size_of(item: plans.WriteItem) -> int:
    assert item.tensor_data is not None
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


# ---- saving ---------------------------------------------------------------------------------------------------------
class PartSavePlanner(plans.SavePlanner):
    """Plans the parts of one rank; the coordinator leaves each box to one of the ranks that hold it."""

    def set_up_planner(
        self,
        state_dict: Mapping[str, Any],
        storage_meta: dcp.StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the parts: name -> `Part` with a tensor."""
        self._parts: Mapping[str, Part] = state_dict

    def create_local_plan(self) -> plans.SavePlan:
        """Say what is here."""
        items = []
        for name, part in self._parts.items():
            if part.dtype not in _NAMES:
                raise HolmesError(
                    seen=f"tensor {name} has dtype {part.dtype}",
                    where="saving a sharded checkpoint",
                    means="safetensors files cannot hold it",
                    do="use checkpoint: single, or another dtype",
                )
            properties = dcp.TensorProperties(dtype=part.dtype)
            for chunk in part.chunks:
                data = plans.TensorWriteData(chunk=_box(chunk), properties=properties, size=torch.Size(part.shape))
                index = dcp.MetadataIndex(name, chunk.offsets)
                items.append(plans.WriteItem(index=index, type=plans.WriteItemType.SHARD, tensor_data=data))
        return plans.SavePlan(items)

    def create_global_plan(self, all_plans: list[plans.SavePlan]) -> tuple[list[plans.SavePlan], dcp.Metadata]:
        """Leave each box to the rank with the least to write, and check that all boxes together are all tensors."""
        chosen, metadata = create_default_global_save_plan(dedup_save_plans(all_plans))
        errors = _validate_global_plan(chosen, metadata)
        if errors:
            raise HolmesError(
                seen="; ".join(errors[:3]),
                where="saving a sharded checkpoint",
                means="the ranks' parts do not make up whole tensors",
                do="report this with the plan that was printed; checkpoint: single does not need it",
            )
        return chosen, metadata

    def finish_plan(self, new_plan: plans.SavePlan) -> plans.SavePlan:
        """Take the plan as it is."""
        return new_plan

    def resolve_data(self, write_item: plans.WriteItem) -> Tensor:
        """Return the values of a box."""
        part = self._parts[write_item.index.fqn]
        assert part.tensor is not None
        assert write_item.index.offset is not None
        offsets = tuple(write_item.index.offset)
        return next(chunk for chunk in part.chunks if chunk.offsets == offsets).of(part.tensor.detach())


@dataclass(frozen=True, slots=True)
class _Written:
    """Where a box is, and what its file's checksums are."""

    file: str
    begin: int
    entry: FileEntry


class FolderWriter(StorageWriter):
    """Writes parts into a folder under a temporary name; the coordinator seals it and gives it its name.

    Args:
        temporary: The folder.
        path: Its name once it is complete.
        place: This rank and host, for errors.
        rank: This rank.
        files: More files; taken from the coordinator only.
    """

    def __init__(
        self, *, temporary: Path, path: Path, place: str, rank: int, files: Mapping[str, bytes | memoryview]
    ) -> None:
        self._temporary, self._path, self._place, self._rank = temporary, path, place, rank
        self._files = files
        self._known: dict[str, FileEntry] = {}
        self._coordinates = False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget: one writer writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this is the coordinator."""
        self._coordinates = is_coordinator

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """Nothing to change."""
        return plan

    def prepare_global_plan(self, plans: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """Refuse what the disk has no room for, before anything is written."""
        needed = sum(_size_of(item) for plan in plans for item in plan.items)
        needed += sum(len(data) for data in self._files.values())
        refuse_if_full(self._temporary, self._path, self._place, needed)
        return plans

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts, and on the coordinator the other files."""
        done: list[WriteResult] = []
        needed = sum(_size_of(item) for item in plan.items)
        try:
            if self._coordinates:
                for name, data in self._files.items():
                    self._known[name] = _write_file(self._temporary / name, iter([memoryview(data)]))
            copies: Counter[str] = Counter()
            files: dict[int, list[plans.WriteItem]] = {}
            for item in plan.items:  # a file holds one box of a tensor: fused weights have several here
                files.setdefault(copies[item.index.fqn], []).append(item)
                copies[item.index.fqn] += 1
            for copy, items in files.items():
                done += self._write_parts(
                    f"rank-{self._rank:05d}{f'-{copy}' if copy else ''}.safetensors", items, planner
                )
        except OSError as error:
            raise storage_error(error, path=self._path, place=self._place, needed=needed) from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(done)
        return future

    def _write_parts(self, file: str, items: list[plans.WriteItem], planner: plans.SavePlanner) -> list[WriteResult]:
        header: dict[str, Any] = {}
        begins, at = [], 0
        for item in items:
            assert item.tensor_data is not None
            end = at + _size_of(item)
            header[item.index.fqn] = {
                "dtype": _NAMES[item.tensor_data.properties.dtype],
                "shape": list(item.tensor_data.chunk.sizes),
                "data_offsets": [at, end],
            }
            begins.append(at)
            at = end
        offsets = {item.index.fqn: {"saved_offsets": list(item.index.offset or ())} for item in items}
        header["__metadata__"] = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)

        def pieces() -> Iterator[memoryview]:
            yield memoryview(len(text).to_bytes(8, "little") + text)
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                if tensor.numel():
                    yield memoryview(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

        entry = _write_file(self._temporary / file, pieces())
        base = 8 + len(text)
        return [
            WriteResult(
                index=item.index, size_in_bytes=_size_of(item), storage_data=_Written(file, base + begin, entry)
            )
            for item, begin in zip(items, begins, strict=True)
        ]

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, and give the folder its name."""
        tensors: dict[str, Any] = {}
        for name, stored in metadata.state_dict_metadata.items():
            assert isinstance(stored, dcp.TensorStorageMetadata)
            tensors[name] = {"dtype": _NAMES[stored.properties.dtype], "shape": list(stored.size), "chunks": []}
        sizes = {
            dcp.MetadataIndex(name, chunk.offsets): list(chunk.sizes)
            for name, stored in metadata.state_dict_metadata.items()
            for chunk in stored.chunks  # type: ignore[union-attr]
        }
        for result in (one for of_rank in results for one in of_rank):
            written: _Written = result.storage_data
            index = result.index
            row = [
                written.file,
                written.begin,
                list(index.offset or ()),
                sizes[dcp.MetadataIndex(index.fqn, index.offset)],
            ]
            tensors[index.fqn]["chunks"].append(row)
            self._known[written.file] = written.entry
        try:
            seal(self._temporary, kind="sharded", known=self._known, tensors=tensors)
            put_in_place(self._temporary, self._path)
        except OSError as error:
            raise storage_error(error, path=self._path, place=self._place) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path will do."""
        return True


def _write_file(path: Path, pieces: Iterator[memoryview]) -> FileEntry:
    """Write and checksum bytes, and wait until the disk has them."""
    sums = BlockSums()
    with open(path, "wb", buffering=0) as file:
        for piece in pieces:
            for start in range(0, len(piece), BLOCK):
                part = piece[start : start + BLOCK]
                sums.update(part)  # while it is in the cache
                done = 0
                while done < len(part):
                    done += file.write(part[done:])
        os.fsync(file.fileno())
    return sums.entry()


# ---- loading --------------------------------------------------------------------------------------------------------
class PartLoadPlanner(plans.LoadPlanner):
    """Plans to read the boxes of parts."""

    def set_up_planner(
        self, state_dict: Mapping[str, Any], metadata: dcp.Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the parts to fill, name -> `Part` with a tensor, and what the checkpoint has."""
        assert metadata is not None
        self._parts, self._metadata = state_dict, metadata

    def create_local_plan(self) -> plans.LoadPlan:
        """Cut stored boxes to the wanted ones."""
        items: list[plans.ReadItem] = []
        for name, part in self._parts.items():
            stored = self._metadata.state_dict_metadata[name]
            assert isinstance(stored, dcp.TensorStorageMetadata)
            wanted = [chunk for chunk in part.chunks if math.prod(chunk.sizes)]
            reads = create_read_items_for_chunk_list(name, stored, [_box(chunk) for chunk in wanted])
            found, asked = sum(math.prod(r.lengths) for r in reads), sum(math.prod(c.sizes) for c in wanted)
            if found != asked:
                raise HolmesError(
                    seen=f"the checkpoint holds {found:,} of the {asked:,} elements of {name} that are needed here",
                    where="reading a checkpoint",
                    do="load another checkpoint",
                )
            items += reads
        return plans.LoadPlan(items)

    def create_global_plan(self, global_plan: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """Ranks read independently."""
        return global_plan

    def finish_plan(self, central_plan: plans.LoadPlan) -> plans.LoadPlan:
        """Take the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: plans.ReadItem, value: Any) -> None:
        """Never: nothing is stored as pickled bytes."""
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: plans.ReadItem) -> Tensor:
        """Return the view to fill."""
        part = self._parts[read_item.dest_index.fqn]
        offsets = tuple(read_item.dest_index.offset or ())
        assert part.tensor is not None
        view: Tensor = next(chunk for chunk in part.chunks if chunk.offsets == offsets).of(part.tensor)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            view = view.narrow(dim, start, length)
        return view

    def commit_tensor(self, read_item: plans.ReadItem, tensor: Tensor) -> None:
        """Nothing to do: the view was filled."""


class FolderReader(StorageReader):
    """Reads parts of a sharded checkpoint.

    Args:
        folder: The checkpoint.

    Raises:
        HolmesError: It is incomplete, damaged or of another kind.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        if self.manifest.kind != "sharded":
            raise HolmesError(
                seen=f"{folder} is a checkpoint of kind {self.manifest.kind!r}",
                where="reading a sharded checkpoint",
                do="load it where it was saved: Accelerator.load_state for what save_state wrote",
            )
        try:
            self.metadata = self._read_metadata()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(folder / MANIFEST, f"cannot be read: {error!r}") from error

    def _read_metadata(self) -> dcp.Metadata:
        self._where: dict[dcp.MetadataIndex, tuple[str, int, torch.Size, torch.dtype]] = {}
        tensors: dict[str, Any] = {}
        for name, entry in self.manifest.tensors.items():
            dtype, shape = DTYPES[entry["dtype"]], torch.Size(entry["shape"])
            chunks = []
            for file, begin, offsets, sizes in entry["chunks"]:
                box = dcp.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                end = begin + math.prod(box.sizes) * dtype.itemsize
                inside = all(
                    o >= 0 and o + s <= whole for o, s, whole in zip(box.offsets, box.sizes, shape, strict=True)
                )
                if not inside or not 0 <= begin <= end <= self.manifest.files[file].size:
                    raise ValueError(f"{name}: a part does not fit")
                chunks.append(box)
                self._where[dcp.MetadataIndex(name, box.offsets)] = file, begin, box.sizes, dtype
            properties = dcp.TensorProperties(dtype=dtype)
            tensors[name] = dcp.TensorStorageMetadata(properties=properties, size=shape, chunks=chunks)
        return dcp.Metadata(state_dict_metadata=tensors, storage_data=self._where)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget: one reader reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return what the manifest says."""
        return self.metadata

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        """Nothing to change."""
        return plan

    def prepare_global_plan(self, plans: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """Nothing to change."""
        return plans

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Read each wanted box, checking the blocks it lies in."""
        by_file: dict[str, list[plans.ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._stored(item)[0], []).append(item)
        for name, items in sorted(by_file.items()):
            with self.manifest.open(self.folder, name) as file:
                for item in sorted(items, key=lambda item: self._stored(item)[1]):
                    _, begin, sizes, dtype = self._stored(item)
                    target = planner.resolve_tensor(item)
                    _read_box(file, begin, tuple(sizes), dtype, item.storage_offsets, target)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _stored(self, item: plans.ReadItem) -> tuple[str, int, torch.Size, torch.dtype]:
        index = item.storage_index
        return self._where[dataclasses.replace(index, index=None)]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Any path will do."""
        return True


def _read_box(
    file: CheckedFile, begin: int, sizes: tuple[int, ...], dtype: torch.dtype, offsets: torch.Size, target: Tensor
) -> None:
    """Fill `target` from a stored box of shape `sizes` that begins at byte `begin`, beginning at `offsets` in it."""
    lengths = tuple(target.shape)
    row = math.prod(sizes[1:]) * dtype.itemsize
    if not sizes:
        sizes, lengths, offsets, row = (1,), (1,), torch.Size((0,)), dtype.itemsize
        target = target.reshape(1)
    begin += offsets[0] * row
    if lengths[1:] == sizes[1:] and target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype:
        file.read_into(memoryview(target.view(-1).view(torch.uint8).numpy().data), begin)
        return
    step = max(1, _PIECE // max(1, row))
    for start in range(0, lengths[0], step):
        count = min(step, lengths[0] - start)
        rows = torch.empty((count, *sizes[1:]), dtype=dtype)
        file.read_into(memoryview(rows.view(-1).view(torch.uint8).numpy().data), begin + start * row)
        for dim in range(1, len(sizes)):
            rows = rows.narrow(dim, offsets[dim], lengths[dim])
        target.narrow(0, start, count).copy_(rows)
