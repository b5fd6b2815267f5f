# SPDX-License-Identifier: Apache-2.0
"""What a job refuses before it plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from holmes_core.cluster.host import Cluster, Host
from holmes_core.cluster.topology import Topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.runtime.planning import settle
from holmes_core.runtime.probe import StepHint


@pytest.mark.parametrize("values", [{"schedule": "zbv"}, {"defer_weights": True}])
def test_a_model_that_recomputes_its_blocks_is_refused_where_backward_passes_are_split(values: dict[str, Any]) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=4, n_head=2, vocab_size=16, n_positions=8))
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has gradient checkpointing switched on"):
        settle(
            HolmesConfig(pp=2, **values),
            model,
            Topology(clusters=(Cluster(name="a", kind="ethernet", hosts=(Host(name="h", ranks=(0, 1)),)),)),
            device=torch.device("cpu"),
            hint=StepHint(),
        )
