# SPDX-License-Identifier: Apache-2.0
"""What NCCL and RCCL write (NCCL_DEBUG=INFO or WARN), by release 2.4 to 2.29.

Sources: NVIDIA/nccl src/{init,bootstrap,debug}.cc, src/misc/{socket,ibvwrap,param,shmutils}.cc, src/plugin/net.cc,
src/transport/net_socket.cc, src/transport/net_ib (net_ib.cc before 2.28).
"""

from __future__ import annotations

import re

from holmes_core.doctor.logs.event import Family, Verdict

__all__ = ["NCCL_FAMILIES"]

_I = re.IGNORECASE

NCCL_FAMILIES = (
    Family(
        name="env",
        words=(" set by env", " set to ", " set from "),
        pattern=re.compile(
            r"\b(?P<name>(?:NCCL|RCCL|GLOO|FI|OFI_NCCL|UCX)_[A-Z0-9_]+) set (?:by env(?:ironment)? |from \S+ )?to "
            r"(?P<value>\S.*?)\.?$"
        ),
    ),
    Family(
        # A script or a dump of the environment in the log: nothing before the name but a shell's or launcher's word.
        name="env",
        words=("NCCL_", "GLOO_"),
        pattern=re.compile(
            r"^[\s+]*(?:export |declare -x |-x |-e |--env[ =])?(?P<name>(?:NCCL|GLOO)_[A-Z0-9_]+)="
            r"[\"']?(?P<value>[^\s\"']+)[\"']?\s*$"
        ),
    ),
    Family(
        name="version",
        words=("CCL version",),
        pattern=re.compile(r"\b[NR]CCL version:? (?P<version>\d+\.\d+(?:\.\d+)*)"),
    ),
    Family(
        name="version-mismatch",
        words=("Mismatched NCCL version",),
        pattern=re.compile(r"rank (?P<a>\d+) version (?P<a_version>\d+) rank (?P<b>\d+) version (?P<b_version>\d+)"),
    ),
    Family(
        name="bootstrap",
        words=("Bootstrap",),
        pattern=re.compile(r"Bootstrap ?: Using (?P<list>\S.*)"),
    ),
    Family(
        name="socket-using",
        words=("NET/Socket",),
        pattern=re.compile(r"NET/Socket ?: Using (?P<list>\S.*)"),
    ),
    Family(
        name="no-subnet",
        words=("in the same subnet",),
        pattern=re.compile(r"No interface found in the same subnet as remote address (?P<peer>\S+)"),
        verdict=Verdict(
            id="no-common-subnet",
            severity="error",
            means="the rendezvous address (MASTER_ADDR, NCCL_COMM_ID) is in no network of this host's interfaces",
            do="give the first host's address on the network that all hosts share, and name its interface in "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME",
            likelihood=91,
        ),
    ),
    Family(
        name="no-interface",
        words=("interface found", "interfaces found"),
        pattern=re.compile(
            r"(?:Bootstrap|NET/\w+|\bNet) ?:? ?no (?:usable |socket |listening )*interfaces? found(?! "
            r"in the same)",
            _I,
        ),
        verdict=Verdict(
            id="no-interface",
            severity="error",
            means="no interface of this host matches NCCL_SOCKET_IFNAME, or none is up with a global address",
            do="compare NCCL_SOCKET_IFNAME with `ip -br addr` on this host; names differ between hosts, so give each "
            "host its own value, or unset it",
            likelihood=90,
        ),
    ),
    Family(
        name="ib-using",
        words=("NET/IB",),
        pattern=re.compile(r"NET/IB\w* ?: Using ?(?P<list>.*)"),
    ),
    Family(
        name="ib-none",
        words=("NET/IB", "NET/Plugin"),
        pattern=re.compile(r"NET/IB\w* ?: No (?:IB )?device found", _I),
    ),
    Family(
        name="ib-open",
        words=("Unable to open device",),
        pattern=re.compile(r"Unable to open device (?P<device>[\w.+-]+)"),
    ),
    Family(name="ib-open-call", words=("ibv_open_device",), pattern=re.compile(r"ibv_open_device failed")),
    Family(
        name="no-libibverbs",
        words=("libibverbs",),
        pattern=re.compile(
            r"(?:fail\w*|cannot|could not|unable).{0,40}libibverbs|libibverbs.{0,60}(?:cannot|fail)", _I
        ),
    ),
    Family(
        name="net",
        words=("network", "NET plugin"),
        pattern=re.compile(r"(?:Using network|Assigned NET plugin) (?P<net>\S.*?)(?: to comm)?$"),
    ),
    Family(
        name="plugin",
        words=("plugin", "Plugin"),
        pattern=re.compile(
            r"Plugin Path ?: (?P<path>\S+)|P2P plugin (?P<plugin>\S+)|Loaded net plugin (?P<loaded>\S+)|"
            r"Successfully loaded external network plugin (?P<external>\S+)"
        ),
    ),
    Family(
        name="plugin-missing",
        words=("No plugin found", "NET/Plugin"),
        pattern=re.compile(
            r"No plugin found \((?P<file>[^)]+)\)|NET/Plugin ?: (?:Could not find|Failed to find) ?:? "
            r"?(?P<name>lib\S+?)\.?(?: |$)"
        ),
    ),
    Family(
        name="net-not-found",
        words=("not found", "any NET plugin"),
        pattern=re.compile(r"network (?P<net>\S.{0,60}?) not found|Failed to initialize any NET plugin"),
    ),
    Family(
        name="channel",
        words=("via NET/",),
        pattern=re.compile(
            r"Channel (?P<channel>\d+)(?:/\d+)? ?: (?P<source>\d+)\[\w+\] -> (?P<target>\d+)\[\w+\] "
            r"\[(?P<way>send|receive)\] via NET/(?P<net>[^/]+)/(?P<device>\d+)"
        ),
    ),
    Family(
        name="comm",
        words=(" rank ",),
        pattern=re.compile(
            r"comm \S+ rank (?P<rank>\d+) n[rR]anks (?P<size>\d+)(?:.* - Init (?P<state>START|COMPLETE))?"
        ),
    ),
    Family(
        name="connected",
        words=("Connected all", "Init COMPLETE"),
        pattern=re.compile(r"Connected all (?:rings|trees)|Init COMPLETE"),
    ),
    Family(
        name="connect",
        words=("onnect",),
        pattern=re.compile(
            r"(?:[Cc]onnect to (?P<peer>\S+?)<(?P<port>\d+)>|Call to connect(?: to (?P<peer2>\S+?)<(?P<port2>\d+)>)?|"
            r"socketPollConnect)\)?:? ?(?P<why>(?:failed|returned|timed out|poll\(\) returned|try|did not).*)"
        ),
    ),
    Family(
        name="incompatible",
        words=("incompatible devices",),
        pattern=re.compile(
            r"incompatible devices: \[\d+\](?P<a>[^\s:]+):\d+/(?P<a_link>\w+) and "
            r"\[\d+\](?P<b>[^\s:]+):\d+/(?P<b_link>\w+)"
        ),
    ),
    Family(
        name="net-counts",
        words=("mixed local Net device",),
        pattern=re.compile(r"mixed local Net device counts across ranks \(min (?P<min>\d+), max (?P<max>\d+)\)"),
    ),
    Family(
        name="net-count",
        words=("local Net devices",),
        pattern=re.compile(r"Rank (?P<rank>\d+) has (?P<count>\d+) local Net devices"),
    ),
    Family(
        name="wc-error",
        words=("Got completion", "Got CQE"),
        pattern=re.compile(
            r"Got completion (?:from peer (?P<peer>\S+?)(?:<\d+>)? )?with (?:error|status)[ =](?:IBV_WC_\w+\()?"
            r"(?P<status>\d+)(?P<rest>.*)"
        ),
    ),
    Family(
        name="modify-qp",
        words=("ibv_modify_qp", "ibv_create_ah"),
        pattern=re.compile(r"ibv_(?:modify_qp|create_ah) failed with (?:error )?(?P<why>.*)"),
    ),
    Family(
        name="query-gid",
        words=("ibv_query_gid",),
        pattern=re.compile(r"ibv_query_gid\w* failed"),
        verdict=Verdict(
            id="gid-index",
            severity="error",
            means="NCCL_IB_GID_INDEX is beyond the end of the port's GID table, or the entry is empty",
            do="unset NCCL_IB_GID_INDEX, or set it to the RoCE v2 entry of the routable address that `show_gids` shows",
            likelihood=90,
        ),
    ),
    Family(
        name="rdma-memory",
        words=("Cannot allocate memory", "max locked memory"),
        pattern=re.compile(
            r"(?P<call>ibv_\w+).{0,200}Cannot allocate memory|max(?:imum)? locked memory.*?(?P<limit>\d+ ?\w*)?\)?$"
        ),
    ),
    Family(
        name="rdma-register",
        words=("ibv_reg_",),
        pattern=re.compile(r"(?P<call>ibv_reg_\w+) failed with (?!(?:error )?(?:\d+ )?Cannot allocate)(?P<why>.*)"),
        verdict=Verdict(
            id="rdma-registration",
            severity="error",
            means="the NIC could not register the memory. Bad address: GPU memory without GPUDirect (nvidia_peermem, "
            "DMA-BUF); Operation not permitted: the container lacks IPC_LOCK",
            do="run `lsmod | grep nvidia_peermem`; try NCCL_NET_GDR_LEVEL=LOC; give the container --cap-add=IPC_LOCK "
            "and --ulimit memlock=-1",
            likelihood=85,
        ),
    ),
    Family(
        name="rdma-async",
        words=("async event", "async fatal event"),
        pattern=re.compile(
            r"(?:NET/IB\w* ?: ?|[\w.+-]+:\d+ |Got ){1,3}async (?:fatal )?event(?: on \w+)? ?:"
            r"(?P<event>(?! ?(?:port active|client rereg|GID |SM |communication est|LID )).+)",
            _I,
        ),
        verdict=Verdict(
            id="rdma-event",
            severity="error",
            means="the RDMA device reported a fault while the job ran: a link that went down (cable, switch port) or a "
            "device that failed",
            do="look at the port (`ibstat`, `dmesg | grep -i mlx5`), its cable and its switch port; leave the device "
            "out with NCCL_IB_HCA='^=DEVICE' until it is repaired",
            likelihood=85,
        ),
    ),
    Family(
        name="gdr-off",
        words=("GPU Direct RDMA Disabled",),
        pattern=re.compile(r"NET/IB\w* ?: GPU Direct RDMA Disabled for (?:HCA|GPU) (?P<device>\d+(?: '[^']+')?)"),
        verdict=Verdict(
            id="no-gpudirect",
            severity="warning",
            means="data is copied through host memory before it is sent: GPU and NIC are far apart, or nvidia_peermem "
            "(or DMA-BUF support) is missing",
            do="run `lsmod | grep nvidia_peermem` and `nvidia-smi topo -m`; load nvidia_peermem, or leave far NICs out",
            likelihood=40,
        ),
    ),
    Family(
        name="duplicate-gpu",
        words=("Duplicate GPU",),
        pattern=re.compile(
            r"Duplicate GPU detected ?: rank (?P<a>\d+) and rank (?P<b>\d+) both on (?:\w+ )*(?P<gpu>\w+)"
        ),
        verdict=Verdict(
            id="duplicate-gpu",
            severity="error",
            means="two ranks chose one GPU: each rank has to call torch.cuda.set_device(LOCAL_RANK), or "
            "CUDA_VISIBLE_DEVICES gives the ranks the same GPU, or two hosts look like one",
            do="print LOCAL_RANK and CUDA_VISIBLE_DEVICES per rank; start no more ranks per host than it has GPUs",
            likelihood=95,
        ),
    ),
    Family(
        name="shared-memory",
        words=("shared memory segment", "/dev/shm"),
        pattern=re.compile(
            r"(?:Error|fail\w*).{0,60}shared memory segment (?P<file>\S+)|/dev/shm.{0,80}No space left|No space "
            r"left.{0,80}/dev/shm"
        ),
        verdict=Verdict(
            id="shared-memory",
            severity="error",
            means="/dev/shm is too small or full: a container gets 64 MB unless told otherwise",
            do="start the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with medium: Memory on "
            "/dev/shm), and remove stale /dev/shm/nccl-* files",
            likelihood=90,
        ),
    ),
    Family(
        name="fabric-manager",
        words=("system not yet initialized",),
        pattern=re.compile(r"(?:Cuda failure|CUDA error).{0,20}system not yet initialized"),
        verdict=Verdict(
            id="fabric-manager",
            severity="error",
            means="error 802: on a host with NVSwitch the fabric manager has to run before CUDA works",
            do="run `systemctl status nvidia-fabricmanager`; its version has to be that of the driver",
            likelihood=95,
        ),
    ),
    Family(
        name="cuda-failure",
        words=("Cuda failure", "HIP failure"),
        pattern=re.compile(r"(?:Cuda|HIP) failure (?:\d+ )?'?(?P<what>(?!out of memory|system not)[^']{1,80})"),
        verdict=Verdict(
            id="cuda-failure",
            severity="error",
            means="a CUDA call inside NCCL failed; a kernel that failed earlier is reported at the next call",
            do="look for an Xid in `dmesg` of this host, and run the step with CUDA_LAUNCH_BLOCKING=1",
            likelihood=60,
            crash=True,
        ),
    ),
    Family(
        name="peer-gone",
        words=(
            "closed by remote",
            "remote process exited",
            "Call to recv",
            "Call to send",
            "socketProgress",
            "ncclRemoteError",
            "by localRank",
            "Proxy ",
        ),
        pattern=re.compile(
            r"Connection closed by remote peer ?(?P<peer>\S*)|remote process exited or there was a network error|"
            r"Connection closed by localRank|Proxy [Cc]all to rank \d+ failed|ncclRemoteError|Call to "
            r"(?:recv|send).{0,80}(?:reset by peer|Broken pipe|Connection timed out)"
        ),
    ),
)
