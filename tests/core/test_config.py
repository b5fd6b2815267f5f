# SPDX-License-Identifier: Apache-2.0
"""What a user may say, from keyword arguments, yaml and environment; and how a mistake is answered."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from holmes_core import config as config_module
from holmes_core.config import SCHEDULES, HolmesConfig
from holmes_core.errors import ConfigError, HolmesError

CLUSTERS = [{"name": "a", "kind": "infiniband", "hosts": ["n1", "n2"]}, {"name": "b", "hosts": "m[1-2]"}]


def test_defaults_load_from_nothing() -> None:
    assert HolmesConfig.load({}, {}) == HolmesConfig() == HolmesConfig.load(None, {})


def test_every_field_has_a_docstring() -> None:
    body = ast.parse(inspect.getsource(HolmesConfig)).body[0].body  # type: ignore[attr-defined]
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(text, ast.Expr), f"{ast.unparse(field)} has no docstring"


def test_config_and_errors_need_no_torch() -> None:
    code = "import sys, holmes_core.plan.plan, holmes_core.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).returncode == 0


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("interleaved-1f1b", "interleaved_1f1b"),
        ("LoopedBFS", "looped_bfs"),
        ("InterleavedZeroBubble", "interleaved_zb"),
        ("ZBVZeroBubble", "zbv"),
        ("DualPipeV", "dualpipev"),
        *((name, name) for name in SCHEDULES),
    ],
)
def test_schedule_spellings(spelling: str, name: str) -> None:
    assert HolmesConfig(schedule=spelling).schedule == name


@pytest.mark.parametrize(
    ("schedule", "given", "expected"),
    [
        ("1f1b", None, 1),
        ("looped_bfs", None, 2),
        ("interleaved_1f1b", 3, 3),
        ("interleaved_zb", 1, 1),
        ("interleaved_zb", None, 2),
        ("zbv", None, 2),
        ("1f1b", 2, "exactly 1"),
        ("interleaved_1f1b", 1, "2 or more"),
        ("dualpipev", 3, "exactly 2"),
    ],
)
def test_stages_per_rank(schedule: str, given: int | None, expected: int | str) -> None:
    if isinstance(expected, int):
        assert HolmesConfig(schedule=schedule, virtual_stages=given).stages_per_rank == expected
    else:
        with pytest.raises(ConfigError, match=rf"HolmesConfig\.virtual_stages(?s:.)*{expected}"):
            HolmesConfig(schedule=schedule, virtual_stages=given)


def test_plain_values_as_parsers_give_them() -> None:
    config = HolmesConfig(
        clusters=CLUSTERS,  # type: ignore[arg-type]
        layers_per_stage="4, 4,3",  # type: ignore[arg-type]
        split_points=None,
        rank_order="0-1,3,2",  # type: ignore[arg-type]
        placement={"model.rotary_emb": "all"},
        timeout=30,
    )
    assert config.layers_per_stage == (4, 4, 3)
    assert config.rank_order == (0, 1, 3, 2)
    assert config.clusters is not None
    assert config.clusters[1].hosts == ("m1", "m2")
    assert type(config.timeout) is float
    assert HolmesConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pp", 0, "a whole number, 1 or more"),
        ("pp", True, r"pp is True \(bool\)"),
        ("tp", "2", "in yaml write 2 without quotes"),
        ("dp", 2.0, r"2\.0 \(float\)"),
        ("print_plan", 1, "true or false"),
        ("check_loss", "false", "without quotes"),
        ("schedule", "1fb1", r"did you mean '1f1b'\?(?s:.)*looped_bfs"),
        ("schedule", None, "NoneType"),
        ("sharding", "optimiser", r"did you mean 'optimizer'\?"),
        ("loss_weight", "mean", "auto, tokens, samples, sum"),
        ("init", "cuda", "auto, meta"),
        ("timeout", 0, "a positive number of seconds"),
        ("timeout", float("nan"), "a positive number of seconds"),
        ("layers_per_stage", "4,x", "whole numbers like 4,4,3"),
        ("layers_per_stage", [4, -1], "whole numbers like 4,4,3"),
        ("layers_per_stage", [], "a list like"),
        ("split_points", ["a", "a"], "different module names"),
        ("placement", {"m": "frist"}, r"did you mean 'first'\?"),
        ("placement", ["m"], "a mapping"),
        ("rank_order", [0, 2], "each rank from 0"),
        ("clusters", {"a": 1}, "a list like"),
        ("clusters", [], "a list like"),
        ("cluster_file", 3, "the path of a file"),
    ],
)
def test_wrong_values_name_field_value_and_remedy(field: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HolmesConfig(**{field: value})
    assert f"where: HolmesConfig.{field}" in str(caught.value)
    assert "\ndo: " in str(caught.value)


def test_contradictions() -> None:
    with pytest.raises(ConfigError, match="both num_microbatches and micro_batch_size"):
        HolmesConfig(num_microbatches=4, micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"layers_per_stage describes 3 stages(?s:.)*give 4 entries"):
        HolmesConfig(pp=2, schedule="zbv", layers_per_stage=(1, 2, 3))
    with pytest.raises(ConfigError, match=r"split_points describes 2 stages(?s:.)*give 2 entries"):
        HolmesConfig(pp=3, split_points=("a",))
    with pytest.raises(ConfigError, match=r"layers_per_stage describes 3 stages(?s:.)*pp x 2 "):
        HolmesConfig(schedule="zbv", layers_per_stage=(1, 2, 3))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_arguments_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "h.yaml", "pp: 2\ndp: 4\nmicro_batch_size: 3\ntp:\n")
    config = HolmesConfig.load({"config": path, "dp": 8, "num_microbatches": 6, "tp": None}, {})
    assert (config.pp, config.dp, config.tp) == (2, 8, None)
    assert (config.num_microbatches, config.micro_batch_size) == (6, None)
    assert HolmesConfig.load({}, {"HOLMES_CONFIG": path}).dp == 4
    assert HolmesConfig.load({}, {"HOLMES_CONFIG": "", "HOLMES_CLUSTER": ""}) == HolmesConfig()
    other = write(tmp_path / "o.yaml", "pp: 7\n")
    assert HolmesConfig.load({"config": other}, {"HOLMES_CONFIG": path}).pp == 7


def test_a_section_of_a_larger_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "num_processes: 4\nholmes_config:\n  pp: 2\n  schedule: GPipe\n")
    assert HolmesConfig.load({"config": path}, {}) == HolmesConfig(pp=2, schedule="gpipe")
    assert HolmesConfig.load({"config": write(tmp_path / "e.yaml", "")}, {}) == HolmesConfig()


def test_cluster_files(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    write(tmp_path / "site" / "c.yaml", "clusters: [{name: far, ranks: 0-3}]\n")
    in_file = write(tmp_path / "h.yaml", "cluster_file: site/c.yaml\n")
    near = write(tmp_path / "near.yaml", "clusters: [{name: near, ranks: 0-3}]\n")

    def names(kwargs: dict[str, Any], env: dict[str, str]) -> list[str]:
        return [spec.name for spec in HolmesConfig.load(kwargs, env).clusters or ()]

    assert names({"config": in_file}, {"HOLMES_CLUSTER": near}) == ["far"]
    assert names({}, {"HOLMES_CLUSTER": near}) == ["near"]
    assert names({"config": in_file, "cluster_file": near}, {}) == ["near"]
    assert names({"config": in_file, "clusters": CLUSTERS}, {}) == ["a", "b"]
    again = HolmesConfig.load({"config": in_file}, {})
    assert HolmesConfig.from_json(again.to_json()) == again


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pp: 2\npipline: 2\n", r"unknown key 'pipline'(?s:.)*h\.yaml, line 2"),
        ("pp: 2\nschedul: gpipe\n", r"did you mean 'schedule'\?(?s:.)*line 2"),
        ("dp: 2\n\npp: '2'\n", r"without quotes(?s:.)*HolmesConfig\.pp, from file .*h\.yaml, line 3"),
        ("placement: {m: x}\n", r"placement\['m'\], from file .*line 1"),
        ("pp: 2\npp: 4\n", "key 'pp' occurs twice, on lines 1 and 2"),
        ("pp: [2\n", r"not yaml(?s:.)*h\.yaml"),
        ("- pp\n", "a list"),
        ("just text\n", "a str"),
        ("num_microbatches: 2\nmicro_batch_size: 2\n", r"both num_microbatches and micro_batch_size(?s:.)*line 2"),
        ("clusters: [{ranks: 0-1}]\ncluster_file: x.yaml\n", "both clusters and cluster_file"),
        ("cluster_file: none.yaml\n", r"cannot read(?s:.)*none\.yaml \(named by file .*h\.yaml, line 1\)"),
        ("clusters: [{ranks: 0-1, kind: wifi}]\n", r"kind 'wifi'(?s:.)*clusters\[0\]\.kind, from file .*line 1"),
        ("cluster_file: 3\n", r"HolmesConfig\.cluster_file"),
    ],
)
def test_wrong_files_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HolmesConfig.load({"config": write(tmp_path / "h.yaml", text)}, {})


def test_wrong_places(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read(?s:.)*missing\.yaml"):
        HolmesConfig.load({"config": str(tmp_path / "missing.yaml")}, {})
    with pytest.raises(ConfigError, match="cannot read"):
        HolmesConfig.load({"config": str(tmp_path)}, {})
    with pytest.raises(ConfigError, match=r"'stage' (?s:.)*keyword arguments|unknown key 'stage'"):
        HolmesConfig.load({"stage": 2}, {})
    with pytest.raises(ConfigError, match="both num_microbatches and micro_batch_size"):
        HolmesConfig.load({"num_microbatches": 2, "micro_batch_size": 2}, {})
    bad = write(tmp_path / "c.yaml", "cluster: []\n")
    with pytest.raises(ConfigError, match=r"did you mean 'clusters'\?"):
        HolmesConfig.load({"cluster_file": bad}, {})
    with pytest.raises(ConfigError, match=r"no key 'clusters'(?s:.)*c\.yaml"):
        HolmesConfig.load({}, {"HOLMES_CLUSTER": write(tmp_path / "c.yaml", "clusters: []\n")})


def test_errors_have_one_shape() -> None:
    error = HolmesError(seen="a\nb", where="here", means="m", do="d")
    assert str(error) == "seen:  a\n       b\nwhere: here\nmeans: m\ndo:    d"
    assert str(HolmesError(seen="a", do="d")) == "seen:  a\ndo:    d"
    copy = pickle.loads(pickle.dumps(ConfigError(seen="s", where="w", do="d")))
    assert isinstance(copy, ValueError)
    assert (copy.seen, copy.where, copy.do) == ("s", "w", "d")
    assert set(config_module.__all__) >= {"HolmesConfig", "ClusterSpec"}


@pytest.mark.parametrize(
    "values", [{"schedule": "zbv"}, {"schedule": "interleaved_zb"}, {"schedule": "dualpipev"}, {"defer_weights": True}]
)
def test_split_backward_passes_do_not_recompute(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="about 10 times") as caught:
        HolmesConfig(recompute=True, **values)
    assert next(iter(values)) in str(caught.value.where)
    HolmesConfig(**values)
    HolmesConfig(recompute=False, **values)
