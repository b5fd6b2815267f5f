# SPDX-License-Identifier: Apache-2.0
"""Ranks: who ended first and why, who hung in which collective, who only lost a connection."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holmes_core.doctor.finding import Finding
from holmes_core.doctor.logs.event import Event
from holmes_core.doctor.logs.parts import Case

__all__ = ["is_echo", "rank_findings"]

# Exceptions that say what another rank's end looked like from here.
_ECHO_TYPES = (
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ChildFailedError",
    "SignalException",
    "RendezvousConnectionError",
    "RendezvousTimeoutError",
    "HolmesError",
    "ProcessExitedException",
    "ProcessRaisedException",
    "CalledProcessError",
    "SystemExit",
)
_ECHO_TEXT = re.compile(
    r"NCCL (?:error|communicator)|ncclRemoteError|ncclSystemError|[Cc]onnection (?:closed|reset|refused)|Broken pipe|"
    r"[Tt]imed out|connectFullMesh|gloo/|Socket (?:closed|Timeout)|closed by peer|got 0 bytes|store is|TCPStore|"
    r"watchdog|DataLoader worker"
)
_SIGNALS = {
    9: (
        "killed",
        "SIGKILL: nearly always the out-of-memory killer, of the kernel, the container or SLURM; else somebody's kill",
        "look at `dmesg -T | grep -i -E 'oom|killed'` of that host, at the container's and the SLURM step's memory "
        "limit",
    ),
    11: (
        "crashed",
        "SIGSEGV: a crash in native code",
        "run the rank with PYTHONFAULTHANDLER=1; look at extensions and driver",
    ),
    6: (
        "aborted",
        "SIGABRT: the process ended itself, mostly torch's watchdog after a timeout, or a C++ exception",
        "look at what this rank wrote before",
    ),
    7: (
        "bus-error",
        "SIGBUS: mostly /dev/shm too small, or a file that was cut while mapped",
        "start the container with --shm-size=16g or --ipc=host",
    ),
    15: (
        "terminated",
        "SIGTERM: somebody else ended it: the launcher after another rank's failure, or the scheduler",
        "look for the rank that failed first, and at the scheduler's log",
    ),
}


def rank_findings(case: Case) -> Iterator[Finding]:
    """Yield what happened to ranks."""
    yield from _holmes(case)
    yield from _exceptions(case)
    yield from _exits(case)
    yield from _watchdog(case)
    yield from _barrier(case)
    yield from _waits(case)
    yield from _versions(case)
    yield from _init(case)
    yield from _gone(case)


# What Holmes knows only by an absence, or what may be an echo; a cause that was seen at its source comes before it.
_WEAK = re.compile(r"is (?:lost|not reached|furthest)|has (?:lost|given no)|ended without|was (?:ended by|interrupted)")


def _holmes(case: Case) -> Iterator[Finding]:
    """All ranks say the same cause; where they do not, one that was seen at its source is it."""
    told = list(case.log.of("holmes"))
    if not told:
        return
    event = next((one for one in told if not _WEAK.match(one.get("cause"))), told[0])
    rank, cause = event.get("rank"), event.get("cause")
    if cause.startswith("failed: "):
        means = "Holmes on that rank reported it before the job went down; the other ranks stopped because of it"
        do, words = f"look at the traceback of rank {rank}", f"failed first: {cause.removeprefix('failed: ')}"
    else:
        means = "Holmes on the ranks that were left reported it; they ended because of it"
        do, words = "read `means:` and `do:` below that line", cause
    yield Finding(
        id="first-failure",
        severity="error",
        seen=f"rank {rank} ({event.get('place')}) {words[:300]}",
        means=means,
        do=do,
        where=case.log.where(*(one for one in told if one.fields == event.fields)),
        likelihood=80 if _WEAK.match(cause) else 94,
    )


def is_echo(event: Event) -> bool:
    """Whether an exception only tells that another rank or the network failed."""
    return event.get("type").split(".")[-1] in _ECHO_TYPES or _ECHO_TEXT.search(event.get("text")) is not None


def _exceptions(case: Case) -> Iterator[Finding]:
    own = [event for event in case.log.of("exception") if not is_echo(event)]
    if not own:
        return
    first = own[0]
    kind, text = first.get("type"), first.get("text")[:300]
    rank = case.log.rank(first.line)
    if re.search(r"out of memory|No space left|CUDA error", text):
        return  # families of their own
    others = len({case.log.rank(event.line) for event in own} - {rank})
    yield Finding(
        id="exception",
        severity="error",
        seen=f"{f'rank {rank}' if rank is not None else 'a process'} raised {kind}{f': {text}' if text else ''}"
        + (f" ({others} other ranks raised, too)" if others else ""),
        means="the first exception of the log that is not about a lost connection",
        do="read the traceback that ends at this line",
        where=case.log.where(first),
        likelihood=78,
    )


def _exits(case: Case) -> Iterator[Finding]:
    blocks = list(case.log.of("exit"))
    chosen = next((event for event in blocks if event.get("root")), None) or next(iter(blocks), None)
    agent = next(case.log.of("exit-agent"), None)
    task = next(case.log.of("task-end"), None)
    event = chosen or agent
    if event is not None:
        code = int(event.get("code"))
        rank = case.log.rank(event.line) if chosen else None
        who = f"rank {rank}" if rank is not None else f"the process with local rank {event.get('local') or '?'}"
        where = f" on host {event.line.host}" if event.line.host else ""
        signal = -code if code < 0 else code - 128 if 128 < code < 160 else 0
        name, means, do = _SIGNALS.get(signal, ("exit", "", ""))
        if signal:
            yield Finding(
                id=f"rank-{name}",
                severity="error",
                seen=f"{who}{where} ended with signal {signal}"
                + (", the first of the job" if event.get("root") else ""),
                means=means,
                do=do,
                where=case.log.where(event),
                likelihood={9: 88, 7: 86, 11: 80}.get(signal, 30),
                symptom=signal in (6, 15),
            )
        else:
            yield Finding(
                id="rank-exit",
                severity="error",
                seen=f"{who}{where} ended with exit code {code}"
                + (", the first of the job" if event.get("root") else ""),
                means="torchrun tells which process ended first, not why",
                do="look for that rank's traceback in its own log (torchrun --log-dir DIR --tee 3 keeps one per rank)",
                where=case.log.where(event),
                likelihood=35,
                symptom=True,
            )
    if task is not None:
        by_word = {"Killed": 9, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6}
        signal = int(task.get("signal") or by_word.get(task.get("what"), 0))
        name, means, do = _SIGNALS.get(
            signal, ("exit", "the launcher tells which task ended, not why", "read its output")
        )
        what = task.get("what") or f"ended with signal {signal}"
        yield Finding(
            id=f"rank-{name}",
            severity="error",
            seen=f"task {task.get('tasks') or task.get('rank')} on host {task.get('host') or task.get('node')}: {what}",
            means=means,
            do=do,
            where=case.log.where(task),
            likelihood=84 if signal else 34,
            symptom=signal in (0, 6, 15),
        )


def _watchdog(case: Case) -> Iterator[Finding]:
    stuck: dict[int | None, Event] = {}
    for event in case.log.of("watchdog"):
        stuck.setdefault(case.log.rank(event.line), event)
    states: dict[int, tuple[int, int]] = {}
    for event in case.log.of("work-state"):
        rank = case.log.rank(event.line)
        if rank is not None:
            states.setdefault(rank, (int(event.get("enqueued")), int(event.get("completed"))))
    if not stuck:
        return
    first = next(iter(stuck.values()))
    ranks = sorted(rank for rank in stuck if rank is not None)
    seconds = f" after {int(first.get('limit')) // 1000} s" if first.get("limit") else ""
    seen = (
        f"collective {first.get('operation')} (number {first.get('sequence')}) timed out{seconds} on "
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8])) or '?'}"
    )
    behind = _behind(stuck, states)
    size = max((int(event.get("size")) for event in case.log.of("comm")), default=0)
    silent = [str(rank) for rank in range(size) if rank not in stuck] if size > 1 and ranks else []
    if behind:
        seen += f"; rank {', '.join(map(str, behind[:8]))} had not reached it"
    elif silent and len(silent) <= size // 2:
        seen += f"; rank {', '.join(silent[:8])} did not report"
    operations = {event.get("operation") for event in stuck.values()}
    if len(operations) > 1:
        seen += f"; ranks wait in different collectives ({', '.join(sorted(operations))})"
    target = behind or [int(rank) for rank in silent[:8]]
    yield Finding(
        id="collective-timeout",
        severity="error",
        seen=seen,
        means="the watchdog tells who waited, not why: the cause is on a rank that did not come (failed, slow in "
        "data or checkpoint, another branch of the script), or a network that does not carry this group's traffic",
        do=(f"look first at rank {', '.join(map(str, target))}: " if target else "")
        + "first errors of the other ranks; NCCL_DEBUG=INFO for the network; TORCH_NCCL_TRACE_BUFFER_SIZE=2000 with "
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1 shows which collective each rank was in (`py-spy dump` while it hangs)",
        where=case.log.where(*stuck.values()),
        likelihood=60,
        symptom=True,
    )


def _behind(stuck: dict[int | None, Event], states: dict[int, tuple[int, int]]) -> list[int]:
    """Ranks that had not started the collective in which others wait."""
    if not states:
        numbers = {rank: int(event.get("sequence")) for rank, event in stuck.items() if rank is not None}
        return sorted(rank for rank, number in numbers.items() if number < max(numbers.values()))
    most = max(enqueued for enqueued, _ in states.values())
    return sorted(rank for rank, (enqueued, _) in states.items() if enqueued < most)


def _barrier(case: Case) -> Iterator[Finding]:
    for event in case.log.of("barrier"):
        yield Finding(
            id="barrier-timeout",
            severity="error",
            seen=f"rank {event.get('ranks')} did not reach the monitored barrier in {int(event.get('limit')) // 1000} "
            f"s",
            means="these ranks failed, hang, or take another branch of the script",
            do=f"look at the output of rank {event.get('ranks')}",
            where=case.log.where(event),
            likelihood=82,
        )
        return


def _waits(case: Case) -> Iterator[Finding]:
    waits = list(case.log.of("gloo-wait"))
    if waits:
        yield Finding(
            id="gloo-timeout",
            severity="error",
            seen=f"gloo waited {int(waits[0].get('limit')) // 1000} s for a {waits[0].get('operation')}",
            means="another rank did not come to this exchange: it failed, hangs, or takes another branch",
            do="look for the rank that wrote last, and for the first error of all ranks",
            where=case.log.where(*waits),
            likelihood=40,
            symptom=True,
        )
    meeting = next(case.log.of("rendezvous"), None)
    if meeting is not None:
        yield Finding(
            id="rendezvous",
            severity="error",
            seen="the rendezvous of the launchers failed",
            means="not all hosts came together in time, or the host of the rendezvous cannot be reached or ended",
            do="compare --nnodes, --rdzv-id and --rdzv-endpoint on all hosts; try `nc -vz HOST PORT` from each",
            where=case.log.where(meeting),
            likelihood=55,
            symptom=True,
        )


def _versions(case: Case) -> Iterator[Finding]:
    told = next(case.log.of("version-mismatch"), None)
    versions: dict[str, list[Event]] = {}
    for event in case.log.of("version"):
        versions.setdefault(event.get("version"), []).append(event)
    if told is not None:
        pairs = ((told.get("a"), told.get("a_version")), (told.get("b"), told.get("b_version")))
        seen = ", ".join(f"rank {rank} has NCCL {version}" for rank, version in pairs)
    elif len(versions) > 1:
        seen = "NCCL versions differ: " + "; ".join(
            f"{version} ({', '.join(dict.fromkeys(e.line.host or e.line.place for e in events[:3]))})"
            for version, events in versions.items()
        )
    else:
        return
    events = [told] if told else [found[0] for found in versions.values()]
    yield Finding(
        id="nccl-versions",
        severity="error" if told else "warning",
        seen=seen,
        means="all ranks of a communicator need one NCCL version; different ones fail or hang",
        do="use one image or environment on all hosts; `ldconfig -p | grep nccl` and LD_LIBRARY_PATH tell which "
        "library wins",
        where=case.log.where(*events),
        likelihood=96 if told else 60,
    )


def _init(case: Case) -> Iterator[Finding]:
    """Ranks that started to build a communicator and did not finish, where others did or something failed."""
    started: dict[tuple[str, int, str], Event] = {}
    finished = set()
    for event in case.log.of("comm"):
        key = event.line.host, event.line.pid, event.get("size")
        if event.get("state") == "COMPLETE":
            finished.add(key)
        elif event.get("state") == "START":
            started.setdefault(key, event)
    open_ones = [event for key, event in started.items() if key not in finished]
    if open_ones:
        size = int(open_ones[0].get("size"))
        present = sorted({int(event.get("rank")) for event in started.values() if int(event.get("size")) == size})
        missing = [rank for rank in range(size) if rank not in present] if size <= 4096 else []
        yield Finding(
            id="init-unfinished",
            severity="warning" if finished else "note",  # a log that ends there may have been cut
            seen=f"{len(open_ones)} ranks began to build a communicator of {size} and did not finish"
            + (f"; ranks {missing[:8]} never began in these logs" if missing and len(missing) < size else ""),
            means="the job hung or ended while NCCL connected the ranks; if all logs are here, ranks that never began "
            "are the cause",
            do="give the logs of all ranks; look at connection errors above all",
            where=case.log.where(*open_ones),
            likelihood=35,
            symptom=True,
        )


def _gone(case: Case) -> Iterator[Finding]:
    gone = list(case.log.of("peer-gone"))
    if gone:
        peers = list(dict.fromkeys(event.get("peer") for event in gone if event.get("peer")))
        yield Finding(
            id="peer-gone",
            severity="error",
            seen="ranks lost their connection" + (f" to {', '.join(peers[:4])}" if peers else ""),
            means="a peer's process ended, or its host or link went down; this is what the others see of it",
            do="find the rank that failed first: look at the logs of the ranks that do NOT have this message, and at "
            "`dmesg` of their hosts",
            where=case.log.where(*gone),
            likelihood=30,
            symptom=True,
        )
