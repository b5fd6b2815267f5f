# SPDX-License-Identifier: Apache-2.0
"""What a split model cannot do for a script of Accelerate, and what to write instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from holmes_core.errors import ConfigError, HolmesError
from holmes_core.plan.layout import Layout

__all__ = [
    "NEWEST",
    "OLDEST",
    "check_same_layout",
    "check_version",
    "dispatched",
    "local_sgd",
    "part_of_the_parameters",
    "refuse_optimizer",
    "refuse_other_engines",
    "refuse_settings",
    "second_model",
    "uneven_inputs",
    "unknown_loader",
]

#: Releases of Accelerate whose loaders, launcher and hooks were tested: tests/accelerate/versions.sh.
OLDEST, NEWEST = (1, 10), (1, 15)

_ENGINES = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "torch_tp_plugin": "ACCELERATE_USE_TP",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}


def check_version(version: str) -> str | None:
    """Check the release of Accelerate.

    Args:
        version: ``accelerate.__version__``.

    Returns:
        A line to warn with where the release is newer than those that were tested, else None.

    Raises:
        ConfigError: It is older than those that are supported.
    """
    found = tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    if found < OLDEST:
        raise ConfigError(
            seen=f"Accelerate {version}",
            where=f"Python environment {sys.prefix}",
            means=f"Holmes supports Accelerate {oldest} and newer; older ones iterate and launch in another way",
            do=f'pip install "accelerate>={oldest}"',
        )
    if found > NEWEST:
        return (
            f"Accelerate {version} is newer than the releases Holmes was tested with ({oldest} to {newest});"
            f' if something fails, try pip install "accelerate=={newest}.*"'
        )
    return None


def refuse_other_engines(kwargs: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Refuse another engine beside Holmes.

    Raises:
        ConfigError: One is asked for.
    """
    for name, variable in _ENGINES.items():
        if kwargs.get(name) is not None or env.get(variable, "").lower() == "true":
            raise ConfigError(
                seen=f"{name} or {variable} beside Holmes",
                where="Accelerator(...) or the launcher's yaml",
                means="both would split the same model",
                do="remove it; Holmes's own degrees are pp, dp and tp in the section holmes_config",
            )


def refuse_settings(accelerator: Any) -> None:
    """Check what was settled only by Accelerate's own set-up.

    Raises:
        ConfigError: torch.compile, fp16, fp8 or dispatched batches are asked for.
    """
    backend = str(getattr(accelerator.state.dynamo_plugin, "backend", "NO")).rpartition(".")[2].upper()
    if backend != "NO":
        raise ConfigError(
            seen=f"dynamo backend {backend}",
            where="Accelerator(dynamo_plugin=...) or dynamo_config in the yaml",
            means="the compiled graph would reach over the borders of pipeline stages",
            do="remove it",
        )
    if accelerator.mixed_precision == "fp16":
        raise ConfigError(
            seen="mixed_precision fp16",
            where="Accelerator, TrainingArguments or the yaml",
            means="its scaler looks for overflow on each rank alone, so some ranks would skip a step and others not",
            do="use bf16",
        )
    if accelerator.fp8_enabled:
        raise ConfigError(
            seen="mixed_precision fp8", where="Accelerator", means="not tried with split layers", do="use bf16"
        )
    if accelerator.dataloader_config.dispatch_batches:
        raise dispatched()


def check_same_layout(early: Layout, real: Layout) -> None:
    """Check that the layout chosen before the model was known is the one of the plan.

    Raises:
        ConfigError: It is not.
    """
    if (early.pp, early.dp, early.tp) != (real.pp, real.dp, real.tp):
        raise ConfigError(
            seen=f"pp {early.pp}, dp {early.dp}, tp {early.tp} before the model was known, now pp {real.pp},"
            f" dp {real.dp}, tp {real.tp}",
            where="accelerator.prepare",
            means="the script has counted its samples with the first",
            do=f"say in holmes_config: pp: {real.pp}, dp: {real.dp}, tp: {real.tp}",
        )


def second_model(first: Any, second: Any) -> HolmesError:
    """Several models are prepared."""
    return ConfigError(
        seen=f"a second model ({type(second).__name__}) besides {type(first).__name__}",
        where="accelerator.prepare",
        means="one pipeline trains one model; its ranks hold parts of it",
        do="to train one after the other call accelerator.free_memory() in between; to train both put them into one"
        " module whose forward returns the loss; a frozen model that each rank can hold whole needs no prepare: use"
        " .to(accelerator.device)",
    )


def dispatched() -> HolmesError:
    """Batches are dispatched from the main process."""
    return ConfigError(
        seen="dispatch_batches=True",
        where="DataLoaderConfiguration",
        means="Accelerate hands a part of each batch to every process; here the ranks of a replica share one batch",
        do="leave dispatch_batches out (or False)",
    )


def unknown_loader(loader: Any) -> HolmesError:
    """Accelerate's loaders are built in another way than those that were tested."""
    return HolmesError(
        seen=f"a prepared loader of type {type(loader).__name__} without base_dataloader",
        where="accelerator.prepare_data_loader",
        means="this version of Accelerate iterates in another way; the ranks of a replica could see different batches",
        do="use an Accelerate from 1.10 on, see constraints.txt for the tested one",
    )


def refuse_optimizer(optimizer: Any) -> None:
    """Check an optimizer.

    Raises:
        ConfigError: It evaluates the loss several times per step.
    """
    if type(optimizer).__name__ == "LBFGS":
        raise ConfigError(
            seen="optimizer LBFGS",
            where="accelerator.prepare",
            means="it looks at all parameters as one vector; here each rank sees its part only",
            do="use AdamW, SGD or another optimizer that treats parameters one by one",
        )


def part_of_the_parameters() -> HolmesError:
    """Some parameters are clipped alone."""
    return HolmesError(
        seen="some of the model's trainable parameters only",
        where="accelerator.clip_grad_norm_ or clip_grad_value_",
        means="the norm is that of the whole model, over all stages",
        do="pass model.parameters()",
    )


def uneven_inputs() -> HolmesError:
    """Replicas have different numbers of batches."""
    return HolmesError(
        seen="join_uneven_inputs with several replicas",
        where="accelerator.join_uneven_inputs",
        means="all replicas reduce gradients together, so each needs as many batches as the others",
        do="leave even_batches=True (the default), or drop_last=True in the DataLoader",
    )


def local_sgd() -> HolmesError:
    """LocalSGD is used."""
    return ConfigError(
        seen="LocalSGD",
        where="the user's script",
        means="it lets replicas drift and averages their whole models; here gradients are summed at every step and each"
        " rank holds a part of the model",
        do="remove it (LocalSGD(..., enabled=False) is fine); to step less often use gradient accumulation",
    )
