# SPDX-License-Identifier: Apache-2.0
"""A job plans itself: profile the model, measure where it matters, decide once, make the plan everywhere.

Rank 0 decides from numbers that all ranks have handed in, and tells the others: the decision is the same everywhere.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holmes_core.cluster.probe import ProbeResult
from holmes_core.cluster.topology import Topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError, HolmesError
from holmes_core.plan.batch_split import default_num_microbatches
from holmes_core.plan.decide import Decision, Step, decide
from holmes_core.plan.decide_memory import gib
from holmes_core.plan.layout import ModelFacts, choose_layout
from holmes_core.plan.plan import Plan, make_plan
from holmes_core.plan.profile import ModelProfile
from holmes_core.plan.profile_config import profile_of_config
from holmes_core.runtime.chain import Chain, find_chain
from holmes_core.runtime.model_facts import hugging_face_model, model_config, model_facts
from holmes_core.runtime.probe import StepHint, Waits, rank_memory, read_probe, run_probe

__all__ = ["plan_by_rule", "profile_of", "recompute_blocks", "settle", "usual_samples"]

_LONGEST = 4096  # tokens of a sample, where nobody says
_USUAL_BATCH = 8
#: Most by which the parameters of a profile may differ from those that the model has.
_SAME_MODEL = 0.2
_DIFFERENT = 1.05
#: What a process on processors comes to occupy besides its model once it trains: code of backward passes and optimizers
#: that is read from disk then (12 MiB), process groups and their threads (16 MiB). Measured with torch 2.13.
_TO_COME = 28 << 20


def plan_by_rule(
    config: HolmesConfig, root: nn.Module, topology: Topology, device_type: str
) -> tuple[Chain | None, Plan]:
    """Make the plan that needs no prediction: the user's degrees, and the rule of ``choose_layout`` for the others.

    Returns:
        The model's blocks (None where it is not cut and need not be), and the plan.

    Raises:
        HolmesError: The degrees do not fit the ranks, or the model has no blocks to cut it at.
    """
    try:
        chain = find_chain(root, config.split_points)
    except HolmesError:
        # Without stages there is nothing to cut: any model can be one piece.
        layout, _ = choose_layout(topology, config, ModelFacts(num_blocks=10**6))
        if layout.num_stages > 1 or layout.tp > 1:
            raise
        return None, make_plan(config, topology, ModelFacts(num_blocks=1), device_type=device_type)
    return chain, make_plan(config, topology, model_facts(root, chain), device_type=device_type)


def settle(
    config: HolmesConfig, root: nn.Module, topology: Topology, *, device: torch.device, hint: StepHint
) -> tuple[HolmesConfig, Chain, Plan]:
    """Decide what the user has left open, and make the plan. Collective.

    Args:
        config: What the user said.
        root: The user's module, whole or on the meta device.
        topology: Where the ranks run.
        device: This rank's device.
        hint: What is known of the steps to come.

    Returns:
        The configuration with what was decided, the model's blocks, and the plan.

    Raises:
        HolmesError: The degrees cannot be, or the layout does not fit the memory; the same on every rank.
    """
    if _recomputes(root):
        config.refuse_recomputing(f"{type(root).__name__} has gradient checkpointing switched on")
    chain, plan = plan_by_rule(config, root, topology, device.type)
    if chain is None:
        return config, Chain(path=type(root).__name__, names=("",), blocks=(root,), front_end="whole model"), plan
    hint = replace(hint, seq=config.seq_len or hint.seq)
    profile, why = profile_of(root, chain, hint)
    probe, problem = _measurements(config, root, topology, plan, profile, device=device, hint=hint)
    if profile is None:
        config, notes = _by_speed_alone(config, topology, plan, probe)
        if probe is not None or problem:
            notes = (*notes, problem or f"the usual layout: {why}, so nothing can be predicted")
        plan = make_plan(config, topology, model_facts(root, chain), device_type=device.type)
        return config, chain, replace(plan, reasons=(*plan.reasons, *notes))
    decision = _decide_once(config, root, topology, profile, probe, device=device, hint=hint)
    plan = make_plan(decision.config, decision.topology, model_facts(root, chain), device_type=device.type)
    timed = probe is not None or device.type == "cuda"
    notes = (*decision.notes, *((problem,) if problem else ()), *_measured_note(probe))
    notes = (*notes, _predicted_note(decision, profile, hint, timed=timed))
    return (
        decision.config,
        chain,
        replace(
            plan,
            prediction=decision.prediction,
            recompute=decision.recompute,
            reasons=(*plan.reasons, *notes),
        ),
    )


def profile_of(root: nn.Module, chain: Chain, hint: StepHint) -> tuple[ModelProfile | None, str]:
    """Return what a model weighs, computes and keeps; None, and why, where its configuration does not say."""
    found = model_config(root)
    if found is None:
        return None, f"{type(root).__name__} holds no transformers model"
    value_bytes, stream_bytes = _widths(root, hint)
    try:
        profile = profile_of_config(
            found[1], seq=_seq(found[1], hint), value_bytes=value_bytes, stream_bytes=stream_bytes
        )
    except (HolmesError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        seen = error.seen if isinstance(error, HolmesError) else str(error)
        return None, f"the configuration of {type(root).__name__} is not understood ({seen})"
    real = sum(p.numel() for block in chain.blocks for p in block.parameters())
    counted = sum(block.parameters for block in profile.blocks)
    if len(profile.blocks) != len(chain.blocks) or abs(counted - real) > _SAME_MODEL * real:
        return None, f"its blocks have {real:,} parameters, its configuration says {counted:,}"
    return profile, ""


def _seq(config: dict[str, Any], hint: StepHint) -> int:
    if hint.seq:
        return hint.seq
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    longest = next((text[n] for n in names if isinstance(text.get(n), int) and text[n] > 0), _LONGEST)  # type: ignore[union-attr, index]
    return min(int(longest), _LONGEST)


def _widths(root: nn.Module, hint: StepHint) -> tuple[int, int]:
    """Bytes of an activation, and of a value of the residual stream."""
    own = next((p.element_size() for p in root.parameters() if p.is_floating_point()), 4)
    return (2, 4) if own == 4 and hint.autocast else (own, own)


def usual_samples(config: HolmesConfig, plan: Plan, hint: StepHint) -> int:
    """Return the samples of a micro-batch, as far as they are known."""
    batch = hint.batch or _USUAL_BATCH
    try:
        return -(-batch // default_num_microbatches(batch, plan.layout))
    except HolmesError:
        return 1


def _measurements(
    config: HolmesConfig,
    root: nn.Module,
    topology: Topology,
    plan: Plan,
    profile: ModelProfile | None,
    *,
    device: torch.device,
    hint: StepHint,
) -> tuple[ProbeResult | None, str]:
    """Return what was measured, now or before; None, and in words why not, where measuring failed."""
    if config.probe not in ("auto", "off"):
        return read_probe(config.probe, topology), ""
    machines = {host.inventory.host for c in topology.clusters for host in c.hosts if host.inventory is not None}
    decided = config.layers_per_stage is not None or config.split_points is not None or config.rank_order is not None
    degrees = None not in (config.pp, config.dp, config.tp) or (config.pp == topology.world_size)
    split = plan.layout.pp > 1 and config.partition != "equal" and not config.cluster_speeds
    shared = plan.layout.dp > 1 and config.sharding == "auto"
    open_ = not decided and (split or (profile is not None and (shared or not degrees)))
    if config.probe == "off" or config.plan is not None or len(machines) < 2 or not open_:
        return None, ""
    seq = profile.seq if profile is not None else hint.seq or 256
    try:
        return run_probe(
            root,
            topology,
            store=dist.distributed_c10d._get_default_store(),
            rank=dist.get_rank(),
            device=device,
            hint=hint,
            samples=usual_samples(config, plan, hint),
            seq=seq,
            waits=Waits(arrive=config.timeout, measure=min(30.0, config.timeout)),
        ), ""
    except ConfigError as error:  # the model cannot be measured, on all ranks alike
        return None, f"not measured: {error.seen}"


def _measured_note(probe: ProbeResult | None) -> tuple[str, ...]:
    if probe is None:
        return ()
    slow, fast = (pick(probe.speeds, key=lambda one: one.block) for pick in (max, min))
    links = [link for link in probe.links if not link.problem]
    text = f"measured in {probe.seconds:.1f} s: the slowest rank ({slow.rank} on {slow.host}) takes "
    text += f"{slow.block / fast.block:.2f} x the fastest's time for a block"
    if links:
        worst = min(links, key=lambda link: link.gbits)
        text += f"; the slowest link, {' - '.join(worst.pair.hosts)}, carries {worst.gbits:.3g} Gbit/s"
    return (text,)


def _predicted_note(decision: Decision, profile: ModelProfile, hint: StepHint, *, timed: bool) -> str:
    p = decision.prediction
    assert p is not None
    fullest = max(range(len(p.memory_bytes)), key=lambda rank: p.memory_bytes[rank] / p.limit_bytes[rank])
    limit = f" of {gib(p.limit_bytes[fullest])}" if p.limit_bytes[fullest] < 1 << 60 else ""
    text = f"predicted: {gib(p.memory_bytes[fullest])}{limit} on pipeline rank {fullest}, the fullest"
    if timed:
        text += f"; {p.step_seconds:.3g} s per step, ranks wait {p.bubble:.0%} of the pipeline's time"
    batch = f"{hint.batch} samples" if hint.batch else f"{_USUAL_BATCH} samples, as a guess,"
    return f"{text} (a replica's batch: {batch} of {profile.seq} tokens)"


def _by_speed_alone(
    config: HolmesConfig, topology: Topology, plan: Plan, probe: ProbeResult | None
) -> tuple[HolmesConfig, tuple[str, ...]]:
    """Without a profile, measured speeds still say how blocks are best split."""
    if probe is None or config.cluster_speeds or config.partition == "equal":
        return config, ()
    by_rank = {speed.rank: speed.block for speed in probe.speeds}
    speeds = {c.name: 1 / max(by_rank[rank] for rank in c.ranks) for c in topology.clusters}
    if max(speeds.values()) < _DIFFERENT * min(speeds.values()):
        return config, ()
    return replace(config, cluster_speeds={name: round(v / min(speeds.values()), 3) for name, v in speeds.items()}), (
        "cluster speeds as measured",
    )


def _decide_once(
    config: HolmesConfig,
    root: nn.Module,
    topology: Topology,
    profile: ModelProfile,
    probe: ProbeResult | None,
    *,
    device: torch.device,
    hint: StepHint,
) -> Decision:
    """Let rank 0 decide from what all ranks hand in."""
    rank = dist.get_rank()
    memory, occupied = rank_memory(device, len(topology.host_of(rank).ranks))
    if device.type == "cpu":  # the whole model is here still; only a part of it stays
        occupied = max(0, occupied - sum(t.nbytes for t in root.parameters() if not t.is_meta and t.device == device))
        occupied += _TO_COME
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (memory, occupied))
    if config.memory_limit is not None:
        limit = int(config.memory_limit * 2**30) or 1 << 62
        parts = [(limit, used) for _, used in parts]
    trainable = sum(p.numel() for p in root.parameters() if p.requires_grad)
    step = Step(
        profile=profile,
        precision=_precision(root, hint),
        batch=hint.batch,
        memory={other: parts[other][0] for other in range(len(parts))},
        runtime_bytes=max(used for _, used in parts),
        trainable=trainable / max(1, sum(p.numel() for p in root.parameters())),
        recomputes=_recomputes(root),
        device_type=device.type,
    )
    box: list[Any] = [None]
    if rank == 0:
        try:
            box = [decide(config, topology, step, probe)]
        except HolmesError as error:
            box = [error]
    dist.broadcast_object_list(box, src=0)
    if isinstance(box[0], HolmesError):
        raise box[0]
    found: Decision = box[0]
    return found


def _precision(root: nn.Module, hint: StepHint) -> str:
    own = next((p.element_size() for p in root.parameters() if p.is_floating_point()), 4)
    if own == 2:
        return "bf16-true"
    return "bf16-mixed" if hint.autocast else "32-true"


def _recomputes(root: nn.Module) -> bool:
    found = hugging_face_model(root)
    return bool(found is not None and _switch(found[1]))


def _switch(model: nn.Module) -> bool:
    """Whether recomputation is on: transformers' own property goes through two names and warns of one."""
    return any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules())


def recompute_blocks(root: nn.Module) -> None:
    """Let the model recompute its blocks in the backward pass, the way transformers does it.

    Raises:
        HolmesError: The model has no such switch.
    """
    found = hugging_face_model(root)
    if found is None or not getattr(found[1], "supports_gradient_checkpointing", False):
        raise HolmesError(
            seen=f"{type(root).__name__} has no switch for recomputing its blocks",
            where="HolmesConfig.recompute",
            means="gradient_checkpointing_enable() of transformers is used; the plan counts on less memory",
            do="recompute in your model (torch.utils.checkpoint), and leave recompute out or set memory_limit: 0",
        )
    if not _recomputes(root):
        model: Any = found[1]
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
