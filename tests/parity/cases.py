# SPDX-License-Identifier: Apache-2.0
"""The parity matrix: a list of trainings that must give one process's numbers, and of mistakes that must not.

A case is a value: what is trained, and how it is laid out. `worker` runs it, `judge` compares it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["CASES", "FAST", "MISTAKES", "REPEATED", "SLOW", "Case", "Tolerance"]

V_SCHEDULES = ("zbv", "dualpipev")
SINGLE = ("1f1b", "gpipe")
SCHEDULES = (*SINGLE, "interleaved_1f1b", "looped_bfs", "interleaved_zb", *V_SCHEDULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Largest difference to one process: losses and norms relative, weights absolute."""

    loss: float = 1e-5
    norm: float = 1e-5
    weight: float = 1e-5


#: By (precision, optimizer). AdamW divides each gradient by its own size: an element whose gradient is only rounding
#: (the bias of keys; tokens that hardly occur) takes steps of the learning rate in a random direction.
TOLERANCES = {
    ("fp32", "sgd"): Tolerance(),
    ("fp32", "adamw"): Tolerance(weight=1e-4),
    ("bf16-mixed", "sgd"): Tolerance(loss=5e-4, norm=5e-3, weight=2e-3),
    ("bf16-true", "sgd"): Tolerance(loss=1e-3, norm=2e-2, weight=4e-3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training, laid out.

    Args:
        name: Unique.
        description: What it is about, for people.
        config: For HolmesConfig; pp, dp and tp are 1 when left out.
        model: ``llama`` or ``gpt2``.
        layers: Blocks; None: 5, or one per stage where there are more.
        tied: Whether embedding and head share their weight.
        rows: Samples of a replica's batch, step by step, from the start again after the last.
        uneven: Each further replica gets a sample less, too.
        lengths: Tokens of a row, step by step (and shifted by one per replica, where there are several).
        padding: ``right``, ``left`` (where a wrong attention mask shows) or ``none``.
        accumulate: Batches per optimizer step.
        precision: ``fp32``, ``bf16-mixed`` (autocast) or ``bf16-true`` (bfloat16 weights).
        optimizer: ``sgd`` or ``adamw``.
        lr: Learning rate of SGD.
        clip: Largest gradient norm, or None.
        frozen: Patterns of parameter names that are not trained.
        checkpointing: Recompute activations.
        dropout: Its probability.
        steps: Optimizer steps; twenty in the slow set.
        mistake: A deliberate mistake, from `mistakes`; the comparison must find it.
        seen_in: The comparison that must find it (`judge.Verdict.problems` begins with the word).
        slow: Only in `make test-all`.
    """

    name: str
    description: str
    config: Mapping[str, Any] = field(default_factory=dict)
    model: str = "llama"
    layers: int | None = None
    tied: bool = False
    rows: tuple[int, ...] = (8,)
    uneven: bool = False
    lengths: tuple[int, ...] = (9,)
    padding: str = "left"
    accumulate: int = 1
    precision: str = "fp32"
    optimizer: str = "sgd"
    lr: float = 0.02
    clip: float | None = None
    frozen: tuple[str, ...] = ()
    checkpointing: bool = False
    dropout: float = 0.0
    steps: int = 5
    mistake: str | None = None
    seen_in: str = ""
    slow: bool = False

    @property
    def degrees(self) -> tuple[int, int, int]:
        """(pp, dp, tp)."""
        pp, dp, tp = (self.config.get(key, 1) for key in ("pp", "dp", "tp"))
        return pp, dp, tp

    @property
    def ranks(self) -> int:
        """Processes."""
        pp, dp, tp = self.degrees
        return int(pp * dp * tp)

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return str(self.config.get("schedule", "1f1b"))

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        per_rank = 1 if self.schedule in SINGLE else self.config.get("virtual_stages", 2)
        return int(self.degrees[0] * per_rank)

    @property
    def blocks(self) -> int:
        """Blocks of the model."""
        return self.layers or max(5, self.stages)

    @property
    def tolerance(self) -> Tolerance:
        """What may differ."""
        return TOLERANCES[self.precision, self.optimizer]


def _config(pp: int = 1, dp: int = 1, tp: int = 1, schedule: str = "1f1b", **more: Any) -> dict[str, Any]:
    return {"pp": pp, "dp": dp, "tp": tp, "schedule": schedule, **more}


# ---- the fast diagonal: every value of every dimension at least once -----------------------------------------------
CHANGING = {"lengths": (9, 13, 4, 9), "rows": (8, 8, 5, 1)}

FAST = (
    Case(
        name="one_process_tokens",
        description="no parallelism, micro-batches weighted by their tokens",
        config=_config(num_microbatches=4),
        steps=3,
    ),
    Case(
        name="pp2_1f1b_llama",
        description="two stages, rows padded on the left, clipping by the norm of the whole model",
        config=_config(pp=2),
        clip=0.5,
    ),
    Case(
        name="pp2_gpipe_gpt2_tied_accumulate2",
        description="tied embeddings on two stages, two batches per step",
        config=_config(pp=2, schedule="gpipe"),
        model="gpt2",
        tied=True,
        accumulate=2,
        clip=0.5,
        padding="right",
    ),
    Case(
        name="pp2_changing_shapes",
        description="another length each step, a smaller batch, fewer samples than stages",
        config=_config(pp=2),
        **CHANGING,
    ),
    Case(
        name="pp2_uneven_microbatches",
        description="eight samples in three micro-batches of 3, 3 and 2",
        config=_config(pp=2, num_microbatches=3),
    ),
    Case(
        name="pp2_frozen_first_stage",
        description="nothing is trained on the first stage: no gradient crosses the border",
        config=_config(pp=2, layers_per_stage=[2, 3]),
        frozen=("model.embed_tokens.*", "model.layers.0.*", "model.layers.1.*"),
    ),
    Case(
        name="pp2_tied_adamw",
        description="tied embeddings under AdamW: both copies take the same steps",
        config=_config(pp=2),
        tied=True,
        optimizer="adamw",
        clip=0.5,
    ),
    Case(
        name="pp2_interleaved_1f1b_tied",
        description="four stages on two ranks, embedding and head on different ranks",
        config=_config(pp=2, schedule="interleaved_1f1b"),
        tied=True,
    ),
    Case(
        name="pp2_looped_bfs_gpt2",
        description="four stages on two ranks, breadth first; rows without padding",
        config=_config(pp=2, schedule="looped_bfs"),
        model="gpt2",
        padding="none",
    ),
    Case(
        name="pp2_zbv_tied",
        description="V schedule: the first and the last stage share a rank and the tied weight",
        config=_config(pp=2, schedule="zbv"),
        tied=True,
        clip=0.5,
    ),
    Case(
        name="pp2_dualpipev_gpt2_tied",
        description="V schedule with overlapped forward and backward, tied",
        config=_config(pp=2, schedule="dualpipev"),
        model="gpt2",
        tied=True,
    ),
    Case(
        name="pp2_bf16_mixed",
        description="bfloat16 autocast: the hidden state crosses the border in the dtype that it has",
        config=_config(pp=2),
        model="gpt2",
        tied=True,
        precision="bf16-mixed",
    ),
    Case(
        name="pp2_bf16_true",
        description="bfloat16 weights",
        config=_config(pp=2),
        precision="bf16-true",
    ),
    Case(
        name="dp2_uneven_tokens",
        description="two replicas with other rows, lengths and token counts; sharded optimizer",
        config=_config(dp=2),
        uneven=True,
        lengths=(9, 13, 4),
        clip=0.5,
    ),
    Case(
        name="tp2_gpt2_tied",
        description="tensor parallelism alone, tied",
        config=_config(tp=2),
        model="gpt2",
        tied=True,
        clip=0.5,
    ),
    Case(
        name="pp2_rank_zero_first",
        description="rank 0 on the first stage",
        config=_config(pp=2, last_stage_on_rank_zero=False),
        tied=True,
    ),
    Case(
        name="pp3_fewer_microbatches_than_stages",
        description="one sample per batch in three stages",
        config=_config(pp=3),
        rows=(1, 2),
        model="gpt2",
        tied=True,
    ),
    Case(
        name="pp3_frozen_middle",
        description="frozen blocks in the middle still pass gradients on",
        config=_config(pp=3),
        frozen=("model.layers.2.*", "model.layers.3.*"),
    ),
    Case(
        name="pp4_1f1b_three_clusters",
        description="clusters of 1, 1 and 2 ranks, in an order of ranks that is not sorted",
        config=_config(
            pp=4,
            clusters=[
                {"name": "a", "kind": "infiniband", "ranks": [2]},
                {"name": "b", "kind": "roce", "ranks": [0]},
                {"name": "c", "kind": "ethernet", "ranks": [1, 3]},
            ],
        ),
        tied=True,
    ),
    Case(
        name="pp2_embedding_on_last_rank",
        description="the embedding beside the head it is tied to; changing lengths, few samples",
        config=_config(pp=2, embedding="last"),
        tied=True,
        **CHANGING,
    ),
    Case(
        name="pp2_dp2_two_clusters_embedding_on_last_rank",
        description="two clusters of two replicas: the tied weight stays in one, accumulation, clipping",
        config=_config(pp=2, dp=2, clusters=[{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2, 3]}]),
        model="gpt2",
        tied=True,
        accumulate=2,
        clip=0.5,
        uneven=True,
    ),
    Case(
        name="pp2_tp2_embedding_on_last_rank",
        description="the same with tensor parallelism and an untied head, all forwards first",
        config=_config(pp=2, tp=2, embedding="last", schedule="gpipe"),
    ),
    Case(
        name="pp3_defer_weights",
        description="first and last backward passes in two parts; few samples now and then",
        config=_config(pp=3, dp=2, defer_weights=True),
        model="gpt2",
        tied=True,
        accumulate=2,
        **CHANGING,
    ),
    Case(
        name="pp2_dp2_defer_weights_embedding_on_last_rank",
        description="both, running ahead, with replicas",
        config=_config(pp=2, dp=2, embedding="last", defer_weights=True, run_ahead=1),
        tied=True,
        clip=0.5,
        uneven=True,
    ),
    Case(
        name="pp4_tapered",
        description="smaller micro-batches at both ends of four stages, one replica, weights' gradients put off",
        config=_config(pp=4, taper=True, defer_weights=True, num_microbatches=4),
        tied=True,
    ),
    Case(
        name="pp2_dp2_tapered",
        description="half a micro-batch at both ends, weights' gradients put off; few samples now and then",
        config=_config(pp=2, dp=2, taper=True, defer_weights=True, num_microbatches=3),
        model="gpt2",
        tied=True,
        accumulate=2,
        clip=0.5,
        **CHANGING,
    ),
    Case(
        name="pp2_dp2_tapered_embedding_on_last_rank",
        description="the same, the embedding's gradients summed before those of the last weights are computed",
        config=_config(
            pp=2, dp=2, taper=True, defer_weights=True, embedding="last", num_microbatches=3, sharding="none"
        ),
        model="gpt2",
        tied=True,
        accumulate=2,
        clip=0.5,
        **CHANGING,
    ),
    Case(
        name="pp2_dp3_parameters_on_their_way",
        description="parameters come from those who stepped them while the next forward runs; clipping, adamw",
        config=_config(pp=2, dp=3, overlap_param_gather=True),
        model="gpt2",
        tied=True,
        accumulate=2,
        clip=0.5,
        optimizer="adamw",
        **CHANGING,
    ),
    Case(
        name="pp2_tp2_two_clusters",
        description="each tensor-parallel rank sends its share of the activation (odd sizes, too)",
        config=_config(
            pp=2, tp=2, embedding="first", clusters=[{"name": "a", "ranks": [0, 1]}, {"name": "b", "ranks": [2, 3]}]
        ),
        tied=True,
        **CHANGING,
    ),
    Case(
        name="pp2_wire_in_compute_dtype",
        description="bfloat16 autocast, activations and gradients cross the clusters' border in bfloat16",
        config=_config(pp=2, wire_dtype="compute", clusters=[{"name": "a", "ranks": [0]}, {"name": "b", "ranks": [1]}]),
        model="gpt2",
        tied=True,
        precision="bf16-mixed",
    ),
    Case(
        name="pp4_zbv",
        description="eight stages on four ranks, zero bubble",
        config=_config(pp=4, schedule="zbv"),
        steps=3,
    ),
    Case(
        name="pp2_dp2_tied_accumulate2",
        description="two stages, two replicas, tied, accumulation, clipping, sharded optimizer, changing lengths",
        config=_config(pp=2, dp=2),
        model="gpt2",
        tied=True,
        accumulate=2,
        clip=0.5,
        uneven=True,
        lengths=(9, 13, 4),
    ),
    Case(
        name="pp2_dp2_rank_order_virtual_tied",
        description="virtual stages, replicas and a tied weight, ranks in an arbitrary order, nothing sharded",
        config=_config(pp=2, dp=2, schedule="interleaved_1f1b", rank_order=[3, 1, 0, 2], sharding="none"),
        tied=True,
        uneven=True,
    ),
    Case(
        name="pp2_tp2_tied",
        description="two stages of two tensor-parallel ranks, tied, clipping",
        config=_config(pp=2, tp=2),
        tied=True,
        clip=0.5,
    ),
    Case(
        name="dp2_tp2_gpt2",
        description="replicas of two tensor-parallel ranks: tokens are counted once per replica",
        config=_config(dp=2, tp=2),
        model="gpt2",
        uneven=True,
        padding="right",
    ),
    Case(
        name="pp2_dp2_tp2_rank_order",
        description="all three dimensions on eight ranks in an arbitrary order, tied",
        config=_config(2, 2, 2, rank_order=[6, 1, 4, 7, 0, 5, 2, 3]),
        tied=True,
        uneven=True,
        steps=2,
    ),
)

# ---- the wide matrix: every layout with every schedule; features by an orthogonal array ----------------------------
# Rows of OA(8, 2^7, strength 2): each pair of features meets in each of its four combinations within eight cases.
_ARRAY = [(a, b, c, a ^ b, a ^ c, b ^ c, a ^ b ^ c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
_LAYOUTS = [(pp, dp, tp) for pp in (1, 2, 4) for dp in (1, 2) for tp in (1, 2) if pp * dp * tp <= 8]


def _featured(row: Sequence[int], config: dict[str, Any]) -> dict[str, Any]:
    gpt2, tied, accumulate, unsharded, changing, clip, frozen = row
    first = "*.0.*"
    return {
        "model": "gpt2" if gpt2 else "llama",
        "tied": bool(tied),
        "accumulate": 1 + accumulate,
        "config": {**config, "sharding": "none" if unsharded else "optimizer"},
        "uneven": bool(changing),
        "lengths": (9, 13, 4) if changing else (9,),
        "rows": (8, 8, 5, 8, 1) if changing else (8,),
        "padding": "right" if changing else "left",
        "clip": 0.5 if clip else None,
        # A batch of one row has a steep gradient; unclipped, twenty long steps amplify rounding in any layout.
        "lr": 0.005 if changing and not clip else 0.02,
        "frozen": (first,) if frozen else (),
    }


def _wide() -> list[Case]:
    cases = []
    for number, (pp, dp, tp) in enumerate(_LAYOUTS):
        for place, schedule in enumerate(SCHEDULES if pp > 1 else SCHEDULES[:1]):
            features = _featured(_ARRAY[(number + 3 * place) % 8], _config(pp, dp, tp, schedule))
            words = [
                features["model"],
                "tied" if features["tied"] else "untied",
                f"accumulate {features['accumulate']}",
                f"sharding {features['config']['sharding']}",
                *(["changing shapes"] if features["uneven"] else []),
                *(["clipped"] if features["clip"] else []),
                *(["first block frozen"] if features["frozen"] else []),
            ]
            cases.append(
                Case(
                    name=f"wide_pp{pp}_dp{dp}_tp{tp}_{schedule}",
                    description=", ".join(words),
                    steps=20,
                    slow=True,
                    **features,
                )
            )
    return cases


def _precisions() -> list[Case]:
    layouts = [(2, 1, 1, "1f1b"), (2, 2, 1, "1f1b"), (2, 1, 2, "gpipe"), (2, 1, 1, "zbv"), (4, 1, 1, "interleaved_zb")]
    return [
        Case(
            name=f"{precision.replace('-', '_')}_{model}_pp{pp}_dp{dp}_tp{tp}_{schedule}",
            description=f"{model} in {precision}",
            config=_config(pp, dp, tp, schedule),
            model=model,
            tied=model == "gpt2",
            precision=precision,
            accumulate=1 + (place % 2),
            uneven=dp > 1,
            slow=True,
        )
        for precision in ("bf16-mixed", "bf16-true")
        for model in ("llama", "gpt2")
        for place, (pp, dp, tp, schedule) in enumerate(layouts)
    ]


def _adamw() -> list[Case]:
    layouts = [(2, 2, 1, "1f1b"), (2, 1, 2, "1f1b"), (2, 1, 1, "dualpipev"), (4, 1, 1, "1f1b"), (2, 2, 2, "1f1b")]
    return [
        Case(
            name=f"adamw_{model}_pp{pp}_dp{dp}_tp{tp}_{schedule}",
            description=f"{model}, tied, accumulation 2, clipped, AdamW",
            config=_config(pp, dp, tp, schedule),
            model=model,
            tied=True,
            accumulate=2,
            clip=0.5,
            optimizer="adamw",
            uneven=dp > 1,
            slow=True,
        )
        for model in ("llama", "gpt2")
        for pp, dp, tp, schedule in layouts
    ]


_THREE = [
    {"name": "a", "kind": "infiniband", "ranks": [5, 1]},
    {"name": "b", "kind": "roce", "ranks": [0, 6]},
    {"name": "c", "kind": "ethernet", "ranks": [2, 7, 3, 4]},
]

SLOW = (
    *_wide(),
    *_precisions(),
    *_adamw(),
    Case(
        name="pp2_dp2_tp2_tied",
        description="three dimensions at once: tied, uneven tokens, changing lengths, accumulation, clipping",
        config=_config(2, 2, 2),
        tied=True,
        uneven=True,
        lengths=(9, 13, 4),
        accumulate=2,
        clip=0.5,
        steps=20,
        slow=True,
    ),
    Case(
        name="pp4_dp2_three_clusters",
        description="clusters of 2, 2 and 4 scattered ranks; replicas; tied",
        config=_config(4, 2, clusters=_THREE),
        model="gpt2",
        tied=True,
        uneven=True,
        slow=True,
    ),
    Case(
        name="pp3_dp2_two_clusters",
        description="one stage in one cluster, two in the other",
        config=_config(
            3, 2, clusters=[{"name": "a", "ranks": [4, 0]}, {"name": "b", "ranks": [1, 2, 3, 5]}], sharding="none"
        ),
        tied=True,
        slow=True,
    ),
    Case(
        name="pp2_dp2_virtual3_tied",
        description="three stages per rank, replicas, tied, accumulation",
        config=_config(2, 2, schedule="interleaved_1f1b", virtual_stages=3),
        layers=7,
        tied=True,
        accumulate=2,
        slow=True,
    ),
    Case(
        name="pp2_dp2_zbv_tied",
        description="V schedule with replicas and sharded optimizer",
        config=_config(2, 2, schedule="zbv"),
        model="gpt2",
        tied=True,
        uneven=True,
        lengths=(9, 13, 4),
        slow=True,
    ),
    Case(
        name="pp4_interleaved_zb_one_stage",
        description="zero bubble with one stage per rank",
        config=_config(4, schedule="interleaved_zb", virtual_stages=1),
        model="gpt2",
        slow=True,
    ),
    Case(
        name="pp2_checkpointing",
        description="activations are recomputed",
        config=_config(2),
        tied=True,
        checkpointing=True,
        slow=True,
    ),
    Case(
        name="pp2_ragged_virtual",
        description="batches too small for the schedule are run in the GPipe order",
        config=_config(2, schedule="dualpipev"),
        **CHANGING,
        slow=True,
    ),
    Case(
        name="pp2_dynamic_shapes",
        description="shapes are sent along with every activation",
        config=_config(2, dynamic_shapes=True),
        **CHANGING,
        slow=True,
    ),
)

# ---- deliberate mistakes: the comparison must see each of them -----------------------------------------------------
_UNTOUCHED = {"steps": 3}

MISTAKES = (
    Case(
        name="norm_of_one_stage",
        description="each stage clips by the norm of its own gradients",
        config=_config(2),
        clip=0.5,
        mistake="norm_of_one_stage",
        seen_in="norm",
        **_UNTOUCHED,
    ),
    Case(
        name="weighted_by_samples",
        description="micro-batches count by their samples, not their tokens",
        config=_config(2),
        mistake="weighted_by_samples",
        seen_in="loss",
        **_UNTOUCHED,
    ),
    Case(
        name="tied_gradient_not_summed",
        description="the two copies of a tied weight are stepped by their own gradients",
        config=_config(2),
        tied=True,
        mistake="tied_gradient_not_summed",
        seen_in="copies",
        **_UNTOUCHED,
    ),
    Case(
        name="scaled_once_more",
        description="gradients are divided by the number of micro-batches at the end of each batch",
        config=_config(2),
        accumulate=2,
        mistake="scaled_once_more",
        seen_in="norm",
        **_UNTOUCHED,
    ),
    Case(
        name="first_mask_for_all",
        description="every micro-batch gets the first one's attention mask",
        config=_config(2, check_loss=False),  # the engine's own check finds it, too
        mistake="first_mask_for_all",
        seen_in="loss",
        **_UNTOUCHED,
    ),
    Case(
        name="labels_one_batch_late",
        description="the last stage compares with the labels of the batch before",
        config=_config(2),
        mistake="labels_one_batch_late",
        seen_in="loss",
        **_UNTOUCHED,
    ),
    Case(
        name="another_schedule",
        description="the micro-batches run in another order than the schedule's (the numbers alone do not tell)",
        config=_config(2),
        mistake="another_schedule",
        seen_in="order",
        **_UNTOUCHED,
    ),
    Case(
        name="replicas_not_summed",
        description="each replica keeps its own gradient",
        config=_config(dp=2),
        mistake="replicas_not_summed",
        seen_in="norm",
        **_UNTOUCHED,
    ),
    Case(
        name="mean_over_replicas",
        description="replicas with unequal token counts weigh the same",
        config=_config(dp=2, num_microbatches=2),
        uneven=True,
        mistake="mean_over_replicas",
        seen_in="loss",
        **_UNTOUCHED,
    ),
    Case(
        name="tensor_parallel_gradient_not_summed",
        description="weights that every tensor-parallel rank holds keep the gradient of their own rank",
        config=_config(tp=2),
        mistake="tensor_parallel_gradient_not_summed",
        seen_in="copies",
        **_UNTOUCHED,
    ),
    Case(
        name="tokens_counted_on_every_rank",
        description="ranks that hold the same tokens each count them",
        config=_config(dp=2, tp=2),
        mistake="tokens_counted_on_every_rank",
        seen_in="loss",
        **_UNTOUCHED,
    ),
    Case(
        name="stages_in_wrong_order",
        description="the second and the third rank of the pipeline are taken for each other",
        config=_config(4, schedule="gpipe"),
        mistake="stages_in_wrong_order",
        seen_in="loss",
        **_UNTOUCHED,
    ),
)

# ---- dropout: no single process draws the same numbers, but each run repeats itself --------------------------------
REPEATED = (
    Case(
        name="dropout_repeats_pp2",
        description="two runs from one seed are equal bit for bit",
        config=_config(2),
        model="gpt2",
        tied=True,
        dropout=0.2,
        steps=3,
    ),
    Case(
        name="dropout_repeats_pp2_dp2",
        description="the same with replicas and virtual stages",
        config=_config(2, 2, schedule="interleaved_1f1b"),
        model="gpt2",
        dropout=0.2,
        steps=3,
    ),
    Case(
        name="dropout_repeats_pp2_tp2",
        description="the same with tensor parallelism",
        config=_config(2, 1, 2),
        model="gpt2",
        tied=True,
        dropout=0.2,
        steps=3,
    ),
)

CASES = (*FAST, *SLOW)
assert len({case.name for case in (*CASES, *MISTAKES, *REPEATED)}) == len(CASES) + len(MISTAKES) + len(REPEATED)


def without_mistake(case: Case) -> Case:
    """The same training, right."""
    return replace(case, mistake=None, name=f"{case.name}_put_right")
