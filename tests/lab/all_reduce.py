# SPDX-License-Identifier: Apache-2.0
"""A rank of a small job: one all_reduce inside each cluster over its RDMA interface, bytes read before and after.

Plain torch, without Holmes: what a lab shows about sockets does not depend on what Holmes makes of it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def interface_bytes() -> dict[str, int]:
    """Return bytes sent per interface, as the host's own kernel counters say."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {name.strip(): int(rest.split()[8]) for name, _, rest in (line.partition(":") for line in lines)}


def main(clusters: list[list[int]], numel: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", timeout=timedelta(seconds=40))
    rank = dist.get_rank()
    os.environ["GLOO_SOCKET_IFNAME"] = "rdma0"
    groups = [dist.new_group(ranks) for ranks in clusters]
    group = next(group for group, ranks in zip(groups, clusters, strict=True) if rank in ranks)
    tensor = torch.full((numel,), float(rank))
    dist.barrier()
    time.sleep(0.5)  # the barrier's last acknowledgements are delayed by up to 0.2 s
    before = interface_bytes()
    dist.all_reduce(tensor, group=group)
    after = interface_bytes()
    time.sleep(0.5)
    dist.barrier()
    moved = {name: after[name] - before[name] for name in ("rdma0", "eth0")}
    line = json.dumps({"rank": rank, "sum": tensor[0].item(), "moved": moved})
    print(line + "\n", end="", flush=True)  # one write: ranks share the stream
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
