# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of HolmesAccelerator: the files that Accelerate writes, with the whole model and optimizer in them.

Sharded, the same folder holds model and optimizer in parts, and everything else as Accelerate writes it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import nn

from holmes_accelerate.wrappers import HolmesOptimizer
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, HolmesError
from holmes_core.runtime import checkpoint as checkpoints
from holmes_core.runtime import state
from holmes_core.runtime.call_mode import CallMode, of_model
from holmes_core.runtime.checkpoint_files import MANIFEST, as_os_error, read_manifest, seal, storage_error
from holmes_core.runtime.checkpoint_place import put_in_place, remove
from holmes_core.runtime.checkpoint_saver import Saver
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.model_facts import model_config
from holmes_core.runtime.step_record import share

if TYPE_CHECKING:
    from accelerate import Accelerator as _Base
else:
    _Base = object

__all__ = ["CheckpointHooks", "read_progress", "write_progress"]

_OURS = "holmes_state.json"


class _Collected(nn.Module):
    """Stands for a model whose whole state is at hand."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        self.state = state


class CheckpointHooks(_Base):
    """The part of HolmesAccelerator that saves and restores."""

    _mode: CallMode | None
    _optimizers: list[Any]
    holmes_config: HolmesConfig
    _made_saver: Saver | None = None
    #: While a sharded checkpoint is loaded: the models' states, with placeholders.
    _loading: list[Any] | None = None
    #: While a sharded checkpoint is saved: the models' states, with placeholders.
    _sharded_models: list[dict[str, Any]] | None = None

    @property
    def _saver(self) -> Saver:
        if self._made_saver is None:
            config = self.holmes_config
            self._made_saver = Saver(background=config.checkpoint_async, timeout=config.timeout)
            for optimizer in self._optimizers:
                optimizer.optimizer.register_step_pre_hook(lambda *_: self._check_saving())
        return self._made_saver

    def _register_checkpoint_hooks(self) -> None:
        self.register_save_state_pre_hook(self._save_ours)
        self.register_load_state_pre_hook(self._load_models)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """Return the whole state on rank 0, meta tensors of the whole shapes elsewhere. Collective over all ranks."""
        if isinstance(model, _Collected):
            return model.state
        mode = of_model(model)
        if mode is None:
            return super().get_state_dict(model, unwrap=unwrap)
        if self._sharded_models is not None:
            self._sharded_models.append(state.sharded_state_dict(mode.engine))
            return self._sharded_models[-1]
        return OrderedDict(mode.state_dict())  # Accelerate takes tied weights out of an OrderedDict only

    def save_model(
        self, model: Any, save_directory: Any, max_shard_size: Any = "10GB", safe_serialization: bool = True
    ) -> None:
        """Write the whole model as safetensors, from rank 0. Collective over all ranks."""
        if of_model(model) is None:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        state = self.get_state_dict(model)
        if self.is_main_process:
            super().save_model(_Collected(state), save_directory, max_shard_size, safe_serialization)
        self.wait_for_everyone()

    def _save_ours(self, models: list[Any], weights: list[Any], output_dir: Any) -> None:
        if self._mode is not None:
            write_progress(self._mode.engine, output_dir)

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Write a checkpoint as Accelerate does, or in parts; it loads under any layout. Collective over all ranks.

        It has its name once it is complete. With ``total_limit`` older ones go away after that, not before.

        Raises:
            HolmesError: It cannot be written; on all ranks. What had the name before is as it was.
        """
        mode = self._mode
        if mode is None:
            return super().save_state(output_dir, safe_serialization, **kwargs)
        mode._meet("a checkpoint")
        self.finish_saving()
        naming = self.project_configuration
        automatic = naming.automatic_checkpoint_naming
        path = self._automatic_name() if automatic else Path(os.path.abspath(os.path.expanduser(output_dir)))
        sharded, world = self.holmes_config.checkpoint == "sharded", mode.engine.groups.world
        temporary = checkpoints.begin(path, world, shared=sharded)
        problem: Exception | None = None
        with ExitStack() as stack:
            # All collective calls come before anything is written: a rank that cannot write leaves no other waiting.
            optimizers = [o for o in self._optimizers if isinstance(o, HolmesOptimizer)]
            states, models = [], list[Any]()
            if sharded:
                states = [
                    state.sharded_optimizer_state(mode.engine, optimizer.optimizer, f"optimizer.{index}")
                    for index, optimizer in enumerate(optimizers)
                ]
                models = stack.enter_context(self._without_parts())
            else:
                for optimizer in optimizers:
                    stack.enter_context(optimizer.collected())
            naming.automatic_checkpoint_naming = False
            stack.callback(setattr, naming, "automatic_checkpoint_naming", automatic)
            try:
                super().save_state(str(temporary), safe_serialization, **kwargs)
            except Exception as error:
                cause = as_os_error(error, temporary.parent)
                problem = storage_error(cause, path=path, place=checkpoints.place_of_rank())
        self._raise_and_remove(problem, temporary)
        if sharded:
            tree = {"models": models, "optimizers": states}
            self._saver.save_sharded(path, tree, world=world, temporary=temporary)
        else:
            self._complete(temporary, path)
        if automatic:
            self._keep_newest(path)
        return path if automatic else Path(output_dir)

    @contextmanager
    def _without_parts(self) -> Iterator[list[dict[str, Any]]]:
        """Let Accelerate write neither models nor optimizers; gives the models' states."""
        self._sharded_models = []
        optimizers: list[Any] = self._optimizers
        self._optimizers = [o for o in optimizers if not isinstance(o, HolmesOptimizer)]
        handle = self.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        try:
            yield self._sharded_models
        finally:
            handle.remove()
            self._optimizers, self._sharded_models = optimizers, None

    def _raise_and_remove(self, problem: Exception | None, temporary: Path) -> None:
        try:
            checkpoints.raise_everywhere(problem)
        except HolmesError:
            if self.is_main_process:
                remove(temporary)  # gives a full disk its space back
            raise

    def _complete(self, temporary: Path, path: Path) -> None:
        """Seal what was written and give it its name; on hosts that do not share the folder, each its own."""
        problem: Exception | None = None
        if self.is_main_process:
            try:
                seal(temporary, kind="single", known={})
                put_in_place(temporary, path)
            except OSError as error:
                problem = storage_error(error, path=path, place=checkpoints.place_of_rank())
        self._raise_and_remove(problem, temporary)
        if not self.is_main_process and self.is_local_main_process and temporary.is_dir():
            shutil.copytree(temporary, path, dirs_exist_ok=True)
            remove(temporary)
        self.wait_for_everyone()  # a rank that goes on to load or to delete must find what rank 0 writes

    def _automatic_name(self) -> Path:
        path = Path(os.path.abspath(self.project_dir)) / "checkpoints" / f"checkpoint_{self.save_iteration}"
        if path.exists():
            raise ConfigError(
                seen=f"{path} exists, and is the next name of automatic_checkpoint_naming",
                where="Accelerator.save_state",
                do="set accelerator.project_configuration.iteration to the number to go on with (as after load_state)",
            )
        return path

    def _keep_newest(self, path: Path) -> None:
        limit = self.project_configuration.total_limit
        if limit is None or not self.is_main_process:
            return
        numbers = {
            int(match[1]): other
            for other in path.parent.iterdir()
            if (match := re.fullmatch(r"checkpoint_(\d+)", other.name))
        }
        numbers[int(path.name.rpartition("_")[2])] = path  # may still be on its way
        for number in sorted(numbers)[:-limit]:
            self._saver.remove(numbers[number])

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is saved in the background; raise on all ranks what it failed with."""
        problem: Exception | None = None
        try:
            if self._made_saver is not None:
                self._made_saver.wait()
        except Exception as error:
            problem = error
        if self.holmes_config.checkpoint_async and self._mode is not None:
            checkpoints.raise_everywhere(problem)
        elif problem is not None:
            raise problem

    def _check_saving(self) -> None:
        if self._made_saver is not None:
            self._made_saver.check()

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load a checkpoint of either kind, or of Accelerate without Holmes, after comparing its checksums."""
        self.finish_saving()
        if input_dir is None:  # the names of automatic_checkpoint_naming, without what a killed save has left
            found = Path(os.path.abspath(self.project_dir)) / "checkpoints"
            numbers = [p for p in found.iterdir() if re.fullmatch(r"checkpoint_\d+", p.name)] if found.is_dir() else []
            if self.project_configuration.automatic_checkpoint_naming and numbers:
                input_dir = str(max(numbers, key=lambda p: int(p.name.rpartition("_")[2])))
        folder = Path(os.path.expanduser(input_dir)) if input_dir is not None else None
        if self._mode is None or folder is None or not (folder / MANIFEST).exists():
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        manifest = read_manifest(folder)
        sharded = manifest.kind == "sharded"
        problem: Exception | None = None
        try:
            for name in manifest.files:
                if not (sharded and name.endswith(".safetensors")):  # parts are compared as they are read
                    with manifest.open(folder, name) as file:
                        file.check()
        except HolmesError as error:
            problem = error
        checkpoints.raise_everywhere(problem)
        if not sharded:
            super().load_state(input_dir, load_kwargs, **kwargs)
            return
        tree = checkpoints.load_tree(folder)
        optimizers = [o for o in self._optimizers if isinstance(o, HolmesOptimizer)]
        if len(tree["optimizers"]) != len(optimizers):
            raise HolmesError(
                seen=f"{folder} holds {len(tree['optimizers'])} optimizers, {len(optimizers)} were prepared",
                where="Accelerator.load_state",
                do="prepare the same optimizers as when it was saved",
            )
        every, self._optimizers = self._optimizers, [o for o in self._optimizers if o not in optimizers]
        self._loading = tree["models"]
        try:
            super().load_state(input_dir, load_kwargs, **kwargs)
        finally:
            self._optimizers, self._loading = every, None
        for optimizer, saved in zip(optimizers, tree["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def _load_models(self, models: list[Any], input_dir: Any) -> None:
        for index, model in reversed(list(enumerate(models))):
            mode = of_model(model)
            if mode is None:
                continue
            mode.load_state_dict(self._loading[index] if self._loading else _read_weights(input_dir, index))
            del models[index]  # Accelerate would load it as if it were whole
        if self._mode is not None:
            read_progress(self._mode.engine, input_dir)


def write_progress(engine: Engine, folder: Any) -> None:
    """Write beside a checkpoint what the next random numbers depend on, and what model it is; rank 0 writes."""
    if engine.rank != 0:
        return
    found = model_config(engine.root)
    ours = {
        "batches_seen": engine.batches_seen,
        "seed": engine.seed,
        "dp": engine.plan.layout.dp,
        "model_path": found[0] if found else None,
        "model_config": found[1] if found else None,
    }
    with open(os.path.join(folder, _OURS), "w", encoding="utf-8") as file:
        json.dump(ours, file)


def read_progress(engine: Engine, folder: Any) -> None:
    """Go on with the random numbers of the run that saved; nothing where it ran without Holmes.

    Collective over all ranks: what rank 0 reads counts.
    """
    ours = None
    if engine.rank == 0:
        with suppress(FileNotFoundError), open(os.path.join(folder, _OURS), encoding="utf-8") as file:
            ours = json.load(file)
    ours = share(ours, source=0, group=engine.groups.world)
    if ours is not None:
        engine.batches_seen, engine.seed = int(ours["batches_seen"]), int(ours["seed"])


def _read_weights(folder: Any, index: int) -> dict[str, Any]:
    ending = f"_{index}" if index else ""
    safe = os.path.join(folder, f"model{ending}.safetensors")
    if os.path.isfile(safe):
        return dict(load_file(safe))
    pickled = os.path.join(folder, f"pytorch_model{ending}.bin")
    if os.path.isfile(pickled):
        return dict(checkpoints.load_file(Path(pickled)))
    raise HolmesError(
        seen=f"neither {os.path.basename(safe)} nor {os.path.basename(pickled)}",
        where=f"folder {folder}",
        do="give load_state a folder that save_state wrote, readable on every host",
    )
