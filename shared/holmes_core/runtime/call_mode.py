# SPDX-License-Identifier: Apache-2.0
"""Call mode: the script calls ``model(**batch)`` itself, and every rank takes part in the call.

A model in one piece is called as in any loop (`call_mode_direct`). A model in stages, in training with labels, runs the
whole schedule, forward and backward, and returns an output whose loss hangs on one autograd.Function; the backward of
that loss scales this call's gradients and adds them to ``param.grad``. In training without labels the call returns the
outputs, on which the script computes a loss of its own, and their backward goes back through the stages. In eval mode
it is a forward, and every rank of the replica gets the outputs; with gradients enabled they can be differentiated, as
of any module (a model from ``from_pretrained`` is in eval mode until the script says ``model.train()``, and many do
not).

Losses are per replica and averaged over replicas, as under DistributedDataParallel: that is what scripts for these
hosts expect. Gradients are reduced once, when the optimizer steps or the norm is asked for, however many calls and
backwards came before. The module stays the object it was; only attributes of this one instance are replaced.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from holmes_core.errors import HolmesError
from holmes_core.runtime.call_mode_ahead import Ahead, OneCall
from holmes_core.runtime.call_mode_autograd import CallGradients, Loss, Outputs
from holmes_core.runtime.call_mode_direct import Direct, calls_are_whole
from holmes_core.runtime.call_mode_graph import OpenForward
from holmes_core.runtime.call_mode_outputs import LossOutput, broadcast, first_loss, pack, unpack
from holmes_core.runtime.call_mode_state import CallState
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.loss import LossRule
from holmes_core.runtime.split import slots
from holmes_core.runtime.step_record import share

__all__ = ["CALL_MODE", "CallMode", "named_parameter_slots", "of_model"]

#: The attribute of a split module that holds its `CallMode`.
CALL_MODE = "_holmes_call_mode"
_ARGS = "*"  # key of positional arguments that have no name
_OUTPUTS = "fused_lm_head"  # TRL asks with it for log-probabilities of the labels and makes the loss itself


def of_model(model: Any) -> CallMode | None:
    """Return the `CallMode` of a split module, None for any other object."""
    return vars(model).get(CALL_MODE) if isinstance(model, nn.Module) else None


def named_parameter_slots(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter by each of its names; to be taken before the split, for `CallMode.adopt`."""
    return {name: param for name, _, _, param in slots(root)}


