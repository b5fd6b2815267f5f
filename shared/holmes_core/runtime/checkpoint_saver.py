# SPDX-License-Identifier: Apache-2.0
"""Saving while training goes on: the state is copied to the CPU, and a thread writes it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from holmes_core.errors import HolmesError
from holmes_core.runtime.checkpoint import STATE, begin, place_of_rank, save_parts, staged, tree_bytes
from holmes_core.runtime.checkpoint_files import as_os_error, refuse_if_full, storage_error
from holmes_core.runtime.checkpoint_parts import map_tree, parts_in
from holmes_core.runtime.checkpoint_place import put_in_place, remove, saving_path

__all__ = ["Saver", "save_file", "tree_size"]


def save_file(path: Path, content: Any) -> None:
    """Write a file of torch.save under a temporary name, and give it its name once the disk has it.

    Raises:
        HolmesError: It cannot be written; what had the name before is as it was.
    """
    temporary, needed = saving_path(path), tree_size(content)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove(temporary)
        refuse_if_full(path.parent, path, place_of_rank(), needed)
        with open(temporary, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(temporary, path)
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, HolmesError) else as_os_error(error, path.parent)
        remove(temporary)
        if isinstance(cause, HolmesError):
            raise
        raise storage_error(cause, path=path, place=place_of_rank(), needed=needed) from error


def tree_size(tree: Any) -> int:
    """Return the bytes of all tensors in nested dicts and lists, those that share memory once."""
    seen: dict[int, int] = {}

    def note(value: Any, _: tuple[str, ...]) -> None:
        if isinstance(value, Tensor) and not value.is_meta:
            seen[value.data_ptr()] = value.numel() * value.element_size()

    map_tree(tree, note)
    return sum(seen.values())


class Saver:
    """Writes checkpoints, one at a time, in the foreground or the background.

    In the background a save must not use the groups that training uses: threads would take each other's messages. It
    has a group of its own.

    Args:
        background: Return from `save` once the state is copied.
        timeout: Longest wait for another rank, in seconds.
    """

    def __init__(self, *, background: bool, timeout: float) -> None:
        self._background, self._timeout = background, timeout
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._afterwards: list[Path] = []

    def save_sharded(self, path: Path, tree: Any, *, world: dist.ProcessGroup, temporary: Path | None = None) -> None:
        """Save a tree with placeholders as a folder. Collective over all ranks.

        Args:
            path: The folder.
            tree: What to save; beside placeholders rank 0's counts.
            world: All ranks, on the CPU.
            temporary: What `begin` returned, where it was called already.

        Raises:
            HolmesError: Any rank failed; on all ranks (in the background: at a later `check`).
        """
        self.wait()
        temporary = begin(path, world) if temporary is None else temporary
        files = {STATE: tree_bytes(tree)} if dist.get_rank(world) == 0 else {}
        if not self._background:
            save_parts(path, temporary, parts_in(tree), files=files, group=world)
            return
        parts, group = staged(tree), self._own_group()
        self._start(path, lambda: save_parts(path, temporary, parts, files=files, group=group))

    def save(self, path: Path, write: Callable[[], None]) -> None:
        """Let `write` run, in the background if wanted; it must use nothing that changes, and no process group."""
        self.wait()
        if self._background:
            self._start(path, write)
        else:
            write()

    def _own_group(self) -> dist.ProcessGroup:
        if self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout))
        group: dist.ProcessGroup = self._group
        return group

    def _start(self, path: Path, write: Callable[[], None]) -> None:
        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._problem = error
                seen = error.seen if isinstance(error, HolmesError) else repr(error)
                print(f"holmes: saving {path} in the background failed: {seen}\n", end="", file=sys.stderr)

        self._thread = threading.Thread(target=run, name="holmes-checkpoint")  # Python waits for it at its end
        self._thread.start()

    def remove(self, path: Path) -> None:
        """Remove an older checkpoint: once the one that is being saved is complete, never if it fails."""
        if self._thread is None:
            remove(path)
        else:
            self._afterwards.append(path)

    def check(self) -> None:
        """Raise what a save in the background failed with."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in the background; raise what it failed with."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        problem, self._problem = self._problem, None
        old, self._afterwards = self._afterwards, []
        if problem is not None:
            raise problem
        for path in old:
            remove(path)
