# SPDX-License-Identifier: Apache-2.0
"""The commands as people type them, and processes that never asked for Holmes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holmes_core.errors import ConfigError
from tests.accelerate.test_loop import assert_same
from tests.lightning.farm import ROOT

LOOP = ROOT / "tests" / "scripts" / "accelerate" / "loop.py"
ACCELERATE = Path(sys.executable).parent / "accelerate"
HOLMES = Path(sys.executable).parent / "holmes"
YAML = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
num_processes: 2
use_cpu: true
mixed_precision: 'no'
main_process_port: 0
holmes_config:
  pp: 2
  num_microbatches: 2
"""
WORDS = ["--layers", "2", "--epochs", "1", "--rows", "12"]


def read(out: Path, world: int = 2) -> list[dict[str, Any]]:
    import torch

    records = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(world)]
    records[0]["weights"] = torch.load(out / "weights.pt")
    return records


@pytest.mark.parametrize("how", ["accelerate", "holmes"])
def test_the_script_is_split(run_script: Any, plain: Any, tmp_path: Path, how: str) -> None:
    (tmp_path / "holmes.yaml").write_text(YAML)
    (tmp_path / "out").mkdir()
    if how == "accelerate":
        words, env = [ACCELERATE, "launch", "--config", "holmes.yaml"], {}
    else:
        words, env = [HOLMES, "launch", "holmes.yaml"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    # The script's own --config is the script's.
    output = run_script([*words, LOOP, "out", *WORDS, "--config", "own"], env=env, timeout=200).check()
    assert "could not add itself" not in output
    assert_same(read(tmp_path / "out"), plain("loop.py", *WORDS))


def test_config_file_is_the_same_and_wrong_keys_are_found_before_anything_starts(
    run_script: Any, tmp_path: Path
) -> None:
    (tmp_path / "holmes.yaml").write_text(YAML.replace("pp: 2", "pq: 2"))
    run = run_script([ACCELERATE, "launch", "--config_file", "holmes.yaml", LOOP, "out"], timeout=100)
    assert run.returncode != 0
    assert "unknown key 'pq'" in run.output
    assert "line 8" in run.output
    assert "Holmes plan" not in run.output


PROBE = """
import sys, torch, accelerate, accelerate.local_sgd
from accelerate import Accelerator
from accelerate.state import PartialState
marks = [name for kind in (Accelerator, PartialState, accelerate.local_sgd.LocalSGD) for name in vars(kind)]
print([name for name in marks if "holmes" in name], type(Accelerator(cpu=True)).__name__,
      [name for name in sys.modules if name.startswith("holmes_core.runtime")])
"""


def test_nothing_happens_where_holmes_is_not_asked_for(run_script: Any, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    output = run_script(["probe.py"], env={"HOLMES_CONFIG": None}).check()
    assert output.strip().splitlines()[-1] == "[] Accelerator []"


def test_holmes_config(run_script: Any, tmp_path: Path) -> None:
    words = [HOLMES, "config", "--processes", "8", "--machines", "2", "--pp", "4", "--mixed-precision", "bf16"]
    run_script([*words, "--main-ip", "10.0.0.1"]).check()
    import yaml

    from holmes_core.config import HolmesConfig

    data = yaml.safe_load((tmp_path / "holmes.yaml").read_text())
    assert (data["num_processes"], data["num_machines"], data["main_process_ip"]) == (8, 2, "10.0.0.1")
    assert HolmesConfig.load({"config": str(tmp_path / "holmes.yaml")}).pp == 4
    assert "--force" in run_script(words).output  # never over an existing file
    bad = run_script([HOLMES, "config", "-o", "b.yaml", "--processes", "6", "--pp", "4"])
    assert bad.returncode == 2
    assert "does not divide 6" in bad.output


def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, *words: str) -> tuple[Any, dict[str, Any]]:
    import accelerate.commands.launch as module
    import yaml

    from holmes_accelerate import launcher
    from holmes_accelerate.registry import patch_launch

    patch_launch(module)
    monkeypatch.setenv("HOLMES_CONFIG", str(tmp_path / "holmes.yaml"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    (tmp_path / "holmes.yaml").write_text(text)
    args = module.launch_command_parser().parse_args(["--config", str(tmp_path / "holmes.yaml"), *words, "train.py"])
    path = launcher._prepare(args)
    data = yaml.safe_load(Path(path).read_text()) if path else {}
    if path:
        Path(path).unlink()
    return args, data


def test_machines_with_unequal_numbers_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate divides a total evenly: each machine is told the total that gives its own number."""
    text = YAML.replace("num_processes: 2", "processes_per_machine: [8, 2]")
    for rank, own in enumerate((8, 2)):
        _, data = prepared(tmp_path, monkeypatch, text, "--machine_rank", str(rank))
        assert data["num_processes"] // data["num_machines"] == own
    with pytest.raises(ConfigError, match="machine_rank 2"):
        prepared(tmp_path, monkeypatch, text, "--machine_rank", "2")


def test_other_engines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="fsdp_config beside holmes_config"):
        prepared(tmp_path, monkeypatch, YAML + "fsdp_config:\n  fsdp_version: 2\n")


def test_a_yaml_without_the_section_is_accelerates_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, data = prepared(tmp_path, monkeypatch, YAML.partition("holmes_config")[0])
    assert data == {}
    assert args.config_file == str(tmp_path / "holmes.yaml")


@pytest.mark.slow
def test_a_job_on_machines_of_one_and_two_processes(plain: Any, tmp_path: Path) -> None:
    """Two launchers on this machine, as if on two: one pipeline of three stages."""
    port = 29700 + os.getpid() % 200
    text = YAML.replace("num_processes: 2", "processes_per_machine: [1, 2]").replace("pp: 2", "pp: 3")
    text = text.replace("main_process_port: 0", f"main_process_ip: 127.0.0.1\nmain_process_port: {port}")
    (tmp_path / "holmes.yaml").write_text(text)
    (tmp_path / "out").mkdir()
    words = ["--layers", "3", "--epochs", "1", "--rows", "12"]
    launches = []
    for machine in range(2):
        command = [ACCELERATE, "launch", "--config", "holmes.yaml", "--machine_rank", machine, LOOP, "out", *words]
        with (tmp_path / f"{machine}.log").open("w") as log:
            launches.append(
                subprocess.Popen([str(w) for w in command], stdout=log, stderr=subprocess.STDOUT, cwd=tmp_path)
            )
    try:
        codes = [launch.wait(200) for launch in launches]
    finally:
        for launch in launches:
            launch.terminate()
            launch.wait(60)
    assert codes == [0, 0], "".join((tmp_path / f"{m}.log").read_text()[-3000:] for m in range(2))
    assert_same(read(tmp_path / "out", 3), plain("loop.py", *words))
