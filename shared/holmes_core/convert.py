# SPDX-License-Identifier: Apache-2.0
"""Turn a checkpoint into a plain Hugging Face model directory, or one written in parts into one file.

A checkpoint that Holmes writes holds the whole model, under the same names as in one process:
`model.transformer.h.0.attn.c_attn.weight`. Only three things are missing for `AutoModelForCausalLM.from_pretrained`:
the place of the model inside the LightningModule (the prefix `model.`), its config, and the safetensors layout. The
prefix is found by comparing names with a model built from the config on the meta device, so nothing is guessed and no
weight is lost on the way without a word.

Files are always read with `weights_only=True`. There is no unsafe fallback.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holmes_core.convert_read import (
    SHOWN,
    ConvertError,
    error,
    read_checkpoint,
    read_json,
    read_whole,
    some,
    state_of,
    stored_config,
    values_of,
    write_single_file,
)
from holmes_core.runtime.checkpoint_place import put_in_place

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

__all__ = ["ConvertError", "convert_checkpoint", "main", "write_single_file"]

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_BAR_FROM = 10**9  # bytes


def convert_checkpoint(
    checkpoint: Path | str,
    out: Path | str,
    *,
    model_key: str | None = None,
    config: Path | str | Mapping[str, Any] | None = None,
    tokenizer: Path | str | None = None,
    max_shard_size: str = "5GB",
    dtype: str | None = None,
    lora_config: Path | str | Mapping[str, Any] | None = None,
    merge_lora: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the model in a Lightning checkpoint as a Hugging Face directory.

    Args:
        checkpoint: What `trainer.save_checkpoint`, ModelCheckpoint or `Accelerator.save_state` wrote, a file or a
            folder; or a plain saved state dict.
        out: The directory to write. It appears only when everything in it is complete.
        model_key: Attribute path of the Hugging Face model inside the LightningModule, for example `model`; "" when
            the checkpoint holds the model itself. Only needed where several places fit.
        config: The model's config: a dict, a `config.json`, or a directory that holds one. Default: the one that the
            Holmes strategy stored in the checkpoint.
        tokenizer: A directory whose tokenizer files are copied, or one `tokenizer.json`.
        max_shard_size: Size limit of each safetensors file, for example "5GB".
        dtype: "float32", "bfloat16", "float16" (or fp32, bf16, fp16). Default: each weight as it was saved.
        lora_config: For a checkpoint with PEFT adapters: the `LoraConfig` as a dict, an `adapter_config.json` or its
            directory. Default: the one stored in the checkpoint.
        merge_lora: Add the adapters into the weights and write a plain model. Otherwise only the adapter is written.
        overwrite: Replace `out` where it exists.

    Returns:
        The directory, as a Path.

    Raises:
        ConvertError: The file, the config and the names do not go together; the message says how to go on.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not overwrite:
        raise error(f"{out} exists and is not empty", "nothing was written", "choose another, or --overwrite")
    content = read_checkpoint(checkpoint)
    state, holmes = state_of(checkpoint, content)
    hparams = content.get("hyper_parameters")
    model = _meta_model(config if config is not None else stored_config(checkpoint, holmes, hparams), holmes)

    adapter = _adapter_name(state)
    if adapter is not None:
        model = _with_adapters(model, adapter, lora_config, holmes, hparams)
    elif merge_lora or lora_config is not None:
        raise error(f"no lora_ weights in {checkpoint}", "nothing to merge", "leave out the LoRA options")

    weights = _select(state, model, model_key, holmes.get("model_path"))
    weights = read_whole(weights)
    _check_shapes(weights, model)
    _untie(weights, model)
    _cast(weights, dtype)

    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        if adapter is None:
            _save(model, weights, partial, max_shard_size)
        else:
            _save_adapters(model, weights, partial, max_shard_size, adapter=adapter, merge=merge_lora)
        if tokenizer is not None:
            _copy_tokenizer(Path(tokenizer), partial)
        partial.chmod(0o755)
        put_in_place(partial, out, replace=overwrite)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def main(argv: list[str] | None = None) -> int:
    """Run `holmes convert`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="holmes convert", description="Write a checkpoint as a Hugging Face model directory, or as one file."
    )
    parser.add_argument(
        "checkpoint", type=Path, help="what trainer.save_checkpoint or save_state wrote: file or folder"
    )
    parser.add_argument("out", type=Path, help="directory to write")
    parser.add_argument("--single-file", action="store_true", help="write a sharded Lightning checkpoint as one file")
    parser.add_argument("--config", type=Path, help="config.json or its directory (default: stored in the checkpoint)")
    parser.add_argument("--model-key", help="attribute path of the model in the LightningModule, e.g. model")
    parser.add_argument("--tokenizer", type=Path, help="directory with tokenizer files, or one tokenizer.json")
    parser.add_argument("--max-shard-size", default="5GB", help="largest safetensors file (default: %(default)s)")
    parser.add_argument("--dtype", choices=[*_DTYPES, *_DTYPES.values()], help="cast the weights (default: as saved)")
    parser.add_argument("--lora-config", type=Path, help="adapter_config.json (default: stored in the checkpoint)")
    parser.add_argument("--merge-lora", action="store_true", help="add LoRA adapters into the weights")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where it exists")
    args = vars(parser.parse_args(argv))
    try:
        if args.pop("single_file"):
            print(write_single_file(args["checkpoint"], args["out"], overwrite=args["overwrite"]))
            return 0
        out = convert_checkpoint(args.pop("checkpoint"), args.pop("out"), **args)
    except ConvertError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{out}: {', '.join(sorted(p.name for p in out.iterdir()))}")
    return 0


