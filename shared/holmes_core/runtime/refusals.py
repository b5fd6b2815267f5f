# SPDX-License-Identifier: Apache-2.0
"""What a user reads when their step or model does not fit a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from holmes_core.errors import HolmesError

__all__ = [
    "again",
    "argument",
    "depends",
    "empty_parameter",
    "not_here",
    "not_reached",
    "out_of_order",
    "outside",
    "recomputed",
    "recorded",
    "writes",
]


def outside(name: str) -> HolmesError:
    """A part of the model is called where not all stages run."""
    return HolmesError(
        seen=f"{name!r} was called outside of training_step, validation_step, test_step and predict_step",
        means="the model is split over pipeline stages; only inside those steps do all stages run together",
        do="move the call into one of these steps, run it before fit or on the exported model, or train with pp=1",
    )


def out_of_order(name: str, due: str | None, stage: int) -> HolmesError:
    """A block is called where another one is due, or none any more."""
    if due is None:
        seen = f"the step called the model a second time (block {name!r} again)"
        means = (
            "a step is one pass through the pipeline; two passes (contrastive losses, DPO, generate()) cannot be"
            " pipelined"
        )
        do = "call the model once on the concatenated inputs and split its output, or train with pp=1"
    else:
        seen = f"block {name!r} was called where {due!r} was due"
        means = "Holmes pipelines blocks that are called once each, one after another (no layer drop, no reuse)"
        do = "set layerdrop to 0, or name the stage borders with split_points=[...], or train with pp=1"
    return HolmesError(seen=seen, where=f"stage {stage}", means=means, do=do)


def not_reached(at: int, total: int, stage: int) -> HolmesError:
    """The step ended before its stage was done."""
    return HolmesError(
        seen=f"the step ended after {at} of the model's {total} blocks",
        where=f"stage {stage}",
        means="every stage waits for the model's forward to pass through its blocks once in each step",
        do="call the model once, on every path of the step",
    )


def again(name: str, stage: int) -> HolmesError:
    """A module of the first stage is called after the blocks, too."""
    return HolmesError(
        seen=f"the step called {name!r} again after the model's last block",
        where=f"stage {stage}",
        means="either it calls the model a second time, which cannot be pipelined (a step is one pass: no contrastive"
        " pairs, DPO, generate()), or the head uses that module, which Holmes placed on another stage",
        do="call the model once on the concatenated inputs and split its output; or"
        f' placement={{"{name}": "ends"}} for a module that the head uses; or train with pp=1',
    )


def not_here(name: str, stage: int, before: bool) -> HolmesError:
    """A module is called on a stage that does not hold its parameters."""
    return HolmesError(
        seen=f"module {name!r} was called on stage {stage}, which does not hold its parameters",
        where=f"stage {stage}, {'before' if before else 'after'} the stage's blocks",
        means="Holmes placed the module on another stage",
        do=f'say where it is used: placement={{"{name}": "first" | "last" | "ends" | "all"}}',
    )


def empty_parameter(names: Sequence[str], due: str | None, stage: int) -> HolmesError:
    """A parameter of another stage is used in a way that torch refuses."""
    return HolmesError(
        seen="the step uses a parameter that this stage does not hold, one of"
        f" {', '.join(repr(name) for name in names) or 'a block'}",
        where=f"stage {stage}, before block {due!r}" if due else f"stage {stage}, after the last block",
        means="the parameter is read directly, not by calling its module, and Holmes placed it on another stage",
        do='say where it is used: placement={"its.name": "ends" | "all"}; or train with pp=1',
    )


def argument(what: Sequence[str], block: str, source: str, stage: int, from_block: bool) -> HolmesError:
    """A block is given something that only another stage can compute."""
    return HolmesError(
        seen=f"{' and '.join(what)} of block {block!r} comes from {source!r}, which runs on another pipeline stage",
        where=f"stage {stage}, block {block!r}",
        means="only the hidden state travels between stages; the other arguments of a block must be computable on every"
        " stage",
        do="train this model with pp=1: its blocks hand more than one tensor to later ones"
        if from_block
        else f'keep the module on every stage: placement={{"{source}": "all"}}; or train with pp=1',
    )


def depends(what: str, source: str, stage: int, from_block: bool) -> HolmesError:
    """The loss or a block's output depends on something that only another stage can compute."""
    return HolmesError(
        seen=f"{what} depends on {source!r}, which runs on another pipeline stage",
        where=f"stage {stage}",
        means="only the hidden state that blocks hand to one another travels between stages",
        do="train this model with pp=1: it uses the output of early blocks again later on"
        if from_block
        else f'keep the module on every stage that uses it: placement={{"{source}": "ends" | "all"}}; or train with'
        " pp=1",
    )


def recorded(outputs: Sequence[str], block: str) -> HolmesError:
    """An output of every block is asked for."""
    return HolmesError(
        seen=f"the model is asked to return {', '.join(outputs)} of every block",
        where=f"block {block!r}",
        means="each pipeline stage runs some of the blocks only; the values of the others, and a loss over them (load"
        " balancing of experts, distillation), would silently be missing",
        do=f"set output_{outputs[0]}=False in the model's config and call, or train with pp=1",
    )


def writes(block: str, argument: str) -> HolmesError:
    """A block writes into an argument that later blocks are given, too."""
    return HolmesError(
        seen=f"block {block!r} writes into its {argument}",
        where=f"block {block!r}",
        means="later blocks, or the loss, may read there, and on another stage would not find it: only the hidden state"
        " travels (shared keys and values, collected outputs)",
        do="train this model with pp=1",
    )


def recomputed(block: str) -> HolmesError:
    """A backward pass calls a block of another stage."""
    return HolmesError(
        seen=f"the backward pass calls block {block!r}, which this stage does not run",
        means="one activation checkpoint reaches over the border of two pipeline stages, or the model has a backward of"
        " its own (reversible layers)",
        do="checkpoint each block by itself, or move the border with layers_per_stage, or train with pp=1",
    )