class CallMode(CallState):
    """Drives an engine from calls of its module.

    Args:
        engine: The engine, built.
        before: The module's parameters before the split (`named_parameter_slots`).
        compute: Returns the context of a forward (autocast).
        convert: What is done to all that a call returns (the host's change of precision).
        guard: Returns the context around everything that talks to other ranks (names who failed first).
        completes: Tells whether the training call that begins now is the last of an optimizer step (each is, unless
            made in `no_sync`); its gradients are then summed over replicas while its backward still runs
            (`call_mode_ahead`).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        before: Mapping[str, nn.Parameter] | None = None,
        compute: Callable[[], AbstractContextManager[Any]] = nullcontext,
        convert: Callable[[Any], Any] = lambda output: output,
        guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
        completes: Callable[[], bool] = lambda: True,
    ) -> None:
        self.engine = engine
        engine.loss_per_replica = True
        self._compute, self._convert, self._guard = compute, convert, guard
        self._adding = False  # in no_sync
        self._ahead = Ahead(engine, lambda: completes() and not self._adding)
        self.dp, self.replica = engine.plan.layout.dp, engine.place.dp
        self._rules = {False: engine.loss_rule, True: LossRule("items")}
        self._returns_loss: dict[Any, bool] = {}
        self._pending = False
        self._summed: Any = WeakIdKeyDictionary()  # gradients that the last reduction left
        self.closed = self._warned = False
        self._versions: dict[nn.Parameter, int] = {}  # of gradients, as the last backward left them
        self._anchor = torch.zeros((), device=engine.device, requires_grad=True)
        self._hooked: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._new: Any = WeakIdKeyDictionary()
        current = named_parameter_slots(engine.root)
        for name, old in (before or {}).items():
            if current.get(name) is not None and current[name] is not old:
                self._new[old] = current[name]
        self.forward = engine.root.forward
        self._names = _positional_names(self.forward)
        whole = calls_are_whole(engine)
        self._direct = Direct(engine, self._ahead, guard, self.mark_backward) if whole else None
        self._attach()

    def half_precision(self) -> None:
        """Allow for the rounding of 16-bit compute in the check of the loss."""
        for rule in self._rules.values():
            rule.half_precision()

    # ---- the module's own attributes ---------------------------------------------------------------
    def _attach(self) -> None:
        own = vars(self.engine.root)
        own[CALL_MODE] = self
        own["forward"] = functools.wraps(self.forward)(lambda *args, **kwargs: self(*args, **kwargs))
        own["no_sync"] = self.no_sync
        apply: Any = type(self.engine.root)._apply
        # `.to(device)` and the like: empty parameters of other stages have nothing to be moved.
        own["_apply"] = lambda fn, recurse=True: apply(
            self.engine.root, lambda tensor: tensor if tensor.is_meta else fn(tensor), recurse
        )
        self._load = self.engine.root.load_state_dict
        own["load_state_dict"] = self.load_state_dict
        if hasattr(type(self.engine.root), "save_pretrained"):
            self._save_pretrained: Any = self.engine.root.save_pretrained
            own["save_pretrained"] = self.save_pretrained
        if hasattr(self.engine.root, "generate") and self.engine.num_stages > 1:
            own["generate"] = self._refuse_generate

    def _refuse_generate(self, *_: Any, **__: Any) -> Any:
        raise HolmesError(
            seen=f"generate() of a {type(self.engine.root).__name__} split over {self.engine.num_stages} stages",
            where="the user's script",
            means="each new token is one more pass through all stages, with caches that live on each of them",
            do="save the model and generate with a whole one, or train with pp: 1",
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around calls whose gradients another call of the same optimizer step adds to, as under DDP.

        Without it, too, gradients are reduced once, when the optimizer steps; they only do not leave early in vain.
        """
        before, self._adding = self._adding, True
        try:
            yield
        finally:
            self._adding = before

    # ---- calls ---------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the module's forward.

        In stages it is collective over the replica, in training over all ranks.
        """
        self._check_open()
        batch = self._named(args, kwargs)
        with self._guard():
            if not torch.is_grad_enabled():
                return self._convert(self._evaluate(batch))
            if self._direct is not None:
                return self._convert(self._direct(lambda: self._run(batch)))
            if not self.engine.root.training:
                return self._convert(self._open(batch, whole=True))
            if not batch.get(_OUTPUTS) and self._has_loss(batch):
                return self._train(batch)
            return self._convert(self._open(batch))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not args:
            return kwargs
        if len(args) > len(self._names):
            return {_ARGS: args, **kwargs}
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def _run(self, batch: dict[str, Any]) -> Any:
        with self._compute():
            return self.forward(*batch.get(_ARGS, ()), **{k: v for k, v in batch.items() if k != _ARGS})

    def _has_loss(self, batch: dict[str, Any]) -> bool:
        """Whether the model returns a loss for such arguments: with labels it does, else it is tried once."""
        if batch.get("labels") is not None:
            return True
        key = tuple(sorted(k for k, v in batch.items() if v is not None))
        if key not in self._returns_loss:
            engine = self.engine
            with engine.loss_rule.undisturbed(engine.root), torch.no_grad():
                outputs = engine.evaluate(lambda b, _: self._run(b), engine.cut(batch)[:1])
            told = first_loss(outputs[0]) is not None if outputs else None
            self._returns_loss[key] = share(told, source=engine.last_rank, group=engine.groups.replica)
        return self._returns_loss[key]

    def _train(self, batch: dict[str, Any]) -> Any:
        engine = self.engine
        engine.loss_rule = self._rules[batch.get("num_items_in_batch") is not None]
        kind: list[str] = []

        def step(part: Any, _: int) -> Any:
            output = self._run(part)
            loss = first_loss(output)
            kind[:] = ["mapping" if isinstance(output, Mapping) else type(output).__name__]
            return output if loss is None else loss.float()

        params = list(engine.gradients.params.values())
        guess = self._ahead.begin()
        call = OneCall(params, replicas=self.dp, guess=guess, onto=self._pending)
        try:
            result = engine.train(step, batch, scale=call.scale, completes=guess is not None, keep=True)
        finally:
            call.end()
        told = (float(result.loss), kind[0]) if result.loss is not None else None
        value, how = share(told, source=engine.last_rank, group=engine.groups.replica)
        apply: Any = Loss.apply
        loss = apply(self._anchor, torch.tensor(value, device=engine.device), CallGradients(self, call))
        if how == "mapping":
            return LossOutput(loss=loss)
        return (loss,) if how in ("tuple", "list") else loss

    def _open(self, batch: dict[str, Any], *, whole: bool = False) -> Any:
        self._ahead.another()
        held = OpenForward(self.engine, lambda b, _: self._run(b), batch, whole=whole)
        packed, tensors = broadcast(self.engine, held.packed, held.tensors)
        floating = [i for i, t in enumerate(tensors) if t.is_floating_point()]
        apply: Any = Outputs.apply
        tied = apply(self._anchor, (self, held, floating, len(tensors), whole), *[tensors[i] for i in floating])
        for index, tensor in zip(floating, tied, strict=True):
            tensors[index] = tensor
        return unpack(packed, tensors)

    @torch.no_grad()
    def _evaluate(self, batch: dict[str, Any]) -> Any:
        engine = self.engine
        if engine.num_stages == 1:
            return self._run(batch)
        outputs = engine.evaluate(lambda b, _: self._run(b), [batch])
        tensors: list[Tensor] = []
        packed = pack(outputs[0], tensors) if outputs else None
        return unpack(*broadcast(engine, packed, tensors))

    def warn_of_eval_mode(self) -> None:
        """Say once that training in eval mode is right, and slow."""
        if not self._warned and self.engine.num_stages > 1 and self.engine.rank == 0:
            warnings.warn(
                f"{type(self.engine.root).__name__} is trained in eval mode, as after from_pretrained: without dropout,"
                " and each batch goes through the stages in one piece, so only one stage works at a time. Call"
                " model.train() before the loop.",
                stacklevel=2,
            )
        self._warned = True

    def close(self) -> None:
        """Give the process groups back; the model is of no more use. All ranks call it at the same place."""
        self.closed = True
        self._ahead.another()
        self._ahead.close()
        if self._direct is not None:
            self._direct.close()
        self.engine.gradients.close()
        self.engine.groups.close()

    def _check_open(self) -> None:
        if self.closed:
            raise HolmesError(
                seen=f"a call of a {type(self.engine.root).__name__} that was given back",
                where="the user's script",
                means="another model was prepared after accelerator.free_memory(), which transformers.Trainer calls,"
                " too; one pipeline trains one model",
                do="save what is needed of a model before the next one is prepared; leave a frozen helper (the"
                " reference model of DPO) unprepared and whole on each rank",
            )

    # ---- gradients ---------------------------------------------------------------
    def mark_backward(self) -> None:
        """A backward has added to this rank's gradients; they are to be reduced before they are used."""
        self._pending = True
        params = self.engine.gradients.params.values()
        self._versions = {p: p.grad._version for p in params if p.grad is not None}

    def commit(self, call: OneCall, grad: float) -> None:
        """Add a call's gradients to ``param.grad``; `grad` is the gradient of its loss."""
        right = call.commit(grad)
        self.mark_backward()
        self._ahead.committed(list(self.engine.gradients.params.values()), right=right, grad=grad)

    def reduce(self) -> None:
        """Sum new gradients over replicas and over stages that share parameters. Collective over all ranks."""
        if self._direct is not None and not self._pending:  # gradients that the script has put there itself
            params = self.engine.gradients.params.values()
            self._pending = any(p.grad is not None and p.grad not in self._summed for p in params)
        if self._pending:
            self._check_parameters()
            if self._direct is not None:
                self._direct.reduces()
            self._pending = False
            changed = any(p.grad is not None and p.grad._version != seen for p, seen in self._versions.items())
            if changed and dist.get_world_size() > 1:
                warnings.warn(
                    "Something has changed gradients between backward and the optimizer's step. If it was"
                    " torch.nn.utils.clip_grad_norm_: it sees this rank's gradients only, and their norm is not the"
                    " model's. Use accelerator.clip_grad_norm_ (in a plain loop: run.clip_grad_norm_). Factors that"
                    " are the same on all ranks do no harm.",
                    stacklevel=2,
                )
            with self._guard():
                self._ahead.settle()
                self.engine.reduce_gradients()
            self._summed = WeakIdKeyDictionary()
            for grad in [p.grad for p in self.engine.gradients.params.values() if p.grad is not None]:
                self._summed[grad] = True

    def _check_parameters(self) -> None:
        known = set(self.engine.gradients.params.values())
        every = self.engine.root.named_parameters()
        late = [name for name, p in every if p.requires_grad and p.grad is not None and p not in known]
        if late and dist.get_world_size() > 1:
            raise HolmesError(
                seen=f"gradients of {len(late)} parameters that were frozen, or not there, at prepare: {late[:4]}",
                where="the optimizer's step",
                means="they are not summed over replicas, so each replica would train its own",
                do="add adapters and unfreeze parameters before prepare (or parallelize); prepare the model again after"
                " accelerator.free_memory() where that comes later",
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the whole model's gradient by its norm, as ``torch.nn.utils.clip_grad_norm_``. Collective.

        Args:
            max_norm: Largest norm.
            norm_type: 2 or infinity.

        Returns:
            The norm before clipping; a scalar on this rank's device, equal on all ranks.

        Raises:
            HolmesError: Another norm is asked for.
        """
        self.reduce()
        with self._guard():
            if float(norm_type) == 2.0:
                norm = self.engine.gradient_norm()
            elif float(norm_type) == float("inf"):
                grads = [p.grad.abs().max().float().cpu() for p in self._with_grad()]
                norm = torch.stack(grads).max() if grads else torch.zeros(())
                dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=self.engine.groups.world)
            else:
                raise HolmesError(
                    seen=f"norm_type={norm_type}",
                    where="clip_grad_norm_",
                    means="the norm is computed over the parts of all ranks, for norms 2 and infinity only",
                    do="use norm_type=2",
                )
        norm = norm.to(self.engine.device)
        self.engine.gradients.scale(torch.clamp(float(max_norm) / (norm + 1e-6), max=1.0))
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clip every element of the gradient. Collective."""
        self.reduce()
        torch.nn.utils.clip_grad_value_(self._with_grad(), clip_value)

    def _with_grad(self) -> list[Any]:
        return [p for p in self.engine.gradients.params.values() if p.grad is not None and p.grad.numel()]

    def covers(self, parameters: Any) -> bool:
        """Whether these are all trainable parameters of this rank."""
        given = {id(self._new.get(p, p)) for p in parameters}
        return all(id(p) in given for p in self.engine.gradients.params.values())


def _positional_names(forward: Callable[..., Any]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return [p.name for p in parameters if p.kind in kinds and p.kind is not inspect.Parameter.POSITIONAL_ONLY]
