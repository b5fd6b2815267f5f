# SPDX-License-Identifier: Apache-2.0
"""RDMA connections: GID indices, queue pairs that cannot be set up, completions with errors, locked memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from holmes_core.cluster.gid import choose_gid, gid_ip
from holmes_core.cluster.nic import Gid
from holmes_core.doctor.finding import Finding
from holmes_core.doctor.logs.event import Event
from holmes_core.doctor.logs.parts import Case, address_kind, devices, error_number

__all__ = ["rdma_findings"]

# enum ibv_wc_status of rdma-core libibverbs/verbs.h
_RETRY, _RNR, _FLUSH = 12, 13, 5
_STATUS = {
    4: (
        "local protection error",
        "the NIC may not access the memory: GPUDirect (nvidia_peermem, DMA-BUF), an IOMMU or ACS setting, or memory "
        "that was freed",
        "try NCCL_NET_GDR_LEVEL=LOC; check nvidia_peermem, and iommu=pt on the kernel's command line",
    ),
    9: (
        "remote invalid request",
        "the two ends do not agree: versions or sizes differ",
        "compare NCCL versions of all hosts",
    ),
    10: (
        "remote access error",
        "the peer's memory is not what was announced: ranks out of step, or different NCCL versions, or a device of "
        "another fabric (NVSwitch's own) was selected",
        "compare NCCL versions; give an exact NCCL_IB_HCA list",
    ),
    11: ("remote operation error", "the peer's NIC could not do it", "look at the peer's `dmesg`"),
    13: (
        "receiver not ready",
        "the peer does not take the data: it hangs or is overloaded",
        "look at the peer's rank first",
    ),
}
_ADVICE_NO_TABLE = (
    "run `show_gids` on this host and take the index of the entry that is RoCE v2 with the routable (IPv4) address; "
    "`holmes doctor LOG --gids FILE` computes it from that output. The index differs between hosts: no number is right "
    "everywhere. Then check the switch: ECN/PFC for RoCE, UDP port 4791 not filtered, equal MTU"
)


def rdma_findings(case: Case) -> Iterator[Finding]:
    """Yield what failed in RDMA connections, and why."""
    yield from _gids(case)
    yield from _statuses(case)
    yield from _queue_pairs(case)
    yield from _memory(case)


def _link(case: Case, event: Event, device: str) -> str:
    """IB or RoCE, of the device that failed, or of all that the host uses (then maybe both); empty if unknown."""
    stated = event.get("link")
    links = _links(case, event, device)
    return stated or (next(iter(links)) if len(links) == 1 else "both" if links else "")


def _links(case: Case, event: Event, device: str) -> set[str]:
    return {
        one.link
        for other in case.log.of("ib-using")
        if other.line.host == event.line.host
        for one in devices(other.get("list"))
        if not device or one.name == device
    }


def _device(event: Event) -> str:
    text = event.get("rest") + event.get("why")
    found = re.search(r"(?:\bhca|on dev) ([\w.+-]+?)(?:[:,\s]|$)", text)
    return event.get("hca") or (found[1].removesuffix("_dma") if found else "")


def _gids(case: Case) -> Iterator[Finding]:
    """Wrong GID first: it is the usual cause of both errors on RoCE."""
    events = [e for e in case.log.of("wc-error") if int(e.get("status")) == _RETRY]
    events += case.log.of("ucx-retry")
    events += [e for e in case.log.of("modify-qp") if error_number(e.get("why")) in (110, 22, 101, 113, 19)]
    seen_hosts = set()
    for event in events:
        if event.line.host in seen_hosts:
            continue
        device = _device(event)
        link = _link(case, event, device)
        if link in ("IB", "both"):  # both: the mixture of link types is the finding
            continue
        seen_hosts.add(event.line.host)
        yield _gid_finding(case, event, device)


def _gid_finding(case: Case, event: Event, device: str) -> Finding:
    setting = case.variable("NCCL_IB_GID_INDEX", "UCX_IB_GID_INDEX", host=event.line.host)
    text = event.get("rest") + event.get("why")
    stated = re.search(r"local GID index (\d+)", text)
    local = re.search(r"local ?(?:GID|Gid) ([0-9A-Fa-f:.]+)", text)
    remote = re.search(r"remote ?(?:GIDs?|Gids?) ?([0-9A-Fa-f:.]+)", text)
    index = int(stated[1]) if stated else int(setting[0]) if setting and setting[0].isdecimal() else None
    name, table = _table(case, event, device)
    what = _what(event)
    likelihood, seen = 86, what
    if table:
        used = next((gid for gid in table if gid.index == index), None)
        right, why = choose_gid(table)
        entry = next((gid for gid in table if gid.index == right), None)
        if right is None:
            means = f"{name}: {why or 'its GID table tells no types'}"
            do = "give the port's interface a routable address on every host, then use the index that `show_gids` shows"
        elif index == right:
            means = (
                f"GID index {right} is the right entry of {name} ({gid_ip(entry.address) if entry else ''}), so the "
                "packets are lost on the way: switch filtering, PFC/ECN, unequal MTU, or subnets without a route"
            )
            do = (
                "run `ib_write_bw -x INDEX` between the two hosts; check PFC/ECN and UDP port 4791 on the switches, "
                "MTU, and that the peers' GIDs are of one network"
            )
            likelihood = 70
        else:
            means = f"{_described(used, index)}; packets with it do not arrive at the peer"
            ip = gid_ip(entry.address) if entry else ""
            do = (
                f"set NCCL_IB_GID_INDEX={right} on this host: the RoCE v2 entry of the routable address {ip} in the "
                f"table of {name}. Other hosts may need another index. If it still fails: switch filtering, PFC"
            )
            likelihood = 95
    else:
        link_local = [f[1] for f in (local, remote) if f and address_kind(f[1]) == "link-local"]
        at = f"GID index {index}" if index is not None else "the GID index that NCCL chose"
        if link_local:
            means = f"{link_local[0]} is a link-local GID: connections through it time out"
            likelihood = 93
        elif local and remote and address_kind(local[1]) == address_kind(remote[1]) == "global":
            means = (
                f"the GIDs {local[1]} and {remote[1]} are routable: either there is no RDMA path between their "
                "networks (the rails are paired wrongly, or cabled differently), or the switch filters or loses the "
                "packets (PFC/ECN)"
            )
        else:
            means = (
                f"RoCE peers found each other over TCP and RDMA packets do not arrive: most likely {at} is a RoCE v1 "
                "or a link-local entry (the first entries of a table mostly are); after that, the switch filters or "
                "loses them"
            )
        do = _ADVICE_NO_TABLE
    if error_number(event.get("why")) == 19:
        means = (
            "an Ethernet (RoCE) port cannot be addressed by LID: it needs a GID, and the index is of no entry. " + means
        )
    return Finding(
        id="gid-index",
        severity="error",
        seen=seen + (f" with GID index {index}" if index is not None else "") + (f" on {name}" if name else ""),
        means=means,
        do=do,
        where=case.log.where(event, *([setting[1]] if setting else [])),
        likelihood=likelihood,
    )


def _what(event: Event) -> str:
    if event.name == "modify-qp":
        return f"ibv_modify_qp fails ({event.get('why')[:60].split(', on dev')[0]})"
    peer = event.get("peer")
    return "RDMA transport retries exceeded (error 12)" + (f" to {peer}" if peer else "")


def _table(case: Case, event: Event, device: str) -> tuple[str, Sequence[Gid]]:
    """Return the device and its GID table: the named device's, else that of the only device there is one for."""
    if device in case.gids:
        return device, case.gids[device]
    used = [
        one.name
        for other in case.log.of("ib-using")
        if other.line.host == event.line.host
        for one in devices(other.get("list"))
    ]
    for name in used:
        if name in case.gids:
            return name, case.gids[name]
    if not device and len(case.gids) == 1:
        name = next(iter(case.gids))
        return name, case.gids[name]
    return device, ()


