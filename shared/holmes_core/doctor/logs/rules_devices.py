# SPDX-License-Identifier: Apache-2.0
"""RDMA devices: which ones each process selected, whether they are of one kind, and whether the hosts agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holmes_core.cluster.hca_list import NameList
from holmes_core.doctor.finding import Finding
from holmes_core.doctor.logs.event import Event
from holmes_core.doctor.logs.parts import Case, Device, devices, named
from holmes_core.errors import did_you_mean

__all__ = ["device_findings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
    host: str
    event: Event
    devices: tuple[Device, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.devices)

    @property
    def links(self) -> set[str]:
        return {one.link for one in self.devices}


def device_findings(case: Case) -> Iterator[Finding]:
    """Yield what is wrong with the selections of RDMA devices."""
    chosen = _selections(case)
    yield from _mixed(case, chosen)
    yield from _kinds_differ(case, chosen)
    yield from _counts_differ(case, chosen)
    yield from _modifiers(case, chosen)
    yield from _list(case, chosen)


def _selections(case: Case) -> list[_Selection]:
    """One per host: the largest of its processes (a rank may be given fewer on purpose)."""
    best: dict[str, _Selection] = {}
    for event in case.log.of("ib-using"):
        found = _Selection(host=event.line.host, event=event, devices=tuple(devices(event.get("list"))))
        if found.host not in best or len(found.devices) > len(best[found.host].devices):
            best[found.host] = found
    return list(best.values())


def _exact(names: tuple[str, ...] | list[str]) -> str:
    return f"NCCL_IB_HCA='={','.join(names)}'"


def _mixed(case: Case, chosen: list[_Selection]) -> Iterator[Finding]:
    refused = next(case.log.of("incompatible"), None)
    failed = next(case.log.of("wc-error", "modify-qp"), None)
    both = [one for one in chosen if len(one.links) > 1]
    if refused is not None:
        kinds = {refused.get("a"): refused.get("a_link"), refused.get("b"): refused.get("b_link")}
        host = refused.line.host
        mine = next((one for one in both if one.host == host), None)
    elif both:
        mine = both[0]
        host, kinds = mine.host, {one.name: one.link for one in mine.devices}
    else:
        return
    if mine is not None:
        kinds |= {one.name: one.link for one in mine.devices}
    single = {link for one in chosen if len(one.links) == 1 for link in one.links}
    by_link = {link: [name for name, its in kinds.items() if its == link] for link in ("IB", "RoCE")}
    keep = next(iter(single)) if len(single) == 1 else max(by_link, key=lambda link: len(by_link[link]))
    # InfiniBand by default: an Ethernet port beside it is mostly for storage or management.
    names = by_link[keep] or by_link["IB"] or list(kinds)
    listed = ", ".join(f"{name} is {link}" for name, link in kinds.items())
    yield Finding(
        id="mixed-link-types",
        severity="error" if refused is not None or failed is not None else "warning",
        seen=f"both link types are selected on {named(host)}: {listed}",
        means="InfiniBand and RoCE devices share NCCL's plugin and cannot talk to each other: a connection between the "
        "two is refused or times out",
        do=f"select one link type with an exact list: {_exact(names)}",
        where=case.log.where(*[e for e in (refused, mine.event if mine else None) if e is not None]),
        likelihood=96 if refused is not None else 89,
    )


def _kinds_differ(case: Case, chosen: list[_Selection]) -> Iterator[Finding]:
    by_link: dict[str, list[_Selection]] = {}
    for one in chosen:
        if len(one.links) == 1:
            by_link.setdefault(next(iter(one.links)), []).append(one)
    if len(by_link) < 2:
        return
    joined = case.has_common_network()
    yield Finding(
        id="ib-and-roce-hosts",
        severity="note" if joined else "error",
        seen="; ".join(
            f"{link} on {', '.join(one.host or '?' for one in found[:4])}" for link, found in by_link.items()
        ),
        means="the hosts are in different fabrics: InfiniBand and RoCE cannot meet in one communicator"
        + ("; all hosts also use one network that they share, so groups across the fabrics can work" if joined else ""),
        do="put the hosts of each fabric into groups of their own and join the fabrics over Ethernet only (Holmes "
        "plans that: `holmes plan`), or set NCCL_NET=Socket for the whole job",
        where=case.log.where(*(one.event for found in by_link.values() for one in found[:2])),
        likelihood=91,
    )


def _counts_differ(case: Case, chosen: list[_Selection]) -> Iterator[Finding]:
    told = next(case.log.of("net-counts"), None)
    unequal = len({len(one.devices) for one in chosen}) > 1
    if not unequal and told is None:
        return
    closed: dict[str, list[str]] = {}
    events = []
    for event in case.log.of("ib-open"):
        closed.setdefault(event.line.host, []).append(event.get("device"))
        events.append(event)
    seen = "; ".join(f"{one.host or '?'} has {', '.join(one.names) or 'none'}" for one in chosen if unequal)
    if not seen and told is not None:
        fewer = [f"rank {event.get('rank')} has {event.get('count')}" for event in case.log.of("net-count")]
        seen = f"ranks have {told.get('min')} to {told.get('max')} network devices" + (
            f" ({', '.join(fewer[:6])})" if fewer else ""
        )
    for host, names in closed.items():
        seen += f"; {host or '?'} could not open {', '.join(dict.fromkeys(names))}"
    seen += "".join(_channels(case, chosen)) if unequal else ""
    common = [name for name in chosen[0].names if all(name in one.names for one in chosen)] if chosen else []
    hidden = case.variable("NCCL_IGNORE_NET_MISMATCH")
    if not closed and told is None and case.has_common_network():
        return
    sure = bool(closed) or told is not None or hidden is not None
    do = (
        f"restrict all hosts to the common devices ({_exact(common)})"
        if common
        else ("give every host an exact list of as many devices, paired rail by rail (names may differ between hosts)")
    )
    if closed:
        do += ", or give the container of " + ", ".join(h or "that host" for h in closed) + " the missing device files"
    yield Finding(
        id="unequal-hcas",
        severity="error" if sure else "warning",
        seen=f"unequal HCA sets: {seen}",
        means="channels are paired by number: those on a device that the peer does not have hang or fail. "
        "NCCL_IGNORE_NET_MISMATCH=1 (the default of newer releases) only hides it, and the job spins for ever",
        do=do,
        where=case.log.where(*(one.event for one in chosen), *events[:2], *([told] if told else [])),
        likelihood=96 if sure else 80,
    )


def _channels(case: Case, chosen: list[_Selection]) -> Iterator[str]:
    """Name the channels that run over a device which some host lacks."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for event in case.log.of("channel"):
        mine = next((one for one in chosen if one.host == event.line.host), None)
        if mine is None or event.get("way") != "send" or not event.get("net").startswith("IB"):
            continue
        device = next((one.name for one in mine.devices if one.index == int(event.get("device"))), "")
        lacking = [one.host or "?" for one in chosen if device and device not in one.names]
        if lacking:
            key = event.get("source"), device, ", ".join(lacking[:4])
            found.setdefault(key, []).append(event.get("channel"))
    for (rank, device, hosts), channels in found.items():
        yield f"; channels {', '.join(dict.fromkeys(channels))} of rank {rank} use {device}, which {hosts} lacks"


