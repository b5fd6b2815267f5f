# SPDX-License-Identifier: Apache-2.0
"""Read single tensors of a safetensors file, each straight into memory of its own.

Not memory-mapped: a mapped weight stays tied to its file, so a rank that saves into the directory the others loaded
from would pull their weights away; and mapping counts the whole file as this process's memory. The safetensors
package's own unmapped reader holds each tensor two or three times for a moment.

The format: eight bytes little-endian length, a JSON header of that length (name to dtype, shape, [begin, end)), data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from types import EllipsisType, TracebackType

import torch
from torch import Tensor

from holmes_core.errors import HolmesError

__all__ = ["DTYPES", "TensorFile", "TensorInFile"]

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CHUNK = 1 << 30  # one read call gives at most 2 GiB


class TensorInFile:
    """A tensor that is read when it is indexed: ``[...]`` for all of it, ``[start:stop]`` for rows."""

    def __init__(self, file: TensorFile, dtype: torch.dtype, shape: tuple[int, ...], begin: int) -> None:
        self._file, self._begin = file, begin
        self.dtype, self.shape = dtype, shape

    def get_shape(self) -> list[int]:
        """Return the shape, as the safetensors package's slices do."""
        return list(self.shape)

    def __getitem__(self, index: slice | EllipsisType) -> Tensor:
        shape, begin = self.shape, self._begin
        if isinstance(index, slice):
            start, stop, step = index.indices(shape[0])
            if step != 1:
                raise ValueError(f"TensorInFile: rows are read one after another, not in steps of {step}")
            begin += start * math.prod(shape[1:]) * self.dtype.itemsize
            shape = (max(0, stop - start), *shape[1:])
        tensor = torch.empty(shape, dtype=self.dtype, device="cpu")
        self._file.read_into(tensor, begin)
        return tensor


class TensorFile:
    """An open safetensors file; a context manager.

    Args:
        path: The file.

    Raises:
        HolmesError: It is no whole safetensors file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            size = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"its header of {length:,} bytes does not fit into {size:,} bytes")
            header = json.loads(self._file.read(length))
            header.pop("__metadata__", None)
            self.tensors: dict[str, TensorInFile] = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
                if end - begin != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
                    raise ValueError(f"tensor {name} does not fit into {size:,} bytes: is the file cut off?")
                self.tensors[name] = TensorInFile(self, dtype, shape, 8 + length + begin)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.close()
            raise HolmesError(
                seen=f"{path} cannot be read as safetensors: {error!r}", do="download or save it again"
            ) from error

    def read_into(self, tensor: Tensor, begin: int) -> None:
        """Fill a contiguous tensor from the file's bytes at ``begin``."""
        if not tensor.numel():
            return
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
        done = 0
        while done < len(view):
            count = os.preadv(self._file.fileno(), [view[done : done + _CHUNK]], begin + done)
            if count == 0:
                raise HolmesError(seen=f"{self.path} got shorter while it was read", do="load again from a whole file")
            done += count

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
