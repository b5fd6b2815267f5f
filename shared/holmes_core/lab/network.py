# SPDX-License-Identifier: Apache-2.0
"""The lab's networks, through iproute2: one namespace per host and one, the switch, that holds all bridges.

Nothing is put into the machine's own namespace, and no namespace has a default route: no packet can leave the lab,
and names inside it never clash with those of another lab.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holmes_core.cluster.value import Value
from holmes_core.errors import HolmesError
from holmes_core.lab.spec import LabHost, LabSpec

__all__ = [
    "Traffic",
    "add_namespace",
    "build_network",
    "delete_namespace",
    "forwarding_commands",
    "host_commands",
    "interface_mtu",
    "mac_address",
    "read_traffic",
    "shaping_commands",
    "switch_commands",
    "try_features",
]

# GSO packets of up to 64 KiB pass the shaper whole only if the bucket holds one with its headers; cut into frames, they
# would cost a quarter of a core.
_MIN_BURST = 96 * 1024  # bytes
_BURST_TIME, _QUEUE_TIME = 0.002, 0.02  # seconds at full rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic(Value):
    """Bytes that one interface has sent and received since the lab came up."""

    tx: int = 0
    rx: int = 0

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(tx=self.tx - before.tx, rx=self.rx - before.rx)


def build_network(spec: LabSpec, switch: str, namespaces: Mapping[str, str]) -> None:
    """Create all interfaces inside existing namespaces.

    Args:
        spec: The lab.
        switch: Namespace of the bridges.
        namespaces: Host name -> its namespace.

    Raises:
        HolmesError: This kernel or container cannot do it; says which command failed.
    """
    _batch("ip", switch, switch_commands(spec, namespaces))
    _batch("bridge", switch, forwarding_commands(spec))
    for host in spec.hosts:
        _batch("ip", namespaces[host.name], host_commands(spec, host))
    on_switch, on_hosts = shaping_commands(spec)
    _batch("tc", switch, on_switch)
    for name, commands in on_hosts.items():
        _batch("tc", namespaces[name], commands)


def switch_commands(spec: LabSpec, namespaces: Mapping[str, str]) -> list[str]:
    """Return the `ip` commands that make the bridges, and a cable from each to its hosts.

    Ports are called ``e<host>`` and ``r<host>`` by the host's index; the bridges ``eth``, ``eth<cluster>`` (a cluster
    with an uplink of its own) and ``rdma<cluster>``.
    """
    bridges = ["eth"]
    cables: list[str] = []
    for number, cluster in enumerate(spec.clusters):
        if cluster.kind != "ethernet":
            bridges.append(f"rdma{number}")
        if cluster.uplink_rate is not None:
            bridges.append(f"eth{number}")
            cables += [
                f"link add name u{number} type veth peer name v{number}",
                *_plug(f"u{number}", "eth"),
                *_plug(f"v{number}", f"eth{number}"),
            ]
    for host in spec.hosts:
        dead = {fault.nic for fault in spec.faults_of(host.name, "nic-dead")}
        own = f"eth{host.cluster_index}" if host.cluster.uplink_rate is not None else "eth"
        ends = [("ethernet", f"e{host.index}", host.cluster.ethernet, own)]
        if host.rdma_address:
            ends.append(("rdma", f"r{host.index}", host.cluster.rdma, f"rdma{host.cluster_index}"))
        for nic, port, interface, bridge in ends:
            mtu = interface_mtu(host, nic)
            cables += [
                f"link add name {port} mtu {mtu} type veth peer name {interface} mtu {mtu} "
                f"address {mac_address(host, nic)} netns {namespaces[host.name]}",
                *_plug(port, "" if nic in dead else bridge),  # a dead cable has carrier and leads nowhere
            ]
    made = [f"link add name {name} mtu 9000 type bridge mcast_snooping 0" for name in bridges]
    return [*made, *(command for name in bridges for command in _plug(name, "")), *cables]


def _plug(interface: str, bridge: str) -> list[str]:
    # Without IPv6 link-local addresses nothing chatters, and counters show the job's bytes only. A command of its own:
    # together with `up` it can come too late.
    return [
        f"link set {interface} addrgenmode none",
        f"link set {interface} {f'master {bridge} ' if bridge else ''}up",
    ]


def forwarding_commands(spec: LabSpec) -> list[str]:
    """Return the `bridge` commands that tell each bridge where each host is.

    A bridge that had to learn it would send the first packets to everybody, and idle interfaces would count them.
    """
    commands: list[str] = []
    for host in spec.hosts:
        place = mac_address(host, "ethernet")
        ports = {"eth": f"e{host.index}"}
        for number, cluster in enumerate(spec.clusters):
            if cluster.uplink_rate is not None:
                ports[f"eth{number}"] = f"e{host.index}" if number == host.cluster_index else f"v{number}"
        if host.cluster.uplink_rate is not None:
            ports["eth"] = f"u{host.cluster_index}"
        dead = {fault.nic for fault in spec.faults_of(host.name, "nic-dead")}
        if "ethernet" not in dead:
            commands += [f"fdb replace {place} dev {port} master static" for port in ports.values()]
        if host.rdma_address and "rdma" not in dead:
            commands.append(f"fdb replace {mac_address(host, 'rdma')} dev r{host.index} master static")
    return commands


def host_commands(spec: LabSpec, host: LabHost) -> list[str]:
    """Return the `ip` commands that configure one host's interfaces from inside its namespace."""
    down = {fault.nic for fault in spec.faults_of(host.name, "nic-down")}
    commands = ["link set lo up"]
    ends = [("ethernet", host.cluster.ethernet, host.ethernet_address)]
    if host.rdma_address:
        ends.append(("rdma", host.cluster.rdma, host.rdma_address))
    for nic, interface, address in ends:
        commands += [
            *([] if nic in down else _plug(interface, "")),
            f"address add {address}/24 dev {interface}",
        ]
        if nic in down:
            continue
        # Known for good: address resolution would add bytes to an interface that nobody uses.
        for other in spec.hosts:
            there = other.ethernet_address if nic == "ethernet" else other.rdma_address
            if other.name != host.name and there and (nic == "ethernet" or other.cluster_index == host.cluster_index):
                commands.append(f"neighbour add {there} lladdr {mac_address(other, nic)} dev {interface} nud permanent")
    return commands


