# SPDX-License-Identifier: Apache-2.0
"""What libfabric and its NCCL plugin, UCX, the kernel and SLURM write.

Sources: aws/aws-ofi-nccl src, ofiwg/libfabric src/fabric.c, openucx/ucx src/{ucs,uct,ucp}, Linux mm/oom_kill.c,
NVIDIA "Xid errors", SchedMD/slurm src/{slurmd,srun}.
"""

from __future__ import annotations

import re

from holmes_core.doctor.logs.event import Family, Verdict

__all__ = ["SYSTEM_FAMILIES"]

SYSTEM_FAMILIES = (
    Family(
        name="ofi-empty",
        words=("output empty list",),
        pattern=re.compile(r"fi_getinfo: provider (?P<provider>[\w;-]+) output empty list"),
    ),
    Family(
        name="ofi-none",
        words=("NET/OFI", "aws-ofi", "OFI plugin"),
        pattern=re.compile(
            r"No eligible providers were found|Unable to find a protocol that worked|aws-ofi-\w+ initialization failed|"
            r"Failed to initialize (?:rdma|sendrecv) protocol|OFI plugin initNet\(\) failed"
        ),
    ),
    Family(
        name="ofi-provider",
        words=("elected provider", "elected Provider"),
        pattern=re.compile(r"Selected [Pp]rovider is (?P<provider>[\w;-]+)(?:.*\(found (?P<count>\d+) nics?\))?"),
    ),
    Family(
        name="ofi-unreachable",
        words=("nreachable remote", "nresponsive remote", "receiver not ready", "Receiver not ready"),
        pattern=re.compile(
            r"(?:NET/OFI|efa|libfabric|prov).{0,200}?(?:[Uu]n(?:reachable|responsive) remote|[Rr]eceiver not ready)"
        ),
        verdict=Verdict(
            id="efa-unreachable",
            severity="error",
            means="the fabric does not carry packets to the peer: EFA needs a security group that allows all traffic "
            "from and to itself, and hosts in one subnet; or the peer is gone",
            do="allow all traffic within the security group, in both directions, by its own id; check that the peer "
            "still runs",
            likelihood=80,
        ),
    ),
    Family(
        name="ucx-device",
        words=("is not available, please use",),
        pattern=re.compile(
            r"(?P<what>network device|transport) '(?P<name>[^']+)' is not available, please use one or more of: "
            r"?(?P<have>.*)"
        ),
        verdict=Verdict(
            id="ucx-device",
            severity="warning",
            means="UCX_NET_DEVICES or UCX_TLS names something that this host does not have",
            do="use one of the names in the message (they may differ between hosts), or unset the variable",
            likelihood=60,
        ),
    ),
    Family(
        name="ucx-transport",
        words=("no active messages transport", "no remote registered memory access transport"),
        pattern=re.compile(r"no (?:active messages|remote registered memory access) transport to"),
        verdict=Verdict(
            id="ucx-transport",
            severity="error",
            means="UCX has no transport that both ends share: UCX_TLS or UCX_NET_DEVICES leaves nothing, or one end "
            "lacks the RDMA device",
            do="unset UCX_TLS and UCX_NET_DEVICES, and compare `ucx_info -d` on both hosts",
            likelihood=80,
        ),
    ),
    Family(
        name="ucx-retry",
        words=("retry count exceeded", "retry counter exceeded"),
        pattern=re.compile(r"retry count(?:er)? exceeded on (?P<hca>[\w.+-]+):\d+/(?P<link>IB|RoCE)"),
    ),
    Family(
        name="oom-kill",
        words=("ut of memory", "oom-kill", "oom_kill", "OOMKilled", "OUT_OF_MEMORY", "Out Of Memory"),
        pattern=re.compile(
            r"Out of memory: Kill(?:ed)? process (?P<pid>\d+) \((?P<name>[^)]*)\)|[Mm]emory cgroup out of memory|"
            r"oom-kill(?:er)?[:=\s]|invoked oom-killer|oom_kill event|OOMKilled|Out Of Memory$|OUT_OF_MEMORY"
        ),
        verdict=Verdict(
            id="host-out-of-memory",
            severity="error",
            means="the kernel's out-of-memory killer ended a process: the host, the container or the SLURM step had no "
            "memory left",
            do="ask for more memory (--mem=0, the container's limit), fewer DataLoader workers, less pinned memory; "
            "load weights lazily instead of once per rank",
            likelihood=95,
            crash=True,
        ),
    ),
    Family(
        name="xid",
        words=("NVRM: Xid",),
        pattern=re.compile(r"NVRM: Xid \(PCI:(?P<pci>[^)]+)\): (?P<xid>\d+)"),
        verdict=Verdict(
            id="gpu-fault",
            severity="error",
            means="the GPU driver reported a fault. 79: the GPU fell off the bus; 48, 63, 64, 94, 95: memory errors "
            "(ECC); 74: NVLink; 119, 120: its firmware; 13, 31, 43: mostly the program's own",
            do="drain the host and reset or replace the GPU for hardware codes; for 13, 31, 43 look at the kernels",
            likelihood=93,
            crash=True,
        ),
    ),
    Family(
        name="gpu-lost",
        words=("fallen off the bus", "ncorrectable ECC", "ncorrectable NVLink"),
        pattern=re.compile(r"fallen off the bus|[Uu]ncorrectable (?:ECC|NVLink) error"),
        verdict=Verdict(
            id="gpu-fault",
            severity="error",
            means="the GPU failed: this is hardware, not the program",
            do="drain the host; `nvidia-smi -q` and `dmesg | grep -i xid` tell which GPU",
            likelihood=93,
            crash=True,
        ),
    ),
    Family(
        name="slurm-end",
        words=("CANCELLED", "TIME LIMIT", "NODE_FAIL", "NODE FAILURE", "PREEMPT", "Node failure"),
        pattern=re.compile(
            r"(?P<why>DUE TO TIME LIMIT|DUE TO PREEMPTION|DUE TO NODE FAILURE|NODE_FAIL\w*|Node failure on \S+|"
            r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+)"
        ),
        verdict=Verdict(
            id="scheduler",
            severity="error",
            means="the scheduler ended the job; what ranks say afterwards follows from that",
            do="time limit: a checkpoint before it (--signal), and requeue; node failure: leave the host out; "
            "preemption: requeue from the last checkpoint",
            likelihood=94,
            crash=True,
        ),
    ),
    Family(
        name="task-end",
        words=("srun: error:", "exited on signal"),
        pattern=re.compile(
            r"srun: error: (?P<host>\S+): tasks? (?P<tasks>[\d,-]+): (?P<what>Killed|Segmentation fault|Bus "
            r"error|Aborted|"
            r"Illegal instruction|Exited with exit code \d+)|"
            r"process rank (?P<rank>\d+) with PID \d+ on node (?P<node>\S+) exited on signal (?P<signal>\d+)"
        ),
    ),
    Family(
        name="native-crash",
        words=("Caught signal", "Fatal Python error", "received signal", "Signal: "),
        pattern=re.compile(
            r"Caught signal (?:7|8|11) |Fatal Python error: (?:Segmentation fault|Bus error|Floating)|"
            r"Signal: (?:Segmentation fault|Bus error)"
        ),
        verdict=Verdict(
            id="rank-crashed",
            severity="error",
            means="a process crashed in native code; with 'Bus error' /dev/shm or a memory-mapped file is at fault "
            "mostly",
            do="read the stack below this line: the topmost library that is neither libc nor torch; compare versions "
            "of extensions, UCX and the driver",
            likelihood=82,
            crash=True,
        ),
    ),
)
