# SPDX-License-Identifier: Apache-2.0
"""How long the planner's search takes: 96, 1,000, 10,000 and 100,000 ranks, one core, no GPU.

Run: python benchmarks/bench_search.py
"""

from __future__ import annotations

import platform
import sys
import time

from holmes_core.plan.cost import Job
from holmes_core.plan.hardware import GPUS, ClusterHardware, Hardware
from holmes_core.plan.profile_config import profile_of_config
from holmes_core.plan.profile_names import find_config
from holmes_core.plan.search import search

#: Ranks, model, batch, hosts of eight per cluster.
SIZES = (
    (96, "llama-3.1-8b", 768, (4, 4, 4)),
    (96, "llama-3.1-70b", 1536, (4, 4, 4)),
    (1_000, "llama-3.1-70b", 2_000, (75, 50)),
    (10_000, "llama-3.1-70b", 8_000, (625, 375, 250)),
    (10_000, "llama-3.1-405b", 8_000, (500, 750)),
    (100_000, "llama-3.1-405b", 40_000, (5_000, 5_000, 2_500)),
)
KINDS = ("infiniband", "roce", "roce")
NAMES = ("H100-SXM", "A100-80GB", "A100-80GB")


def main() -> int:
    print(f"python {platform.python_version()}, {platform.machine()}")
    print(f"{'ranks':>7} {'model':<15} {'batch':>6} {'examined':>8} {'simulated':>9} {'CPU s':>8}  fastest")
    for ranks, model, batch, hosts in SIZES:
        clusters = tuple(
            ClusterHardware(name="abc"[i], kind=KINDS[i], hosts=(8,) * count, gpu=GPUS[NAMES[i]], nics=8,
                nic_rate=400.0, ethernet_rate=100.0)
            for i, count in enumerate(hosts)
        )  # fmt: skip
        job = Job(
            profile=profile_of_config(find_config(model)[1], seq=4096),
            hardware=Hardware(clusters=clusters),
            batch=batch,
            precision="bf16-true",
        )
        assert job.hardware.ranks == ranks
        start = time.process_time()  # of this process alone: other work on the machine does not count
        result = search(job)
        took = time.process_time() - start
        found = f"{result.best.choice.describe()} (predicted {result.best.prediction.step_seconds:.3g} s a step)"
        print(f"{ranks:>7} {model:<15} {batch:>6} {result.examined:>8} {result.simulated:>9} {took:>8.2f}  {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
