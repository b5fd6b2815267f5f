# SPDX-License-Identifier: Apache-2.0
"""What torch (c10d, gloo, ProcessGroupNCCL), torchrun and Holmes itself write.

Sources: pytorch/pytorch torch/csrc/distributed/c10d (socket.cpp, TCPStore.cpp, ProcessGroupGloo.cpp,
ProcessGroupNCCL.cpp), torch/distributed/elastic; pytorch/gloo gloo/transport/tcp.
"""

from __future__ import annotations

import re

from holmes_core.doctor.logs.event import Family, Verdict

__all__ = ["TORCH_FAMILIES"]

_I = re.IGNORECASE

TORCH_FAMILIES = (
    Family(
        name="gloo-loopback",
        words=("loopback address as fallback",),
        pattern=re.compile(r"Using the loopback address as fallback"),
    ),
    Family(
        name="gloo-connect",
        words=("connectFullMesh", "SO_ERROR", "timed out connecting"),
        pattern=re.compile(
            r"(?P<why>(?:timed out connecting|connect).*?)(?:, remote=\[(?P<peer>[^\]]+)\]:(?P<port>\d+))?"
            r"(?: \(?.{0,40}local=\[(?P<local>[^\]]+)\].*)?$"
        ),
    ),
    Family(
        name="gloo-interface",
        words=(
            "Unable to find address for",
            "Unable to find interface for",
            "makeDeviceFor",
            "unsupported gloo device",
        ),
        pattern=re.compile(
            r"Unable to find (?:address|interface) for:? ?\[?(?P<interface>[^\s\].,]*)|"
            r"makeDeviceFor\w+\(\): (?:unsupported gloo device|interface or hostname)"
        ),
        verdict=Verdict(
            id="gloo-interface",
            severity="error",
            means="gloo takes exact interface names: GLOO_SOCKET_IFNAME names one that this host does not have or that "
            "has no address, or the host name cannot be resolved",
            do="set GLOO_SOCKET_IFNAME on each host to the interface that `ip -br addr` shows with the address the "
            "other hosts reach; names differ between hosts",
            likelihood=92,
        ),
    ),
    Family(
        name="c10d-connect",
        words=("client socket has",),
        pattern=re.compile(
            r"client socket has (?:failed to connect to (?:any network address of )?|timed out after \S+ while trying "
            r"to "
            r"connect to )[\[(](?P<peer>[^\]\s,]+?)(?:\]:|, )(?P<port>\d+)\)?(?P<why>.*)"
        ),
    ),
    Family(
        name="resolve",
        words=("gai error", "Name or service not known", "Temporary failure in name resolution", "not known"),
        pattern=re.compile(
            r"addresses of \((?P<peer>[^,]+), \d+\) cannot be retrieved|Name or service not known|"
            r"Temporary failure in name resolution|nodename nor servname"
        ),
        verdict=Verdict(
            id="name-resolution",
            severity="error",
            means="a host name does not resolve on this host. Where it is the rendezvous' name (MASTER_ADDR) this rank "
            "cannot join; where it is a server's on the internet, the host has no way out",
            do="use an IP address in MASTER_ADDR (--rdzv-endpoint, main_process_ip), or add the name to DNS or "
            "/etc/hosts of every host",
            likelihood=88,
        ),
    ),
    Family(
        name="bind",
        words=("Address already in use", "EADDRINUSE"),
        pattern=re.compile(r"(?:bind to (?P<address>\S+?):(?P<port>\d+).*)?(?:Address already in use|EADDRINUSE)"),
        verdict=Verdict(
            id="port-in-use",
            severity="error",
            means="the rendezvous port is taken: another job, a process left from the last run, or two launchers of "
            "one job on one host",
            do="find it with `ss -ltnp`, end it, or choose another MASTER_PORT (--master-port, --rdzv-endpoint; 0 lets "
            "--standalone choose)",
            likelihood=88,
        ),
    ),
    Family(
        name="bind-address",
        words=("Cannot assign requested address",),
        pattern=re.compile(r"bind.{0,160}Cannot assign requested address"),
        verdict=Verdict(
            id="wrong-address",
            severity="error",
            means="the address to listen on belongs to no interface of this host: MASTER_ADDR (or NCCL_COMM_ID) is "
            "another host's, or this is not the first host",
            do="set MASTER_ADDR to an address of the host on which rank 0 runs (`ip -br addr`)",
            likelihood=88,
        ),
    ),
    Family(
        name="files",
        words=("Too many open files",),
        pattern=re.compile(r"Too many open files"),
        verdict=Verdict(
            id="open-files",
            severity="error",
            means="the limit on open files is too low: every connection and every DataLoader worker needs some",
            do="`ulimit -n 65536` for the process that runs the ranks (container: --ulimit nofile=65536)",
            likelihood=88,
        ),
    ),
    Family(
        name="heartbeat",
        words=("watchdog got stuck",),
        pattern=re.compile(r"watchdog got stuck for (?P<seconds>\d+)"),
        verdict=Verdict(
            id="watchdog-stuck",
            severity="error",
            means="torch's watchdog thread could not go on: a CUDA call hangs, or something holds the GIL or the file "
            "system for long. That is no network fault by itself",
            do="look at the other ranks first; `py-spy dump --native` on this rank; TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
            likelihood=45,
            symptom=True,
        ),
    ),
    Family(
        name="nccl-error",
        words=("NCCL error", "unhandled ", "ncclSystemError", "ncclInternalError", "ncclUnhandledCudaError"),
        pattern=re.compile(
            r"NCCL error in|unhandled (?:system|cuda|internal) "
            r"error|nccl(?:System|Internal|UnhandledCuda|InvalidUsage)\w*"
        ),
        verdict=Verdict(
            id="nccl-error",
            severity="error",
            means="NCCL failed, and torch tells only the kind of the error",
            do="run again with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV and give that log: the warning before "
            "this line names the cause",
            likelihood=25,
            symptom=True,
        ),
    ),
    Family(
        name="watchdog",
        words=("collective operation timeout", "ran for"),
        pattern=re.compile(
            r"(?:collective operation timeout: )?WorkNCCL\(SeqNum=(?P<sequence>\d+), OpType=(?P<operation>\w+)"
            r"(?:.*?Timeout\(ms\)=(?P<limit>\d+))?"
        ),
    ),
    Family(
        name="work-state",
        words=("ast enqueued", "ast completed"),
        pattern=re.compile(
            r"[Ll]ast enqueued (?:NCCL )?work: (?P<enqueued>-?\d+), last completed (?:NCCL )?work: (?P<completed>-?\d+)"
        ),
    ),
    Family(
        name="barrier",
        words=("monitoredBarrier",),
        pattern=re.compile(r"Ranks? (?P<ranks>\d[\d, ]*) failed to pass monitoredBarrier in (?P<limit>\d+) ?ms"),
    ),
    Family(
        name="gloo-wait",
        words=("Timed out waiting",),
        pattern=re.compile(r"Timed out waiting (?P<limit>\d+)ms for (?P<operation>\w+) operation"),
    ),
    Family(
        name="collective-mismatch",
        words=("mismatch between collectives",),
        pattern=re.compile(r"Detected mismatch between collectives on ranks\.?(?P<detail>.*)"),
        verdict=Verdict(
            id="collective-mismatch",
            severity="error",
            means="ranks of one group called different collectives, or with different shapes: the script branches by "
            "rank around a collective, or batches differ",
            do="compare the two calls in the message; look for `if rank == 0` around logging, saving or evaluation",
            likelihood=92,
        ),
    ),
    Family(
        name="rendezvous",
        words=("Rendezvous", "rendezvous"),
        pattern=re.compile(r"Rendezvous(?:Timeout|Connection)Error|rendezvous.{0,60}timed out"),
    ),
    Family(
        name="peer-gone",
        words=("by peer", "Broken pipe", "Socket closed", "got 0 bytes", "likely closed", "communicator"),
        pattern=re.compile(
            r"Connection (?:closed|reset) by peer(?: \[(?P<peer>[^\]]+)\])?|Connection was likely closed|NCCL "
            r"communicator \w+ aborted|"
            r"(?:\[rank\d|Error|gloo|c10d|[Nn][Cc][Cc][Ll]|TCPStore|recv|send).{0,300}?(?:Broken pipe|Socket "
            r"closed|got 0 bytes)"
        ),
    ),
    Family(
        name="cuda-memory",
        words=("out of memory", "OutOfMemoryError"),
        pattern=re.compile(
            r"(?:CUDA|HIP|Cuda|cuda)\W.{0,40}out of memory(?P<detail>\. Tried to allocate \S+ \S+)?|"
            r"(?:torch\.)(?:cuda\.)?OutOfMemoryError"
        ),
        verdict=Verdict(
            id="gpu-out-of-memory",
            severity="error",
            means="a rank ran out of GPU memory and ended; the others lost their connection to it",
            do="take more micro-batches (smaller ones), activation checkpointing, or more stages or tensor "
            "parallelism; `nvidia-smi` shows whether another process holds memory",
            likelihood=90,
            crash=True,
        ),
    ),
    Family(
        name="data-worker",
        words=("DataLoader worker", "out of shared memory"),
        pattern=re.compile(r"DataLoader worker.{0,80}(?:Bus error|killed by signal)|workers are out of shared memory"),
        verdict=Verdict(
            id="shared-memory",
            severity="error",
            means="a DataLoader worker died: /dev/shm too small (Bus error), or the host out of memory (Killed)",
            do="start the container with --shm-size=16g or --ipc=host; fewer workers; `dmesg` tells an out-of-memory "
            "kill",
            likelihood=85,
            crash=True,
        ),
    ),
    Family(
        name="cuda-error",
        words=("CUDA error", "HIP error"),
        pattern=re.compile(r"(?:CUDA|HIP) error: (?P<what>(?!out of memory|system not)[^.\n]{1,120})"),
        verdict=Verdict(
            id="cuda-error",
            severity="error",
            means="a CUDA call failed; a kernel that failed earlier is reported at the next call. ECC or NVLink "
            "errors are the hardware's, a device-side assert mostly an index out of range",
            do="look for an Xid in `dmesg` of this host; run with CUDA_LAUNCH_BLOCKING=1 to find the kernel",
            likelihood=75,
            crash=True,
        ),
    ),
    Family(
        name="disk",
        words=("No space left on device",),
        pattern=re.compile(r"^(?!.*(?:/dev/shm|shared memory)).*No space left on device"),
        verdict=Verdict(
            id="disk-full",
            severity="error",
            means="a disk is full: checkpoints, logs, compiler caches or core dumps",
            do="run `df -h` and `df -i` on this host, for the checkpoint directory, TMPDIR and the home directory",
            likelihood=85,
            crash=True,
        ),
    ),
    Family(
        name="holmes",
        words=("seen: ",),
        pattern=re.compile(
            r"seen: +rank (?P<rank>\d+) \((?P<place>.+?)\) (?P<cause>(?:failed: |was |has |is |crashed|ended ).+)"
        ),
    ),
    Family(
        name="clock",
        words=("holmes: the clock of",),
        pattern=re.compile(r"holmes: the clock of host (?P<host>\S+) is [\d.]+ s (?:behind|ahead of) that of"),
        verdict=Verdict(
            id="clock-skew",
            severity="warning",
            means="the watchdogs compared their clocks by datagrams of both ways, so that a slow network cannot feign "
            "this: which line of two hosts' logs came first cannot be told from their times; certificates and tokens "
            "may be refused",
            do="set the clock of that host and keep it in step (chronyc tracking, timedatectl); until then order lines "
            "by step numbers",
            likelihood=40,
        ),
    ),
    Family(
        name="slow",
        words=("holmes: rank ", "holmes: stage "),
        pattern=re.compile(r"holmes: (?:rank \d+ \(.+\) has become slow|stage \d+ waits \d+ % of each step for link)"),
        verdict=Verdict(
            id="slow-rank-or-link",
            severity="warning",
            means="the job as a whole waits for it: every step takes as long as the slowest rank and link",
            do="look at that host's clocks, temperature and other processes (nvidia-smi -q -d PERFORMANCE, top), or at "
            "the ports and counters of the link (`holmes doctor` on both hosts)",
            likelihood=60,
        ),
    ),
    Family(
        name="exit-agent",
        words=("failed (exitcode",),
        pattern=re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+)"),
    ),
)
