# SPDX-License-Identifier: Apache-2.0
"""The zoo itself: every family builds, trains one step, repeats exactly, and is what its row says."""

from __future__ import annotations

import math

import pytest
import torch

from tests.models import zoo

_OWN_LOSS = {
    "mixtral-router-loss",  # plus the router's loss
    "prophetnet",  # over all n-gram streams
}


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor, *, shift: bool) -> float:
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()


def test_the_zoo_is_large() -> None:
    assert len({family.model_type for family in zoo.FAMILIES.values()}) >= 62


@pytest.mark.parametrize("name", list(zoo.FAMILIES))
def test_family(name: str) -> None:
    family = zoo.FAMILIES[name]
    inputs = zoo.batch(name)
    rng = torch.get_rng_state()
    model = zoo.build(name)
    assert torch.equal(torch.get_rng_state(), rng), "build moved the global random state"
    assert model.training
    found = zoo.describe(model, inputs)
    assert math.isfinite(found["loss"])
    unexpected = [p for p in found["no_grad"] if not any(part in p for part in family.unused)]
    assert not unexpected, f"parameters without gradient: {unexpected}"
    assert found["blocks"]
    assert zoo.verdict(found) == family.split

    if name not in _OWN_LOSS:
        with torch.no_grad():
            logits = model(**inputs).logits
        assert found["loss"] == pytest.approx(_cross_entropy(logits, inputs["labels"], shift=family.shifted), abs=1e-5)

    again = zoo.build(name)
    for (key, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), key
    assert again(**inputs).loss.item() == found["loss"]


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "mamba"])
def test_seed_and_overrides(name: str) -> None:
    first, second = (next(zoo.build(name, seed=seed).parameters()) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert zoo.describe(zoo.build(name, num_hidden_layers=3))["n_blocks"] == 3


def test_batch_pads_rows_unequally() -> None:
    inputs = zoo.batch("llama", batch=3, seq=9)
    lengths = inputs["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == 3
    assert ((inputs["labels"] == -100) == (inputs["attention_mask"] == 0)).all()
    assert zoo.batch("llama", pad=False)["attention_mask"].all()


def _skip(module, args, output):
    return args[0] if isinstance(output, torch.Tensor) else (args[0], *output[1:])


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "mixtral", "mamba", "bloom"])
def test_every_block_matters(name: str) -> None:
    """Weights are drawn wide enough that a block left out shows in the loss far above rounding."""
    inputs = zoo.batch(name)
    model = zoo.build(name)
    path = zoo.describe(model, inputs)["blocks"]
    with torch.no_grad():
        whole = float(model(**inputs).loss)
        for block in model.get_submodule(path):
            handle = block.register_forward_hook(_skip)
            assert abs(float(model(**inputs).loss) - whole) > 1e-3
            handle.remove()
