# SPDX-License-Identifier: Apache-2.0
"""Any text may be a holmes.yaml or a cluster file: it is taken, or refused with an error that says what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holmes_core.config import HolmesConfig
from holmes_core.errors import ConfigError
from tests.core.damage import damaged_json

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MANY = settings(
    max_examples=10_000,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

FIELDS = [item.name for item in dataclasses.fields(HolmesConfig)]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.floats(), st.text(max_size=8),
    st.sampled_from(["1f1b", "zbv", "auto", "a[1-3]", "n1", "infiniband", "0-3", "first", "x" * 300]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=6), part, max_size=3),
    max_leaves=6,
)
CLUSTERS = st.lists(
    st.dictionaries(st.sampled_from(["name", "kind", "hosts", "ranks", "gpu", "link", "nmae"]), VALUES, max_size=5)
    | VALUES,
    max_size=3,
)
CONFIGS = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), VALUES, max_size=4)


def check(load: Any) -> None:
    refused = None
    try:
        load()
    except ConfigError as error:  # anything else fails the test
        refused = error
    assert refused is None or (refused.seen and refused.do)


def config_file(folder: Path, text: str) -> None:
    path = folder / "holmes.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    check(lambda: HolmesConfig.load({}, env={"HOLMES_CONFIG": str(path)}))


def cluster_file(folder: Path, text: str) -> None:
    path = folder / "clusters.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    check(lambda: HolmesConfig.load({}, env={"HOLMES_CLUSTER": str(path)}))


def as_yaml(value: Any) -> str:
    return str(yaml.safe_dump(value, allow_unicode=True))


@FEW
@given(text=st.text(max_size=80))
def test_any_text(tmp_path: Path, text: str) -> None:
    config_file(tmp_path, text)
    cluster_file(tmp_path, text)


@FEW
@given(config=CONFIGS)
def test_any_settings(tmp_path: Path, config: Any) -> None:
    config_file(tmp_path, as_yaml(config))
    check(lambda: HolmesConfig.load(config, env={}))


@FEW
@given(clusters=CLUSTERS)
def test_any_clusters(tmp_path: Path, clusters: Any) -> None:
    cluster_file(tmp_path, as_yaml({"clusters": clusters}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MANY
@given(config=CONFIGS, clusters=CLUSTERS, text=st.text(max_size=80))
def test_many(tmp_path: Path, config: Any, clusters: Any, text: str) -> None:
    config_file(tmp_path, as_yaml(config))
    config_file(tmp_path, text)
    check(lambda: HolmesConfig.load(config, env={}))
    cluster_file(tmp_path, as_yaml({"clusters": clusters}))


PLANS = [path.read_text() for path in sorted((Path(__file__).parent / "plan/goldens").glob("*.json"))]


def plan_file(folder: Path, text: str) -> None:
    path = folder / "plan.json"
    path.write_text(text)
    check(lambda: HolmesConfig.load({"plan": str(path)}, env={}))


@FEW
@given(text=damaged_json(PLANS))
def test_any_plan(tmp_path: Path, text: str) -> None:
    plan_file(tmp_path, text)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MANY
@given(text=damaged_json(PLANS))
def test_ten_thousand_plans(tmp_path: Path, text: str) -> None:
    plan_file(tmp_path, text)
