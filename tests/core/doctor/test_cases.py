# SPDX-License-Identifier: Apache-2.0
"""Public cases of real jobs, where HOLMES_CASES names the folder that holds them: each gets the right diagnosis."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from holmes_core.cli import main
from holmes_core.cluster.detect import detect_host
from holmes_core.cluster.links import Link
from holmes_core.cluster.nic import Inventory, Nic
from holmes_core.doctor.compare import compare_hosts
from holmes_core.doctor.finding import Finding, in_order
from holmes_core.doctor.host import host_findings
from holmes_core.doctor.logs.diagnose import diagnose
from holmes_core.doctor.logs.parts import Case
from holmes_core.doctor.logs.read import read_lines
from holmes_core.doctor.process import surroundings_findings
from holmes_core.doctor.surroundings import Surroundings
from tests.core.cluster.trees import Tree

_FOLDER = os.environ.get("HOLMES_CASES", "")
pytestmark = pytest.mark.skipif(not _FOLDER, reason="HOLMES_CASES does not name a folder of cases")

# Case: first finding, words of it. These are read by the command, with the case's own files.
READ: dict[str, tuple[str, list[str]]] = {
    "F1-26": ("rdma-device-closed", ["mlx5_bond_0", "/dev/infiniband/uverbs", "memlock=-1", "TCP"]),
    "F1-35": ("device-broken", ["mlx5_8"]),
    "F1-40": ("transport", ["IB plugin over RoCE on rocep161s0,", "not Socket"]),
    "F2-03": ("unequal-hcas", ["01 of rank 0 use erdma_1", "node-b1", "'=erdma_0'", "hides"]),
    "F2-05": ("mixed-link-types", ["node-a1", "mlx5_0 is IB", "mlx5_1 is RoCE", "NCCL_IB_HCA='=mlx5_0'"]),
    "F2-09": ("gid-index", ["NCCL_IB_GID_INDEX=3", "switch filtering, PFC"]),
    "F2-11": ("gid-index", ["index 1 is the RoCE v2 entry of the link-local address", "NCCL_IB_GID_INDEX=3"]),
    "F2-19": ("socket-interfaces", ["veth0000001", "channel 00", "NCCL_SOCKET_IFNAME='=eno1'"]),
    "F2-21": ("gloo-loopback", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ALL hosts", "torch.log:1"]),
    "F2-25": ("bridge-address", ["172.17.0.2", "random ports", "--network=host"]),
    "F2-27": ("firewall", ["192.0.2.4", "113", "firewall"]),
    "F2-29": ("memlock", ["unlimited", "--ulimit memlock=-1", "inside a launched rank"]),
    "F2-31": ("socket-wanted", ["RoCE", "NCCL_NET=Socket", "instead of NCCL_IB_DISABLE"]),
    "F2-33": ("rails", ["NIC0 (GPU0", "left out: NIC2", "ib_write_bw", "NCCL_CROSS_NIC"]),
    "F2-37": ("no-fabric-provider", ["efa", "container", "NCCL_IB_* variables have no part"]),
    "F2-39": ("roce-addressing", ["GID", "never by LID", "normal"]),
}
GID_TABLE_OF = {"F2-09": "F1-19", "F2-11": "F1-19"}


def grow(case: Path, root: Path) -> Path:
    """Make the case's tree; return what stands for /sys."""
    for line in (case / "sysfs.tsv").read_text().splitlines():
        path, kind, content = ([*line.split("\t"), "", ""])[:3]
        place = root / path.lstrip("/")
        if kind == "absent" or not path:
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            place.symlink_to(content)
        elif kind in ("dir", "unreadable"):  # reading a directory is an error, as root too
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.write_text(content.replace("\\n", "\n") + ("" if kind == "file-no-eol" else "\n"))
    return root / "sys"


