# SPDX-License-Identifier: Apache-2.0
"""Logs with one trait each, and the diagnosis that comes first."""

from __future__ import annotations

import json

import pytest

from holmes_core.cluster.nic import Gid
from holmes_core.doctor.finding import Finding, exit_status
from holmes_core.doctor.logs.diagnose import diagnose, silence
from holmes_core.doctor.logs.parts import Case
from holmes_core.doctor.logs.read import read_lines


def findings(text: str, **known) -> tuple[Finding, ...]:
    log = read_lines([("job.log", text.strip("\n").splitlines())])
    return diagnose(Case(log=log, **known))


def n(host: str, text: str, *, pid: int = 71, gpu: int = 0, level: str = "INFO") -> str:
    """A line as NCCL writes it."""
    source = "misc/some_file.cc:99 " if level == "WARN" else ""
    return f"{host}:{pid}:{pid + 1} [{gpu}] {source}NCCL {level} {text}"


def w(host: str, text: str, **more) -> str:
    return n(host, text, level="WARN", **more)


# Name: log, first finding, words of it.
FAULTS = {
    "a container without device files": (
        [
            w("c1", "NET/IB : Unable to open device bnxt_re3"),
            n("c1", "NET/IB : No device found."),
            n("c1", "NET/Socket : Using [0]ens7:198.51.100.9<0>"),
            n("c1", "Using network Socket"),
        ],
        "rdma-device-closed",
        ["bnxt_re3", "/dev/infiniband", "memlock=-1", "over sockets"],
    ),
    "one host has a device less": (
        [
            n(
                "x1",
                "NET/IB : Using [0]ionic_0:1/RoCE [1]ionic_1:1/RoCE [2]ionic_2:1/RoCE [RO]; OOB ens1:198.51.100.1<0>",
            ),
            n("x1", "comm 0xaa rank 3 nranks 16 cudaDev 3 busId 1b000 - Init START"),
            n("x1", "Channel 05/0 : 3[3] -> 11[3] [send] via NET/IB/2/GDRDMA"),
            n("x2", "NET/IB : Using [0]ionic_0:1/RoCE [1]ionic_1:1/RoCE [RO]; OOB ens1:198.51.100.2<0>"),
            w("x2", "NET/IB : Unable to open device ionic_2"),
        ],
        "unequal-hcas",
        ["channels 05 of rank 3 use ionic_2, which x2 lacks", "NCCL_IB_HCA='=ionic_0,ionic_1'"],
    ),
    "unequal devices, and a collective that hangs": (
        [
            n("x1", "NET/IB : Using [0]irdma0:1/RoCE [1]irdma1:1/RoCE [RO]; OOB ens1:198.51.100.1<0>"),
            n("x2", "NET/IB : Using [0]irdma0:1/RoCE [RO]; OOB ens1:198.51.100.2<0>"),
            "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=BROADCAST, NumelIn=1, "
            "NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing out.",
        ],
        "unequal-hcas",
        ["x1 has irdma0, irdma1", "'=irdma0'"],
    ),
    "NCCL counts unequal devices": (
        [
            n("x1", "Rank 8 has 1 local Net devices (max 2)."),
            w(
                "x1",
                "Detected mixed local Net device counts across ranks (min 1, max 2). Set NCCL_IGNORE_NET_MISMATCH=1",
            ),
        ],
        "unequal-hcas",
        ["1 to 2 network devices", "rank 8 has 1", "only hides it"],
    ),
    "InfiniBand and RoCE meet": (
        [
            w(
                "g7",
                "NET/IB : Attempted to connect incompatible devices: [3]mlx5_9:1/IB and [0]bnxt_re0:1/RoCE. Try "
                "selecting NICs",
            )
        ],
        "mixed-link-types",
        ["bnxt_re0 is RoCE", "NCCL_IB_HCA='=mlx5_9'", "host g7"],
    ),
    "both link types in one list, and the others use RoCE": (
        [
            n("g1", "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_4:1/IB [RO]; OOB eth2:192.0.2.7<0>"),
            n("g2", "NET/IB : Using [0]mlx5_3:1/RoCE [RO]; OOB eth2:192.0.2.8<0>"),
            w("g1", "NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129"),
        ],
        "mixed-link-types",
        ["mlx5_4 is IB", "NCCL_IB_HCA='=mlx5_0'"],
    ),
    "two fabrics in one communicator": (
        [
            n("a1", "NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:192.0.2.1<0>"),
            n("b1", "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:192.0.2.2<0>"),
        ],
        "ib-and-roce-hosts",
        ["IB on a1", "RoCE on b1", "cannot meet"],
    ),
    "hosts on different networks": (
        [n("a1", "Using network IB"), n("b1", "Using network Socket")],
        "different-networks",
        ["IB on a1", "Socket on b1"],
    ),
    "a link-local GID, told by the message": (
        [
            w(
                "r3",
                "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_2:1, curr state INIT, next "
                "state "
                "RTR, local GID index 1, local GID fe80::ff:fe00:3, remote GID ::ffff:198.51.100.4",
            )
        ],
        "gid-index",
        ["GID index 1 on mlx5_2", "fe80::ff:fe00:3 is a link-local GID", "show_gids"],
    ),
    "routable GIDs without a path": (
        [
            n("r3", "NET/IB : Using [0]mlx5_6:1/RoCE [RO]; OOB eth0:192.0.2.3<0>"),
            w(
                "r3",
                "NET/IB: Got completion from peer 192.0.2.4<40554> with status=IBV_WC_RETRY_EXC_ERR(12) "
                "opcode=IBV_WC_RECV(128) vendor_err=129 localGid ::ffff:198.51.100.3 remoteGids::ffff:203.0.113.4 hca "
                "mlx5_6",
            ),
        ],
        "gid-index",
        ["error 12) to 192.0.2.4", "::ffff:198.51.100.3 and ::ffff:203.0.113.4 are routable", "PFC"],
    ),
    "an index beyond the table": (
        [w("r3", "Call to ibv_query_gid failed with error No data available")],
        "gid-index",
        ["beyond the end"],
    ),
    "retries over InfiniBand": (
        [
            n("r3", "NET/IB : Using [0]mlx5_6:1/IB [RO]; OOB eth0:192.0.2.3<0>"),
            w("r3", "NET/IB : Got completion from peer 192.0.2.4<4> with error 12, opcode 0, len 0, vendor err 129"),
        ],
        "rdma-retries",
        ["InfiniBand", "ibstat"],
    ),
    "UCX retries over RoCE": (
        [
            "[r1:4711:0:4711] ib_mlx5_log.c:171  UCX ERROR Transport retry count exceeded on mlx5_1:1/RoCE (synd 0x15 "
            "vend 0x81)"
        ],
        "gid-index",
        ["mlx5_1"],
    ),
    "a memory region that the NIC may not touch": (
        [
            w(
                "r3",
                "NET/IB: Got completion from peer 192.0.2.4<1> with status=4 opcode=0 len=0 vendor err 81 (Send) hca "
                "mlx5_0",
            )
        ],
        "rdma-completion",
        ["local protection error", "nvidia_peermem"],
    ),
    "an InfiniBand queue pair": (
        [
            n("r3", "NET/IB : Using [0]mlx5_6:1/IB [RO]; OOB eth0:192.0.2.3<0>"),
            w("r3", "Call to ibv_modify_qp failed with error Invalid argument"),
        ],
        "queue-pair",
        ["partitions"],
    ),
    "gloo on loopback": (
        [
            "[rank3]: [W1128 socket.cpp] Unable to resolve hostname to a (local) address. Using the loopback address "
            "as fallback.",
            "[rank3]: Traceback (most recent call last):",
            '[rank3]:   File "train.py", line 8, in <module>',
            "[rank3]: RuntimeError: Gloo connectFullMesh failed with "
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
            "[rank5]: Traceback (most recent call last):",
            "[rank5]: ValueError: world is broken",
        ],
        "gloo-loopback",
        ["GLOO_SOCKET_IFNAME", "ALL hosts", "loopback"],
    ),
    "gloo told to connect to 127.0.1.1": (
        [
            "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: Connection "
            "refused, "
            "remote=[127.0.1.1]:33012 (rank=2, size=4, local=[127.0.0.1])"
        ],
        "gloo-loopback",
        ["127.0.1.1"],
    ),
    "gloo has no such interface": (
        ["RuntimeError: [enforce fail at device.cc:83] ifa != nullptr. Unable to find address for: ib7"],
        "gloo-interface",
        ["ib7", "exact"],
    ),
    "a container's bridge": (
        [
            n("0123456789ab", "Bootstrap : Using eth0:172.18.0.3<0>"),
            w(
                "0123456789ab",
                "socketStartConnect: Connect to 172.18.0.3<40001> failed : Software caused connection abort",
            ),
        ],
        "bridge-address",
        ["172.18.0.3", "--network=host", "random ports"],
    ),
    "two hosts with one address": (
        [n("pod-a", "Bootstrap: Using eth0:10.88.0.2<0>"), n("pod-b", "Bootstrap: Using eth0:10.88.0.2<0>")],
        "bridge-address",
        ["pod-a, pod-b", "10.88.0.2"],
    ),
    "a firewall": (
        [
            n("h1", "Bootstrap : Using em2:198.51.100.5<0>"),
            w(
                "h1",
                "socketPollConnect: Connect to 198.51.100.6<41234> returned 113(No route to host) errno 115(In "
                "progress)",
            ),
        ],
        "firewall",
        ["198.51.100.6", "errno 113", "firewall", "ports"],
    ),
    "a rendezvous behind a firewall": (
        [
            "[W socket.cpp:663] [c10d] The client socket has failed to connect to [node0.example]:29500 (errno: 113 - "
            "No route "
            "to host)."
        ],
        "firewall",
        ["node0.example"],
    ),
    "a rendezvous that does not answer": (
        [
            "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to "
            "connect to "
            "(203.0.113.9, 29400)."
        ],
        "connect-timeout",
        ["203.0.113.9"],
    ),
    "no route": (
        [w("h1", "Call to connect to 203.0.113.5<55> failed : Network is unreachable")],
        "no-route",
        ["203.0.113.5"],
    ),
    "an address of localhost": (
        [
            "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 (errno: 111 - "
            "Connection refused)"
        ],
        "loopback-address",
        ["MASTER_ADDR"],
    ),
    "a virtual interface in the list": (
        [
            n("h1", "Bootstrap : Using [0]vethab12:fe80::1:2%vethab12<0> [1]enp5s0:198.51.100.7<0>"),
            n("h1", "Channel 01 : 1[1b000] -> 0[1b000] [send] via NET/Socket/0"),
            n("h1", "Call to connect returned Connection timed out, retrying"),
        ],
        "socket-interfaces",
        ["vethab12 (link-local address)", "channel 01", "NCCL_SOCKET_IFNAME='=enp5s0'"],
    ),
    "a bridge of containers in the list": (
        [
            n("h1", "NET/Socket : Using [0]bond1:198.51.100.7<0> [1]docker0:172.17.0.1<0> [2]tailscale0:100.64.0.9<0>"),
        ],
        "socket-interfaces",
        ["docker0", "tailscale0", "'=bond1'"],
    ),
    "only loopback on one of two hosts": (
        [n("h1", "Bootstrap : Using lo:127.0.0.1<0>"), n("h2", "Bootstrap : Using eth0:192.0.2.2<0>")],
        "unreachable-interface",
        ["host h1 uses lo", "127.0.0.1"],
    ),
    "VLANs that the prefix matches": (
        [
            n("h1", "NCCL_SOCKET_IFNAME set by environment to team0"),
            n("h1", "Bootstrap : Using [0]team0:192.0.2.7<0> [1]team0.811:198.51.100.3<0>"),
        ],
        "interface-prefix",
        ["team0.811", "NCCL_SOCKET_IFNAME='=team0'"],
    ),
    "nothing but a bridge": (
        [n("h1", "Bootstrap : Using docker0:192.168.9.1<0>"), n("h2", "Bootstrap : Using eth0:192.0.2.2<0>")],
        "unreachable-interface",
        ["docker0", "no other host"],
    ),
    "Docker's network on two hosts": (
        [n("h1", "Bootstrap : Using eth0:172.17.0.2<0>"), n("h2", "Bootstrap : Using eth0:172.17.0.3<0>")],
        "bridge-address",
        ["h1, h2", "--network=host"],
    ),
    "islands": (
        [
            "RuntimeError: Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: SO_ERROR: No route to "
            "host, "
            "remote=[203.0.113.11]:4040 (rank=1, size=2, local=[192.0.2.11])"
        ],
        "firewall",
        ["203.0.113.11 is in another network than 192.0.2.11"],
    ),
    "no common subnet": (
        [w("h1", "Net : No interface found in the same subnet as remote address 203.0.113.1<4040>")],
        "no-common-subnet",
        ["203.0.113.1", "MASTER_ADDR"],
    ),
    "memory of a GPU without GPUDirect": (
        [w("h1", "Call to ibv_reg_mr_iova2 failed with error Bad address")],
        "rdma-registration",
        ["nvidia_peermem"],
    ),
    "an address that is not this host's": (
        [
            "RuntimeError: The server socket has failed to bind to 192.0.2.9:29500 (errno: 99 - Cannot assign "
            "requested address)."
        ],
        "wrong-address",
        ["MASTER_ADDR"],
    ),
    "too many files": (["[rank7]: OSError: [Errno 24] Too many open files"], "open-files", ["ulimit -n"]),
    "NCCL's error without a warning": (
        [
            "[rank0]: torch.distributed.DistBackendError: NCCL error in: x.cpp:268, unhandled system error (run with "
            "NCCL_DEBUG=INFO for details), NCCL version 2.27.5",
        ],
        "nccl-error",
        ["NCCL_DEBUG=INFO"],
    ),
    "no interface": ([w("h1", "Bootstrap : no socket interface found")], "no-interface", ["NCCL_SOCKET_IFNAME"]),
    "a host called localhost": (
        [n("localhost", "Bootstrap : Using eth0:192.0.2.5<0>")],
        "host-named-localhost",
        ["hostnamectl"],
    ),
    "memlock, registration": (
        [w("h1", "Call to ibv_reg_mr failed with error Cannot allocate memory")],
        "memlock",
        ["ibv_reg_mr", "unlimited"],
    ),
    "memlock, completion queue": (
        [w("h1", "Call to ibv_create_cq failed with error Cannot allocate memory")],
        "memlock",
        [],
    ),
    "memlock, UCX": (
        [
            "[1700000000.1] [h1:99:0] ib_md.c:309 UCX ERROR ibv_reg_mr(address=0x7f, length=8, access=0xf) failed: "
            "Cannot allocate "
            "memory : Please set max locked memory (ulimit -l) to 'unlimited' (current: 64 kbytes)"
        ],
        "memlock",
        [],
    ),
    "InfiniBand switched off, and on": (
        [
            n("h1", "NCCL_IB_DISABLE set by environment to 1."),
            n("h1", "P2P plugin IBext_v7"),
            n("h1", "NET/IB : Using [0]mlx5_2:1/IB [RO]; OOB eth0:192.0.2.2<0>"),
            n("h1", "Using network IBext_v7"),
        ],
        "socket-wanted",
        ["NCCL_NET=Socket", "IB"],
    ),
    "no EFA in the container": (
        ["libfabric:9:170::core:core:fi_getinfo_():1391<warn> fi_getinfo: provider efa output empty list"],
        "no-fabric-provider",
        ["/dev/infiniband/uverbs", "NCCL_IB_* variables have no part"],
    ),
    "the OFI plugin finds nothing": (
        [
            n("h1", "NET/OFI No eligible providers were found"),
            "h1:71:72 [0] int nccl_net_ofi_create_plugin(nccl_net_ofi_plugin_t**):259 NCCL WARN NET/OFI Unable to "
            "find a protocol "
            "that worked.  Failing initialization.",
            n("h1", "Using network Socket"),
        ],
        "no-fabric-provider",
        ["fi_info -p efa"],
    ),
    "libfabric over TCP": (
        [n("h1", "NET/OFI Selected provider is tcp, fabric is 192.0.2.0/24 (found 1 nics)")],
        "slow-fabric-provider",
        ["TCP"],
    ),
    "Slingshot without the plugin": (
        [n("h1", "NET/Socket : Using [0]hsn0:192.0.2.1<0> [1]hsn1:192.0.2.2<0>"), n("h1", "Using network Socket")],
        "ofi-plugin-missing",
        ["sockets on an RDMA fabric", "OFI", "hsn0"],
    ),
    "a network that no plugin offers": (
        [n("h1", "NCCL_NET set by environment to AWS Libfabric."), w("h1", "Error: network AWS Libfabric not found.")],
        "net-plugin-missing",
        ["aws-ofi-nccl", "LD_LIBRARY_PATH"],
    ),
    "a list that selects nothing": (
        [
            n("h1", "NCCL_IB_HCA set to =mlx5_77"),
            n("h1", "NET/IB : No device found."),
            n("h1", "Using network Socket"),
        ],
        "hca-list-empty",
        ["mlx5_77"],
    ),
    "modifiers in the middle": (
        [
            n("h1", "NCCL_IB_HCA set by environment to ^=mlx5_2,^=mlx5_5."),
            n("h1", "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_5:1/IB [RO]; OOB eth0:192.0.2.2<0>"),
        ],
        "hca-list-modifier",
        ["NCCL_IB_HCA='^=mlx5_2,mlx5_5'", "once, at the beginning"],
    ),
    "a prefix that matches more": (
        [
            n("h1", "NCCL_IB_HCA set to mlx5_1"),
            n("h1", "NET/IB : Using [0]mlx5_1:1/IB [1]mlx5_10:1/IB [RO]; OOB eth0:192.0.2.2<0>"),
        ],
        "hca-list-prefix",
        ["mlx5_10", "'=mlx5_1'"],
    ),
    "NCCL versions": (
        [w("h1", "Mismatched NCCL version detected : rank 4 version 22105 rank 0 version 22703")],
        "nccl-versions",
        ["rank 4 has NCCL 22105, rank 0 has NCCL 22703"],
    ),
    "a link that went down": (
        [w("h1", "NET/IB : mlx5_3:1 Got async event : port error")],
        "rdma-event",
        ["mlx5_3", "port error"],
    ),
    "two ranks on one GPU": (
        [w("h1", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000")],
        "duplicate-gpu",
        ["LOCAL_RANK"],
    ),
    "small /dev/shm": (
        [w("h1", "Error while creating shared memory segment /dev/shm/nccl-kLmN12 (size 9637888)")],
        "shared-memory",
        ["--shm-size"],
    ),
    "a full disk": (["[rank0]: OSError: [Errno 28] No space left on device: 'ckpt/step-100'"], "disk-full", ["df -h"]),
    "fabric manager": (
        [w("h1", "Cuda failure 802 'system not yet initialized'")],
        "fabric-manager",
        ["nvidia-fabricmanager"],
    ),
    "port taken": (
        [
            "RuntimeError: The server socket has failed to listen on any local network address. The server socket has "
            "failed to "
            "bind to [::]:29500 (errno: 98 - Address already in use)."
        ],
        "port-in-use",
        ["29500", "ss -ltnp"],
    ),
    "a name that nobody knows": (
        [
            "[W socket.cpp] [c10d] The IPv6 network addresses of (gpu-7, 29500) cannot be retrieved (gai error: -2 - "
            "Name or service)."
        ],
        "name-resolution",
        ["gpu-7"],
    ),
    "a rank that ran out of GPU memory": (
        [
            "[rank1]: Traceback (most recent call last):",
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total "
            "capacity of 9 GiB",
            "[rank0]: Traceback (most recent call last):",
            "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [192.0.2.2]:1234",
        ],
        "gpu-out-of-memory",
        ["rank 1"],
    ),
    "a rank that was killed": (
        [
            "Failures:",
            "[1]:",
            "  time      : 2026-03-01_10:00:00",
            "  host      : n2",
            "  rank      : 3 (local_rank: 1)",
            "  exitcode  : 1 (pid: 12)",
            "Root Cause (first observed failure):",
            "[0]:",
            "  host      : n1",
            "  rank      : 2 (local_rank: 0)",
            "  exitcode  : -9 (pid: 11)",
            "  traceback : Signal 9 (SIGKILL) received by PID 11",
        ],
        "rank-killed",
        ["rank 2 on host n1", "out-of-memory"],
    ),
    "the out-of-memory killer": (
        [
            "[512.1] Memory cgroup out of memory: Killed process 4711 (python) total-vm:1kB",
            "[rank2]: RuntimeError: Connection reset by peer",
        ],
        "host-out-of-memory",
        ["--mem"],
    ),
    "SLURM's task": (["srun: error: n7: task 5: Killed"], "rank-killed", ["task 5 on host n7"]),
    "mpirun's rank": (
        ["mpirun noticed that process rank 3 with PID 0 on node cn1 exited on signal 9 (Killed)."],
        "rank-killed",
        ["task 3 on host cn1"],
    ),
    "only an exit code": (["srun: error: n7: tasks 0-3: Exited with exit code 1"], "rank-exit", ["0-3 on host n7"]),
    "a crash in native code": (
        ["[n1:4711:0:4711] Caught signal 11 (Segmentation fault: address not mapped to object at address 0x8)"],
        "rank-crashed",
        ["Segmentation fault"],
    ),
    "a device that cannot be opened, without its name": (
        [
            w("h1", "Call to ibv_open_device failed"),
            n("h1", "NET/IB : No device found."),
            n("h1", "Using network Socket"),
        ],
        "rdma-device-closed",
        ["/dev/infiniband"],
    ),
    "the script's own exception, before the echoes": (
        [
            "[rank2]: Traceback (most recent call last):",
            "[rank2]: KeyError: 'labels'",
            "[rank0]: Traceback (most recent call last):",
            "[rank0]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was "
            "a network error",
            w("n1", "socketProgress: Connection closed by remote peer n2<40000>"),
        ],
        "exception",
        ["rank 2 raised KeyError: 'labels'"],
    ),
    "a refused connection after the peer's exception": (
        [
            "[rank0]: Traceback (most recent call last):",
            "[rank0]: FileNotFoundError: data/train.bin",
            w("n2", "socketPollConnect: Connect to 192.0.2.1<40000> returned 111(Connection refused) errno 115(x)"),
        ],
        "exception",
        ["FileNotFoundError"],
    ),
    "a traceback that follows a failed connection": (
        [
            w("n2", "socketPollConnect: Connect to 192.0.2.1<40000> returned 110(Connection timed out) errno 115(x)"),
            "[rank0]: Traceback (most recent call last):",
            "[rank0]: AssertionError: model was not wrapped",
        ],
        "connect-timeout",
        ["192.0.2.1"],
    ),
    "a collective that timed out": (
        [
            n("n1", "comm 0xaa rank 0 nranks 3 cudaDev 0 - Init COMPLETE", pid=1),
            "[rank0]:[E ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=11, "
            "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600001 milliseconds before timing "
            "out.",
            "[rank0]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 0] Timeout at NCCL work: 11, last enqueued NCCL work: "
            "11, last "
            "completed NCCL work: 10.",
            "[rank1]:[E ProcessGroupNCCL.cpp:1537] [PG 0 Rank 1] last enqueued NCCL work: 10, last completed NCCL "
            "work: 10.",
        ],
        "collective-timeout",
        ["ALLREDUCE (number 11)", "rank 1 had not reached it", "600 s"],
    ),
    "a barrier": (
        ["[Rank 0]: Ranks 2, 5 failed to pass monitoredBarrier in 30000 ms"],
        "barrier-timeout",
        ["rank 2, 5", "30 s"],
    ),
    "collectives that differ": (
        ["RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: ALLREDUCE"],
        "collective-mismatch",
        ["rank == 0"],
    ),
    "a GPU that is gone": (
        ["NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen off the bus.", "[rank0]: RuntimeError: Broken pipe"],
        "gpu-fault",
        ["Xid"],
    ),
    "a communicator that was aborted": (
        [
            "[rank3]: RuntimeError: NCCL communicator was aborted on rank 3.",
            n("h1", "Proxy Call to rank 8 failed (Connect)"),
        ],
        "peer-gone",
        ["rank 3"],
    ),
    "the time limit": (
        ["slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***"],
        "scheduler",
        ["TIME LIMIT"],
    ),
    "what Holmes says itself": (
        [
            "[rank1]: holmes_core.errors.HolmesError: seen:  rank 3 (stage 1 of 2, host n4) failed: ValueError: no",
            "Broken pipe",
        ],
        "first-failure",
        ["rank 3 (stage 1 of 2, host n4)"],
    ),
    "what Holmes says of a rank that was killed": (
        [
            "holmes: rank 1 ends, because of another failure",
            "seen:  rank 0 (stage 1 of 2, dp 0, tp 0, host b1) was killed (SIGKILL)",
            "where: at step 5, computing, told on rank 1 (stage 0 of 2, dp 0, tp 0, host a1)",
            "RuntimeError: Connection closed by peer [192.0.2.1]:1",
        ],
        "first-failure",
        ["rank 0 (stage 1 of 2, dp 0, tp 0, host b1) was killed (SIGKILL)", "job.log:2"],
    ),
    "a lost host is named after a rank that died": (
        [
            "seen:  rank 2 (stage 1 of 2, dp 0, tp 0, host b1) is lost with its host b1: no sign of life from its ranks"
            " 2, 3 for 12 s",
            "seen:  rank 4 (stage 2 of 2, dp 0, tp 0, host c1) crashed (SIGSEGV)",
        ],
        "first-failure",
        ["rank 4", "crashed (SIGSEGV)", "job.log:2"],
    ),
    "a host of which nothing is heard": (
        ["seen:  rank 2 (stage 1 of 2, dp 0, tp 0, host b1) is lost with its host b1: no sign of life"],
        "first-failure",
        ["rank 2", "is lost with its host b1"],
    ),
    "a clock that is wrong": (
        [
            "holmes: the clock of host b1 is 75.0 s behind that of a1 (measured to 0.0002 s): times in their logs do "
            "not compare; keep clocks in step (chronyc tracking, timedatectl)"
        ],
        "clock-skew",
        ["b1", "75.0 s", "chronyc"],
    ),
    "a rank that has become slow": (
        [
            "holmes: rank 2 (host b1, stage 1, dp 0, tp 0) has become slow: it computes 0.4 s per batch; 0.2 s before",
            "holmes: stage 1 waits 38 % of each step for link a -> b (host a2 -> b1, rank 1 -> rank 2)",
        ],
        "slow-rank-or-link",
        ["rank 2 (host b1", "2 times"],
    ),
    "other launchers' prefixes": (
        [
            "[1,3]<stdout>:" + n("q1", "NET/IB : No device found."),
            "(Worker pid=12, ip=192.0.2.1) " + w("q1", "NET/IB : Unable to open device rxe9"),
            "worker-0 | " + n("q1", "Using network Socket"),
        ],
        "rdma-device-closed",
        ["rxe9", "rank 3"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault(name: str) -> None:
    lines, first, words = FAULTS[name]
    found = findings("\n".join(lines))
    assert found, "nothing was found"
    assert found[0].id == first, [(one.severity, one.likelihood, one.id, one.seen) for one in found]
    assert exit_status(found) == 1
    text = " ".join((found[0].seen, found[0].means, found[0].do, *found[0].where))
    assert [word for word in words if word not in text] == [], text
    assert found[0].do
    assert found[0].where[0].startswith("job.log:")


@pytest.mark.parametrize("name", FAULTS)
def test_the_diagnosis_survives_noise_around_it(name: str) -> None:
    lines, first, _ = FAULTS[name]
    noise = [f"step {step}  loss 2.{step:03}  lr 3e-4" for step in range(40)]
    found = findings("\n".join([*noise, *lines, *noise]))
    assert found[0].id == first


HEALTHY = {
    "InfiniBand": [
        n("h1", "Bootstrap : Using ens3:192.0.2.1<0>"),
        n("h1", "NET/Plugin : No plugin found (libnccl-net.so), using internal implementation"),
        n("h1", "NCCL_IB_HCA set to =mlx5_0,mlx5_1"),
        n("h1", "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ens3:192.0.2.1<0>"),
        n("h1", "Using network IB"),
        n("h1", "Call to connect returned Connection refused, retrying"),
        n("h1", "Connected all rings"),
        n("h1", "comm 0xaa rank 0 nranks 2 cudaDev 0 - Init START"),
        n("h1", "comm 0xaa rank 0 nranks 2 cudaDev 0 - Init COMPLETE"),
    ],
    "EFA": [
        n("h1", "NET/OFI Selected provider is efa, fabric is efa (found 4 nics)"),
        "libfabric:9:170::core:core:fi_getinfo_():1391<warn> fi_getinfo: provider efa output empty list",
        n("h1", "Using network AWS Libfabric"),
    ],
    "sockets by choice": [
        n("h1", "NCCL_NET set by environment to Socket."),
        n("h1", "NET/Socket : Using [0]hsn0:192.0.2.1<0>"),
        n("h1", "Using network Socket"),
    ],
    "one host on loopback": [n("h1", "Bootstrap : Using lo:127.0.0.1<0>"), n("h1", "Connected all rings")],
    "one global address inside a container": [
        n("p1", "Bootstrap : Using veth0:2001:db8:1::6<0>"),
        n("p1", "Using network Socket"),
    ],
    "a port that came up": [w("h1", "NET/IB : Got async event : port active")],
    "each group on the network that its members share": [
        n("a1", "NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB e:192.0.2.1<0>"),
        n("b1", "NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB e:192.0.2.2<0>"),
        n("a1", "Assigned NET plugin IB to comm"),
        n("b1", "Assigned NET plugin IB to comm"),
        n("c1", "Assigned NET plugin Socket to comm"),
        n("a1", "Assigned NET plugin Socket to comm"),
        n("b1", "Assigned NET plugin Socket to comm"),
    ],
    "names that differ": [
        n("h1", "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_3:1/RoCE [RO]; OOB e:192.0.2.1<0>"),
        n("h2", "NET/IB : Using [0]mlx5_0:1/RoCE [1]mlx5_1:1/RoCE [RO]; OOB e:192.0.2.2<0>"),
    ],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_health_is_no_fault(name: str) -> None:
    found = findings("\n".join(HEALTHY[name]))
    assert exit_status(found) == 0, found


def test_transport_is_told_with_link_type_and_without_data_direct_suffix() -> None:
    found = findings(
        "\n".join(
            [n("h1", "NET/IB : Using [0]rocep9s0_dma:1/RoCE [RO]; OOB e:192.0.2.1<0>"), n("h1", "Using network IB")]
        )
    )
    (only,) = found
    assert (only.id, only.severity) == ("transport", "note")
    assert "IB plugin over RoCE on rocep9s0" in only.seen
    assert "rocep9s0_dma" not in only.seen
    assert "not Socket" in only.means
    assert "Data Direct" in only.means


V1, V2 = "roce_v1", "roce_v2"
LOCAL, ROUTABLE = "fe80:0000:0000:0000:0000:00ff:fe00:0001", "0000:0000:0000:0000:0000:ffff:c633:6407"


def table(*entries: tuple[str, str]) -> tuple[Gid, ...]:
    return tuple(
        Gid(index=index, address=address, type=kind) for index, (address, kind) in enumerate(entries) if address
    )


TABLES = {
    3: table((LOCAL, V1), (LOCAL, V2), (ROUTABLE, V1), (ROUTABLE, V2)),
    1: table((ROUTABLE, V1), (ROUTABLE, V2), (LOCAL, V1), (LOCAL, V2)),
    5: table((LOCAL, V1), (LOCAL, V2), ("", ""), ("", ""), (ROUTABLE, V1), (ROUTABLE, V2)),
}


@pytest.mark.parametrize("right", TABLES)
@pytest.mark.parametrize("set_to", [0, 1, 3, 5])
@pytest.mark.parametrize("symptom", ["modify", "completion"])
def test_the_gid_index_is_computed_from_the_table(right: int, set_to: int, symptom: str) -> None:
    text = {
        "modify": "Call to ibv_modify_qp failed with error Connection timed out",
        "completion": "NET/IB : Got completion with error 12, opcode 1, len 0, vendor err 129",
    }[symptom]
    lines = [n("h1", f"NCCL_IB_GID_INDEX set by environment to {set_to}."), w("h1", text)]
    found = findings("\n".join(lines), gids={"mlx5_bond_0": TABLES[right]})
    assert found[0].id == "gid-index"
    if set_to == right:
        assert "is the right entry" in found[0].means
        assert "PFC" in found[0].do
    else:
        assert f"NCCL_IB_GID_INDEX={right} " in found[0].do
        entry = next((gid for gid in TABLES[right] if gid.index == set_to), None)
        expected = "empty entry" if entry is None else "link-local" if entry.address == LOCAL else "RoCE v1"
        assert expected in found[0].means


def test_without_a_table_no_index_is_recommended() -> None:
    found = findings(w("h1", "Call to ibv_modify_qp failed with error Connection timed out"))
    assert "NCCL_IB_GID_INDEX=" not in found[0].do
    assert "--gids" in found[0].do


def test_echoes_become_notes_where_there_is_a_cause() -> None:
    lines = [
        w("h1", "Call to ibv_reg_mr failed with error Cannot allocate memory"),
        "[rank1]: RuntimeError: Connection closed by peer [192.0.2.1]:1",
    ]
    found = findings("\n".join(lines))
    assert [(one.id, one.severity) for one in found] == [("memlock", "error"), ("peer-gone", "note")]


def test_attempts_before_the_first_host_listens_are_no_error() -> None:
    line = (
        "[W socket.cpp] [c10d] The client socket has failed to connect to [n1]:29500 (errno: 111 - Connection refused)."
    )
    (only,) = findings(line)
    assert (only.id, only.severity) == ("connection-refused", "warning")


def test_a_large_job_is_told_in_few_findings() -> None:
    lines = []
    for number in range(300):
        lines += [
            n(f"h{number}", "NCCL_SOCKET_IFNAME set by environment to eth"),
            n(
                f"h{number}",
                f"NET/Socket : Using [0]eth0:10.0.{number // 250}.{number % 250 + 1}<0> [1]docker0:172.17.0.1<0>",
            ),
            n(f"h{number}", "Using network Socket"),
        ]
    found = findings("\n".join(lines))
    assert len(found) < 8
    assert found[0].id == "socket-interfaces"
    assert any("300 hosts use TCP sockets" in one.seen for one in found)
    assert any("297 more like this (h3, h4," in one.seen for one in found)


def test_echoes_alone_say_that_the_cause_is_elsewhere() -> None:
    (only,) = findings("[rank1]: RuntimeError: Connection closed by peer [192.0.2.1]:1")
    assert (only.id, only.severity) == ("peer-gone", "error")
    assert "logs of the ranks that do NOT" in only.do


def test_what_is_not_known_is_said() -> None:
    log = read_lines([("a.log", ["epoch 1", "epoch 2"])])
    assert diagnose(Case(log=log)) == ()
    assert "2 lines read" in silence(log)
    assert "NCCL_DEBUG=INFO" in silence(log)
    (only,) = findings(w("h1", "a thing that nobody has seen before"))
    assert (only.id, only.severity) == ("unknown-warnings", "note")
    assert "nobody has seen" in only.seen


def test_a_rank_is_known_from_the_name_of_its_file() -> None:
    log = read_lines([("out/rank_12.err", ["OSError: [Errno 24] Too many open files"])])
    assert "rank 12" in diagnose(Case(log=log))[0].where


def test_lines_that_a_collector_wrapped() -> None:
    line = json.dumps({"log": n("h1", "NCCL_IB_HCA set by environment to ^=a,^=b.") + "\n", "stream": "stdout"})
    assert "NCCL_IB_HCA='^=a,b'" in findings(line)[0].do


def test_a_rank_is_known_from_its_communicator() -> None:
    lines = [
        n("h1", "comm 0xaa rank 5 nranks 8 cudaDev 1 - Init START", pid=9),
        n("h1", "comm 0xbb rank 0 nranks 2 cudaDev 1 - Init START", pid=9),
        w("h1", "Call to ibv_reg_mr failed with error Cannot allocate memory", pid=9),
    ]
    assert "rank 5" in findings("\n".join(lines))[0].where
