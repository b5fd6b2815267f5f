# SPDX-License-Identifier: Apache-2.0
"""Build a pretrained model without its weights, and remember where they are.

Inside `lazy_loading` a transformers ``from_pretrained`` runs as always (configuration, dtype, attention, hub, key
renaming, load report), except that it stops before weights are read: the model stays on the meta device and carries a
`WeightSource`. Once a rank knows its part of the model, `holmes_core.runtime.materialize` has transformers' own loader
read that part, so renamings and conversions (merged experts, ...) are the ones ordinary loading applies.

transformers is not imported here; it is patched inside the context only, and only the loader's two last steps.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import logging
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holmes_core.errors import ConfigError, HolmesError
from holmes_core.runtime.tensor_file import TensorFile, TensorInFile

__all__ = ["SOURCE_ATTRIBUTE", "WeightSource", "lazy_loading", "read_source"]

#: The attribute of a transformers model that holds its `WeightSource`.
SOURCE_ATTRIBUTE = "_holmes_source"

_log = logging.getLogger(__name__)

#: Rows compared at a time where a checkpoint holds both names of a tied weight.
_ROWS = 4096


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class WeightSource:
    """Where the weights of a model that was built on the meta device are to be read.

    Places are kept as (module, attribute): wrapping modules later (adapters, compile) renames parameters, and
    checkpoint names must still find them.

    Attributes:
        where: The directory or hub name that was given to ``from_pretrained``.
        files: The checkpoint files, resolved.
        load_config: What transformers' loader needs to know, its own type.
        places: State-dict name at loading time to (module, attribute).
        keys: Checkpoint key to (key after renaming, names it fills).
        ready: Whether ``from_pretrained`` is through.
    """

    where: str
    files: tuple[str, ...]
    load_config: Any
    places: dict[str, tuple[nn.Module, str]]
    keys: dict[str, tuple[str, tuple[str, ...]]]
    ready: bool = False


class _Transformers:
    """The names of transformers' loader that are used here; all of them private to it."""

    def __init__(self) -> None:
        modeling = importlib.import_module("transformers.modeling_utils")
        core = importlib.import_module("transformers.core_model_loading")
        self.model_class: Any = modeling.PreTrainedModel
        self.read_pickle: Any = modeling.load_state_dict
        self.report: Any = modeling.log_state_dict_report
        self.logger: Any = modeling.logger
        self.info_class: Any = core.LoadStateDictInfo
        self.convert: Any = core.convert_and_load_state_dict_in_model
        self.rename: Any = core.rename_source_key
        self.apply_renamings: Any = core.apply_renamings
        self.sort_key: Any = core.dot_natural_key
        self.renaming_class: Any = core.WeightRenaming
        self.converter_class: Any = core.WeightConverter
        self.logging: Any = importlib.import_module("transformers.utils.logging")
        load = list(inspect.signature(self.model_class._load_pretrained_model).parameters)[:4]
        finish = list(inspect.signature(self.model_class._finalize_model_loading).parameters)[:3]
        if load != ["model", "state_dict", "checkpoint_files", "load_config"]:
            raise AttributeError(f"PreTrainedModel._load_pretrained_model takes {load}")
        if finish != ["model", "load_config", "loading_info"]:
            raise AttributeError(f"PreTrainedModel._finalize_model_loading takes {finish}")

    def split(self, load_config: Any) -> tuple[list[Any], list[Any]]:
        """Return the renamings and the converters of a checkpoint."""
        mapping = load_config.weight_mapping or []
        return (
            [entry for entry in mapping if isinstance(entry, self.renaming_class)],
            [entry for entry in mapping if isinstance(entry, self.converter_class)],
        )