@pytest.mark.parametrize("name", READ)
def test_files(name: str, tmp_path: Path, capsys) -> None:
    folder = Path(_FOLDER) / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    files = [path for path in sorted(folder.iterdir()) if path.name not in ("case.json", "sysfs.tsv")]
    more = ["--sysfs", grow(Path(_FOLDER) / GID_TABLE_OF[name], tmp_path)] if name in GID_TABLE_OF else []
    status = main(["doctor", "--json", *map(str, [*files, *more])])
    found = [Finding.from_json(one) for one in json.loads(capsys.readouterr().out)["findings"]]
    first, words = READ[name]
    chosen = next((one for one in found if one.id == first), None)
    assert chosen is not None, found
    assert status == int(chosen.severity != "note")
    assert chosen.severity == "note" or found[0].id == first
    text = " ".join((chosen.seen, chosen.means, chosen.do, *chosen.where))
    assert [word for word in words if word not in text] == [], text


Check = Callable[[Path, Path], Sequence[Finding]]
# Case: what is found with the words of the case as input; name of the finding, words of it.
TOLD: dict[str, tuple[str, list[str], Check]] = {}


def told(name: str, first: str, *words: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        TOLD[name] = (first, list(words), check)
        return check

    return keep


def rdma(kind: str, names: Sequence[str], host: str = "n1", env: Mapping[str, str] | None = None, **more) -> Inventory:
    nics = tuple(Nic(device=name, kind=kind, state="active", rate=400.0) for name in names)  # type: ignore[arg-type]
    environment = tuple(sorted((env or {}).items()))
    return Inventory(host=host, nics=nics, kind=kind, rails=tuple(names), environment=environment, **more)  # type: ignore[arg-type]


@told("F1-05", "two-link-types", "'=mlx5_0,mlx5_1,mlx5_4,mlx5_5,mlx5_6,mlx5_7,mlx5_8,mlx5_9'")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    return list(host_findings(detect_host(host="n1", sysfs=grow(folder, root), addresses=lambda: None, env={})))


@told("F1-07", "degraded-rails", "7 of 8", "mlx5_ib0", "no subnet manager")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    return list(host_findings(detect_host(host="n1", sysfs=grow(folder, root), addresses=lambda: None, env={})))


@told("F1-15", "ofi-plugin-missing", "efa", "NCCL_NET_PLUGIN=ofi", "silently")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    inventory = detect_host(host="n1", sysfs=grow(folder, root), addresses=lambda: None, env={})
    return list(surroundings_findings(Surroundings(memlock=-1), inventory))


@told("F1-23", "bond-queue-pairs", "NCCL_IB_QPS_PER_CONNECTION=2", "NCCL_IB_SPLIT_DATA_ON_QPS=0")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    tree = Tree(root).port("mlx5_bond_0", layer="Ethernet", gid_attrs__ndevs__0="x")
    tree.write({"class/infiniband/mlx5_bond_0/ports/1/gid_attrs/ndevs/0": "bond0"})
    tree.net("a", speed="200000").net("b", speed="200000").net("bond0", speed="400000", bonding__slaves="a b")
    return list(host_findings(tree.detect()))


@told("F1-28", "interface-list", "NCCL_SOCKET_IFNAME='=bond0'", "bond0.2973")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    tree = Tree(root).net("bond0").net("bond0.2973", uevent="DEVTYPE=vlan")
    links = [("bond0.2973", "198.51.100.189/16"), ("bond0", "192.0.2.7/27")]
    found = tree.detect(*[Link(name=n, addresses=(a,)) for n, a in links], env={"NCCL_SOCKET_IFNAME": "bond0"})
    return list(host_findings(found))


@told("F1-32", "ofi-plugin-missing", "sockets on an RDMA fabric", "OFI")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    tree = Tree(root)
    for number in range(4):
        tree.net(f"hsn{number}", speed="200000")
        (tree.sysfs / f"class/cxi/cxi{number}").mkdir(parents=True)
    log = read_lines([("nccl.log", ["n1:1:1 [0] NCCL INFO Using network Socket"])])
    return diagnose(Case(log=log, inventories={"n1": tree.detect()}))


@told("F1-36", "rdma-unusable", "no device registered")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    tree = Tree(root)
    tree.pci("pci0000:00", "0000:01:00.0", class_="0x020700", vendor="0x15b3")
    (tree.sysfs / "class/infiniband").mkdir(parents=True)
    return list(host_findings(tree.net("eth0").detect(Link(name="eth0", addresses=("192.0.2.1/24",)))))


@told("F2-01", "clusters", "node-a1, node-a2", "node-b1, node-b2")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    hosts = []
    for line in (folder / "inventory.tsv").read_text().splitlines()[1:]:
        name, _, cards, _ = line.split("\t")
        hosts.append(rdma("infiniband" if cards.startswith("IB") else "roce", [f"mlx5_{n}" for n in range(8)], name))
    return list(compare_hosts(hosts))


@told("F2-07", "hca-list-per-host", "='=mlx5_0,mlx5_3,mlx5_5,mlx5_8'", "='=mlx5_0,mlx5_1,mlx5_4,mlx5_5'")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    env = {"NCCL_IB_HCA": "=mlx5_0,mlx5_3,mlx5_5,mlx5_8"}
    names = (("node-a1", (0, 3, 5, 8)), ("node-b1", (0, 1, 4, 5)))
    return list(compare_hosts([rdma("roce", [f"mlx5_{n}" for n in rails], host, env) for host, rails in names]))


@told("F2-13", "hca-list", "(15)", "'^=mlx5_8,mlx5_14'", "once, at the beginning")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    env = {"NCCL_IB_HCA": "^=mlx5_8,^=mlx5_14"}
    return list(host_findings(rdma("infiniband", [f"mlx5_{n}" for n in range(16)], env=env)))


@told("F2-15", "hca-list", "mlxl5_7", "did you mean 'mlx5_7'")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    env = {"NCCL_IB_HCA": "^=mlx5_0,mlx5_5,mlxl5_7"}
    return list(host_findings(rdma("infiniband", [f"mlx5_{n}" for n in range(9)], env=env)))


@told("F2-17", "interface-list", "lo", "no other host")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    links = [Link(name="lo", addresses=("127.0.0.1/8",)), Link(name="eno1", addresses=("192.0.2.1/24",))]
    return list(host_findings(Tree(root).detect(*links, env={"NCCL_SOCKET_IFNAME": "lo"})))


@told("F2-23", "name-is-loopback", "127.0.1.1", "192.0.2.11", "/etc/hosts")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    inventory = Tree(root).detect(Link(name="eth0", addresses=("192.0.2.11/24",)))
    return list(surroundings_findings(Surroundings(hostname="node-a1", own_addresses=("127.0.1.1",)), inventory))


@told("F2-35", "master-subnet", "192.0.2.12", "ens1", "rp_filter", "MASTER_ADDR")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    links = [Link(name="eno1", addresses=("192.0.2.12/24",)), Link(name="ens1", addresses=("198.51.100.12/24",))]
    inventory = Tree(root).detect(*links, env={"NCCL_SOCKET_IFNAME": "ens1"})
    around = Surroundings(master="node-a1", master_addresses=("192.0.2.12",), several_hosts=True)
    return list(surroundings_findings(around, inventory))


@told("F2-41", "clusters", "node-a1, node-a2", "node-b1, node-b2")
def _(folder: Path, root: Path) -> Sequence[Finding]:
    hosts = [("node-a1", "1"), ("node-a2", "1"), ("node-b1", "2"), ("node-b2", "2")]
    return list(compare_hosts([rdma("roce", ["m"], name, {"HOLMES_FABRIC": fabric}) for name, fabric in hosts]))


@pytest.mark.parametrize("name", TOLD)
def test_words(name: str, tmp_path: Path) -> None:
    folder = Path(_FOLDER) / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    first, words, check = TOLD[name]
    found = in_order(check(folder, tmp_path))
    chosen = next((one for one in found if one.id == first), None)
    assert chosen is not None, found
    text = " ".join((chosen.seen, chosen.means, chosen.do, *chosen.where))
    assert [word for word in words if word not in text] == [], text


def test_every_case_of_failures_has_a_check() -> None:
    found = {path.name for path in Path(_FOLDER).iterdir() if path.name.startswith("F2-")}
    assert found - set(READ) - set(TOLD) == set()