def _described(gid: Gid | None, index: int | None) -> str:
    if index is None:
        return "NCCL chose an entry that does not reach the peer (or an older NCCL took entry 0)"
    if gid is None:
        return f"index {index} is an empty entry of the table"
    kind = {"roce_v2": "RoCE v2", "roce_v1": "RoCE v1", "ib": "InfiniBand"}.get(gid.type, "an")
    ip = gid_ip(gid.address)
    where = "the link-local address" if address_kind(ip) == "link-local" else "the address"
    return f"index {index} is the {kind} entry of {where} {ip}"


def _statuses(case: Case) -> Iterator[Finding]:
    by_status: dict[int, list[Event]] = {}
    for event in case.log.of("wc-error", "ucx-retry"):
        if event.name == "wc-error":
            by_status.setdefault(int(event.get("status")), []).append(event)
        elif _link(case, event, _device(event)) == "IB":
            by_status.setdefault(_RETRY, []).append(event)
    for status, events in by_status.items():
        event = events[0]
        device = _device(event)
        if status == _RETRY:
            if _link(case, event, device) != "IB":
                continue
            yield Finding(
                id="rdma-retries",
                severity="error",
                seen=f"{_what(event)}{f' on {device}' if device else ''} over InfiniBand",
                means="the peer's NIC does not answer: its process or host ended, its port is down, or the two ports "
                "are in different InfiniBand subnets or partitions",
                do="look whether the peer rank failed first; then `ibstat` and `ibping` between the two ports, and "
                "pairwise ib_write_bw; NCCL_IB_TIMEOUT=22 helps only on large, congested fabrics",
                where=case.log.where(*events),
                likelihood=75,
            )
            continue
        name, means, do = _STATUS.get(
            status, (f"status {status}", "an RDMA operation failed", "look at the other ranks and at `dmesg`")
        )
        if status == _FLUSH:
            name, means = "flushed", "the queue pair was closed after an earlier error"
        yield Finding(
            id="rdma-completion",
            severity="error",
            seen=f"an RDMA operation ended with error {status} ({name}){f' on {device}' if device else ''}",
            means=means,
            do=do,
            where=case.log.where(*events),
            likelihood=20 if status == _FLUSH else 72,
            symptom=status == _FLUSH,
        )


