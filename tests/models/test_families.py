# SPDX-License-Identifier: Apache-2.0
"""Every family of the zoo through the real engine: its numbers are those of one process, or it is refused.

`make test` runs the families below, `make test-all` all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.models import zoo
from tests.models.family_cases import family
from tests.models.pipeline import Workers, assert_same

# One of each kind of forward: the others of the zoo are its siblings.
_FAST = """
    llama llama-tied gpt2 gpt_neo opt opt-350m openai-gpt biogpt bert electra roformer bloom mpt falcon falcon-alibi
    gptj codegen gpt_neox phi phi3 qwen2 qwen3 qwen2-sliding mistral gemma gemma2 gemma3_text cohere granite stablelm
    nemotron starcoder2 olmo2 mixtral gpt_oss deepseek_v3 longcat_flash mamba mamba2 rwkv recurrent_gemma qwen3_next
    lfm2 falcon_h1 xlstm xlnet bart whisper deepseek_v4 roc_bert camembert
"""
FAST = _FAST.split()
# Refused, and by which words. Everything else must be exact.
REFUSED = {
    "mixtral-router-loss": "output_router_logits is True",
    "zaya": "argument 1 of block 'model.layers.2' comes from 'model.layers.1'",
    "glm_moe_dsa": "argument 'prev_topk_indices' of block",
    "hy_v4": "argument 'prev_topk_indices' of block",
    "gemma3n_text": "per_layer_model_projection",
    "gemma4_text": "per_layer_model_projection",
    "gemma4_unified_text": "writes into its argument 'shared_kv_states'",
    "inkling2_text": "embed_tokens",
    "inkling2_loop_text": "embed_tokens",
    "hrm_text": "two lists of blocks",
    "dory": "was called where",
    "xlm": "two lists of blocks",
    "reformer": "autograd.Function _ReversibleFunction",
    "prophetnet": "prophetnet.decoder",
    "t5": "two lists of blocks",
    "bart-seq2seq": "two lists of blocks",
}
# Every hybrid block reads the embeddings, which are tied to the head: both of two stages hold them, not all of three.
REFUSED_ON_THREE = {"zamba": "embed_tokens", "zamba2": "embed_tokens"}
FAST_REFUSED = ["mixtral-router-loss", "zaya", "gemma4_unified_text", "inkling2_text", "dory", "reformer", "t5"]
_RULES = {True: "shifted_tokens", False: "tokens"}


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def three() -> Iterator[Workers]:
    workers = Workers(3)
    yield workers
    workers.close()


def _params(names: list[str], fast: list[str]) -> list[object]:
    return [pytest.param(n, marks=() if n in fast else pytest.mark.slow) for n in names if n in zoo.FAMILIES]


def test_every_family_has_a_place() -> None:
    assert set(FAST) <= set(zoo.FAMILIES) - set(REFUSED)
    exact = {name for name, entry in zoo.FAMILIES.items() if entry.split != "plain"} - set(REFUSED)
    # A small frozen table of positions lives on every stage; so do cpmant's raw parameter for position biases.
    assert exact - set(REFUSED_ON_THREE) == {"roformer", "cpmant"}


@pytest.mark.parametrize("name", _params([n for n in zoo.FAMILIES if n not in REFUSED], FAST))
def test_two_stages_are_exact(two: Workers, name: str) -> None:
    values = assert_same(two.run(family, name, (2, 3)))
    if zoo.FAMILIES[name].padding:  # else all rules give the same weights
        assert {found["rule"] for found in values} == {_RULES[zoo.FAMILIES[name].shifted]}


@pytest.mark.parametrize(
    "name",
    _params(
        [n for n in zoo.FAMILIES if n not in {**REFUSED, **REFUSED_ON_THREE}],
        ["llama", "gpt2", "mixtral", "bert", "xlnet", "mamba", "bloom"],
    ),
)
def test_three_stages_are_exact(three: Workers, name: str) -> None:
    assert_same(three.run(family, name, (1, 2, 2)))


@pytest.mark.parametrize("name", _params(list(REFUSED), FAST_REFUSED))
def test_refused(two: Workers, name: str) -> None:
    outcome = two.run(family, name, (2, 3))
    assert REFUSED[name] in outcome.refusal, outcome
    assert "do:" in outcome.refusal
    assert all(outcome.errors), "every rank ends"
    assert outcome.ended, "every process ends by itself"
    assert outcome.seconds < 30


@pytest.mark.parametrize("name", _params(list(REFUSED_ON_THREE), ["zamba"]))
def test_refused_on_three_stages(three: Workers, name: str) -> None:
    outcome = three.run(family, name, (1, 2, 2))
    assert REFUSED_ON_THREE[name] in outcome.refusal
    assert all(outcome.errors)
    assert outcome.ended


@pytest.mark.parametrize("layers", [(1, 4), (4, 1), (3, 2)])
@pytest.mark.parametrize("name", _params(list(REFUSED), []))
def test_refused_wherever_it_is_cut(two: Workers, name: str, layers: tuple[int, int]) -> None:
    """Never wrong numbers: where only the stage that reads runs the writers, too, a cut may even be exact."""
    outcome = two.run(family, name, layers)
    if not outcome.refusal:
        assert_same(outcome)
