# SPDX-License-Identifier: Apache-2.0
"""What a layout costs: seconds per step and bytes per rank, in closed form. All of it is prediction.

Per stage and micro-batch: matrix products at the accelerator's rate, a fixed time per block for launching kernels,
tensor-parallel all-reduces. Per edge: bytes over the bandwidth that a rank gets while its neighbours send, too. Per
step: the schedule's critical path, gradients over the rings of each stage, the optimizer's passes over memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from holmes_core.cluster.value import Value
from holmes_core.plan.cost_memory import PRECISIONS, ParameterBytes
from holmes_core.plan.cost_network import INSIDE_RANK, Edge, Network, Place
from holmes_core.plan.cost_schedule import (
    RECOMPUTED_FOR_WEIGHTS,
    SPLIT_BACKWARD,
    ZERO_BUBBLE,
    in_flight,
    pipeline_seconds,
    rank_of_stage,
    stages_by_rank,
)
from holmes_core.plan.hardware import Hardware, Measured
from holmes_core.plan.profile import ModelProfile

__all__ = ["PRECISIONS", "Choice", "CostModel", "Job", "Prediction", "StageCosts"]

#: Part of the peak that matrix products of large models reach in training (Narayanan et al. 2021, table 1: 44 to 52 %
#: with communication and bubbles, on A100).
COMPUTE_EFFICIENCY = 0.55
#: Seconds a block's forward pass takes at least, however small it is: about 15 kernels of 4 us each.
BLOCK_SECONDS = 60e-6
#: Bytes that CUDA, its libraries and the communicators take on every GPU.
RUNTIME_BYTES = int(1.5 * 2**30)
#: Part of a GPU's memory that can be used before fragmentation makes an allocation fail.
USABLE_MEMORY = 0.92
_TP_LATENCY = 15e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Value):
    """What is to be trained, on what.

    Args:
        profile: The model, at one sequence length.
        hardware: The clusters.
        batch: Samples per step over all replicas.
        precision: A key of PRECISIONS.
        efficiency: Part of the peak that compute reaches, where no speed was measured.
        overlap: Part of summing gradients that is hidden behind compute, 0 to 1.
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
    overlap: float = 0.0
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

    def describe(self) -> str:
        """Return the choice on one line."""
        virtual = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        recompute = ", recompute" if self.recompute else ""
        recompute += f", sharding {self.sharding}" if self.sharding != "optimizer" and self.dp > 1 else ""
        return (
            f"pp {self.pp} x dp {self.dp} x tp {self.tp}, {self.schedule}{virtual}, "
            f"micro-batch {self.micro_batch_size}{recompute}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds and bytes of a choice, per stage (in pipeline order) or per pp rank.

    Args:
        forward: Seconds per micro-batch, per stage.
        backward: The same, with recomputation where it is chosen.
        again: Those of them that recompute.
        edges: The way from each stage to the next.
        embedded: The way from the last rank to the first, where the last runs the embedding; else None.
        sent: Bytes one rank sends over an edge per micro-batch, in each direction.
        reduce_seconds: Per pp rank, per step: gradients are summed.
        gather_seconds: The same: parameters are handed out.
        gradient_bytes: Per pp rank: what its rings move between hosts in one step.
        optimizer_seconds: Per pp rank, per step.
        tied_seconds: Per step: gradients of the weights that first and last stage share.
        static_bytes: Per pp rank: weights, gradients, optimizer states, runtime.
        activation_bytes: Per stage and micro-batch.
        transient_bytes: Per pp rank: what one micro-batch needs while it is computed.
        ending_bytes: Per pp rank: what the end of a step needs besides, when activations are gone.
        limit_bytes: Per pp rank: memory that can be used.
        num_microbatches: Per step and replica.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    again: tuple[float, ...]
    edges: tuple[Edge, ...]
    sent: int
    reduce_seconds: tuple[float, ...]
    gather_seconds: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    optimizer_seconds: tuple[float, ...]
    tied_seconds: float
    static_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    transient_bytes: tuple[int, ...]
    ending_bytes: tuple[int, ...]
    limit_bytes: tuple[int, ...]
    num_microbatches: int
    embedded: Edge | None = None

    def send_seconds(self, edge: int) -> float:
        """Return how long an activation occupies an edge."""
        return self.sent / self.edges[edge].bandwidth

    def input_seconds(self, stage: int) -> float:
        """Return what the input's part of a split backward pass takes."""
        return SPLIT_BACKWARD[0] * (self.backward[stage] - self.again[stage]) + self.again[stage]

    def weight_seconds(self, stage: int) -> float:
        """Return what the weights' part of a split backward pass takes."""
        plain = self.backward[stage] - self.again[stage]
        return SPLIT_BACKWARD[1] * plain + RECOMPUTED_FOR_WEIGHTS * self.again[stage]

    def memory_bytes(self, rank: int, kept: int) -> int:
        """Return a pp rank's peak: while it computes with ``kept`` bytes of activations, or at the end of the step."""
        return self.static_bytes[rank] + max(kept + self.transient_bytes[rank], self.ending_bytes[rank])

    def exposed_seconds(self, rank: int, overlap: float) -> float:
        """Return what a pp rank's gradients and parameters take when it does nothing else."""
        return self.reduce_seconds[rank] * (1 - overlap) + self.gather_seconds[rank]

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


class CostModel:
    """Predicts choices of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.network = Network(job.hardware)
        profile = job.profile
        clusters = job.hardware.clusters
        self.speeds = [(c.speed or c.gpu.tflops * job.efficiency) * 1e12 for c in clusters]
        self._limits = [c.usable or int(c.gpu.memory * 2**30 * USABLE_MEMORY) for c in clusters]
        self._peak = sum(c.ranks * c.gpu.tflops * 1e12 for c in clusters)
        self.flops = [0.0, *accumulate(block.forward_flops for block in profile.blocks)]
        self.parameters = [0, *accumulate(block.parameters for block in profile.blocks)]
        self.kept = [0, *accumulate(block.activation_bytes for block in profile.blocks)]
        self.whole = [0, *accumulate(block.whole_bytes for block in profile.blocks)]
        self.bytes = ParameterBytes.of(job.precision, trainable=job.trainable, gloo=job.device_type == "cpu")
        self._largest_block = max(block.activation_bytes for block in profile.blocks)

    def places(self, choice: Choice) -> list[Place]:
        """Return where each pp rank's stage lies."""
        found: list[Place] = []
        for cluster, count in zip(choice.order, choice.stages, strict=True):
            found.extend(self.network.places(cluster, choice.width)[:count])
        return found

    def block_seconds(self, place: Place, tp: int, samples: int, flops: float) -> tuple[float, float]:
        """Seconds of one block's forward and backward pass on a micro-batch."""
        cluster = place.cluster
        measured = self.job.hardware.clusters[cluster].measured
        if measured is None:
            forward = samples * flops / (tp * self.speeds[cluster]) + BLOCK_SECONDS
            backward = 2 * forward
        else:
            slow = self._slow(place, measured)
            part = samples * flops / (tp * measured.block_flops)
            forward = slow * (part * measured.forward + measured.forward_fixed)
            backward = slow * (part * measured.backward + measured.backward_fixed)
        if tp > 1:  # one all-reduce after attention, one after the feed-forward layer; as many in the backward pass
            moved = 2 * (tp - 1) / tp * samples * self.job.profile.reduced_bytes
            summing = 2 * (moved / self.network.local_bandwidth(cluster) + _TP_LATENCY)
            forward, backward = forward + summing, backward + (2 if measured is None else 1) * summing
        return forward, backward

    def head_seconds(self, place: Place, tp: int, samples: int) -> tuple[float, float]:
        """Seconds of the head's forward and backward pass on a micro-batch."""
        measured = self.job.hardware.clusters[place.cluster].measured
        if measured is not None:
            part = self._slow(place, measured) * samples / tp
            return part * measured.head_forward, part * measured.head_backward
        forward = samples * self.job.profile.head_forward_flops / (tp * self.speeds[place.cluster])
        return forward, 2 * forward

    @staticmethod
    def _slow(place: Place, measured: Measured) -> float:
        """How many times as long a stage takes as the usual host: as the slowest of its hosts."""
        factors = measured.host_factors[place.first_host : place.last_host + 1]
        return max(factors) if factors else 1.0

    def stage_costs(self, choice: Choice) -> StageCosts:
        """Work out what each stage and each edge of a choice costs."""
        job, profile, tp, dp, x = self.job, self.job.profile, choice.tp, choice.dp, choice.micro_batch_size
        places, pp, width = self.places(choice), choice.pp, choice.width
        num_stages, rank_of = choice.num_stages, choice.ranks()
        forward, backward, again, kept = [], [], [], []
        parameters = [0.0] * pp
        at = 0
        for stage, count in enumerate(choice.layers_per_stage):
            place, stop = places[rank_of[stage]], at + count
            flops = self.flops[stop] - self.flops[at]
            there, back = self.block_seconds(place, tp, x, flops / max(count, 1))
            parameters[rank_of[stage]] += (self.parameters[stop] - self.parameters[at]) / tp
            head = self.head_seconds(place, tp, x) if stage == num_stages - 1 else (0.0, 0.0)
            forward.append(count * there + head[0])
            again.append(count * there if choice.recompute else 0.0)
            backward.append(count * back + again[-1] + head[1])
            inside = count * profile.boundary_bytes if choice.recompute else self._kept(at, stop, tp)
            kept.append(x * (inside + (profile.boundary_bytes if stage < num_stages - 1 else 0)))  # what it has sent
            at = stop
        if choice.embedding_on_last or rank_of[-1] == 0:  # a shared matrix is there once
            parameters[rank_of[-1]] += (profile.embedding_parameters - profile.tied_parameters) / tp
        else:
            parameters[0] += profile.embedding_parameters / tp
        parameters[rank_of[-1]] += profile.head_parameters / tp
        edges = tuple(self._edge(places[a], places[b], a == b, width) for a, b in pairwise(rank_of))
        gradient = [self._gradients(places[r], n, choice) for r, n in enumerate(parameters)]
        # Gradients that come and go, and the next activation; a block that is computed again; the head.
        arriving = 3 * x * profile.boundary_bytes if num_stages > 1 else 0
        transient = [arriving + (x * self._largest_block // tp if choice.recompute else 0)] * pp
        transient[rank_of[-1]] += x * profile.head_activation_bytes // tp
        if choice.embedding_on_last:  # micro-batches that were embedded ahead
            transient[rank_of[-1]] += (pp + 1) * x * profile.boundary_bytes
        sharded = choice.sharding != "none"
        owners = dp if sharded else 1  # replicas that share the optimizer's work
        clusters = job.hardware.clusters
        # Adam reads and writes weights and both moments, and reads gradients.
        touched = (2 * self.bytes.weights * job.trainable + 2 * self.bytes.states + self.bytes.gradients) / owners
        static, ending = self.bytes.static(dp, sharded=sharded), self.bytes.ending(dp, sharded=sharded)
        return StageCosts(
            forward=tuple(forward),
            backward=tuple(backward),
            again=tuple(again),
            edges=edges,
            sent=x * profile.boundary_bytes,
            reduce_seconds=tuple(seconds for seconds, _, _ in gradient),
            gather_seconds=tuple(seconds for _, seconds, _ in gradient),
            gradient_bytes=tuple(moved for _, _, moved in gradient),
            optimizer_seconds=tuple(
                n * job.trainable * (measured.optimizer / owners)
                if (measured := clusters[place.cluster].measured) and measured.optimizer
                else n * touched / (clusters[place.cluster].gpu.bandwidth * 1e9 * 0.7)
                for n, place in zip(parameters, places, strict=True)
            ),
            tied_seconds=0.0 if choice.embedding_on_last else self._tied(places, rank_of[-1], width, tp),
            embedded=self.network.edge(places[-1], places[0], width) if choice.embedding_on_last else None,
            static_bytes=tuple(int(n * static) + job.runtime_bytes for n in parameters),
            activation_bytes=tuple(kept),
            transient_bytes=tuple(transient),
            ending_bytes=tuple(int(n * ending) for n in parameters),
            limit_bytes=tuple(self._limits[place.cluster] for place in places),
            num_microbatches=max(1, -(-job.samples(dp) // x)),
        )

    def predict(self, choice: Choice) -> Prediction:
        """Predict one step of a choice."""
        costs = self.stage_costs(choice)
        m, pp, v = costs.num_microbatches, choice.pp, choice.virtual_stages
        backward: Sequence[float] = costs.backward
        weights: Sequence[float] = ()
        if choice.schedule in ZERO_BUBBLE:
            weights = [costs.weight_seconds(stage) for stage in range(choice.num_stages)]
            if choice.schedule != "dualpipev":
                backward = [costs.input_seconds(stage) + w for stage, w in enumerate(weights)]
        pipeline = pipeline_seconds(
            choice.schedule,
            costs.forward,
            backward,
            [costs.send_seconds(edge) for edge in range(len(costs.edges))],
            [edge.latency for edge in costs.edges],
            num_microbatches=m,
            pp=pp,
            port=costs.port_seconds(),
            weights=weights,
        )
        if costs.embedded is not None:
            pipeline += 2 * (costs.sent / costs.embedded.bandwidth + costs.embedded.latency)
        memory = []
        for rank in range(pp):
            stages = choice.stages_of(rank) if v > 1 else [rank]
            held = in_flight(choice.schedule, rank=rank, pp=pp, virtual_stages=v, num_microbatches=m)
            mean = sum(costs.activation_bytes[stage] for stage in stages) / v
            memory.append(costs.memory_bytes(rank, int(held * mean)))
        gradient = max(costs.exposed_seconds(rank, self.job.overlap) for rank in range(pp)) + costs.tied_seconds
        return self.assemble(choice, costs, pipeline, tuple(memory), gradient)

    def assemble(
        self, choice: Choice, costs: StageCosts, pipeline: float, memory: tuple[int, ...], gradient: float
    ) -> Prediction:
        """Put a prediction together from the pipeline's seconds, however they were found."""
        m, pp = costs.num_microbatches, choice.pp
        step = pipeline + gradient + max(costs.optimizer_seconds)
        works = [f + b for f, b in zip(costs.forward, costs.backward, strict=True)]
        per_rank = [0.0] * pp
        for rank, work in zip(choice.ranks(), works, strict=True):
            per_rank[rank] += work
        links: dict[str, int] = {}
        for edge in (*costs.edges, *((costs.embedded,) if costs.embedded is not None else ())):
            if edge is INSIDE_RANK:
                continue
            links[edge.label] = links.get(edge.label, 0) + 2 * m * costs.sent * choice.width
        for place, moved in zip(self.places(choice), costs.gradient_bytes, strict=True):
            if moved:
                label = f"inside {self.job.hardware.clusters[place.cluster].name} (gradients, parameters)"
                links[label] = links.get(label, 0) + int(moved)
        profile = self.job.profile
        batch = self.job.samples(choice.dp) * choice.dp if self.job.replica_batch else self.job.batch
        return Prediction(
            step_seconds=step,
            pipeline_seconds=pipeline,
            gradient_seconds=gradient,
            optimizer_seconds=max(costs.optimizer_seconds),
            bubble=1 - m * sum(per_rank) / (pp * pipeline),
            tokens_per_second=batch * profile.seq / step,
            mfu=batch * profile.flops / step / self._peak,
            memory_bytes=memory,
            limit_bytes=costs.limit_bytes,
            slowest_stage=per_rank.index(max(per_rank)),
            link_bytes=links,
        )

    def _kept(self, start: int, stop: int, tp: int) -> int:
        """Bytes per sample that a rank keeps of a run of blocks; tp divides all but what norms keep."""
        whole = self.whole[stop] - self.whole[start]
        return whole + (self.kept[stop] - self.kept[start] - whole) // tp

    def _edge(self, a: Place, b: Place, same: bool, width: int) -> Edge:
        return INSIDE_RANK if same else self.network.edge(a, b, width)

    def _gradients(self, place: Place, parameters: float, choice: Choice) -> tuple[float, float, float]:
        """Seconds to sum a stage's gradients over its replicas and to hand out parameters; bytes between hosts."""
        dp, tp = choice.dp, choice.tp
        if dp == 1:
            return 0.0, 0.0, 0.0
        part = (dp - 1) / dp * parameters
        # To the owners and back as parameters; or all around, so that every replica has the sums.
        reduced = part * self.bytes.gradients * (2 if choice.sharding == "none" else 1)
        handed_out = 0.0 if choice.sharding == "none" else part * self.bytes.weights * self.job.trainable
        between = self.network.ring_bandwidth(place, dp)
        if not between:
            local = self.network.local_bandwidth(place.cluster)
            return reduced / local, handed_out / local, 0.0
        # One ring per tp rank, all through the same ports.
        hosts = place.last_host - place.first_host + 1
        return tp * reduced / between, tp * handed_out / between, tp * (reduced + handed_out) * hosts

    def _tied(self, places: list[Place], last: int, width: int, tp: int) -> float:
        if not self.job.profile.tied_parameters or last == 0:
            return 0.0
        edge = self.network.edge(places[0], places[last], width)
        # Only the replica that owns the weight sends: its tp ranks, not all that share the port.
        share = max(1, places[0].per_host // tp)
        return self.bytes.gradients * self.job.profile.tied_parameters / tp / (edge.bandwidth * share)
