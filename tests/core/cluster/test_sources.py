# SPDX-License-Identifier: Apache-2.0
"""Tools' outputs become inventories, one by one and together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.cluster.nic import Inventory
from holmes_core.cluster.sources import SOURCES, inventory_from_files, inventory_from_texts
from holmes_core.errors import ConfigError
from tests.core.cluster.trees import only, verdicts

IBSTAT = """\
CA 'mlx5_0'
\tCA type: MT4123
\tSystem image GUID: 0x0200000000000001
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 200
\t\tLink layer: InfiniBand
CA 'mlx5_1'
\tCA type: MT4123
\tSystem image GUID: 0x0200000000000002
\tPort 1:
\t\tState: Initializing
\t\tPhysical state: LinkUp
\t\tRate: 200
\t\tLink layer: InfiniBand
CA 'mlx5_2'
\tCA type: MT4125
\tPort 1:
\t\tState: Active
\t\tPhysical state: LinkUp
\t\tRate: 100
\t\tPort GUID: 0x0000000000000000
\t\tLink layer: Ethernet
"""
BROKEN = "ibpanic: [77] main: stat of IB device 'mlx5_9' failed: No such file or directory\n"
IBSTATUS = """\
Infiniband device 'mlx5_0' port 1 status:
\tdefault gid:\t fec0:0000:0000:0007:0200:0000:0000:0001
\tbase lid:\t 0x1
\tstate:\t\t 4: ACTIVE
\tphys state:\t 5: LinkUp
\trate:\t\t 200 Gb/sec (4X HDR)
\tlink_layer:\t InfiniBand
"""
DEV2NET = "mlx5_0 port 1 ==> ib0 (Down)\nmlx5_2 port 1 ==> ens1 (Up)\n"
DEV2NET_LONG = (
    "0000:17:00.0 mlx5_0 (MT4123 - MCX653105A) ConnectX-6 VPI fw 20.35 port 1 (ACTIVE) ==> ib0 (Up)\n"
    "0000:31:00.0 mlx5_1 (MT4123 - MCX653105A) ConnectX-6 VPI fw 20.35 port 1 (DOWN  ) ==> ib1 (Down)\n"
)
SHOW_GIDS = """\
DEV     PORT    INDEX   GID                                     IPv4            VER     DEV
---     ----    -----   ---                                     ------------    ---     ---
mlx5_2  1       0       fe80:0000:0000:0000:0202:02ff:fe02:0202                 v1      ens1
mlx5_2  1       1       fe80:0000:0000:0000:0202:02ff:fe02:0202                 v2      ens1
mlx5_2  1       2       0000:0000:0000:0000:0000:ffff:c000:0206 192.0.2.6       v1      ens1
mlx5_2  1       3       0000:0000:0000:0000:0000:ffff:c000:0206 192.0.2.6       v2      ens1
n_gids_found=4
"""
MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\tNODE\t0-31,64-95\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPIX\tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS\tNODE
NIC1\tSYS\tPIX\tSYS\t X \tSYS
NIC2\tNODE\tSYS\tNODE\tSYS\t X

Legend:

  X    = Self
  PIX  = Connection traversing at most a single PCIe bridge

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
  NIC2: mlx5_2
"""
ADDRESSES = """\
lo               UNKNOWN        127.0.0.1/8 ::1/128
ens1             UP             192.0.2.6/24 fe80::1/64
ib0              DOWN
eno1@if7         UP             198.51.100.6/24
"""
XML = """\
<system version="1">
  <cpu numaid="1" arch="x86_64">
    <pci busid="0000:20:00.0" class="0x060400">
      <pci busid="0000:21:00.0" class="0x030200"/>
      <pci busid="0000:22:00.0" class="0x020000"><nic>
        <net name="rocep34s0_dma" dev="0" speed="400000" port="1" guid="0x20" gdr="1"/>
        <net name="rocep34s0" dev="0" speed="400000" port="1" guid="0x20" gdr="1"/>
      </nic></pci>
      <pci busid="0000:23:00.0" class="0x060400"><pci busid="0000:24:00.0" class="0x030200"/></pci>
    </pci>
  </cpu>
  <cpu numaid="0" arch="x86_64">
    <pci busid="0000:0a:00.0" class="0x030200"><gpu dev="0" rank="0"/></pci>
    <pci busid="0000:0b:00.0" class="0x020000"><nic><net name="eno1" speed="25000" port="0" guid="0x0"/></nic></pci>
  </cpu>
</system>
"""


def read(*texts: str) -> Inventory:
    return inventory_from_texts({f"text {number}": text for number, text in enumerate(texts)}, host="n1")


def test_every_kind_of_text_is_recognised_as_itself() -> None:
    texts = [XML, IBSTAT, IBSTATUS, SHOW_GIDS, DEV2NET, MATRIX, ADDRESSES]
    assert [[name for name, (matches, _) in SOURCES.items() if matches(text)] for text in texts] == [
        [name] for name in SOURCES
    ]