def shaping_commands(spec: LabSpec) -> tuple[list[str], dict[str, list[str]]]:
    """Return the `tc` commands that limit each link in both directions: on the switch, and per host."""
    on_switch: list[str] = []
    on_hosts: dict[str, list[str]] = {}
    for number, cluster in enumerate(spec.clusters):
        if cluster.uplink_rate is not None:
            on_switch += [_limit(f"u{number}", cluster.uplink_rate), _limit(f"v{number}", cluster.uplink_rate)]
    for host in spec.hosts:
        ends = [("ethernet", f"e{host.index}", host.cluster.ethernet, host.cluster.ethernet_rate)]
        if host.rdma_address:
            ends.append(("rdma", f"r{host.index}", host.cluster.rdma, host.cluster.rdma_rate))
        for nic, port, interface, wanted in ends:
            slow = spec.faults_of(host.name, "nic-slow", nic=nic)
            rate = slow[0].rate if slow else wanted
            if rate is not None:
                on_switch.append(_limit(port, rate))
                on_hosts.setdefault(host.name, []).append(_limit(interface, rate))
    return on_switch, on_hosts


def _limit(interface: str, rate: int) -> str:
    burst = max(_MIN_BURST, int(rate / 8 * _BURST_TIME))
    queue = burst + max(512 * 1024, int(rate / 8 * _QUEUE_TIME))
    return f"qdisc add dev {interface} root tbf rate {rate}bit burst {burst} limit {queue}"


def mac_address(host: LabHost, nic: str) -> str:
    """Return the Ethernet address of a host's interface: the same in every lab of the same spec."""
    return f"02:00:00:{1 if nic == 'rdma' else 0:02x}:{host.cluster_index:02x}:{host.index:02x}"


def interface_mtu(host: LabHost, nic: str) -> int:
    """Return the MTU of a host's interface in bytes."""
    if nic == "ethernet":
        return 1500
    return 4092 if host.cluster.kind == "infiniband" else 9000


def read_traffic(spec: LabSpec, switch: str) -> dict[str, dict[str, Traffic]]:
    """Return host name -> interface -> traffic, all read at one moment.

    Raises:
        HolmesError: The switch is gone.
    """
    links = json.loads(_run(["ip", "-n", switch, "-s", "-j", "link", "show"], what="read the counters"))
    # Both ends of a cable count the same bytes; what a port has received, its host has sent.
    ports = {
        link["ifname"]: Traffic(tx=link["stats64"]["rx"]["bytes"], rx=link["stats64"]["tx"]["bytes"]) for link in links
    }
    found: dict[str, dict[str, Traffic]] = {}
    for host in spec.hosts:
        found[host.name] = {host.cluster.ethernet: ports[f"e{host.index}"]}
        if host.rdma_address:
            found[host.name][host.cluster.rdma] = ports[f"r{host.index}"]
    return found


def add_namespace(name: str) -> None:
    """Create a network namespace.

    Raises:
        HolmesError: It exists already, or this process may not.
    """
    _run(["ip", "netns", "add", name], what="create a network namespace")


def delete_namespace(name: str) -> None:
    """Delete a network namespace with its interfaces, if it is there."""
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def try_features(namespace: str) -> None:
    """Make one of each thing a lab needs inside an empty namespace.

    Raises:
        HolmesError: One of them is not possible here.
    """
    _batch("ip", namespace, ["link add name b type bridge mcast_snooping 0", "link add name x type veth peer name y"])
    _batch("tc", namespace, [_limit("x", 10**9)])


def _batch(tool: str, namespace: str, commands: Sequence[str]) -> None:
    if commands:
        _run([tool, "-n", namespace, "-batch", "-"], what=f"set up {namespace}", commands=commands)


def _run(words: list[str], *, what: str, commands: Sequence[str] = ()) -> str:
    try:
        done = subprocess.run(
            words, input="\n".join(commands) + "\n", capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HolmesError(
            seen=f"{' '.join(words)}: {error}", where=what, do="install iproute2 (apt-get install iproute2)"
        ) from error
    if done.returncode == 0:
        return done.stdout
    text = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}")[:800]
    failed = [line for line in text.splitlines() if line.startswith("Command failed -:")]
    if failed and (number := failed[0].rpartition(":")[2]).isdigit() and int(number) <= len(commands):
        text += f"\n({commands[int(number) - 1]})"
    raise HolmesError(
        seen=f"{' '.join(words)}: {text}",
        where=what,
        means="this kernel or container does not let the lab build its networks",
        do="run as root outside a container, or in one with --cap-add NET_ADMIN --cap-add SYS_ADMIN; the kernel needs "
        "network namespaces, veth, bridge and sch_tbf",
    )
