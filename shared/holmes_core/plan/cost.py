# SPDX-License-Identifier: Apache-2.0
"""What a layout costs: seconds per step and bytes per rank, in closed form. All of it is prediction.

Per stage and micro-batch: matrix products at the accelerator's rate, a fixed time per block for launching kernels,
tensor-parallel all-reduces. Per edge: bytes over the bandwidth that a rank gets while its neighbours send, too. Per
step: the schedule's critical path, gradients over the rings of each stage, the optimizer's passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from holmes_core.config import V_SCHEDULES, ZERO_BUBBLE
from holmes_core.plan.cost_memory import PRECISIONS, ParameterBytes, heap_factor
from holmes_core.plan.cost_network import INSIDE_RANK, Edge, Network, Place
from holmes_core.plan.cost_schedule import SPLIT_BACKWARD, in_flight, pipeline_seconds
from holmes_core.plan.cost_values import (
    COMPUTE_EFFICIENCY,
    RUNTIME_BYTES,
    SHOWN,
    SHOWN_ON_CPU,
    SOCKET_COPIES,
    Choice,
    Job,
    Prediction,
    StageCosts,
)
from holmes_core.plan.hardware import Measured
from holmes_core.plan.one_f_one_b import embedding_lead

__all__ = [
    "ACTION_OPERATIONS",
    "COMPUTE_EFFICIENCY",
    "PRECISIONS",
    "RUNTIME_BYTES",
    "Choice",
    "CostModel",
    "Job",
    "Prediction",
    "StageCosts",
]

#: Seconds a block's forward pass takes at least, however small it is: about 15 kernels of 4 us each.
BLOCK_SECONDS = 60e-6
#: Part of a GPU's memory that can be used before fragmentation makes an allocation fail.
USABLE_MEMORY = 0.92
#: What the pipeline's runtime does for a forward and a backward pass, in small operations of torch: schedule, stage,
#: interceptor, seeds, messages. By processor time on a CPU, torch 2.13: 1.3 and 0.4 ms where an operation takes 2.5 us.
ACTION_OPERATIONS = (500, 150)
_TP_LATENCY = 15e-6


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
        on_cpu = job.device_type == "cpu"
        self.heap = heap_factor(profile.blocks[0].parameters, PRECISIONS[job.precision][0]) if on_cpu else 1.0
        self.bytes = ParameterBytes.of(job.precision, trainable=job.trainable, gloo=on_cpu, heap=self.heap)
        self._empty: dict[Choice, StageCosts] = {}
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
            part = self._slow(place, measured) / tp
            back = samples * measured.head_backward + measured.head_fixed
            return part * samples * measured.head_forward, part * back
        forward = samples * self.job.profile.head_forward_flops / (tp * self.speeds[place.cluster])
        return forward, 2 * forward

    def action_seconds(self, place: Place) -> tuple[float, float]:
        """Seconds of a stage's forward and backward pass besides blocks and head, for each micro-batch.

        Every stage runs the user's step, and torch's schedule runtime and our stages take their time for each action.
        """
        measured = self.job.hardware.clusters[place.cluster].measured
        if measured is None:
            return 0.0, 0.0
        slow = self._slow(place, measured)
        forward, backward = (slow * count * measured.operation for count in ACTION_OPERATIONS)
        return slow * measured.around + forward, backward

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
        forward, backward, kept = [], [], []
        parameters = [0.0] * pp
        at = 0
        for stage, count in enumerate(choice.layers_per_stage):
            place, stop = places[rank_of[stage]], at + count
            flops = self.flops[stop] - self.flops[at]
            there, back = self.block_seconds(place, tp, x, flops / max(count, 1))
            parameters[rank_of[stage]] += (self.parameters[stop] - self.parameters[at]) / tp
            head = self.head_seconds(place, tp, x) if stage == num_stages - 1 else (0.0, 0.0)
            # On the last rank the embedding is a stage of its own, then, and runs the step, too.
            steps = 2 if choice.embedding_on_last and stage == num_stages - 1 else 1
            before, after = self.action_seconds(place) if num_stages > 1 else (0.0, 0.0)
            forward.append(count * there + head[0] + steps * before)
            again = count * there if choice.recompute else 0.0
            backward.append(count * back + again + head[1] + steps * after)
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
            lead = embedding_lead(pp, choice.ahead(), split=choice.split)
            transient[rank_of[-1]] += lead * x * profile.boundary_bytes
        sharded = choice.sharding != "none"
        owners = dp if sharded else 1  # replicas that share the optimizer's work
        clusters = job.hardware.clusters
        # Adam reads and writes weights and both moments, and reads gradients.
        touched = (2 * self.bytes.weights * job.trainable + 2 * self.bytes.states + self.bytes.gradients) / owners
        static, ending = self.bytes.static(dp, sharded=sharded), self.bytes.ending(dp, sharded=sharded)
        return StageCosts(
            forward=tuple(forward),
            backward=tuple(backward),
            edges=edges,
            sent=x * profile.boundary_bytes,
            copy_seconds=tuple(copied for copied, *_ in gradient),
            reduce_seconds=tuple(seconds for _, seconds, *_ in gradient),
            gather_seconds=tuple(seconds for _, _, seconds, *_ in gradient),
            spread_seconds=tuple(seconds for *_, seconds, _ in gradient),
            gradient_bytes=tuple(moved for *_, moved in gradient),
            optimizer_seconds=tuple(
                n * job.trainable * (measured.optimizer / owners)
                if (measured := clusters[place.cluster].measured) and measured.optimizer
                else n * touched / (clusters[place.cluster].gpu.bandwidth * 1e9 * 0.7)
                for n, place in zip(parameters, places, strict=True)
            ),
            tied_seconds=0.0 if choice.embedding_on_last else self._tied(places, rank_of[-1], width, tp),
            embedded=self.network.edge(places[-1], places[0], width) if choice.embedding_on_last else None,
            static_bytes=tuple(int(n * static) + job.runtime_bytes for n in parameters),
            activation_bytes=tuple(int(self.heap * count) for count in kept),
            transient_bytes=tuple(int(self.heap * count) for count in transient),
            ending_bytes=tuple(int(n * ending) for n in parameters),
            limit_bytes=tuple(self._limits[place.cluster] for place in places),
            num_microbatches=max(1, -(-job.samples(dp) // x)),
            covering=tuple(self._covering(choice, rank, backward) for rank in range(pp)),
            opening=tuple(forward[choice.stages_of(rank)[0]] for rank in range(pp)),
            shown=SHOWN_ON_CPU if job.device_type == "cpu" else SHOWN,
        )

    def empty_costs(self, choice: Choice) -> StageCosts:
        """Return what a choice costs without any block, which limits its blocks; worked out once for all schedules."""
        kind = choice.schedule if choice.schedule in V_SCHEDULES else "1f1b"
        key = replace(choice, schedule=kind, layers_per_stage=(0,) * choice.num_stages)
        if key not in self._empty:
            self._empty[key] = self.stage_costs(key)
        return self._empty[key]

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
            further=choice.further() if choice.schedule == "1f1b" else (),
        )
        if costs.embedded is not None:
            pipeline += 2 * (costs.sent / costs.embedded.bandwidth + costs.embedded.latency)
        memory, more = [], choice.kept()
        for rank in range(pp):
            stages = choice.stages_of(rank) if v > 1 else [rank]
            held = in_flight(
                choice.schedule, rank=rank, pp=pp, virtual_stages=v, num_microbatches=m, further=more[rank]
            )
            mean = sum(costs.activation_bytes[stage] for stage in stages) / v
            memory.append(costs.memory_bytes(rank, int(held * mean)))
        job = self.job
        exposed = [
            costs.exposed_reduce(rank, job.overlap) + costs.exposed_gather(rank, job.overlap_param_gather)
            for rank in range(pp)
        ]
        gradient = max(exposed) + costs.tied_seconds
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

    def _covering(self, choice: Choice, rank: int, backward: Sequence[float]) -> float:
        """Seconds under which the last gradients travel: the first stage's backward pass, or its weights' part.

        The last rank of 1F1B has put off as many weights' parts as there are ranks; it does them together.
        """
        whole = choice.schedule not in ZERO_BUBBLE and not (choice.split and rank)
        together = choice.pp if choice.split and rank == choice.pp - 1 else 1
        return backward[choice.stages_of(rank)[0]] * (1.0 if whole else SPLIT_BACKWARD[1] * together)

    def _gradients(self, place: Place, parameters: float, choice: Choice) -> tuple[float, float, float, float, float]:
        """What the end of a step takes for a stage.

        Returns:
            Seconds to put gradients together, and on their way; of parameters on their way, and to put them into
            messages and out of them; bytes between hosts.
        """
        dp, tp = choice.dp, choice.tp
        if dp == 1:
            return 0.0, 0.0, 0.0, 0.0, 0.0
        part = (dp - 1) / dp * parameters
        # To the owners and back as parameters; or all around, so that every replica has the sums.
        reduced = part * self.bytes.gradients * (2 if choice.sharding == "none" else 1)
        handed_out = 0.0 if choice.sharding == "none" else part * self.bytes.weights * self.job.trainable
        measured = self.job.hardware.clusters[place.cluster].measured
        copied = 0.0 if measured is None else self._slow(place, measured) * measured.copied
        gradients, weights = parameters * self.bytes.gradients, parameters * self.bytes.weights * self.job.trainable
        # Into flat buffers; gloo's owners add up what they receive. Parameters go into flat buffers and out of them;
        # with gloo (almost all) from where they lie into sockets, and out of them.
        shared = choice.sharding != "none"
        before = copied * gradients * (1 + (dp - 1) / dp * (self.bytes.gloo and shared))
        copies = 2 * (dp - 1) / dp * SOCKET_COPIES if self.bytes.gloo else 1 + (dp - 1) / dp
        after = copied * weights * copies if shared else 0.0
        between = self.network.ring_bandwidth(place, dp)
        if not between:
            local = self.network.local_bandwidth(place.cluster)
            return before, reduced / local, handed_out / local, after, 0.0
        # One ring per tp rank, all through the same ports.
        hosts = place.last_host - place.first_host + 1
        return (
            before,
            tp * reduced / between,
            tp * handed_out / between,
            after,
            tp * (reduced + handed_out) * hosts,
        )

    def _tied(self, places: list[Place], last: int, width: int, tp: int) -> float:
        if not self.job.profile.tied_parameters or last == 0:
            return 0.0
        edge = self.network.edge(places[0], places[last], width)
        # Only the replica that owns the weight sends: its tp ranks, not all that share the port.
        share = max(1, places[0].per_host // tp)
        return self.bytes.gradients * self.job.profile.tied_parameters / tp / (edge.bandwidth * share)
