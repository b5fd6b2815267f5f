# SPDX-License-Identifier: Apache-2.0
"""Sockets: which interfaces and addresses were offered, and why a connection failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holmes_core.doctor.finding import Finding
from holmes_core.doctor.logs.event import Event
from holmes_core.doctor.logs.parts import (
    Case,
    Interface,
    address_kind,
    error_number,
    interfaces,
    is_container_name,
    named,
)

__all__ = ["socket_findings"]

_BOTH = "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
_CONTAINER_ID = re.compile(r"[0-9a-f]{12}")
_BRIDGE = re.compile(r"docker|br-|virbr|cni\d|flannel|lxdbr|podman")
_HOST_NETWORK = (
    "start the containers with the host's network (--network=host, hostNetwork: true), or on a network that joins the "
    "hosts; NCCL listens on random ports, so publishing a few ports cannot work"
)
_BY_ERROR: dict[int, tuple[str, str, str]] = {
    113: (
        "firewall",
        "the peer's host, or a firewall before it, rejects the connection (No route to host). Where ping works it is a "
        "firewall: NCCL and gloo listen on random ports",
        "open all TCP ports between the hosts of the job (`firewall-cmd --zone=trusted --add-source=NETWORK`, or stop "
        "firewalld/ufw between them); where ping fails too, look at routes and at the interface that was chosen",
    ),
    110: (
        "connect-timeout",
        "nothing answers: a firewall drops the packets, or the address is on a network that this host cannot reach "
        "(the wrong interface was chosen)",
        "try `nc -vz ADDRESS PORT` from this host; open all TCP ports between the hosts; name the interface that the "
        f"hosts share in {_BOTH}",
    ),
    111: (
        "connection-refused",
        "the address answers, and nothing listens on the port: the peer's process has ended or has not started, or the "
        "address belongs to another host or container",
        "look for the first error of the other ranks; compare MASTER_ADDR and MASTER_PORT on all hosts; for containers "
        "use the host's network",
    ),
    101: (
        "no-route",
        "this host has no route to the peer's network: the hosts chose interfaces of different networks",
        f"name an interface of the common network in {_BOTH} on each host",
    ),
    103: (
        "connection-aborted",
        "the connection was given up while it was being made: the address cannot be reached from here",
        f"check that the address is the one other hosts reach, and name its interface in {_BOTH}",
    ),
    99: (
        "wrong-address",
        "the address belongs to no interface of this host, or localhost has no address of that family",
        "set MASTER_ADDR to an address of the first host, as the others reach it",
    ),
}


def socket_findings(case: Case) -> Iterator[Finding]:
    """Yield what the log says about interfaces, addresses and connections."""
    offered = _offered(case)
    failures = _failures(case)
    yield from _lists(case, offered, failures)
    yield from _loopback(case, offered, failures)
    yield from _bridges(case, offered, failures)
    yield from _localhost(case, failures)
    yield from _by_error(case, offered, failures)
    yield from _prefix_matches(case, offered)
    yield from _other_interface(case, offered)


def _offered(case: Case) -> dict[str, tuple[list[Interface], Event]]:
    """Host -> the interfaces NCCL listed, and where."""
    found: dict[str, tuple[list[Interface], Event]] = {}
    for event in case.log.of("bootstrap", "socket-using"):
        listed = interfaces(event.get("list"))
        if listed and len(listed) > len(found.get(event.line.host, ([], event))[0]):
            found[event.line.host] = (listed, event)
    return found


def _failures(case: Case) -> list[tuple[Event, str, int]]:
    """Connections that failed: event, peer, errno. What was retried with success at last is none."""
    done = {}
    for event in case.log.of("connected"):
        done[event.line.file, event.line.host] = event.line.number
    found = []
    for event in case.log.of("connect", "gloo-connect", "c10d-connect"):
        why, peer = event.get("why"), event.get("peer") or event.get("peer2")
        number = error_number(why)
        if _is_retried(event) and done.get((event.line.file, event.line.host), 0) > event.line.number:
            continue
        if ("time" in why and not number) or (event.name == "c10d-connect" and not number):
            number = 110
        found.append((event, peer, number))
    return found


def _is_retried(event: Event) -> bool:
    """Whether the process goes on trying: c10d warns about each attempt, and names the end as such."""
    if event.name == "c10d-connect":
        return "timed out after" not in event.line.text and "any network address" not in event.line.text
    return "retry" in event.get("why")


def _lists(
    case: Case, offered: Mapping[str, tuple[list[Interface], Event]], failures: list[tuple[Event, str, int]]
) -> Iterator[Finding]:
    for host, (listed, event) in offered.items():
        bad = [one for one in listed if not _carries(one)]
        good = [one for one in listed if _carries(one)]
        if not bad or not good:
            continue
        used = [
            other
            for other in case.log.of("channel")
            if other.get("net") == "Socket"
            and other.line.host == host
            and int(other.get("device")) in {one.index for one in bad}
        ]
        failing = [other for other, _, _ in failures if other.line.host == host]
        alone = len(case.log.hosts()) == 1 and not failing and any(case.log.of("connected"))
        names = ", ".join(f"{one.name} ({_why(one)})" for one in bad)
        seen = f"{named(host)} offers {len(listed)} interfaces, among them {names}"
        if used:
            channel = used[0]
            seen += f"; channel {channel.get('channel')} goes over interface {channel.get('device')} of the list"
        exact = ",".join(one.name for one in good[:1])
        yield Finding(
            id="socket-interfaces",
            severity="error" if failing or used else "note" if alone else "warning",
            seen=seen,
            means="NCCL spreads its connections over all interfaces it selected, and through those no other host can "
            "be reached",
            do=f"set NCCL_SOCKET_IFNAME='={exact}' on this host ('=' takes the exact name; without it the value is a "
            f"prefix), and GLOO_SOCKET_IFNAME={exact}",
            where=case.log.where(event, *used[:1], *failing[:1]),
            likelihood=92 if used and failing else 88,
        )


def _carries(one: Interface) -> bool:
    return address_kind(one.address) in ("global", "docker") and not is_container_name(one.name)


def _why(one: Interface) -> str:
    kind = address_kind(one.address)
    if kind in ("link-local", "loopback"):
        return f"{kind} address"
    return "made by a container engine or a tunnel"


def _loopback(
    case: Case, offered: Mapping[str, tuple[list[Interface], Event]], failures: list[tuple[Event, str, int]]
) -> Iterator[Finding]:
    fallback = list(case.log.of("gloo-loopback"))
    failed = [event for event, peer, _ in failures if event.name == "gloo-connect" and address_kind(peer) == "loopback"]
    if fallback or failed:
        first = [*fallback, *failed]
        peers = ", ".join(dict.fromkeys(event.get("peer") for event in failed if event.get("peer")))
        seen = (
            "gloo fell back to the loopback address" if fallback else f"gloo connects to a loopback address ({peers})"
        )
        if fallback and peers:
            seen += f", and peers were told to connect to {peers}"
        yield Finding(
            id="gloo-loopback",
            severity="error" if failed or any(event.name == "gloo-connect" for event, _, _ in failures) else "warning",
            seen=seen,
            means="the host's name resolves to no address of an interface (or to 127.x), so gloo bound to loopback and "
            "advertised it: no other host can connect. What is reported later follows from this",
            do="set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface the hosts share, on ALL hosts, "
            "before the start; or correct /etc/hosts: the own name must not stand beside 127.0.0.1 or 127.0.1.1",
            where=case.log.where(*first),
            likelihood=97,
        )
    several = len(case.log.hosts()) > 1
    alone = {
        host: (one, event)
        for host, (listed, event) in offered.items()
        for one in listed[:1]
        if len(listed) == 1 and address_kind(one.address) in ("loopback", "link-local")
    }
    for host, (one, event) in alone.items():
        failing = [other for other, _, _ in failures if other.line.host == host]
        if not several and not failing and address_kind(one.address) == "loopback":
            continue  # one host alone may well talk to itself
        yield Finding(
            id="unreachable-interface",
            severity="error",
            seen=f"{named(host)} uses {one.name} with the {address_kind(one.address)} address {one.address}",
            means="no other host can connect to it",
            do=f"set {_BOTH} on this host to the interface with the address that the others reach (`ip -br addr`)",
            where=case.log.where(event, *failing[:1]),
            likelihood=93,
        )
    for host, (listed, event) in offered.items():
        if len(listed) == 1 and _BRIDGE.match(listed[0].name):
            yield Finding(
                id="unreachable-interface",
                severity="error" if several or failures else "warning",
                seen=f"{named(host)} uses {listed[0].name} ({listed[0].address})",
                means="by its name that is a bridge of containers or virtual machines on this host: no other host can "
                "connect to it",
                do=f"set {_BOTH} on this host to the interface with the address that the others reach (`ip -br addr`)",
                where=case.log.where(event),
                likelihood=91,
            )
    told = [(event, peer) for event, peer, _ in failures if address_kind(peer) == "loopback" and event not in failed]
    if told:
        event, peer = told[0]
        yield Finding(
            id="loopback-address",
            severity="error" if several else "warning",
            seen=f"a connection to {peer} failed",
            means="a loopback address reaches only the own host: a peer (or MASTER_ADDR) was given as localhost, or "
            "its name resolves to 127.x",
            do="set MASTER_ADDR to the first host's address as the others see it; correct /etc/hosts where the own "
            "name stands beside 127.0.0.1 or 127.0.1.1",
            where=case.log.where(*(one for one, _ in told)),
            likelihood=80,
        )


def _bridges(
    case: Case, offered: Mapping[str, tuple[list[Interface], Event]], failures: list[tuple[Event, str, int]]
) -> Iterator[Finding]:
    own: dict[str, list[str]] = {}
    for host, (listed, _) in offered.items():
        for one in listed:
            # A bridge itself has the same address everywhere; that is another finding.
            if address_kind(one.address) in ("global", "docker") and not is_container_name(one.name):
                own.setdefault(one.address, []).append(host)
    shared = {address: hosts for address, hosts in own.items() if len(hosts) > 1}
    failed = [
        (event, peer)
        for event, peer, _ in failures
        if address_kind(peer) == "docker" or (peer in own and any(_CONTAINER_ID.fullmatch(h) for h in own[peer]))
    ]
    if not shared and not failed:
        inside = [
            host for host, (listed, _) in offered.items() if all(address_kind(o.address) == "docker" for o in listed)
        ]
        if inside and len(case.log.hosts()) > 1:
            yield Finding(
                id="bridge-address",
                severity="warning",
                seen=f"host {', '.join(inside[:4])} offers only addresses of Docker's default network (172.17.0.0/16)",
                means="mostly these are containers on bridge networks of their hosts, which other hosts cannot reach",
                do=_HOST_NETWORK,
                where=case.log.where(*(offered[host][1] for host in inside)),
                likelihood=70,
            )
        return
    events = [event for event, _ in failed] or [offered[hosts[0]][1] for hosts in shared.values()]
    address = failed[0][1] if failed else next(iter(shared))
    if failed:
        seen = f"connections to {address} fail"
    else:
        seen = f"hosts {', '.join(shared[address])} all offer the address {address}"
    yield Finding(
        id="bridge-address",
        severity="error",
        seen=seen,
        means=f"{address} is the address of a container on its own host's bridge network: it cannot be reached from "
        "another host",
        do=_HOST_NETWORK,
        where=case.log.where(*events),
        likelihood=94,
    )


def _localhost(case: Case, failures: list[tuple[Event, str, int]]) -> Iterator[Finding]:
    named = [event for event in case.log.events if event.line.host.split(".")[0] == "localhost"]
    if named:
        yield Finding(
            id="host-named-localhost",
            severity="warning",
            seen="a host is called 'localhost'",
            means="NCCL takes ranks with the same host name for ranks of one host, and tries shared memory between "
            "machines; names of the rendezvous resolve to the wrong host",
            do="give each host its own name (`hostnamectl set-hostname NAME`; containers: --hostname), or set "
            "NCCL_HOSTID",
            where=case.log.where(named[0]),
            likelihood=75 if failures else 60,
        )


def _other_network(found: list[tuple[Event, str]], offered: Mapping[str, tuple[list[Interface], Event]]) -> str:
    """Say where a peer is visibly in none of this host's networks; the length of prefixes is not in a log."""
    for event, peer in found:
        own = [one.address for one in offered.get(event.line.host, ([], event))[0]] + [event.get("local")]
        own = [text for text in own if "." in text and address_kind(text) == "global"]
        near = any(text.rsplit(".", 2)[0] == peer.rsplit(".", 2)[0] for text in own)
        if own and not near and "." in peer and address_kind(peer) == "global":
            return (
                f". {peer} is in another network than {', '.join(own[:3])}: the hosts may have chosen interfaces that "
                "no network joins; name those of a common one"
            )
    return ""


