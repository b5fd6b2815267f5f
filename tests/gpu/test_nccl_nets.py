# SPDX-License-Identifier: Apache-2.0
"""Two NCCL communicators with different networks in one process, where a GPU is at hand."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from holmes_core.cluster.detect import detect_host
from holmes_core.plan.transport import Transport
from holmes_core.runtime.process_groups import nccl_options

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; this machine has none"),
]


@pytest.mark.parametrize("nets", [("Socket", "Socket"), ("Socket", "IB")])
def test_each_communicator_has_its_own_network(nets: tuple[str, str]) -> None:
    if "IB" in nets and detect_host(host="here").kind not in ("infiniband", "roce"):
        pytest.skip("needs a usable InfiniBand or RoCE port; this host has none")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for net in nets:
            transport = Transport(backend="nccl", kind="x", net=net, reason="")
            group = dist.new_group(
                [0], backend="nccl", timeout=timedelta(seconds=60), pg_options=nccl_options(transport)
            )
            tensor = torch.ones(4, device="cuda")
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [1.0] * 4
            assert group._get_backend(torch.device("cuda")).options.config.net_name == net
    finally:
        dist.destroy_process_group()
