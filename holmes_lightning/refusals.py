# SPDX-License-Identifier: Apache-2.0
"""What a pipeline cannot do for a Lightning script, refused before any process group exists."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from holmes_core.errors import ConfigError, HolmesError

__all__ = ["name_several_optimizers", "refuse_generate", "refuse_optimizers", "refuse_unsupported"]

_COPYING_CALLBACKS = ("StochasticWeightAveraging", "WeightAveraging", "EMAWeightAveraging")


def refuse_unsupported(trainer: Any, module: Any) -> None:
    """Check the LightningModule and the callbacks.

    Args:
        trainer: The Trainer, already attached.
        module: The LightningModule.

    Raises:
        ConfigError: Something needs the whole model in one process.
    """
    name = type(module).__name__
    if not module.automatic_optimization:
        raise ConfigError(
            seen=f"{name}.automatic_optimization is False",
            where=name,
            means="with manual optimization the step itself calls backward and the optimizer; a pipeline runs the"
            " backward of all stages together, after the step",
            do="return the loss from training_step and let Lightning call the optimizer, or train this model with"
            " another strategy",
        )
    if _overrides(module, "backward"):
        raise ConfigError(
            seen=f"{name}.backward is overridden",
            where=name,
            means="the backward of a pipeline runs stage by stage and never calls LightningModule.backward",
            do="put what it does into on_after_backward or into the loss",
        )
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise ConfigError(
            seen=f"{name}.training_step(dataloader_iter)",
            where=name,
            means="Holmes hands out micro-batches of the batches that the DataLoader yields",
            do="take (batch, batch_idx)",
        )
    for callback in trainer.callbacks:
        kinds = {cls.__name__ for cls in type(callback).__mro__}
        if kinds & set(_COPYING_CALLBACKS):
            raise ConfigError(
                seen=f"callback {type(callback).__name__}",
                where="Trainer(callbacks=[...])",
                means="it keeps a second copy of the whole model, which no rank of a split model holds",
                do="remove it; average checkpoints after training instead",
            )


def _overrides(module: Any, method: str) -> bool:
    """Whether a class outside of Lightning defines the method."""
    owner = next((cls for cls in type(module).__mro__ if method in vars(cls)), None)
    return owner is not None and owner.__module__.split(".")[0] not in ("lightning", "pytorch_lightning")


@contextmanager
def name_several_optimizers() -> Iterator[None]:
    """Say what to do about several optimizers; Lightning's own error advises manual optimization.

    Raises:
        ConfigError: configure_optimizers returned several.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ConfigError(
            seen="configure_optimizers returned several optimizers",
            where="LightningModule.configure_optimizers",
            means="Lightning steps several optimizers by manual optimization only, which a pipeline cannot run",
            do="use one optimizer with several parameter groups",
        ) from None


@contextmanager
def refuse_generate(root: nn.Module) -> Iterator[None]:
    """Refuse ``generate()`` of a split model by name while a step runs.

    Args:
        root: The user's module.
    """
    models = [m for m in root.modules() if hasattr(type(m), "generate")]

    def refuse(*_: Any, **__: Any) -> Any:
        raise HolmesError(
            seen=f"the step calls generate() of {type(models[0]).__name__}",
            where="the user's step",
            means="it calls the model once for each new token; a pipeline runs one forward per step",
            do="generate after training (the model is whole again when fit returns), or train with pp: 1",
        )

    for model in models:
        vars(model)["generate"] = refuse
    try:
        yield
    finally:
        for model in models:
            vars(model).pop("generate", None)


def refuse_optimizers(optimizers: list[Any]) -> None:
    """Check what configure_optimizers returned.

    Raises:
        ConfigError: One that evaluates the loss several times per step.
    """
    for optimizer in optimizers:
        if type(optimizer).__name__ == "LBFGS":
            raise ConfigError(
                seen="optimizer LBFGS",
                where="LightningModule.configure_optimizers",
                means="it looks at all parameters as one vector and evaluates the loss several times per step; here"
                " each rank sees its part only",
                do="use AdamW, SGD or another optimizer that treats parameters one by one",
            )
