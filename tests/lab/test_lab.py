# SPDX-License-Identifier: Apache-2.0
"""Labs that are really built: what a host sees, where bytes go, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holmes_core.errors import ConfigError
from holmes_core.lab.session import Lab
from holmes_core.lab.state import labs_directory, list_labs

pytestmark = pytest.mark.lab

SERVE = """if True:
    import socket, sys
    listener = socket.create_server((sys.argv[1], 5000))
    listener.settimeout(20)
    print("ready", flush=True)
    connection, _ = listener.accept()
    count = 0
    while data := connection.recv(1 << 20):
        count += len(data)
    print(count)
"""
SEND = """if True:
    import socket, sys
    connection = socket.create_connection((sys.argv[1], 5000), timeout=5)
    connection.sendall(bytes(int(sys.argv[2])))
"""
REACH = """if True:
    import socket, sys
    try:
        socket.create_connection((sys.argv[1], 5000), timeout=1)
        print("reached")
    except ConnectionRefusedError:
        print("reached")
    except OSError as error:
        print(error)
"""
PYTHON = [sys.executable, "-I", "-S", "-c"]


def exists(lab: Lab) -> list[str]:
    """Return everything of a lab that is still on the machine."""
    namespaces = [
        name for name in (lab.state.switch, *lab.state.namespaces.values()) if Path("/run/netns", name).exists()
    ]
    groups = [path for _, path in lab.state.groups if Path(path).exists()]
    files = [str(lab.state.directory)] if lab.state.directory.exists() else []
    return namespaces + groups + files


def runs(pid: int) -> bool:
    """Return whether a process is there and no zombie (nobody may be there to reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def send(lab: Lab, sender: str, receiver: str, address: str, count: int) -> None:
    """Send bytes from one host to another over TCP."""
    server = lab.start(receiver, [*PYTHON, SERVE, address], output=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    assert lab.start(sender, [*PYTHON, SEND, address, str(count)]).wait(20) == 0
    assert server.communicate(timeout=20)[0] == f"{count}\n".encode()


def test_what_a_host_sees(make_lab: Callable[..., Lab], output_of: Callable[..., str]) -> None:
    lab = make_lab(faults=[{"fault": "loopback-name", "host": "b2"}])
    code = "import json, os, socket; name = socket.gethostname(); others = ['a1', 'a2', 'b1', 'b2']; print(json.dumps("
    code += "[name, socket.if_nameindex(), dict(os.environ), {o: socket.gethostbyname(o) for o in others}, "
    code += "os.listdir('/sys/class/net')]))"
    name, interfaces, environment, addresses, _ = json.loads(output_of(lab, "b2", code))
    assert name == "b2"
    assert sorted(interface for _, interface in interfaces) == ["eth0", "lo", "rdma0"]
    assert addresses == {"a1": "10.77.0.1", "a2": "10.77.0.2", "b1": "10.77.0.3", "b2": "127.0.1.1"}
    assert Path(environment["HOLMES_SYSFS"], "class/infiniband/mlx5_0/ports/1/state").read_text() == "4: ACTIVE\n"
    assert Path(environment["HOLMES_DEV"], "infiniband/uverbs0").exists()
    assert environment["HOLMES_HOST"] == "b2"
    assert environment["MASTER_ADDR"] == "10.77.0.1"
    assert "RANK" not in environment
    assert socket_name() not in ("b2", "a1")  # ours did not change


def socket_name() -> str:
    return os.uname().nodename


def test_variables_of_a_rank(make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "77")
    monkeypatch.setenv("SLURM_PROCID", "77")
    clusters = [
        {"name": "a", "kind": "roce", "hosts": 1, "ranks_per_host": 2},
        {"name": "b", "kind": "roce", "hosts": 1},
    ]
    lab = make_lab(clusters=clusters)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "SLURM_PROCID", "X")
    code = f"import os; print([os.environ.get(name) for name in {names}])"
    seen = [
        lab.start(host, [*PYTHON, code], local_rank=rank, env={"X": "1"}, output=subprocess.PIPE).communicate(
            timeout=20
        )
        for host, rank in (("a1", 0), ("a1", 1), ("b1", 0))
    ]
    assert [eval(text) for text, _ in seen] == [
        ["0", "0", "3", "2", "0", None, "1"],
        ["1", "1", "3", "2", "0", None, "1"],
        ["2", "0", "3", "1", "1", None, "1"],
    ]


def test_bytes_go_where_they_should(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab()
    before = lab.counters()
    send(lab, "a1", "a2", "10.100.0.2", 300_000)
    send(lab, "a1", "b2", "10.77.0.4", 200_000)
    sent = {
        (host, nic): (value - before[host][nic]).to_json()
        for host, nics in lab.counters().items()
        for nic, value in nics.items()
    }
    for pair, tx, rx in (
        (("a1", "rdma0"), 300_000, 0),
        (("a2", "rdma0"), 0, 300_000),
        (("a1", "eth0"), 200_000, 0),
        (("b2", "eth0"), 0, 200_000),
    ):
        found = sent.pop(pair)
        assert tx <= found["tx"] < 1.05 * tx + 5_000  # headers one way, acknowledgements the other
        assert rx <= found["rx"] < 1.05 * rx + 5_000
    assert set(map(str, sent.values())) == {"{'tx': 0, 'rx': 0}"}  # an idle interface counts nothing at all


def test_rdma_networks_do_not_meet_and_nothing_leaves(
    make_lab: Callable[..., Lab], output_of: Callable[..., str]
) -> None:
    lab = make_lab()
    assert output_of(lab, "a1", REACH, "10.100.0.2") == "reached\n"
    assert output_of(lab, "a1", REACH, "10.77.0.3") == "reached\n"
    for outside in ("10.101.0.1", "192.0.2.1"):
        assert "Network is unreachable" in output_of(lab, "a1", REACH, outside)


def test_faults(make_lab: Callable[..., Lab], output_of: Callable[..., str]) -> None:
    lab = make_lab(
        faults=[
            {"fault": "nic-down", "host": "a1", "nic": "rdma"},
            {"fault": "nic-dead", "host": "b1", "nic": "rdma0"},
            {"fault": "nic-slow", "host": "b2", "nic": "ethernet", "rate": "1mbit"},
        ]
    )
    assert "Network is unreachable" in output_of(lab, "a1", REACH, "10.100.0.2")
    assert "timed out" in output_of(lab, "b1", REACH, "10.101.0.2")
    assert output_of(lab, "a1", REACH, "10.77.0.4") == "reached\n"
    start = time.monotonic()
    send(lab, "b2", "a1", "10.77.0.1", 250_000)
    assert time.monotonic() - start > 1.0  # 2 Mbit, of which the shaper lets the first 0.8 pass at once


def test_interfaces_with_swapped_names_and_a_shared_uplink(make_lab: Callable[..., Lab]) -> None:
    a = {"name": "a", "kind": "roce", "hosts": 2, "interfaces": {"rdma": "ens1", "ethernet": "ens2"}}
    b = {"name": "b", "kind": "infiniband", "hosts": 1, "interfaces": {"rdma": "ens2", "ethernet": "ens1"}}
    lab = make_lab(clusters=[{**a, "uplink_rate": "100mbit"}, b])
    before = lab.counters()
    send(lab, "a1", "a2", "10.100.0.2", 100_000)
    send(lab, "a1", "b1", "10.77.0.3", 100_000)
    after = lab.counters()
    moved = {(host, nic) for host, nics in after.items() for nic in nics if nics[nic] != before[host][nic]}
    assert moved == {("a1", "ens1"), ("a2", "ens1"), ("a1", "ens2"), ("b1", "ens1")}


def test_labs_side_by_side(make_lab: Callable[..., Lab]) -> None:
    """Two labs of one spec have the same addresses and do not disturb each other."""
    first, second = make_lab(), make_lab()
    send(first, "a1", "b1", "10.77.0.3", 100_000)
    assert first.counters()["b1"]["eth0"].rx > 100_000
    assert second.counters()["b1"]["eth0"].rx == 0
    assert {first.name, second.name} <= {state.name for state in list_labs()}
    first.down()
    assert not exists(first)
    send(second, "a1", "b1", "10.77.0.3", 100_000)
    with pytest.raises(ConfigError, match="exists already"):
        make_lab(second.name)
    assert exists(second)


def test_down_ends_what_runs_and_can_be_repeated(make_lab: Callable[..., Lab]) -> None:
    lab = make_lab(cpu=0.5)
    daemon = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)"
    assert lab.start("a1", [*PYTHON, daemon]).wait(20) == 0
    (left,) = lab.processes("a1")
    lab.down()
    assert not exists(lab)
    assert not runs(left)
    lab.down()


def test_a_cpu_quota_per_host(make_lab: Callable[..., Lab], output_of: Callable[..., str]) -> None:
    lab = make_lab(cpu=0.4)
    if not lab.state.groups:
        pytest.skip("cgroups are not writable here")
    group = Path(dict(lab.state.groups)["a2"])
    quota = [(group / name).read_text().split() for name in ("cpu.cfs_quota_us", "cpu.max") if (group / name).exists()]
    assert quota[0][0] == "8000"
    assert group.name in output_of(lab, "a2", "print(open('/proc/self/cgroup').read())")


def test_more_cores_than_there_are_is_said(make_lab: Callable[..., Lab]) -> None:
    with pytest.warns(UserWarning, match="this machine has"):
        make_lab(cpu=100)


def test_a_host_that_does_not_exist(make_lab: Callable[..., Lab]) -> None:
    with pytest.raises(ConfigError, match="no host 'a3'"):
        make_lab().start("a3", ["true"])


@pytest.mark.parametrize("name", ["a/b", "a b", "-", "x" * 41, "ä"])
def test_names_that_are_refused(make_lab: Callable[..., Lab], name: str) -> None:
    with pytest.raises(ConfigError, match="lab name"):
        make_lab(name)


def test_a_lab_that_cannot_be_finished_leaves_nothing(
    make_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(labs_directory().iterdir()), set(Path("/run/netns").iterdir())
    monkeypatch.setattr("holmes_core.lab.session.write_dev", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_lab()
    assert (set(labs_directory().iterdir()), set(Path("/run/netns").iterdir())) == before


def test_a_killed_parent_leaves_nothing_that_stays(make_lab: Callable[..., Lab], tmp_path: Path) -> None:
    """SIGKILL: the ranks end with their parent, and the next lab removes the rest."""
    spec = tmp_path / "lab.yaml"
    spec.write_text("{clusters: [{name: a, kind: roce, hosts: 2}]}")
    code = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(100)"
    command = [sys.executable, "-m", "holmes_core.cli", "lab", "run", str(spec), "--", *PYTHON, code]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(parent.stdout.readline().split()[-1]) for _ in range(2)]
    (state,) = (state for state in list_labs() if state.owner == parent.pid)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 5
    while any(map(runs, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left = Lab(state)
    assert exists(left)
    make_lab()
    assert not exists(left)


def test_another_process_with_the_number_of_the_owner_is_not_the_owner(make_lab: Callable[..., Lab]) -> None:
    from dataclasses import replace

    state = make_lab().state
    assert not state.abandoned
    assert replace(state, owner_started=state.owner_started - 1).abandoned
    assert replace(state, boot="another").abandoned
    assert not replace(state, owner=0).abandoned
