# SPDX-License-Identifier: Apache-2.0
"""Whatever a tree looks like: never a crash, always a verdict per port."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from holmes_core.cluster.detect import detect_host
from holmes_core.cluster.fabric import fabric_warnings, group_hosts
from holmes_core.cluster.hca_list import exact_hcas, lint_hcas
from holmes_core.cluster.links import Link
from holmes_core.cluster.nic import Inventory

# What a file may be instead of what it should be; text after "!" is no file.
ODD = [
    "",
    "\n\n",
    "x",
    "-1",
    "99999999999999999999",
    "0x",
    "4:",
    ": ACTIVE",
    "\u00b2",
    "\0\0",
    "!dir",
    "!loop",
    "!none",
]
PORT = {
    "link_layer": ["InfiniBand", "Ethernet", "Unknown", "InfiniBand\n"],
    "state": ["4: ACTIVE", "2: INIT", "1: DOWN", "ACTIVE"],
    "phys_state": ["5: LinkUp", "3: Disabled", "4: ACTIVE"],
    "rate": ["400 Gb/sec (4X NDR)", "10 Gb/sec (4X)", "0 Gb/sec"],
    "gids/0": ["fe80:0000:0000:0000:0202:02ff:fe02:0202", "fec0::1", ":::", "zz:zz"],
    "gids/3": ["0000:0000:0000:0000:0000:ffff:c000:0206"],
    "gids/three": ["0000:0000:0000:0000:0000:ffff:c000:0206"],
    "gid_attrs/types/0": ["IB/RoCE v1"],
    "gid_attrs/types/3": ["RoCE v2"],
    "gid_attrs/ndevs/3": ["e0", "gone"],
}
DEVICE = {
    "node_type": ["1: CA", "4: RNIC", "7: unspecified"],
    "board_id": ["Omni-Path"],
    "hca_type": ["MT4129"],
    "device/vendor": ["0x15b3", "0x1d0f"],
    "device/device": ["0x1021", "0xefa1"],
    "device/numa_node": ["0", "-1"],
    "device/uevent": ["DRIVER=mlx5_core\nPCI_SLOT_NAME=0000:01:00.0", "DRIVER="],
    "device/net/e0/dev_port": ["0", "1"],
    "ports/x/state": ["4: ACTIVE"],
}
NET = {
    "type": ["1", "32", "772", "769"],
    "operstate": ["up", "down", "unknown"],
    "carrier": ["0", "1"],
    "flags": ["0x1003", "0x83", "4099"],
    "speed": ["100000", "-1"],
    "mtu": ["9000"],
    "uevent": ["DEVTYPE=vlan", "DEVTYPE=bridge"],
    "bonding/slaves": ["e0 e1 gone", "e2"],
    "device/infiniband/m0/x": ["1"],
}


def files(known: dict[str, list[str]], *needed: str) -> st.SearchStrategy[dict[str, str]]:
    """Some of the files, mostly with good content; the needed ones are always there."""
    values = {name: st.sampled_from(good * 12 + ODD) for name, good in known.items()}
    return st.fixed_dictionaries({name: values.pop(name) for name in needed}, optional=values)


TREES = st.fixed_dictionaries(
    {
        "devices": st.lists(
            st.tuples(files(DEVICE), st.lists(files(PORT, "link_layer", "state"), max_size=3)), max_size=4
        ),
        "nets": st.lists(files(NET), max_size=3),
        "verbs": st.lists(st.sampled_from(["m0", "m1", "", "\n", "!dir"]), max_size=3),
        "pci": st.lists(st.sampled_from(["0x020700", "0x030200", "", "!dir", "x"]), max_size=3),
    }
)
LINKS = st.none() | st.lists(
    st.builds(
        Link,
        name=st.sampled_from(["e0", "e1", "e9"]),
        addresses=st.lists(
            st.sampled_from(["192.0.2.1/24", "fe80::1/64", "2001:db8::1/64", "x", "10.0.0.1/31"]), max_size=3
        ).map(tuple),
        up=st.none() | st.booleans(),
        default_route=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda link: link.name,
)


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if text == "!dir":
        path.mkdir()
    elif text == "!loop":
        path.symlink_to(path)
    elif text == "!none":
        path.symlink_to("nowhere")
    else:
        path.write_bytes(text.encode("latin-1") if text.isascii() else text.encode())


@settings(max_examples=250, deadline=None)
@given(tree=TREES, links=LINKS, judge_dev=st.booleans())
def test_always_a_verdict(tree: dict[str, list], links: list[Link] | None, judge_dev: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, expected = Path(folder) / "sys", set()
        for number, (device, ports) in enumerate(tree["devices"]):
            home = root / "class/infiniband" / f"m{number}"
            home.mkdir(parents=True)
            for name, text in device.items():
                put(home / name, text)
            for port, found in enumerate(ports, start=1):
                (home / "ports" / str(port)).mkdir(parents=True)
                expected.add((f"m{number}", port))
                for name, text in found.items():
                    put(home / "ports" / str(port) / name, text)
            if not ports:
                expected.add((f"m{number}", 1))
        for number, net in enumerate(tree["nets"]):
            for name, text in net.items():
                put(root / "class/net" / f"e{number}" / name, text)
        for number, text in enumerate(tree["verbs"]):
            put(root / f"class/infiniband_verbs/uverbs{number}/ibdev", text)
            put(Path(folder) / f"dev/infiniband/uverbs{number}", "")
        for number, text in enumerate(tree["pci"]):
            put(root / f"bus/pci/devices/0000:0{number}:00.0/class", text)
            put(root / f"bus/pci/devices/0000:0{number}:00.0/vendor", "0x10de")
        inventory = detect_host(
            host="n1", sysfs=root, dev=Path(folder) / "dev" if judge_dev else None, addresses=lambda: links, env={}
        )
    check(inventory, expected)


def check(inventory: Inventory, expected: set[tuple[str, int]]) -> None:
    assert expected <= {(nic.device, nic.port) for nic in inventory.nics}
    assert all(nic.usable or nic.reason for nic in inventory.nics)
    assert Inventory.from_json(inventory.to_json()) == inventory
    assert len(set(inventory.rails)) == len(inventory.rails)
    assert {nic.device for nic in inventory.rail_nics} == set(inventory.rails)
    assert (inventory.kind == "ethernet") == (not inventory.rails)
    carrier = inventory.nic(inventory.ethernet)
    assert not inventory.ethernet or (carrier is not None and carrier.usable)
    assert all(gpu.nearest in inventory.rails or not inventory.rails for gpu in inventory.accelerators)
    value = exact_hcas(inventory)
    assert not value or lint_hcas(value, inventory).problems == ()
    clusters = group_hosts([inventory])
    fabric_warnings([inventory], clusters)
    assert clusters[0].kind == inventory.kind