# -- matching ---------------------------------------------------------------------------------------------------------


def _meta_model(source: Path | str | Mapping[str, Any], holmes: Mapping[str, Any]) -> PreTrainedModel:
    """Build the model without weights; its names and shapes are what the checkpoint is held against."""
    import torch
    import transformers

    values = read_json(source, "config.json")
    try:
        config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[values["model_type"]]
    except KeyError:
        raise error(
            f"model_type is {values.get('model_type')!r}",
            f"transformers {transformers.__version__} knows no such model",
            "install the transformers version that the model was trained with",
        ) from None
    config = config_class.from_dict(values)
    named = [holmes.get("model_class"), *(config.architectures or [])]
    classes = [getattr(transformers, name) for name in named if isinstance(name, str) and hasattr(transformers, name)]
    with torch.device("meta"):
        model: PreTrainedModel
        model = classes[0](config) if classes else transformers.AutoModelForCausalLM.from_config(config)
    return model


def _required(model: torch.nn.Module) -> tuple[set[str], dict[str, str]]:
    """Return all names of the model and, for the tied ones, alias -> source."""
    names = set(model.state_dict())
    ties: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for alias, source in (getattr(module, "all_tied_weights_keys", None) or {}).items():
            dot = f"{prefix}." if prefix else ""
            if f"{dot}{alias}" in names and f"{dot}{source}" in names:
                ties[f"{dot}{alias}"] = f"{dot}{source}"
    return names, ties


def _select(
    state: dict[str, Tensor], model: torch.nn.Module, model_key: str | None, stored_key: object
) -> dict[str, Tensor]:
    """Find the model inside the checkpoint and return its weights under the model's own names."""
    names, ties = _required(model)
    count: Counter[str] = Counter()
    for key in state:
        parts = key.split(".")
        count.update(".".join(parts[:i]) for i in range(len(parts)) if ".".join(parts[i:]) in names)

    def missing(prefix: str) -> list[str]:
        dot = f"{prefix}." if prefix else ""
        gone = {name for name in names if f"{dot}{name}" not in state}
        twin = ties | {source: alias for alias, source in ties.items()}
        return [name for name in model.state_dict() if name in gone and twin.get(name, name) in gone]

    kind = type(model).__name__
    if not count:
        raise error(
            f"no weight of the checkpoint belongs to {kind}",
            f"checkpoint: {some(state)}; {kind}: {some(names)}",
            "pass the --config of the model that was trained",
        )
    full = [prefix for prefix in count if not missing(prefix)]
    if model_key is None and isinstance(stored_key, str) and stored_key in full:
        model_key = stored_key
    if model_key is None:
        if len(full) > 1:
            keys = ", ".join(repr(p) for p in sorted(full))
            raise error(f"{kind} fits at {keys}", "the checkpoint holds several models", "pass --model-key")
        model_key = full[0] if full else count.most_common(1)[0][0]
    if gone := missing(model_key):
        raise error(
            f"{len(gone)} of the {len(names)} weights of {kind} are not under {model_key!r}: {some(gone)}",
            "the config describes another model, or the checkpoint is incomplete",
            f"pass the right --config{'' if model_key in count else f' or --model-key, best: {some(count)}'}",
        )

    dot = f"{model_key}." if model_key else ""
    under = {key[len(dot) :]: value for key, value in state.items() if key.startswith(dot)}
    weights = {name: value for name, value in under.items() if name in names}
    tops = {name.split(".")[0] for name in names}
    ignored = {name for name, _ in model.named_buffers()}  # non-persistent ones, saved by older transformers
    extra = [
        name
        for name in under
        if name not in names and name.split(".")[0] in tops and name not in ignored and not _is_old_buffer(name)
    ]
    if extra:
        raise error(
            f"{len(extra)} weights under {model_key!r} have no place in {kind}: {some(extra)}",
            "the config describes a smaller or another model; writing it would lose them",
            "pass the right --config",
        )
    return weights


