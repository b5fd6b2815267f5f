# SPDX-License-Identifier: Apache-2.0
"""`holmes lab`: run, up, down, show, as a user calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holmes_core.cli import main
from holmes_core.lab.session import why_not
from holmes_core.lab.state import list_labs

LAB = [sys.executable, "-m", "holmes_core.cli", "lab"]
lab = pytest.mark.lab


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text("{cpu: none, clusters: [{name: a, kind: infiniband, hosts: 1}, {name: b, kind: roce, hosts: 1}]}")
    return path


@pytest.fixture
def _all_gone() -> Iterator[None]:
    before = {state.name for state in list_labs()}
    yield
    assert {state.name for state in list_labs()} <= before


def run(*words: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *map(str, words)], capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "x.yaml"], "write it after the lab: FILE -- CMD"),
        (["run", "nothing.yaml", "--", "true"], "nothing.yaml: No such file"),
        (["run", "nolab", "--", "true"], "no lab 'nolab'; "),
        (["run", "nolab", "--env", "x", "--", "true"], "write --env NAME=VALUE"),
        (["down", "nolab"], "no lab 'nolab'"),
        (["show", "nolab"], "no lab 'nolab'"),
    ],
)
def test_mistakes(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", *words]) == 2
    assert message in capsys.readouterr().err


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["lab"], ["lab", "rnu"], ["lab", "down"], ["lab", "run", "x.yaml", "true"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)
        assert "usage: holmes lab" in capsys.readouterr().err


def test_without_root_the_reason_is_given(spec: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert why_not() == "a lab needs root: run it with sudo"
    assert main(["lab", "run", str(spec), "--", "true"]) == 2
    assert "sudo" in capsys.readouterr().err


def test_without_iproute2_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt-get install iproute2" in why_not()


def test_on_another_system_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in why_not()


@lab
@pytest.mark.usefixtures("_all_gone")
def test_run(spec: Path, tmp_path: Path) -> None:
    done = run(
        "run", spec, "--counters", tmp_path / "bytes.json", "--env", "X=1", "--",
        "sh", "-c", "echo $RANK/$WORLD_SIZE $(hostname) $X; printf unfinished; [ $RANK = 0 ] || printf '1\\r2\\n'",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {"a1:0| 0/2 a1 1", "b1:1| 1/2 b1 1", "a1:0| unfinished", "b1:1| unfinished1", "b1:1| 2"} <= set(lines)
    assert any(line.split()[:4] == ["b1", "b", "rdma0", "roce"] for line in lines)
    data = json.loads((tmp_path / "bytes.json").read_text())
    assert (data["returncode"], data["failed"]) == (0, "")
    assert data["hosts"]["a1"] == {"eth0": {"tx": 0, "rx": 0}, "rdma0": {"tx": 0, "rx": 0}}


@lab
@pytest.mark.usefixtures("_all_gone")
@pytest.mark.parametrize(
    ("script", "status", "how"),
    [
        ("[ $RANK = 1 ] && exit 7; sleep 100", 7, "exit status 7"),
        ("[ $RANK = 1 ] && kill -9 $$; sleep 100", 137, "SIGKILL"),
        pytest.param(
            "[ $RANK = 1 ] && exit 3; trap '' TERM; sleep 100", 3, "exit status 3", marks=pytest.mark.slow, id="deaf"
        ),
    ],
)
def test_the_first_failing_rank_ends_the_others(spec: Path, script: str, status: int, how: str) -> None:
    start = time.monotonic()
    done = run("run", spec, "--grace", "0.5", "--", "sh", "-c", script)
    assert done.returncode == status
    assert f"holmes lab: b1:1 failed ({how})" in done.stdout
    assert time.monotonic() - start < 15


@lab
@pytest.mark.usefixtures("_all_gone")
def test_a_job_ends_after_its_time(spec: Path) -> None:
    done = run("run", spec, "--timeout", "0.5", "--", "sleep", "100")
    assert done.returncode == 124
    assert "time is up" in done.stdout


@lab
@pytest.mark.usefixtures("_all_gone")
def test_a_program_that_does_not_exist(spec: Path) -> None:
    done = run("run", spec, "--", "no-such-program")
    assert done.returncode == 127
    assert "cannot run 'no-such-program'" in done.stdout


@lab
@pytest.mark.usefixtures("_all_gone")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_the_ranks_and_the_lab(spec: Path, signum: signal.Signals) -> None:
    code = "import signal, sys, time\nfor s in (1, 2, 15): signal.signal(s, lambda n, _: sys.exit(f'got {n}'))\n"
    code += "print('ready', flush=True)\ntime.sleep(100)"
    command = [*LAB, "run", str(spec), "--", sys.executable, "-I", "-S", "-c", code]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert {parent.stdout.readline() for _ in range(2)} == {"a1:0| ready\n", "b1:1| ready\n"}
    parent.send_signal(signum)
    text, _ = parent.communicate(timeout=20)
    assert parent.returncode == 128 + signum
    assert f"a1:0| got {int(signum)}" in text


@lab
@pytest.mark.usefixtures("_all_gone")
def test_up_run_show_down(spec: Path) -> None:
    name = f"test-{os.getpid()}"
    up = run("up", spec, "--name", name)
    assert up.returncode == 0, up.stderr
    try:
        assert f"holmes-{name}.host-a1" in up.stdout
        assert f"{name}  a (infiniband, 1), b (roce, 1)" in run("show").stdout
        assert name in [state["name"] for state in json.loads(run("show", "--json").stdout)]
        shown = json.loads(run("show", name, "--json").stdout)
        assert shown["namespaces"]["b1"] == f"holmes-{name}.host-b1"
        part = run("run", name, "--hosts", "b", "--", "sh", "-c", "echo $RANK/$WORLD_SIZE; (sleep 100 & ) ")
        assert "b1:1| 1/2" in part.stdout
        assert "a1:0|" not in part.stdout
        assert json.loads(run("show", name, "--json").stdout)["hosts"]["b1"]["rdma0"] == {"tx": 0, "rx": 0}
        again = run("up", spec, "--name", name)
        assert again.returncode == 2
        assert f"`holmes lab down {name}`" in again.stderr
    finally:
        down = run("down", name)
    assert f"{name} is down" in down.stdout