def _by_error(
    case: Case, offered: Mapping[str, tuple[list[Interface], Event]], failures: list[tuple[Event, str, int]]
) -> Iterator[Finding]:
    groups: dict[int, list[tuple[Event, str]]] = {}
    for event, peer, number in failures:
        if number in _BY_ERROR and address_kind(peer) not in ("loopback", "docker"):
            groups.setdefault(number, []).append((event, peer))
    for number, found in groups.items():
        name, means, do = _BY_ERROR[number]
        peers = list(dict.fromkeys(peer for _, peer in found if peer))
        final = [event for event, _ in found if not _is_retried(event)]
        target = f" to {', '.join(peers[:4])}" if peers else ""
        times = f" ({len(found)} times)" if len(found) > 1 else ""
        means += _other_network(found, offered) if number in (110, 113, 101) else ""
        words = {113: "No route to host", 110: "timed out", 111: "refused", 101: "network unreachable"}.get(number, "")
        yield Finding(
            id=name,
            severity="error" if final or number in (110, 113, 101) else "warning",
            seen=f"connections{target} fail with errno {number}{f' ({words})' if words else ''}{times}",
            means=means,
            do=do,
            where=case.log.where(*(event for event, _ in found)),
            likelihood={113: 85, 101: 82, 110: 70, 103: 66, 99: 60, 111: 50}[number],
        )


