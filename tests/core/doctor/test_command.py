# SPDX-License-Identifier: Apache-2.0
"""`holmes doctor`: what it reads, what it prints, what it returns."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys

import pytest

from holmes_core.cli import main
from tests.core.cluster.trees import LINK_LOCAL, MAPPED, V1, V2, Tree

FAULT = "n1:7:8 [0] misc/ibvwrap.cc:99 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory\n"
TIMEOUT = "n1:7:8 [0] misc/ibvwrap.cc:99 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out\n"


def doctor(*words: object) -> int:
    return main(["doctor", *map(str, words)])


def test_a_fault_is_printed_and_returned(tmp_path, capsys) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(FAULT)
    assert doctor(log) == 1
    out = capsys.readouterr().out
    for word in ("1. error  memlock", "seen", "means", "do", "nccl.log:1", "unlimited", "1 error"):
        assert word in out


def test_json(tmp_path, capsys) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(FAULT)
    assert doctor("--json", log) == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["status"], data["read"], data["findings"][0]["id"]) == (1, {str(log): "log"}, "memlock")
    assert set(data["findings"][0]) >= {"id", "severity", "seen", "means", "do", "where", "likelihood"}


def test_nothing_known(tmp_path, capsys) -> None:
    log = tmp_path / "train.log"
    log.write_text("epoch 0 loss 3.2\n")
    assert doctor(log) == 0
    assert "nothing in them tells a fault" in " ".join(capsys.readouterr().out.split())
    assert doctor(log, "--json") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_standard_input_and_gzip(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(FAULT.encode() + b"\xff\xfe\n")))
    assert doctor("-") == 1
    assert "-:1" in capsys.readouterr().out
    packed = tmp_path / "job.log.gz"
    packed.write_bytes(gzip.compress(FAULT.encode()))
    assert doctor(packed) == 1
    packed.write_bytes(gzip.compress(FAULT.encode())[:-9])
    assert doctor(packed) == 2


def test_several_logs_are_one_job(tmp_path, capsys) -> None:
    for name, devices in (("a", "[0]q0:1/IB [1]q1:1/IB"), ("b", "[0]q0:1/IB")):
        (tmp_path / f"{name}.log").write_text(
            f"{name}:1:2 [0] NCCL INFO NET/IB : Using {devices} [RO]; OOB e:192.0.2.1<0>\n"
        )
    assert doctor(tmp_path / "a.log", tmp_path / "b.log") == 1
    assert "unequal HCA sets: a has q0, q1; b has q0" in " ".join(capsys.readouterr().out.split())


def tree(root) -> Tree:
    table = (
        (LINK_LOCAL, V1),
        (LINK_LOCAL, V2),
        (MAPPED.format(198, 51, 100, 7), V1),
        (MAPPED.format(198, 51, 100, 7), V2),
    )
    return Tree(root).port("mlx5_4", layer="Ethernet").gids("mlx5_4", *table)


def test_the_gid_table_of_a_copied_sys(tmp_path, capsys) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("n1:7:8 [0] NCCL INFO NCCL_IB_GID_INDEX set by environment to 1.\n" + TIMEOUT)
    assert doctor(log, "--sysfs", tree(tmp_path / "root").sysfs) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "NCCL_IB_GID_INDEX=3" in out
    assert "index 1 is the RoCE v2 entry of the link-local address" in out


def test_a_log_of_this_host_needs_no_copy(tmp_path, capsys, monkeypatch) -> None:
    log = tmp_path / "nccl.log"
    log.write_text(TIMEOUT)
    monkeypatch.setenv("HOLMES_HOST", "n1")
    monkeypatch.setenv("HOLMES_SYSFS", str(tree(tmp_path / "root").sysfs))
    assert doctor(log) == 1
    assert "NCCL_IB_GID_INDEX=3" in capsys.readouterr().out


SHOW_GIDS = """DEV     PORT    INDEX   GID                                     IPv4            VER     DEV
---     ----    -----   ---                                     ------------    ---     ---
mlx5_4  1       0       fe80:0000:0000:0000:0202:02ff:fe02:0202                 v1      e7
mlx5_4  1       1       fe80:0000:0000:0000:0202:02ff:fe02:0202                 v2      e7
mlx5_4  1       6       0000:0000:0000:0000:0000:ffff:c633:6407 198.51.100.7    v1      e7
mlx5_4  1       7       0000:0000:0000:0000:0000:ffff:c633:6407 198.51.100.7    v2      e7
n_gids_found=4
"""


@pytest.mark.parametrize("option", [True, False])
def test_the_gid_table_of_show_gids(option: bool, tmp_path, capsys) -> None:
    (tmp_path / "nccl.log").write_text(TIMEOUT)
    (tmp_path / "gids.txt").write_text(SHOW_GIDS)
    words = ["--gids"] if option else []
    assert doctor(tmp_path / "nccl.log", *words, tmp_path / "gids.txt") == 1
    assert "NCCL_IB_GID_INDEX=7" in capsys.readouterr().out


def test_sockets_although_the_tree_has_rdma(tmp_path, capsys) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("n1:7:8 [0] NCCL INFO Using network Socket\n")
    assert doctor(log) == 0
    assert doctor(log, "--sysfs", Tree(tmp_path / "root").port("mlx5_0").sysfs) == 1
    assert "socket-on-rdma" in capsys.readouterr().out


IBSTAT = """CA 'mlx5_3'
\tCA type: MT4129
\tNumber of ports: 1
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 100
\t\tBase lid: 0
\t\tPort GUID: 0x0000000000000000
\t\tLink layer: Ethernet
"""


def test_outputs_of_tools(tmp_path, capsys) -> None:
    (tmp_path / "ibstat.txt").write_text(IBSTAT)
    assert doctor(tmp_path / "ibstat.txt") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "'Base lid: 0' and 'Port GUID: 0x0' are normal" in out
    (tmp_path / "ibstat.txt").write_text(
        IBSTAT + "ibpanic: [1] main: stat of IB device 'mlx5_4' failed: No such file\n"
    )
    assert doctor(tmp_path / "ibstat.txt") == 1
    assert "mlx5_4" in capsys.readouterr().out


def test_inventories_of_several_hosts(tmp_path, capsys) -> None:
    for name, count in (("a", 2), ("b", 1)):
        mine = Tree(tmp_path / name)
        for number in range(count):
            mine.port(f"mlx5_{number}")
        data = mine.detect().to_json() | {"host": name}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert doctor(tmp_path / "a.json", tmp_path / "b.json") == 1
    assert "fabric" in capsys.readouterr().out


def test_a_copied_sys_alone(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("NCCL_IB_GID_INDEX", "0")
    assert doctor("--sysfs", tree(tmp_path).sysfs, "--host", "g7") == 1
    out = capsys.readouterr().out
    assert "NCCL_IB_GID_INDEX=3" in out
    assert "host g7" in out


def test_this_host(capsys) -> None:
    assert doctor("--json") in (0, 1)
    data = json.loads(capsys.readouterr().out)
    assert list(data["read"].values()) == ["this host"]
    assert any(one["id"] == "versions" for one in data["findings"])


@pytest.mark.parametrize("words", [["no-such.log"], ["."], ["--sysfs", "."], ["--gids", "no-such"]])
def test_wrong_calls(words: list[str], tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor(*words) == 2
    assert "do:" in capsys.readouterr().err


def test_notes_can_be_left_out(tmp_path, capsys) -> None:
    log = tmp_path / "nccl.log"
    log.write_text("n1:7:8 [0] NCCL INFO Using network Socket\n" + FAULT)
    assert doctor(log, "--no-notes") == 1
    assert "transport" not in capsys.readouterr().out


def test_no_torch_is_imported(run_script, tmp_path) -> None:
    log = tmp_path / "a.log"
    log.write_text(FAULT)
    calls = f"from holmes_core.cli import main\nmain(['doctor', {str(log)!r}])\nmain(['doctor'])\n"
    output = run_script(["-c", calls + "import sys\nprint(*sys.modules)"]).check()
    assert "torch" not in output.splitlines()[-1].split()


def test_a_reader_that_has_seen_enough(tmp_path) -> None:
    log = tmp_path / "a.log"
    log.write_text(FAULT)
    command = f"{sys.executable} -m holmes_core.cli doctor {log} | true"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert found.stderr == ""
