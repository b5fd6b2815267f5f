# SPDX-License-Identifier: Apache-2.0
"""What goes into a prediction and what comes out: a job, a way to run it, what its stages cost, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holmes_core.cluster.value import Value
from holmes_core.plan.cost_network import Edge
from holmes_core.plan.cost_schedule import SPLIT_BACKWARD, rank_of_stage, stages_by_rank
from holmes_core.plan.hardware import Hardware
from holmes_core.plan.profile import ModelProfile

__all__ = ["COMPUTE_EFFICIENCY", "RUNTIME_BYTES", "SOCKET_COPIES", "Choice", "Job", "Prediction", "StageCosts"]

#: Part of the peak that matrix products of large models reach in training (Narayanan et al. 2021, table 1: 44 to 52 %
#: with communication and bubbles, on A100).
COMPUTE_EFFICIENCY = 0.55
#: Bytes that CUDA, its libraries and the communicators take on every GPU.
RUNTIME_BYTES = int(1.5 * 2**30)
#: Part of the gradients' way that a backward pass cannot hide: the last of about 8 buckets (`runtime.data_parallel`).
#: On processors sending takes their time: 0.04 to 0.05 s of 0.2 s that 56 MB travel, with 0.45 cores and 2.25 Gbit/s.
SHOWN, SHOWN_ON_CPU = 1 / 8, 0.2
#: Copies of memory that cost a processor as much as one byte in a socket does, or one out of it: handing out 30 MB each
#: way took 0.17 to 0.21 s there, of which 0.11 s are the way, where a copied byte took 0.13 to 0.28 ns.
SOCKET_COPIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Value):
    """What is to be trained, on what.

    Args:
        profile: The model, at one sequence length.
        hardware: The clusters.
        batch: Samples per step over all replicas.
        precision: A key of PRECISIONS.
        efficiency: Part of the peak that compute reaches, where no speed was measured.
        overlap: Part of summing gradients that is hidden behind compute, 0 to 1. None: what is on its way while the
            step's last backward runs; copying them together is not.
        overlap_param_gather: Whether parameters are handed out while the next step's first forward runs.
        replica_batch: Samples of one replica's batch, where the data loader decides that; `batch` is then not looked
            at, and the layout that trains most samples per second is the fastest. 0: `batch` decides.
        runtime_bytes: What every rank occupies besides the model.
        trainable: Part of the parameters that is trained, 0 to 1; the others have no gradient and no state.
        device_type: ``cuda`` or ``cpu``: what sums gradients (NCCL, gloo), and how AdamW steps.
    """

    profile: ModelProfile
    hardware: Hardware
    batch: int
    precision: str = "bf16-mixed"
    efficiency: float = COMPUTE_EFFICIENCY
    overlap: float | None = None
    overlap_param_gather: bool = False
    replica_batch: int = 0
    runtime_bytes: int = RUNTIME_BYTES
    trainable: float = 1.0
    device_type: str = "cuda"

    def samples(self, dp: int) -> int:
        """Return the samples of one replica's batch."""
        return self.replica_batch or self.batch // dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Value):
    """One way to run a job.

    Args:
        tp: Tensor-parallel degree.
        dp: Data-parallel degree.
        order: Clusters along the pipeline, as positions in ``Hardware.clusters``.
        stages: Pipeline ranks of each of them, in that order.
        schedule: Name in ``config.SCHEDULES``.
        virtual_stages: Stages per rank.
        micro_batch_size: Samples per micro-batch.
        recompute: Whether blocks are recomputed in the backward pass.
        layers_per_stage: Blocks of each stage in pipeline order.
        embedding_on_last: Whether the last rank runs the input embedding, too, and sends what it has embedded to the
            first.
        sharding: ``optimizer`` (each parameter is stepped by one replica, which hands it out) or ``none``.
        run_ahead: Micro-batches that 1F1B runs further ahead at each edge between clusters.
        defer_weights: Whether 1F1B puts off the weights' part of its first and last backward passes.
        taper: Whether one micro-batch of 1F1B is cut in two, for both ends of the step.
    """

    tp: int
    dp: int
    order: tuple[int, ...]
    stages: tuple[int, ...]
    schedule: str = "1f1b"
    virtual_stages: int = 1
    micro_batch_size: int = 1
    recompute: bool = False
    layers_per_stage: tuple[int, ...] = ()
    embedding_on_last: bool = False
    sharding: str = "optimizer"
    run_ahead: int = 0
    defer_weights: bool = False
    taper: bool = False

    @property
    def pp(self) -> int:
        """Ranks along the pipeline."""
        return sum(self.stages)

    @property
    def width(self) -> int:
        """Ranks of one stage."""
        return self.dp * self.tp

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.pp * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """Return the pp rank that runs a stage."""
        return rank_of_stage(self.schedule, stage, self.pp)

    def ranks(self) -> list[int]:
        """Return the pp rank of each stage."""
        pp = self.pp
        return [rank_of_stage(self.schedule, stage, pp) for stage in range(pp * self.virtual_stages)]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages a pp rank runs, ascending."""
        return stages_by_rank(self.schedule, self.pp, self.virtual_stages)[rank]

    def ahead(self) -> tuple[int, ...]:
        """Return, per pp rank, the forwards 1F1B runs ahead: ``run_ahead`` for each later edge between clusters."""
        if self.schedule != "1f1b" or not self.run_ahead:
            return ()
        return tuple(
            self.run_ahead * (len(self.stages) - 1 - index)
            for index, count in enumerate(self.stages)
            for _ in range(count)
        )

    @property
    def split(self) -> bool:
        """Whether weights' parts are put off."""
        return self.defer_weights and self.schedule == "1f1b" and self.pp > 1

    @property
    def tapered(self) -> bool:
        """Whether there is half a micro-batch at each end of a step."""
        return self.taper and self.schedule == "1f1b" and self.pp > 1 and self.micro_batch_size > 1

    def further(self) -> tuple[int, ...]:
        """Return, per pp rank, how many more forward passes than in plain 1F1B come before its first backward."""
        ahead = self.ahead() or (0,) * self.pp
        return tuple(a + (self.pp - 1 - rank if self.split else 0) for rank, a in enumerate(ahead))

    def kept(self) -> tuple[int, ...]:
        """Return, per pp rank, how many more micro-batches' activations than plain 1F1B it keeps at most.

        Those that it is further ahead, and those whose weights' part it puts off.
        """
        return tuple(more + (rank if self.split else 0) for rank, more in enumerate(self.further()))

    def describe(self) -> str:
        """Return the choice on one line."""
        virtual = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        recompute = ", recompute" if self.recompute else ""
        recompute += f", sharding {self.sharding}" if self.sharding != "optimizer" and self.dp > 1 else ""
        ahead = f", {self.run_ahead} ahead" if any(self.ahead()) else ""
        deferred = ", deferred weights" if self.split else ""
        return (
            f"pp {self.pp} x dp {self.dp} x tp {self.tp}, {self.schedule}{virtual}, "
            f"micro-batch {self.micro_batch_size}{' (half at both ends)' * self.tapered}{ahead}{deferred}{recompute}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds and bytes of a choice, per stage (in pipeline order) or per pp rank.

    Args:
        forward: Seconds per micro-batch, per stage.
        backward: The same, with recomputation where it is chosen.
        edges: The way from each stage to the next.
        embedded: The way from the last rank to the first, where the last runs the embedding; else None.
        sent: Bytes one rank sends over an edge per micro-batch, in each direction.
        copy_seconds: Per pp rank, per step: gradients are copied together, and added up.
        reduce_seconds: The same: they are on their way.
        gather_seconds: The same: parameters are on their way to those who did not step them.
        spread_seconds: The same: they are put into messages, and out of them.
        gradient_bytes: Per pp rank: what its rings move between hosts in one step.
        optimizer_seconds: Per pp rank, per step.
        tied_seconds: Per step: gradients of the weights that first and last stage share.
        static_bytes: Per pp rank: weights, gradients, optimizer states, runtime.
        activation_bytes: Per stage and micro-batch.
        transient_bytes: Per pp rank: what one micro-batch needs while it is computed.
        ending_bytes: Per pp rank: what the end of a step needs besides, when activations are gone.
        limit_bytes: Per pp rank: memory that can be used.
        num_microbatches: Per step and replica.
        covering: Per pp rank: the backward pass under which the last of its gradients travel; 0: none does.
        opening: Per pp rank: the forward pass under which its parameters come.
        shown: Part of their way that these cannot hide.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    edges: tuple[Edge, ...]
    sent: int
    copy_seconds: tuple[float, ...]
    reduce_seconds: tuple[float, ...]
    gather_seconds: tuple[float, ...]
    spread_seconds: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]
    tied_seconds: float
    static_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    ending_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]
    num_microbatches: int
    covering: tuple[float, ...]
    opening: tuple[float, ...]
    shown: float = SHOWN
    embedded: Edge | None = None

    def send_seconds(self, edge: int) -> float:
        """Return how long an activation occupies an edge."""
        return self.sent / self.edges[edge].bandwidth

    def input_seconds(self, stage: int) -> float:
        """Return what the input's part of a split backward pass takes."""
        return SPLIT_BACKWARD[0] * self.backward[stage]

    def weight_seconds(self, stage: int) -> float:
        """Return what the weights' part of a split backward pass takes."""
        return SPLIT_BACKWARD[1] * self.backward[stage]

    def memory_bytes(self, rank: int, kept: int) -> int:
        """Return a pp rank's peak: while it computes with ``kept`` bytes of activations, or at the end of the step."""
        return self.static_bytes[rank] + max(kept + self.transient_bytes[rank], self.ending_bytes[rank])

    def exposed_reduce(self, rank: int, overlap: float | None) -> float:
        """Return what summing a pp rank's gradients takes when it does nothing else."""
        travel = self.reduce_seconds[rank]
        if overlap is not None:
            return (self.copy_seconds[rank] + travel) * (1 - overlap)
        if self.covering[rank]:
            travel = max(travel * self.shown, travel - self.covering[rank])
        return self.copy_seconds[rank] + travel

    def exposed_gather(self, rank: int, overlap: bool) -> float:
        """Return how much longer a step takes because a pp rank's parameters are handed out."""
        travel = self.gather_seconds[rank]
        if overlap:  # blocks run as theirs are there
            travel = max(travel * self.shown, travel - self.opening[rank])
        return self.spread_seconds[rank] + travel

    def port_seconds(self) -> float:
        """Return how long the busiest port sends per micro-batch."""
        ports: dict[str, float] = {"": 0.0}
        for index, edge in enumerate(self.edges):
            for port in (edge.source, edge.target):
                if port:
                    ports[port] = ports.get(port, 0.0) + self.send_seconds(index)
        if self.embedded is not None:
            for port in (self.embedded.source, self.embedded.target):
                ports[port] = ports.get(port, 0.0) + self.sent / self.embedded.bandwidth
        return max(ports.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Value):
    """What a choice is predicted to cost.

    Args:
        step_seconds: One optimizer step.
        pipeline_seconds: Of them, from the first forward to the last backward pass.
        gradient_seconds: Summing gradients and handing out parameters, where it is not hidden.
        optimizer_seconds: Of the slowest rank.
        bubble: Part of the pipeline's time in which ranks wait, on average.
        tokens_per_second: Of the whole job.
        mfu: Model FLOPs over what all accelerators could do at their peak.
        memory_bytes: Peak of each pp rank.
        limit_bytes: What each pp rank has.
        slowest_stage: Position in the pipeline.
        link_bytes: Link in words -> bytes per step of all ranks together, both directions.
    """

    step_seconds: float
    pipeline_seconds: float
    gradient_seconds: float
    optimizer_seconds: float
    bubble: float
    tokens_per_second: float
    mfu: float
    memory_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]
    slowest_stage: int
    link_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return all(need <= have for need, have in zip(self.memory_bytes, self.limit_bytes, strict=True))
