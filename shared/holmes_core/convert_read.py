# SPDX-License-Identifier: Apache-2.0
"""Read what `holmes convert` is given: files and folders of either host, without running code from them."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holmes_core.errors import HolmesError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SHOWN",
    "ConvertError",
    "error",
    "read_checkpoint",
    "read_json",
    "read_whole",
    "some",
    "state_of",
    "stored_config",
    "values_of",
    "write_single_file",
]

#: Names shown of a long list.
SHOWN = 5
_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class ConvertError(HolmesError, ValueError):
    """The checkpoint, the config and the wanted directory do not go together."""


def error(seen: str, means: str, do: str) -> ConvertError:
    """Return the error that a person should read."""
    return ConvertError(seen=seen, means=means, do=do)


def some(names: Iterable[object]) -> str:
    """Return the first of many names."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a file or folder; tensors of a sharded one are read by `read_whole`."""
    import torch

    from holmes_core.runtime.checkpoint_latest import check_file

    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise error(f"{path} does not exist", "there is nothing to read", "check the path")
    try:
        with open(path, "rb") as file:
            if file.read(1) == b"P":  # torch compares no checksums
                check_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except HolmesError as cause:
        raise error(cause.seen, cause.means or "the file is damaged", cause.do) from cause
    except pickle.UnpicklingError as cause:
        raise _not_weights_only(path, cause) from cause
    except (RuntimeError, OSError, EOFError, ValueError) as cause:
        raise error(
            f"{path} cannot be read by torch.load: {str(cause).splitlines()[0]}",
            "the file is damaged, cut short, in torch's format from before 1.6, or no checkpoint at all",
            "give a file written by trainer.save_checkpoint",
        ) from cause
    if not isinstance(content, dict):
        raise error(f"{path} holds a {type(content).__name__}", "no checkpoint", "give a Lightning .ckpt file")
    return content


def _read_folder(path: Path) -> dict[str, Any]:
    """Return the content of a folder; tensors in parts are read once it is known which are needed."""
    from safetensors.torch import load_file

    from holmes_core.runtime.checkpoint import check_checkpoint, load_tree
    from holmes_core.runtime.checkpoint_files import read_manifest

    try:
        if read_manifest(path).kind == "sharded":
            content: dict[str, Any] = load_tree(path)
        else:
            check_checkpoint(path)
            content = {"models": [load_file(path / "model.safetensors")]}
    except (HolmesError, OSError) as cause:
        raise error(
            cause.seen if isinstance(cause, HolmesError) else str(cause),
            (isinstance(cause, HolmesError) and cause.means) or f"{path} is no checkpoint that can be read",
            "give a file or folder that a finished save wrote",
        ) from cause
    if "models" in content:  # of Accelerator.save_state
        ours = path / "holmes_state.json"
        holmes = json.loads(ours.read_text("utf-8")) if ours.is_file() else {}
        content = {"state_dict": content["models"][0], "holmes": holmes}
    return content


def read_whole(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights, those of a sharded checkpoint with their values."""
    from holmes_core.runtime.checkpoint import load_whole

    try:
        whole: dict[str, Tensor] = load_whole(weights)
    except HolmesError as cause:
        raise error(cause.seen, cause.means or "the checkpoint is damaged", cause.do) from cause
    return whole


def write_single_file(checkpoint: Path | str, out: Path | str, *, overwrite: bool = False) -> Path:
    """Write a Lightning checkpoint that is a folder as one file, which loads under any strategy.

    Args:
        checkpoint: The folder.
        out: The file; it appears only when it is complete.
        overwrite: Replace it where it exists.

    Returns:
        The file, as a Path.

    Raises:
        ConvertError: The folder is no whole checkpoint of Lightning, or `out` exists.
    """
    from holmes_core.runtime.checkpoint import load_tree, load_whole
    from holmes_core.runtime.checkpoint_saver import save_file

    checkpoint, out = Path(checkpoint), Path(out)
    if out.exists() and not (overwrite and out.is_file()):
        raise error(f"{out} exists", "nothing was written", "choose another name, or --overwrite")
    try:
        tree = load_tree(checkpoint)
        if "state_dict" not in tree:
            raise error(
                f"{checkpoint} was written by Accelerator.save_state",
                "its model and optimizer are not those of a LightningModule",
                "without --single-file its model becomes a Hugging Face directory",
            )
        save_file(out, load_whole(tree))
    except ConvertError:
        raise
    except HolmesError as cause:
        raise error(cause.seen, cause.means or "the checkpoint cannot be read", cause.do) from cause
    return out


def _not_weights_only(path: Path, cause: Exception) -> ConvertError:
    import torch.serialization

    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:
        names = []
    if not names:
        return error(
            f"{path} cannot be read: {str(cause).splitlines()[0]}", "not a checkpoint", "give a Lightning .ckpt file"
        )
    return error(
        f"{path} holds Python objects beside the weights: {', '.join(names[:SHOWN])}",
        "reading them can run code from the file, so Holmes does not (most often they come from save_hyperparameters)",
        "if you trust them: torch.serialization.add_safe_globals([...]) before convert_checkpoint; or load the file "
        "yourself and save only the weights: torch.save({'state_dict': ckpt['state_dict']}, 'weights.ckpt'), then "
        "convert that with --config",
    )


def state_of(path: Path, content: dict[str, Any]) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Return the weights, under names without wrappers, and what the Holmes strategy noted."""
    from torch import Tensor

    state = content.get("state_dict", content)
    tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)} if isinstance(state, Mapping) else {}
    if not tensors:
        raise error(
            f"no weights in {path}; its keys: {some(content)}",
            "not a checkpoint of a model, or one of a sharded format",
            "give a file written by trainer.save_checkpoint",
        )
    plain = {".".join(part for part in key.split(".") if part not in _WRAPPERS): v for key, v in tensors.items()}
    holmes = content.get("holmes")
    return (plain if len(plain) == len(tensors) else tensors), (holmes if isinstance(holmes, Mapping) else {})


def stored_config(path: Path, holmes: Mapping[str, Any], hparams: object) -> Mapping[str, Any]:
    """Return the model's config that was saved with it."""
    if isinstance(stored := holmes.get("model_config"), Mapping):
        return stored
    found = [v for v in values_of(hparams) if isinstance(v, Mapping) and "model_type" in v]
    if len(found) == 1:
        return found[0]
    raise error(
        f"{path} holds no model config",
        "it was not written by the Holmes strategy, or its model is no transformers model",
        "pass --config with the model's config.json (model.config.save_pretrained(DIR) writes one)",
    )


def values_of(mapping: object) -> Iterable[Any]:
    """Return the values of a mapping; nothing of anything else."""
    return mapping.values() if isinstance(mapping, Mapping) else ()


def read_json(source: Path | str | Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a JSON object: given, in a file, or in the file `name` of a directory."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    path = path / name if path.is_dir() else path
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as cause:
        raise error(f"{path}: {cause}", f"no readable {name}", f"give a {name} or its directory") from cause
    if not isinstance(value, dict):
        raise error(f"{path} holds no JSON object", f"not a {name}", f"give a {name} or its directory")
    return value