def _modifiers(case: Case, chosen: list[_Selection]) -> Iterator[Finding]:
    """A modifier after the first name: wrong whatever the devices are."""
    seen = set()
    for event in case.log.of("env"):
        name, value = event.get("name"), event.get("value")
        words = value.lstrip("^=").split(",")
        if name not in ("NCCL_IB_HCA", "NCCL_SOCKET_IFNAME") or (name, value) in seen:
            continue
        seen.add((name, value))
        if any(word.startswith(("^", "=")) for word in words):
            clean = value[: len(value) - len(value.lstrip("^="))] + ",".join(word.lstrip("^=") for word in words)
            used = next((one for one in chosen if one.host == event.line.host and name == "NCCL_IB_HCA"), None)
            yield Finding(
                id="hca-list-modifier" if name == "NCCL_IB_HCA" else "interface-list-modifier",
                severity="error",
                seen=f"{name}={value}" + (f"; in use are {', '.join(used.names)}" if used else ""),
                means="'^' and '=' are read once, at the beginning; a later '^=name' is taken as a name and matches "
                "nothing, so that device stays in use",
                do=f"write {name}='{clean}'",
                where=case.log.where(event, *([used.event] if used else [])),
                likelihood=90,
            )


def _list(case: Case, chosen: list[_Selection]) -> Iterator[Finding]:
    """What NCCL_IB_HCA says against what was selected."""
    for one in chosen:
        setting = case.variable("NCCL_IB_HCA", host=one.host)
        if setting is None or not one.names:
            continue
        value, event = setting
        words = [word.split(":")[0] for word in value.lstrip("^=").split(",") if word]
        if not value.startswith(("^", "=")):
            more = [name for name in one.names if name not in words and NameList.parse(value).selects(name)]
            if more and any(name in words for name in one.names):
                yield Finding(
                    id="hca-list-prefix",
                    severity="warning",
                    seen=f"NCCL_IB_HCA={value} also selects {', '.join(more)}",
                    means="without '=' the names are prefixes: mlx5_1 matches mlx5_10 and mlx5_11, too",
                    do=f"write NCCL_IB_HCA='={value}'",
                    where=case.log.where(event, one.event),
                    likelihood=82,
                )
        elif value.startswith("="):
            lost = [word for word in words if word and word not in one.names and not word.startswith(("^", "="))]
            if lost:
                yield Finding(
                    id="hca-list-unused",
                    severity="warning",
                    seen=f"NCCL_IB_HCA={value} names {', '.join(lost)}, which {named(one.host)} does not use"
                    + did_you_mean(lost[0], one.names),
                    means="the device is not there, not active or cannot be opened, or the name is another host's (or "
                    "a typo)",
                    do="compare with `ibstat` on this host; give each host its own list",
                    where=case.log.where(event, one.event),
                    likelihood=75,
                )
