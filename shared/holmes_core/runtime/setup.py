# SPDX-License-Identifier: Apache-2.0
"""Set-up in one place, read top to bottom: chain, plan, groups, split, fill, tensor parallel, engine."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holmes_core.cluster.topology import Topology
from holmes_core.config import HolmesConfig
from holmes_core.plan.environment import check_plan_environment, nccl_variables
from holmes_core.plan.layout import ModelFacts, choose_layout
from holmes_core.plan.plan_file import check_followed, check_topology
from holmes_core.runtime.engine import Engine
from holmes_core.runtime.environment import require_ofi_plugin, set_missing
from holmes_core.runtime.memory import give_back_freed_memory, keep_freed_memory
from holmes_core.runtime.planning import plan_by_rule, recompute_blocks, settle
from holmes_core.runtime.probe import StepHint
from holmes_core.runtime.process_groups import ProcessGroups
from holmes_core.runtime.reach import check_links
from holmes_core.runtime.start import Meeting, host_name, meet
from holmes_core.runtime.tensor_parallel import apply_tensor_parallel

__all__ = ["build_engine", "check_degrees", "share_random_state"]


def check_degrees(config: HolmesConfig, root: nn.Module, topology: Topology) -> None:
    """Refuse degrees that cannot be, before any process group exists.

    Args:
        config: The user's settings.
        root: The user's module; it may not hold its model yet (``configure_model`` runs later).
        topology: Where the ranks run.

    Raises:
        HolmesError: The degrees do not fit the ranks, or the model has no blocks to cut it at.
    """
    check_topology(config, topology)
    if sum(p.numel() for p in root.parameters()) == 0:
        choose_layout(topology, config, ModelFacts(num_blocks=10**6))
        return
    _, plan = plan_by_rule(config, root, topology, "cpu")
    check_followed(config, plan)


def share_random_state() -> int:
    """Start all ranks from rank 0's random state, so that modules made from now on are equal; returns the seed."""
    numpy: Any = sys.modules.get("numpy")
    state: list[Any] = [None, None, None, 0]
    if dist.get_rank() == 0:
        seed = int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed())) & (2**63 - 1)
        state = [torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None, seed]
    dist.broadcast_object_list(state, src=0)
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    if numpy and state[2] is not None:
        numpy.random.set_state(state[2])
    return int(state[3])


def _same_weights(root: nn.Module) -> None:
    """Give every rank rank 0's weights where they differ (models built without a common seed)."""
    params = [p for p in (*root.parameters(), *root.buffers()) if not p.is_meta]
    if dist.get_world_size() == 1 or not params:
        return
    with torch.no_grad():
        # Numbers, not tensors: small tensors that stay between large ones that go keep the heap as large as the model.
        mine = torch.tensor([float(p.detach().double().sum()) for p in params], dtype=torch.float64).nan_to_num()
        rank_zero = mine.clone()
        dist.broadcast(rank_zero, src=0)
        different = torch.tensor(int(not torch.equal(mine, rank_zero)))
        dist.all_reduce(different, op=dist.ReduceOp.MAX)
        if not different:
            return
        for param in params:
            value = param.detach().cpu().contiguous()
            dist.broadcast(value, src=0)
            param.copy_(value)


def build_engine(
    *,
    root: nn.Module,
    config: HolmesConfig,
    device: torch.device,
    seed: int,
    convert: Callable[[nn.Module], nn.Module] | None = None,
    meeting: Meeting | None = None,
    hint: StepHint | None = None,
) -> Engine:
    """Plan the job and make this rank's engine. Collective: all ranks call it with the same model.

    Args:
        root: The user's module, whole or on the meta device; changed in place.
        config: The user's settings.
        device: This rank's device.
        seed: Seed of the run.
        convert: Converts the precision of a module in place.
        meeting: What the hosts said about themselves before the default group was made; None: they are asked now.
        hint: What is known of the steps to come, for predictions.

    Returns:
        The engine, ready to train.

    Raises:
        HolmesError: The model cannot be cut or split as planned.
    """
    if meeting is None:
        meeting = meet(rank=dist.get_rank(), world_size=dist.get_world_size(), timeout=config.timeout)
    topology = meeting.topology(config)
    check_topology(config, topology)
    if device.type == "cpu":
        keep_freed_memory()  # before the probe: what it measures is what will be
    config, chain, plan = settle(config, root, topology, device=device, hint=hint or StepHint())
    check_followed(config, plan)
    if device.type == "cuda":
        check_plan_environment(plan, meeting.inventories)
        if any(group.transport.net == "OFI" for group in plan.groups_of(meeting.rank)):
            require_ofi_plugin(host_name())
        set_missing(nccl_variables(plan, meeting.rank))
    _same_weights(root)
    if config.print_plan and dist.get_rank() == 0:
        from holmes_core.report.plan_table import print_plan

        print_plan(plan, warnings=meeting.warnings(topology, device.type))
    check_links(plan, meeting.rank)
    groups = ProcessGroups(
        plan,
        rank=dist.get_rank(),
        device=device,
        timeout=config.timeout,
        separate_control=config.overlap_param_gather,  # what is said before a forward must not queue behind parameters
    )
    if plan.recompute:
        recompute_blocks(root)
    engine = Engine(root=root, chain=chain, plan=plan, config=config, groups=groups, device=device, seed=seed)
    if meeting.watch is not None:
        engine.pulse = meeting.watch.pulse
        meeting.watch.planned(plan)
    engine.split()
    local = engine.local_names()
    if any(param.is_meta and local[name] for name, param in root.named_parameters()):
        from holmes_core.runtime.materialize import materialize

        materialize(root, local=local, device=torch.device("cpu"), seed=seed)
    root._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    if plan.layout.tp > 1:
        absent = [b for b in chain.blocks if (ps := list(b.parameters())) and all(p.is_meta for p in ps)]
        absent += [module for _, module in engine.lost]
        apply_tensor_parallel(root, blocks=chain.blocks, block_prefix=chain.path, group=groups.tp, skip=absent)
    if convert is not None:
        convert(root)
    engine.build()
    if device.type == "cpu":
        give_back_freed_memory()  # of the stages that others hold
    return engine