def _is_old_buffer(name: str) -> bool:
    """Tell the mask and rotary buffers that earlier transformers releases saved and today's compute."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", ".position_ids"))


def _check_shapes(weights: Mapping[str, Tensor], model: torch.nn.Module) -> None:
    wrong = [
        f"{name}: checkpoint {tuple(weights[name].shape)}, config {tuple(value.shape)}"
        for name, value in model.state_dict().items()
        if name in weights and weights[name].shape != value.shape
    ]
    if wrong:
        raise error(
            f"{len(wrong)} weights have another shape:\n" + "\n".join(wrong[:SHOWN]),
            "the config does not describe the model that was trained",
            "pass the right --config",
        )


def _untie(weights: dict[str, Tensor], model: torch.nn.Module) -> None:
    """Keep one copy of tied weights, under the source's name, as save_pretrained does."""
    import torch

    for alias, source in _required(model)[1].items():
        if alias not in weights:
            continue
        copy = weights.pop(alias)
        if source not in weights:
            weights[source] = copy
        elif not torch.equal(weights[source], copy):
            raise error(
                f"{alias} and {source} differ",
                "the config says that they are one weight (tie_word_embeddings), the training says two",
                "pass --config with tie_word_embeddings false",
            )


def _cast(weights: dict[str, Tensor], dtype: str | None) -> None:
    import torch

    kind = None if dtype is None else getattr(torch, _DTYPES.get(dtype, dtype), None)
    if dtype is not None and not isinstance(kind, torch.dtype):
        raise error(f"dtype is {dtype!r}", "no torch dtype", f"use one of {', '.join(_DTYPES)}")
    seen: set[int] = set()
    for name, value in weights.items():
        value = value.to(kind) if kind is not None and value.is_floating_point() else value
        pointer = value.untyped_storage().data_ptr()
        weights[name] = value.clone() if pointer in seen else value  # safetensors refuses views of one storage
        seen.add(pointer)


# -- adapters ---------------------------------------------------------------------------------------------------------


def _adapter_name(state: Mapping[str, Tensor]) -> str | None:
    """Return the name of the LoRA adapter (PEFT's is "default"), or None in a checkpoint without one."""
    names = {key.split(".lora_A.")[1].split(".")[0] for key in state if ".lora_A." in key}
    if len(names) > 1:
        raise error(f"adapters: {', '.join(sorted(names))}", "only one can be written", "keep one adapter")
    return names.pop() if names else None


def _with_adapters(
    model: PreTrainedModel,
    adapter: str,
    source: Path | str | Mapping[str, Any] | None,
    holmes: Mapping[str, Any],
    hparams: object,
) -> Any:
    try:
        import peft
    except ImportError:
        raise error("the checkpoint holds LoRA adapters", "they need peft", "pip install peft") from None
    import torch

    if source is None:
        stored = [holmes.get("peft_config"), *values_of(hparams)]
        found = [v for v in stored if isinstance(v, Mapping) and "lora_alpha" in v]
        if not found:
            raise error(
                "the checkpoint holds LoRA adapters without their config",
                "their scale (lora_alpha) is not in the weights",
                "pass --lora-config with adapter_config.json (peft_config.save_pretrained(DIR) writes one), or keep "
                "LoraConfig's arguments as a dict in save_hyperparameters",
            )
        source = found[0]
    values = read_json(source, "adapter_config.json")
    known = set(peft.LoraConfig.__dataclass_fields__)
    with torch.device("meta"):
        return peft.get_peft_model(model, peft.LoraConfig(**{k: v for k, v in values.items() if k in known}), adapter)


def _save_adapters(
    model: Any, weights: dict[str, Tensor], out: Path, max_shard_size: str, *, adapter: str, merge: bool
) -> None:
    model.load_state_dict(weights, strict=False, assign=True)  # names and shapes were checked; only aliases are missing
    base = model.get_base_model()
    base.tie_weights()
    if merge:
        merged = model.merge_and_unload(progressbar=False)
        _save(merged, {name: value.detach() for name, value in merged.state_dict().items()}, out, max_shard_size)
        return
    model.save_pretrained(out, selected_adapters=[adapter])
    if adapter != "default":  # peft writes other names into a folder of their own
        for path in (out / adapter).iterdir():
            path.rename(out / path.name)
        (out / adapter).rmdir()


# -- writing ----------------------------------------------------------------------------------------------------------


def _save(model: PreTrainedModel, weights: dict[str, Tensor], out: Path, max_shard_size: str) -> None:
    """Let transformers write: it knows the on-disk names of each model and draws the progress bar."""
    import torch
    from transformers.utils import logging

    floats = Counter(str(value.dtype) for value in weights.values() if value.is_floating_point())
    if floats:
        model.to(getattr(torch, floats.most_common(1)[0][0].removeprefix("torch.")))  # becomes config.dtype
    size = sum(value.numel() * value.element_size() for value in weights.values())
    quiet = size < _BAR_FROM and logging.is_progress_bar_enabled()
    if quiet:
        logging.disable_progress_bar()
    try:
        model.save_pretrained(out, state_dict=weights, max_shard_size=max_shard_size)
    finally:
        if quiet:
            logging.enable_progress_bar()


def _copy_tokenizer(source: Path, out: Path) -> None:
    if source.is_file():
        import transformers

        transformers.PreTrainedTokenizerFast(tokenizer_file=str(source)).save_pretrained(out)
        return
    found = [source / name for name in _TOKENIZER_FILES if (source / name).is_file()]
    if not found:
        raise error(f"no tokenizer files in {source}", "nothing to copy", "give the directory that holds them")
    for path in found:
        shutil.copy2(path, out / path.name)
