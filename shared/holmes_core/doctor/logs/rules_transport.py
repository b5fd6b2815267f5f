# SPDX-License-Identifier: Apache-2.0
"""Which network NCCL uses on each host, whether it is the one that was wanted, and whether the hosts agree."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holmes_core.doctor.finding import Finding
from holmes_core.doctor.logs.event import Event
from holmes_core.doctor.logs.parts import Case, Interface, devices, interfaces, named

__all__ = ["transport_findings"]

_NO_DEVICE_FILES = (
    "give the container the devices: --device=/dev/infiniband (Kubernetes: an RDMA device plugin), "
    "--ulimit memlock=-1; outside containers `modprobe ib_uverbs` and check the permissions of /dev/infiniband/uverbs*"
)
_WORDS = {"IB": "NCCL's IB plugin", "Socket": "TCP sockets"}


def transport_findings(case: Case) -> Iterator[Finding]:
    """Yield the verdicts on transports, wanted and used."""
    used = _used(case)
    yield from _in_use(case, used)
    yield from _socket_wanted(case, used)
    yield from _cannot_open(case, used)
    yield from _socket_on_rdma(case, used)
    yield from _plugin_not_found(case)
    yield from _libfabric(case, used)
    yield from _mixed_networks(case, used)


def _used(case: Case) -> dict[str, tuple[str, Event]]:
    """Host -> the network that its first communicator uses."""
    found: dict[str, tuple[str, Event]] = {}
    for event in case.log.of("net"):
        found.setdefault(event.line.host, (event.get("net"), event))
    for event in case.log.of("channel"):  # a log may have been cut
        found.setdefault(event.line.host, (event.get("net"), event))
    return found


def _links(case: Case, host: str) -> dict[str, str]:
    """Device -> IB or RoCE, of a host."""
    return {
        one.name: one.link
        for event in case.log.of("ib-using")
        if event.line.host == host
        for one in devices(event.get("list"))
    }


def _in_use(case: Case, used: dict[str, tuple[str, Event]]) -> Iterator[Finding]:
    networks = case.networks()
    same: dict[tuple[str, str], list[tuple[str, Event]]] = {}
    for host, (net, event) in used.items():
        links = _links(case, host)
        over = " and ".join(sorted(set(links.values())))
        detail = f" over {over} on {', '.join(links)}" if net.startswith("IB") and links else ""
        if net == "Socket":
            names = dict.fromkeys(one.name for one in _interfaces(case, host))
            detail = f" over {', '.join(names)}" if names else ""
        more = [_WORDS.get(other, other) for other in networks.get(host, []) if other != net]
        detail += f", and {', '.join(more)} in other groups" if more else ""
        means = f"network {net!r} in NCCL's words"
        if "RoCE" in over and net.startswith("IB"):
            means += "; RoCE runs on NCCL's IB plugin, it is not Socket"
        if any("_dma" in e.get("list") for e in case.log.of("ib-using") if e.line.host == host):
            means += "; the suffix _dma stands for Data Direct: the kernel's device has the name without it"
        same.setdefault((_WORDS.get(net, net) + detail, means), []).append((host, event))
    for (what, means), found in same.items():
        hosts = [host or "?" for host, _ in found]
        listed = ", ".join(hosts[:6]) + (f" and {len(hosts) - 6} more" if len(hosts) > 6 else "")
        yield Finding(
            id="transport",
            severity="note",
            seen=f"{named(found[0][0])} uses {what}" if len(found) == 1 else f"{len(found)} hosts use {what}: {listed}",
            means=means,
            where=case.log.where(*(event for _, event in found)),
            likelihood=50,
        )


def _interfaces(case: Case, host: str) -> list[Interface]:
    return [
        one
        for event in case.log.of("socket-using", "bootstrap")
        if event.line.host == host
        for one in interfaces(event.get("list"))
    ]


def _socket_wanted(case: Case, used: dict[str, tuple[str, Event]]) -> Iterator[Finding]:
    for name in ("NCCL_IB_DISABLE", "NCCL_IBEXT_DISABLE"):
        for host, (net, event) in used.items():
            setting = case.variable(name, host=host)
            if setting is None or setting[0] in ("0", "") or not net.startswith("IB"):
                continue
            over = " and ".join(sorted(set(_links(case, host).values()))) or "RDMA"
            plugin = next((e for e in case.log.of("plugin") if e.line.host == host), None)
            yield Finding(
                id="socket-wanted",
                severity="error",
                seen=f"{name}={setting[0]} asks for TCP, and {named(host)} uses {over} (network {net})",
                means="each of the two variables switches off one implementation: NCCL_IB_DISABLE the internal one, "
                "NCCL_IBEXT_DISABLE an external plugin's; the other one takes over",
                do="to force sockets set NCCL_NET=Socket (or the net name of one communicator) instead of "
                "NCCL_IB_DISABLE",
                where=case.log.where(setting[1], event, *([plugin] if plugin else [])),
                likelihood=90,
            )
            return


def _cannot_open(case: Case, used: dict[str, tuple[str, Event]]) -> Iterator[Finding]:
    hosts: dict[str, list[Event]] = {}
    for event in case.log.of("ib-open", "ib-open-call"):
        hosts.setdefault(event.line.host, []).append(event)
    for host, events in hosts.items():
        names = list(dict.fromkeys(event.get("device") for event in events if event.get("device"))) or ["a device"]
        nothing = [event for event in case.log.of("ib-none") if event.line.host == host]
        socket = used.get(host, ("", events[0]))[0] == "Socket"
        yield Finding(
            id="rdma-device-closed",
            severity="error" if socket or nothing or len(hosts) < len(case.log.hosts()) else "warning",
            seen=f"{named(host)} sees {', '.join(names)} and cannot open "
            + ("it" if len(names) == 1 else "them")
            + ("; it runs over sockets" if socket else ""),
            means="/sys shows the device, /dev/infiniband/uverbs* is missing or not permitted in this container: RDMA "
            "hardware that this process cannot use"
            + (", so NCCL falls back to TCP, many times slower" if socket or nothing else ""),
            do=_NO_DEVICE_FILES,
            where=case.log.where(*events, *nothing[:1]),
            likelihood=95 if socket or nothing else 80,
        )


def _socket_on_rdma(case: Case, used: dict[str, tuple[str, Event]]) -> Iterator[Finding]:
    """Sockets although the host has RDMA: told by its inventory, by variables, or by what other lines name."""
    if _forced(case):
        return
    for host, (net, event) in used.items():
        if net != "Socket" or any(e.line.host == host for e in case.log.of("ib-open")):
            continue
        inventory = case.inventories.get(host)
        listed = _interfaces(case, host)
        slingshot = [one.name for one in listed if re.fullmatch(r"hsn\d+", one.name)]
        ofi = _wants_ofi(case, host)
        none = next((e for e in case.log.of("ib-none") if e.line.host == host), None)
        hca = case.variable("NCCL_IB_HCA", host=host)
        verbs = next((e for e in case.log.of("no-libibverbs") if e.line.host == host), None)
        if (inventory is not None and inventory.kind in ("efa", "slingshot")) or slingshot or ofi:
            kind = (
                inventory.kind
                if inventory is not None and inventory.rails
                else "slingshot"
                if slingshot
                else "libfabric"
            )
            names = (
                ", ".join(dict.fromkeys(slingshot)) or (ofi or "") or ", ".join(inventory.rails if inventory else ())
            )
            yield Finding(
                id="ofi-plugin-missing",
                severity="error",
                seen=f"{named(host)} uses sockets on an RDMA fabric ({kind}: {names})",
                means="NCCL reaches EFA and Slingshot only through the OFI (libfabric) plugin, and it was not loaded: "
                "traffic goes over TCP, several times slower",
                do="install aws-ofi-nccl (aws-ofi-rccl), put its directory into LD_LIBRARY_PATH of the ranks, set "
                "NCCL_NET_PLUGIN=ofi, and NCCL_NET='AWS Libfabric' so that a plugin that does not load is an error",
                where=case.log.where(event, *([none] if none else [])),
                likelihood=90,
            )
        elif inventory is not None and inventory.rails:
            yield Finding(
                id="socket-on-rdma",
                severity="error",
                seen=f"host {host} has {inventory.kind} rails ({', '.join(inventory.rails)}) and NCCL uses sockets",
                means="the RDMA devices are usable on the host, and NCCL did not take them",
                do="unset NCCL_IB_DISABLE and NCCL_NET, check NCCL_IB_HCA, and libibverbs inside the ranks' container",
                where=case.log.where(event, *([none] if none else [])),
                likelihood=88,
            )
        elif verbs is not None:
            yield Finding(
                id="no-libibverbs",
                severity="warning" if hca is not None else "note",
                seen=f"{named(host)} has no libibverbs, and NCCL uses sockets",
                means="without the library NCCL cannot see any InfiniBand or RoCE device, whatever the hardware",
                do="install libibverbs1 and the providers (ibverbs-providers, rdma-core) in the image, if the host "
                "has RDMA",
                where=case.log.where(verbs, event),
                likelihood=70,
            )
        elif none is not None and hca is not None:
            yield Finding(
                id="hca-list-empty",
                severity="error",
                seen=f"NCCL_IB_HCA={hca[0]} selects no device on {named(host)}, and NCCL uses sockets",
                means="the list names devices that this host does not have, cannot open, or whose ports are down",
                do="compare the list with `ls /sys/class/infiniband` and `ibstat` inside the container; give each host "
                "its own list",
                where=case.log.where(hca[1], none, event),
                likelihood=88,
            )
        elif none is not None:
            yield Finding(
                id="no-rdma-seen",
                severity="note",
                seen=f"{named(host)}: NCCL found no RDMA device and uses sockets",
                means="right for a host without RDMA; the log does not say whether this one has any",
                do="if it has: `ls /sys/class/infiniband /dev/infiniband` inside the container, `ibstat` for the port "
                "states",
                where=case.log.where(none, event),
                likelihood=40,
            )


def _forced(case: Case) -> bool:
    net, disabled = case.variable("NCCL_NET"), case.variable("NCCL_IB_DISABLE")
    return (net is not None and net[0].lower() == "socket") or (disabled is not None and disabled[0] not in ("", "0"))


def _wants_ofi(case: Case, host: str) -> str:
    """What shows that the OFI plugin was wanted; empty if nothing does."""
    for event in case.log.of("env"):
        name, value = event.get("name"), event.get("value")
        if event.line.host not in ("", host):
            continue
        if name.startswith(("FI_", "OFI_NCCL_")) or (
            name in ("NCCL_NET", "NCCL_NET_PLUGIN") and re.search(r"ofi|libfabric|efa|cxi", value, re.IGNORECASE)
        ):
            return f"{name}={value}"
    return ""


def _plugin_not_found(case: Case) -> Iterator[Finding]:
    for event in case.log.of("net-not-found"):
        setting = case.variable("NCCL_NET", "NCCL_NET_PLUGIN")
        net = event.get("net") or (setting[0] if setting else "")
        ofi = bool(re.search(r"ofi|libfabric", net, re.IGNORECASE))
        missing = next(case.log.of("plugin-missing"), None)
        yield Finding(
            id="net-plugin-missing",
            severity="error",
            seen=f"NCCL did not get the network {net!r}" if net else "NCCL could not start any network",
            means="NCCL_NET names a network that no loaded plugin offers: the plugin's library was not found, does not "
            "fit this NCCL, or has no device",
            do=(
                "install aws-ofi-nccl, put its directory into LD_LIBRARY_PATH and set NCCL_NET_PLUGIN=ofi"
                if ofi
                else "check NCCL_NET and NCCL_NET_PLUGIN, and that LD_LIBRARY_PATH of the ranks has the plugin; for "
                "IB check /dev/infiniband and `ibstat` inside the container; unset NCCL_NET to let NCCL choose"
            ),
            where=case.log.where(event, *([setting[1]] if setting else []), *([missing] if missing else [])),
            likelihood=92,
        )
        return


def _libfabric(case: Case, used: dict[str, tuple[str, Event]]) -> Iterator[Finding]:
    providers = {event.get("provider").split(";")[0]: event for event in case.log.of("ofi-provider")}
    fast = [name for name in providers if name not in ("tcp", "sockets", "udp", "net")]
    empty = [event for event in case.log.of("ofi-empty") if not fast or event.get("provider") not in fast]
    none = [] if fast else list(case.log.of("ofi-none"))
    if empty or none:
        provider = empty[0].get("provider") if empty else ""
        efa = provider.startswith("efa") or not provider
        yield Finding(
            id="no-fabric-provider",
            severity="error",
            seen=f"libfabric finds no {provider or 'suitable'} provider" + (": its list is empty" if empty else ""),
            means=(
                "the EFA device was not passed to the container (/dev/infiniband/uverbs*), the instance type has no "
                "EFA, or this libfabric was built without EFA. NCCL_IB_* variables have no part in it"
                if efa
                else "the device of this provider is not there or not permitted in this container"
            ),
            do="check `fi_info -p efa` inside the container; request vpc.amazonaws.com/efa (Kubernetes) or pass "
            "--device=/dev/infiniband/uverbs0..N; let only one libfabric be loaded"
            if efa
            else f"check `fi_info -p {provider}` inside the container and its device files",
            where=case.log.where(*empty[:2], *none[:2]),
            likelihood=93,
        )
    elif providers and not fast:
        name, event = next(iter(providers.items()))
        yield Finding(
            id="slow-fabric-provider",
            severity="error",
            seen=f"the OFI plugin selected the provider {name}",
            means="libfabric found no RDMA provider and runs over TCP, several times slower",
            do="unset FI_PROVIDER; check `fi_info -p efa` (or cxi) inside the container and its device files",
            where=case.log.where(event),
            likelihood=90,
        )


def _mixed_networks(case: Case, used: dict[str, tuple[str, Event]]) -> Iterator[Finding]:
    nets: dict[str, list[str]] = {}
    for host, (net, _) in used.items():
        nets.setdefault(net, []).append(host or "?")
    if len(nets) < 2 or case.has_common_network():
        return
    yield Finding(
        id="different-networks",
        severity="error",
        seen="; ".join(f"{net} on {', '.join(hosts[:4])}" for net, hosts in nets.items()),
        means="all members of a communicator have to use one network; hosts that differ hang or fail at the first "
        "transfer",
        do="bring the odd hosts to the network of the others, or give every group the network that its members share "
        "(Holmes does), or NCCL_NET=Socket everywhere",
        where=case.log.where(*(event for _, event in used.values())),
        likelihood=84,
    )
