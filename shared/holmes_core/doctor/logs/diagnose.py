# SPDX-License-Identifier: Apache-2.0
"""From a Log to findings: what messages say by themselves, what rules conclude, causes before echoes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holmes_core.doctor.finding import Finding, in_order
from holmes_core.doctor.logs.event import Event, Log, Verdict
from holmes_core.doctor.logs.parts import Case
from holmes_core.doctor.logs.read import families
from holmes_core.doctor.logs.rules_devices import device_findings
from holmes_core.doctor.logs.rules_ranks import is_echo, rank_findings
from holmes_core.doctor.logs.rules_rdma import rdma_findings
from holmes_core.doctor.logs.rules_socket import socket_findings
from holmes_core.doctor.logs.rules_transport import transport_findings

__all__ = ["diagnose", "silence"]

# What peers of a process that ended report: echoes, if they come after the end in the same log.
_AFTER_A_CRASH = {
    "connection-refused",
    "connect-timeout",
    "gid-index",
    "rdma-retries",
    "connection-aborted",
    "firewall",
    "no-route",
    "init-unfinished",
}
# A wrong choice of networks hangs jobs: with a hang in the log it is the cause, else it may do no harm.
_HANGS = {"collective-timeout", "gloo-timeout"}
_CAUSES_OF_HANGS = {
    "unequal-hcas",
    "mixed-link-types",
    "socket-interfaces",
    "interface-prefix",
    "gloo-loopback",
    "bridge-address",
}
_MOST_UNKNOWN = 3
_MOST_ALIKE = 3


def diagnose(case: Case) -> tuple[Finding, ...]:
    """Return what a log says is wrong, most likely cause first.

    Args:
        case: The log, and what is known about the hosts besides.

    Returns:
        Findings; none where the log says nothing that Holmes knows.
    """
    log = case.log
    found = [
        *_by_themselves(log),
        *transport_findings(case),
        *device_findings(case),
        *rdma_findings(case),
        *socket_findings(case),
        *rank_findings(case),
    ]
    found = _collapsed(_without_echoes(found, _crashes(log)))
    found.extend(_unknown(log, found))
    return in_order(found)


def silence(log: Log) -> str:
    """Return what to tell where nothing was found: what was read, and how a log says more."""
    lines = sum(log.files.values())
    known = len(log.events)
    text = f"{lines} lines read, {known} of them of a known kind: nothing in them tells a fault that Holmes knows."
    if not log.nccl_lines:
        text += (
            " There are no lines of NCCL. Run again with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV and "
            "TORCH_CPP_LOG_LEVEL=INFO, and give the logs of all ranks."
        )
    else:
        text += " If the job failed, give the logs of all ranks: the cause is mostly in another rank's."
    return text


def _by_themselves(log: Log) -> Iterable[Finding]:
    verdicts = {family.name: family.verdict for family in families() if family.verdict is not None}
    groups: dict[str, tuple[Verdict, list[Event]]] = {}
    for event in log.events:
        verdict = verdicts.get(event.name)
        if verdict is not None:
            groups.setdefault(verdict.id, (verdict, []))[1].append(event)
    for verdict, events in groups.values():
        times = f" ({len(events)} times)" if len(events) > 1 else ""
        yield Finding(
            id=verdict.id,
            severity=verdict.severity,
            seen=events[0].line.text.strip()[:240] + times,
            means=verdict.means,
            do=verdict.do,
            where=log.where(*events),
            likelihood=verdict.likelihood,
            symptom=verdict.symptom,
        )


def _crashes(log: Log) -> list[Event]:
    names = {family.name for family in families() if family.verdict is not None and family.verdict.crash}
    return [
        event
        for event in log.events
        if event.name in names or event.name == "holmes" or (event.name == "exception" and not is_echo(event))
    ]


def _without_echoes(found: list[Finding], crashes: list[Event]) -> list[Finding]:
    """Turn what follows from another finding into notes."""
    first: dict[str, int] = {}
    for event in crashes:
        first.setdefault(event.line.file, event.line.number)
    marked = []
    for finding in found:
        file, number = _place(finding)
        later = finding.id in _AFTER_A_CRASH and first.get(file, number) < number
        marked.append(replace(finding, symptom=True) if later else finding)
    marked = [replace(one, likelihood=45) if _is_late_exception(one, marked) else one for one in marked]
    if any(one.id in _HANGS for one in marked):
        marked = [
            replace(one, severity="error") if one.id in _CAUSES_OF_HANGS and one.severity == "warning" else one
            for one in marked
        ]
    if not any(one.severity == "error" and not one.symptom for one in marked):
        return marked
    return [
        replace(one, severity="note", means=f"follows from another finding, most likely. {one.means}")
        if one.symptom
        else one
        for one in marked
    ]


def _collapsed(found: list[Finding]) -> list[Finding]:
    """Say the same about a few hosts and count the rest: a job may have thousands."""
    by_name: dict[str, list[Finding]] = {}
    for finding in found:
        by_name.setdefault(finding.id, []).append(finding)
    kept = []
    for same in by_name.values():
        last = same[:_MOST_ALIKE][-1]
        if len(same) > _MOST_ALIKE:
            places = dict.fromkeys(
                place for one in same[_MOST_ALIKE:] for place in one.where if place.startswith("host ")
            )
            names = ", ".join(place.removeprefix("host ") for place in list(places)[:8])
            more = f"; and {len(same) - _MOST_ALIKE} more like this" + (f" ({names}, ...)" if names else "")
            last = replace(last, seen=last.seen + more)
        kept += [*same[: _MOST_ALIKE - 1], last] if len(same) >= _MOST_ALIKE else same
    return kept


def _place(finding: Finding) -> tuple[str, int]:
    file, _, number = finding.where[0].rpartition(":") if finding.where else ("", "", "")
    return file, int(number) if number.isdecimal() else 0


def _is_late_exception(finding: Finding, found: list[Finding]) -> bool:
    """Whether a traceback comes after another error in the same log: the first failing line wins."""
    if finding.id != "exception":
        return False
    file, number = _place(finding)
    others = [_place(one) for one in found if one.severity == "error" and not one.symptom and one.id != "exception"]
    return any(other == file and 0 < line < number for other, line in others)


def _unknown(log: Log, found: list[Finding]) -> Iterable[Finding]:
    if not log.unknown:
        return
    shown = "; ".join(dict.fromkeys(line.text[:120] for line in log.unknown[: _MOST_UNKNOWN * 10]))
    yield Finding(
        id="unknown-warnings",
        severity="note",
        seen=f"{len(log.unknown)} warnings of NCCL that Holmes does not know: {shown[:360]}",
        means="what they mean is not known here",
        do="search for the text in NCCL's sources and issues" if not found else "",
        where=tuple(line.place for line in log.unknown[:_MOST_UNKNOWN]),
        likelihood=10,
    )