def _queue_pairs(case: Case) -> Iterator[Finding]:
    known = (110, 22, 101, 113, 19, 12)
    for event in case.log.of("modify-qp"):
        number = error_number(event.get("why"))
        if number not in known or (_link(case, event, _device(event)) == "IB" and number != 12):
            yield Finding(
                id="queue-pair",
                severity="error",
                seen=f"ibv_modify_qp fails: {event.get('why')[:80]}",
                means="a queue pair could not be connected: ports in different InfiniBand subnets or partitions, MTU "
                "that differs, or a port that is not active",
                do="compare `ibstat` (state, SM lid, rate) and partitions (`/sys/class/infiniband/*/ports/*/pkeys`) "
                "of the two ports",
                where=case.log.where(event),
                likelihood=70,
            )
            return


def _memory(case: Case) -> Iterator[Finding]:
    events = list(case.log.of("rdma-memory"))
    if events:
        call = next((event.get("call") for event in events if event.get("call")), "")
        limit = next((event.get("limit") for event in events if event.get("limit")), "")
        yield Finding(
            id="memlock",
            severity="error",
            seen=f"{call or 'RDMA memory registration'} fails: Cannot allocate memory"
            + (f" (limit {limit})" if limit else ""),
            means="RDMA pins memory, and the limit on locked memory (ulimit -l) of the process is too low",
            do="set it to unlimited for the process that runs the ranks: container --ulimit memlock=-1 (and "
            "IPC_LOCK), SLURM PropagateResourceLimitsExcept=MEMLOCK with LimitMEMLOCK=infinity for slurmd, "
            "/etc/security/limits.conf for logins; check with `ulimit -l` inside a launched rank",
            where=case.log.where(*events),
            likelihood=95,
        )
