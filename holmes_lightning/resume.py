# SPDX-License-Identifier: Apache-2.0
"""``resume: auto``: a fit without ckpt_path goes on from the newest whole checkpoint of its ModelCheckpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch.distributed as dist

from holmes_core.errors import ConfigError
from holmes_core.runtime.checkpoint_latest import latest_checkpoint

__all__ = ["resume_by_itself"]


def resume_by_itself(trainer: Any) -> None:
    """Let this trainer's next fit find its checkpoint, if the script names none.

    What a strategy is asked comes too early or too late for that: Lightning decides on a path before it calls any hook,
    and asks a strategy to load only where there is one. So its connector's `resume_start` is wrapped.

    Raises:
        ConfigError: The trainer saves to a folder with a new name for each run, or does not save.
    """
    folders = _folders(trainer)
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    @functools.wraps(original)
    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        del connector.resume_start  # once
        return original(checkpoint_path or _newest(folders), *args, **kwargs)

    connector.resume_start = resume_start


def _folders(trainer: Any) -> list[Path]:
    callbacks = [one for one in trainer.checkpoint_callbacks if hasattr(one, "dirpath")]
    found = [Path(one.dirpath) for one in callbacks if one.dirpath]
    if callbacks and not found and not trainer.loggers:
        found = [Path(trainer.default_root_dir) / "checkpoints"]  # where ModelCheckpoint then saves
    if found:
        return list(dict.fromkeys(found))
    raise ConfigError(
        seen="resume auto, and no ModelCheckpoint with a dirpath",
        where="HolmesConfig.resume",
        means="without one each run saves to a folder with a new number (version_0, version_1, ...), and which of them "
        "this run goes on with cannot be known",
        do="use ModelCheckpoint(dirpath=...), or resume: off",
    )


def _newest(folders: list[Path]) -> Path | None:
    """Newest good checkpoint, as rank 0 sees it. Collective over all ranks."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        found = [path for path in map(latest_checkpoint, folders) if path is not None]
        box[0] = max(found, key=lambda path: path.stat().st_mtime, default=None)
        said = f"goes on from {box[0]}" if box[0] else f"nothing to go on from in {', '.join(map(str, folders))}"
        print(f"holmes: resume auto: {said}\n", end="", flush=True)
    dist.broadcast_object_list(box, src=0)
    return box[0]