def _prefix_matches(case: Case, offered: Mapping[str, tuple[list[Interface], Event]]) -> Iterator[Finding]:
    for host, (listed, event) in offered.items():
        setting = case.variable("NCCL_SOCKET_IFNAME", host=host)
        if setting is None or setting[0].startswith(("^", "=")):
            continue
        words = [word for word in setting[0].split(",") if word]
        names = [one.name for one in listed]
        more = [name for name in names if name not in words and any(name.startswith(word) for word in words)]
        exact = [name for name in names if name in words]
        if more and exact:
            yield Finding(
                id="interface-prefix",
                severity="warning",
                seen=f"NCCL_SOCKET_IFNAME={setting[0]} selects {', '.join(more)} besides {', '.join(exact)}",
                means="without '=' the value is a prefix: VLANs and numbered interfaces match too, and may lead to "
                "networks that the peers are not on",
                do=f"set NCCL_SOCKET_IFNAME='={','.join(exact)}'",
                where=case.log.where(setting[1], event),
                likelihood=86,
            )


def _other_interface(case: Case, offered: Mapping[str, tuple[list[Interface], Event]]) -> Iterator[Finding]:
    """A connection that leaves from an address which the named interface does not have."""
    known = {one.address: (host, one.name) for host, (listed, _) in offered.items() for one in listed}
    setting = case.variable("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    if setting is None or not known:
        return
    for event in case.log.of("gloo-connect"):
        local = event.get("local")
        if address_kind(local) == "global" and local not in known:
            yield Finding(
                id="other-interface",
                severity="warning",
                seen=f"a connection uses the local address {local}; {setting[1].get('name')}={setting[0]} selects "
                + ", ".join(f"{name} ({address})" for address, (_, name) in known.items()),
                means="traffic leaves by another interface than the named one: the rendezvous address is in another "
                "subnet than the interface",
                do="put MASTER_ADDR on the subnet of the named interface; check `ip route get ADDRESS` and rp_filter",
                where=case.log.where(event),
                likelihood=65,
            )
            return