def test_ibstat_keeps_what_it_printed_before_it_broke_off() -> None:
    inventory = read(IBSTAT + BROKEN)
    assert verdicts(inventory) == {
        "mlx5_0:1": "infiniband",
        "mlx5_1:1": "infiniband, INIT: link up, no subnet manager yet",
        "mlx5_2:1": "roce",
        "mlx5_9:1": "unknown, ibstat could not read it: No such file or directory",
    }
    assert (inventory.rails, inventory.missing_rails) == (("mlx5_0",), 1)
    assert any("mlx5_9" in text for text in inventory.warnings)
    assert read(BROKEN).nics[0].usable is False


def test_ibstatus_tells_the_subnet() -> None:
    assert only(read(IBSTATUS), "mlx5_0").subnet_prefix == "fec0:0000:0000:0007"


def test_show_gids_gives_the_index_and_says_that_it_is_roce() -> None:
    nic = only(read(SHOW_GIDS), "mlx5_2")
    assert (nic.kind, nic.gid_index, nic.netdev, len(nic.gids)) == ("roce", 3, "ens1", 4)


def test_ibdev2netdev() -> None:
    nic = only(read(IBSTAT, DEV2NET), "mlx5_0")
    assert (nic.netdev, nic.usable) == ("ib0", True)  # an InfiniBand port does without its interface
    long = read(DEV2NET_LONG)
    assert [(nic.device, nic.pci, nic.state) for nic in long.nics[:2]] == [
        ("mlx5_0", "0000:17:00.0", "active"),
        ("mlx5_1", "0000:31:00.0", "down"),
    ]


def test_topo_matrix() -> None:
    inventory = read(MATRIX)
    assert [gpu.numa for gpu in inventory.accelerators] == [0, 1]
    assert [gpu.nearest for gpu in inventory.accelerators] == ["mlx5_0", "mlx5_1"]
    assert inventory.rails == ("mlx5_0", "mlx5_1")
    assert any("taken as InfiniBand; add ibstat" in text for text in inventory.warnings)


def test_topo_matrix_pasted_with_spaces() -> None:
    pasted = MATRIX.replace("\t", "    ")
    assert read(pasted) == read(MATRIX)


def test_nccl_xml() -> None:
    inventory = read(XML)
    assert [(gpu.pci, gpu.numa, gpu.nearest, dict(gpu.distances)) for gpu in inventory.accelerators] == [
        ("0000:0a:00.0", 0, "rocep34s0", {"rocep34s0": "SYS"}),
        ("0000:21:00.0", 1, "rocep34s0", {"rocep34s0": "PIX"}),
        ("0000:24:00.0", 1, "rocep34s0", {"rocep34s0": "PXB"}),
    ]
    assert verdicts(inventory) == {"rocep34s0:1": "roce", "eno1:1": "ethernet"}
    assert (inventory.ethernet, only(inventory, "eno1").rate, inventory.nics[0].rate) == ("eno1", 25.0, 400.0)


def test_all_together() -> None:
    inventory = read(MATRIX, IBSTAT, IBSTATUS, DEV2NET, SHOW_GIDS, ADDRESSES)
    assert inventory.rails == ("mlx5_0",)
    assert inventory.missing_rails == 1
    assert only(inventory, "mlx5_2").addresses == ("192.0.2.6/24",)
    assert only(inventory, "mlx5_0").subnet_prefix == "fec0:0000:0000:0007"
    assert inventory.ethernet == "eno1"
    assert not any("taken as InfiniBand" in text for text in inventory.warnings)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a1.ibstat.txt").write_text(IBSTAT)
    (tmp_path / "a1.topo.txt").write_bytes(MATRIX.encode("utf-16"))
    inventory = inventory_from_files([tmp_path / "a1.ibstat.txt", tmp_path / "a1.topo.txt"])
    assert (inventory.host, len(inventory.accelerators)) == ("a1", 2)
    (tmp_path / "x.json").write_text(json.dumps(inventory.to_json()))
    assert inventory_from_files([tmp_path / "x.json"]) == inventory
    assert inventory_from_files([tmp_path / "x.json"], host="b").host == "b"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("odd.txt", "hello\nworld", "begins with 'hello'"),
        ("empty.txt", "", r"begins with '\(empty\)'"),
        ("bad.json", "{nonsense", "no valid JSON"),
        ("other.json", '{"a": 1}', "unknown key 'a'"),
        ("bad.xml", "<system><cpu>", "no valid XML"),
    ],
)
def test_unknown_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        inventory_from_files([tmp_path / name])
    with pytest.raises(ConfigError, match="cannot be read"):
        inventory_from_files([tmp_path / "none.txt"])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_texts_are_read_or_refused(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([IBSTAT, IBSTATUS, SHOW_GIDS, DEV2NET, MATRIX, ADDRESSES, XML]))
    start, length = data.draw(st.integers(0, len(text))), data.draw(st.integers(0, 60))
    damaged = text[:start] + data.draw(st.text(max_size=5)) + text[start + length :]
    try:
        inventory = read(damaged)
    except ConfigError:
        return
    assert Inventory.from_json(inventory.to_json()) == inventory
    assert all(nic.usable or nic.reason for nic in inventory.nics)
