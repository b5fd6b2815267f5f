# SPDX-License-Identifier: Apache-2.0
"""plan.json: written, read back the same, followed exactly or refused with the difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holmes_core.cli import main
from holmes_core.cluster.topology import Topology, build_topology
from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from holmes_core.plan.plan import Plan, make_plan
from holmes_core.plan.plan_file import check_followed, check_topology, read_plan, write_plan
from holmes_core.plan.profile_config import profile_of_config

GPT = {"model_type": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 128, "vocab_size": 1024}
CLUSTERS = """clusters:
  - {name: a, kind: infiniband, hosts: [a1, a2], gpus: 2}
  - {name: b, kind: roce, hosts: [b1, b2], gpus: 2, gpu: V100-32GB}
"""
HOSTS = ("b1", "b1", "b2", "b2", "a1", "a1", "a2", "a2")


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A plan whose pipeline ends in b."""
    (tmp_path / "config.json").write_text(json.dumps(GPT))
    (tmp_path / "cluster.yaml").write_text(CLUSTERS)
    words = ["--model", str(tmp_path / "config.json"), "--cluster", str(tmp_path / "cluster.yaml"), "--batch", "64"]
    out = tmp_path / "plan.json"
    assert main(["plan", *words, "--rank-zero", "b", "-o", str(out)]) == 0
    return out


def job(planned: Path, hosts: tuple[str, ...] = HOSTS, **more: object) -> tuple[HolmesConfig, Topology]:
    config = HolmesConfig.load({"plan": str(planned), **more}, env={})
    return config, build_topology(config, hosts)


def made(config: HolmesConfig, topology: Topology, **changes: object) -> Plan:
    facts = profile_of_config({**GPT, **changes}, seq=128).facts()
    return make_plan(config, topology, facts)


def test_a_plan_comes_back_as_it_was_written(planned: Path, tmp_path: Path) -> None:
    plan = read_plan(planned)
    assert plan.prediction is not None
    assert plan.prediction.step_seconds > 0
    assert len(plan.prediction.memory_bytes) == plan.layout.pp
    assert plan.model is not None
    assert plan.model.num_blocks == 6
    write_plan(plan, tmp_path / "again.json")
    assert read_plan(tmp_path / "again.json") == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_the_job_that_was_planned_follows_it(planned: Path) -> None:
    config, topology = job(planned)
    plan = read_plan(planned)
    check_topology(config, topology)
    found = made(config, topology)
    check_followed(config, found)
    assert (found.layout.pp, found.layout.dp, found.layout.tp) == (plan.layout.pp, plan.layout.dp, plan.layout.tp)
    assert found.layers_per_stage == plan.layers_per_stage


def test_rank_numbers_may_differ(planned: Path) -> None:
    """A launcher may number the hosts in another order, as long as rank 0 is in the right cluster."""
    config, topology = job(planned, ("b2", "b2", "a2", "a2", "b1", "b1", "a1", "a1"))
    check_topology(config, topology)
    check_followed(config, made(config, topology))


def test_rank_zero_in_another_cluster_is_refused(planned: Path) -> None:
    config, topology = job(planned, ("a1", "a1", "a2", "a2", "b1", "b1", "b2", "b2"))
    with pytest.raises(ConfigError, match="global rank 0 runs on a1 of cluster a") as caught:
        check_topology(config, topology)
    assert "start it on one of b1, b2" in caught.value.seen


def test_other_numbers_of_ranks_are_refused(planned: Path) -> None:
    config, topology = job(planned, ("b1", "b2", "b2", "a1", "a1", "a2", "a2"))
    with pytest.raises(ConfigError, match="host b1 of cluster b: planned 2 ranks, here 1"):
        check_topology(config, topology)


def test_hosts_that_are_not_there_are_refused(planned: Path) -> None:
    with pytest.raises(ConfigError, match="b2"):
        check_topology(*job(planned, ("b1", "b1", "a1", "a1", "a2", "a2")))


@pytest.mark.parametrize(("changes", "said"), [({"vocab_size": 2048}, "vocab_size: planned 1024, here 2048")])
def test_another_model_is_refused(planned: Path, changes: dict[str, object], said: str) -> None:
    config, topology = job(planned)
    with pytest.raises(ConfigError, match=said):
        check_followed(config, made(config, topology, **changes))


def test_another_number_of_blocks_is_refused(planned: Path) -> None:
    config, topology = job(planned)
    with pytest.raises(ConfigError, match="blocks"):
        check_followed(config, made(config, topology, n_layer=12))


def test_a_setting_that_contradicts_the_plan_is_refused(planned: Path) -> None:
    other = 2 * read_plan(planned).layout.pp
    with pytest.raises(ConfigError, match=f"pp {other}; the plan says {other // 2}"):
        job(planned, pp=other)
    assert job(planned, pp=other // 2)[0].pp == other // 2


def test_a_file_that_is_no_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"layout": 1}')
    with pytest.raises(ConfigError, match=r"no key|unknown"):
        HolmesConfig.load({"plan": str(tmp_path / "plan.json")}, env={})
    with pytest.raises(ConfigError, match="no plan can be read"):
        HolmesConfig.load({"plan": str(tmp_path / "absent.json")}, env={})
