# SPDX-License-Identifier: Apache-2.0
"""`holmes detect` and `holmes topology`: what a person and a program get to see."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from holmes_core.cli import main
from holmes_core.cluster.nic import Accelerator, Inventory, Nic
from holmes_core.cluster.topology import Topology
from tests.core.cluster.trees import MAPPED, V2, Tree


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "HOLMES_SYSFS", "HOLMES_DEV", "HOLMES_HOST"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    tree = Tree(tmp_path / "n1")
    for number in range(2):
        tree.port(f"mlx5_{number}").gids(f"mlx5_{number}", ("fec0:0000:0000:0001:0202:02ff:fe02:0202", ""))
    tree.port("mlx5_2", state="2: INIT").port("mlx5_9", layer="Ethernet", rate="25 Gb/sec (1X EDR)")
    return tree.gids("mlx5_9", (MAPPED.format(192, 0, 2, 6), V2)).net("eno1").net("lo", type="772")


def inventory(host: str, number: int, kind: str = "infiniband") -> Inventory:
    rail = Nic(device="mlx5_0", kind=kind, rate=200.0, state="active", addresses=(f"10.0.0.{number}/24",))  # type: ignore[arg-type]
    carrier = Nic(device="eth0", kind="ethernet", netdev="eth0", rate=25.0, addresses=(f"192.0.2.{number}/24",))
    rails = () if kind == "ethernet" else ("mlx5_0",)
    return Inventory(
        host=host,
        nics=(rail, carrier) if rails else (carrier,),
        rails=rails,
        kind=kind,  # type: ignore[arg-type]
        ethernet="eth0",
        accelerators=tuple(Accelerator(index=n, nearest="mlx5_0" if rails else "") for n in range(2)),
    )


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    found = []
    for number, (host, kind) in enumerate(
        (("a1", "infiniband"), ("a2", "infiniband"), ("b1", "roce"), ("c1", "ethernet"))
    ):
        path = tmp_path / f"{host}.json"
        path.write_text(json.dumps(inventory(host, number + 1, kind).to_json()))
        found.append(str(path))
    return found


def test_detect_shows_verdicts_and_the_conclusion(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", "--sysfs", str(tree.sysfs), "--host", "n1"]) == 0
    output = capsys.readouterr().out
    for text in (
        "Host n1",
        "infiniband: 2 rails x 200 Gbit/s; degraded, 1 more cannot be used",
        "=mlx5_0,mlx5_1",
        "no: INIT: link up, no subnet manager yet",
        "not a rail: the infiniband devices",
        "=eno1",
        "cannot carry a job: lo (loopback)",
        "degraded: 2 of 3 rails usable",
    ):
        assert text in output
    assert output.isascii()
    assert max(map(len, output.splitlines())) <= 120


def test_detect_json_and_back(tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", "--sysfs", str(tree.sysfs), "--host", "n7", "--json"]) == 0
    text = capsys.readouterr().out
    assert Inventory.from_json(json.loads(text)).host == "n7"
    (tmp_path / "n7.json").write_text(text)
    assert main(["detect", "--from", str(tmp_path / "n7.json"), "--json"]) == 0
    assert capsys.readouterr().out == text


def test_detect_this_host(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "^=mlx5_0,^=mlx5_1")
    main(["detect", "--all"])
    output = capsys.readouterr().out
    assert f"Host {socket.gethostname()}" in output
    assert "modifiers are allowed once" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["detect", "--sysfs", "/nowhere"], "no directory '/nowhere'"),
        (["detect", "--sysfs", "/proc"], "has no class/ in it"),
        (["detect", "--from", "/nowhere.txt"], "cannot be read"),
        (["topology"], "no launcher: RANK and WORLD_SIZE"),
        (["topology", "--from", "/nowhere.json"], "cannot be read"),
    ],
)
def test_wrong_calls(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "do:" in error


def test_topology_of_files(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "topology.svg"
    assert main(["topology", "--from", *files, "--picture", str(picture)]) == 0
    output = capsys.readouterr().out
    for text in ("infiniband-0", "roce-0", "ethernet-0", "=mlx5_0", "between clusters: eth0 (all on 192.0.2.0/24)"):
        assert text in output
    assert output.isascii()
    assert "<svg" in picture.read_text()[:400]
    assert main(["topology", "--from", *files, "--picture", str(tmp_path / "x.txt")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_topology_json_and_back(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--from", *files, "--json"]) == 0
    text = capsys.readouterr().out
    topology = Topology.from_json(json.loads(text))
    assert [(c.name, c.ranks) for c in topology.clusters] == [
        ("infiniband-0", (0, 1, 2, 3)),
        ("roce-0", (4, 5)),
        ("ethernet-0", (6, 7)),
    ]
    (tmp_path / "all.json").write_text(text)
    assert main(["topology", "--from", str(tmp_path / "all.json"), "--json"]) == 0
    assert capsys.readouterr().out == text


def test_declared_clusters_go_first(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    declared = tmp_path / "clusters.yaml"
    declared.write_text("clusters: [{name: east, hosts: [a1, b1]}, {name: west, hosts: [a2, c1]}]\n")
    assert main(["topology", "--from", *files, "--cluster", str(declared)]) == 0
    output = capsys.readouterr().out
    assert "east" in output
    assert "declared" in output


def test_topology_asks_all_ranks(run_script) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def start(rank: int) -> str:
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return run_script(["-m", "holmes_core.cli", "topology"], env={**env, "HOLMES_HOST": f"n{rank}"}).check()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(start, range(2))
    assert "n0" in first
    assert "n1" in first
    assert second.strip() == ""


def test_srun_needs_no_meeting_place(run_script) -> None:
    job = next(number for number in range(200, 999) if _is_free(29500 + number))

    def start(rank: int) -> str:
        env = {"SLURM_PROCID": str(rank), "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(job)}
        env |= {"SLURM_JOB_NODELIST": "127.0.0.1", "HOLMES_HOST": f"n{rank}"}
        return run_script(["-m", "holmes_core.cli", "topology", "--timeout", "60"], env=env).check()

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(start, range(2))
    assert "n1" in first


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) != 0


def test_absent_ranks_are_named(run_script) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = run_script(["-m", "holmes_core.cli", "topology", "--timeout", "2"], env=env)
    assert result.returncode != 0
    assert "rank 1: was never heard of" in result.output


def test_a_large_cluster_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for number in range(40):
        one = inventory(f"n{number}", number + 1, "roce")
        if number == 33:
            one = replace(one, missing_rails=1)
        paths.append(tmp_path / f"n{number}.json")
        paths[-1].write_text(json.dumps(one.to_json()))
    assert main(["topology", "--from", *map(str, paths)]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "roce-0" in line]
    assert rows[:7] == ["roce-0", "n0", "n1", "n2", "n3", "n33", "(35"]


def test_the_picture_of_many_hosts(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from holmes_core.cluster.topology import build_topology
    from holmes_core.config import HolmesConfig
    from holmes_core.report.topology_picture import draw_topology

    hosts = [inventory(f"node{n:03}", n, "roce" if n % 2 else "infiniband") for n in range(40)]
    topology = build_topology(HolmesConfig(), [one.host for one in hosts], hosts)
    draw_topology(topology, tmp_path / "many.png")
    assert (tmp_path / "many.png").read_bytes()[:4] == b"\x89PNG"