@contextmanager
def lazy_loading() -> Iterator[None]:
    """Make ``from_pretrained`` of transformers models build on the meta device and remember where the weights are.

    Nothing happens where transformers is not installed. Models that cannot wait (quantized, spread over several
    devices by ``device_map``, GGUF, ``state_dict=``) are loaded in the ordinary way; the reason is logged. A
    ``device_map`` of one device is ignored: `materialize` says where the weights go. An adapter (PEFT) needs its
    base model's weights, which are then read whole.

    A model from this context is of no use before `materialize`.
    """
    if importlib.util.find_spec("transformers") is None:
        yield
        return
    try:
        hf = _Transformers()
    except (ImportError, AttributeError) as error:
        _log.warning("from_pretrained loads whole models: the loader of this transformers is not known (%s)", error)
        yield
        return
    model_class = hf.model_class
    load, finish = model_class._load_pretrained_model, model_class._finalize_model_loading
    adapter = model_class.load_adapter

    def lazy_load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kw: Any) -> Any:
        reason = _reason_to_wait_not(model, state_dict, checkpoint_files, load_config, bool(args or kw))
        if reason is not None:
            _log.warning("%s is loaded whole, now: %s", type(model).__name__, reason)
            return load(model, state_dict, checkpoint_files, load_config, *args, **kw)
        return _remember(hf, model, checkpoint_files, load_config), None

    def lazy_finish(model: Any, load_config: Any, loading_info: Any) -> Any:
        source = model.__dict__.get(SOURCE_ATTRIBUTE)
        if source is None or source.ready:
            return finish(model, load_config, loading_info)
        try:
            model.tie_weights(missing_keys=loading_info.missing_keys, recompute_mapping=False)
            model._adjust_missing_and_unexpected_keys(loading_info)
        finally:
            hf.report(
                model=model,
                pretrained_model_name_or_path=source.where,
                ignore_mismatched_sizes=load_config.ignore_mismatched_sizes,
                loading_info=loading_info,
                logger=hf.logger,
            )
        source.ready = True
        return loading_info

    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        if SOURCE_ATTRIBUTE in self.__dict__:
            from holmes_core.runtime.materialize import materialize_whole

            _log.warning("%s is loaded whole, now: an adapter is loaded into it", type(self).__name__)
            materialize_whole(self)
        return adapter(self, *args, **kwargs)

    with ExitStack() as stack:
        for name, new in (
            ("_load_pretrained_model", staticmethod(lazy_load)),
            ("_finalize_model_loading", staticmethod(lazy_finish)),
            ("load_adapter", load_adapter),
        ):
            stack.callback(_put_back, model_class, name, model_class.__dict__.get(name))
            setattr(model_class, name, new)
        yield


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is None:  # it was inherited
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _reason_to_wait_not(model: Any, state_dict: Any, files: Any, load_config: Any, more: bool) -> str | None:
    """Say why a model must be loaded the ordinary way, or None."""
    device_map = load_config.device_map or {}
    if state_dict is not None:
        return "its weights were given as state_dict (GGUF files are read into one, too)"
    if load_config.hf_quantizer is not None:
        return "it is quantized"
    if len(set(map(str, device_map.values()))) > 1 or "disk" in device_map.values():
        return "device_map spreads it over several devices"
    if more:
        return "only some of its weights were asked for"
    if load_config.device_mesh is not None:
        return "transformers distributes it"
    if not files:
        return "it has no checkpoint files"
    if not all(param.is_meta for param in model.parameters()):
        return "it was not built on the meta device"
    if any(name.endswith("_extra_state") for name in model.state_dict()):
        return "its checkpoint holds extra state that is no tensor"
    return None


# ---- what the checkpoint holds ------------------------------------------------------------------------------------
class _Mapped:
    """A tensor of a mapped pickle that is copied when it is indexed, so that nothing stays tied to the file."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.shape = data, tuple(data.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.data[index].clone()


@contextmanager
def _open(files: Collection[str], read_pickle: Callable[..., Any]) -> Iterator[dict[str, TensorInFile | _Mapped]]:
    """Open checkpoint files; nothing but headers is read until a tensor is indexed."""
    entries: dict[str, TensorInFile | _Mapped] = {}
    with ExitStack() as stack:
        for file in files:
            if file.endswith(".safetensors"):
                entries.update(stack.enter_context(TensorFile(file)).tensors)
            elif zipfile.is_zipfile(file):
                entries.update((key, _Mapped(value)) for key, value in read_pickle(file).items())
            else:
                raise ConfigError(
                    seen=f"{file} is a pickle of the old form",
                    where="lazy loading of a pretrained model",
                    means="it can only be read whole, which is more than one rank's part of the model",
                    do="convert it once on a machine with enough memory: model = Class.from_pretrained(path);"
                    " model.save_pretrained(new_path) writes safetensors",
                )
        yield entries


def _remember(hf: _Transformers, model: Any, files: Any, load_config: Any) -> Any:
    """Work out which checkpoint key fills which parameter, as the loader will; return transformers' loading info."""
    state = model.state_dict()
    places: dict[str, tuple[nn.Module, str]] = {}
    for name in state:
        path, _, attribute = name.rpartition(".")
        places[name] = (model.get_submodule(path), attribute)
    renamings, converters = hf.split(load_config)
    targets_of = {pattern: c.target_patterns for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    kinds = {"conversion_errors": dict, "error_msgs": list}
    info = hf.info_class(**{f.name: kinds.get(f.name, set)() for f in dataclasses.fields(hf.info_class)})
    info.missing_keys.update(state)
    keys: dict[str, tuple[str, tuple[str, ...]]] = {}
    plain: dict[str, str] = {}  # name to the key that fills it unchanged
    with _open(files, hf.read_pickle) as entries:
        for key in sorted(entries, key=hf.sort_key):
            name, pattern = hf.rename(key, renamings, converters, prefix, state)
            between = hf.apply_renamings(key, renamings)
            if name not in state and key in state:
                name, pattern = hf.rename(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
                between = key
            names = [name]
            if pattern is not None:
                first = targets_of[pattern][0]
                names = [name.replace(first, target) for target in targets_of[pattern]]
            if name not in state:
                info.unexpected_keys.update(names)
            elif pattern is None and entries[key].shape != tuple(state[name].shape):
                info.mismatched_keys.add((name, torch.Size(entries[key].shape), state[name].shape))
                info.missing_keys.discard(name)
            else:
                keys[key] = (between, tuple(n for n in names if n in state))
                info.missing_keys.difference_update(names)
                if pattern is None:
                    plain[name] = key
        for target, source in model.all_tied_weights_keys.items():
            if {target, source} & info.missing_keys:
                continue
            if _equal(entries, plain.get(target), plain.get(source)):
                info.missing_keys.add(target)  # so that transformers ties it
                keys.pop(plain.get(target, ""), None)
            else:
                _log.warning(
                    "%s: the configuration ties %s to %s, but the checkpoint holds two different ones: not tied",
                    type(model).__name__, target, source,
                )  # fmt: skip
                model.all_tied_weights_keys = {k: v for k, v in model.all_tied_weights_keys.items() if k != target}
    model._weight_conversions = [c for c in load_config.weight_mapping or [] if c.was_used()]  # for save_pretrained
    source = WeightSource(
        where=str(load_config.pretrained_model_name_or_path),
        files=tuple(map(str, files)),
        load_config=load_config,
        places=places,
        keys=keys,
    )
    setattr(model, SOURCE_ATTRIBUTE, source)
    return info


def _equal(entries: Mapping[str, TensorInFile | _Mapped], one: str | None, other: str | None) -> bool:
    """Whether two tensors of the checkpoint are equal; those that need conversion are taken to be."""
    if one is None or other is None:
        return True
    a, b = entries[one], entries[other]
    if a.shape != b.shape:
        return False
    rows = a.shape[0] if a.shape else 0
    if not rows:
        return torch.equal(a[...], b[...])
    return all(torch.equal(a[i : i + _ROWS], b[i : i + _ROWS]) for i in range(0, rows, _ROWS))


# ---- reading a part of it --------------------------------------------------------------------------------------------
class _Place:
    """Stands for a module towards transformers' loader: what is set on it goes to ``put``."""

    def __init__(self, module: nn.Module, put: Callable[[nn.Module, str, Tensor], None]) -> None:
        object.__setattr__(self, "_module", module)
        object.__setattr__(self, "_put", put)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_module"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_put")(self._module, name, value.detach())


class _Model:
    """Stands for a model towards transformers' loader: its parameters under the names of loading time."""

    def __init__(self, model: Any, source: WeightSource, put: Callable[[nn.Module, str, Tensor], None]) -> None:
        state = {name: getattr(module, key) for name, (module, key) in source.places.items()}
        modules = {name.rpartition(".")[0]: module for name, (module, _) in source.places.items()}
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "state_dict", lambda: dict(state))
        object.__setattr__(self, "get_parameter", state.__getitem__)
        object.__setattr__(self, "get_parameter_or_buffer", state.__getitem__)
        object.__setattr__(self, "get_submodule", lambda path: _Place(modules[path], put))
        object.__setattr__(
            self, "named_buffers", lambda: [(n, state[n]) for n, (m, k) in source.places.items() if k in m._buffers]
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_model"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Drop what the loader notes on the model: it saw a part of the checkpoint only."""


def read_source(
    model: nn.Module,
    source: WeightSource,
    *,
    wanted: Callable[[nn.Module, str], bool],
    put: Callable[[nn.Module, str, Tensor], None],
    device: torch.device,
) -> None:
    """Read the wanted part of a model's checkpoint.

    Args:
        model: The model that carries `source`.
        source: Its source.
        wanted: Whether the tensor at (module, attribute) is to be read.
        put: Takes each tensor that was read, on `device` and in the dtype of the one it replaces. It may be called
            for unwanted ones, where one checkpoint tensor holds several.
        device: Where the tensors go.

    Raises:
        HolmesError: Transformers could not convert a tensor of the checkpoint.
    """
    hf = _Transformers()
    need = {key for key, (_, names) in source.keys.items() if any(wanted(*source.places[name]) for name in names)}
    if not need:
        return
    _, converters = hf.split(source.load_config)
    # An offloaded module makes the loader read one tensor at a time instead of many in threads; no module has this name
    devices = {"": device, "holmes: one at a time": "disk"}
    load_config = dataclasses.replace(source.load_config, device_map=devices, weight_mapping=converters)
    with _open(source.files, hf.read_pickle) as entries, _quiet(hf):
        part = {source.keys[key][0]: entries[key] for key in need}
        info, _ = hf.convert(model=_Model(model, source, put), state_dict=part, load_config=load_config)
    if info.conversion_errors or info.mismatched_keys:
        raise HolmesError(
            seen=f"{source.where}: cannot be read into {type(model).__name__}:"
            f" {dict(info.conversion_errors) or sorted(info.mismatched_keys)}",
            where="lazy loading of a pretrained model",
            do="load it once with plain from_pretrained, outside of Holmes, to see whether the checkpoint is sound",
        )


@contextmanager
def _quiet(hf: _Transformers) -> Iterator[None]:
    """Show no progress bars: every rank would draw one."""
    shown = hf.logging.is_progress_bar_enabled()
    hf.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf.logging.enable_progress_bar()
