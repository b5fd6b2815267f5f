# SPDX-License-Identifier: Apache-2.0
"""What small micro-batches cost a processor: the lab's model on 16 sequences, in passes of 1 to 16, in one process.

    .venv/bin/python benchmarks/bench_micro_batch.py [--repeats 5]

Interleaved; medians. No communication and no schedule: only what a pass takes besides its share of the batch.
"""

from __future__ import annotations

import argparse
import statistics
import time

import lab_systems
import torch

BATCH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = lab_systems.model()
    ids = torch.randint(0, lab_systems.VOCAB, (BATCH, lab_systems.LENGTH))
    times: dict[int, list[float]] = {1: [], 2: [], 4: [], 8: [], 16: []}
    for _ in range(args.repeats + 1):
        for size, found in times.items():
            start = time.perf_counter()
            for part in ids.split(size):
                model(input_ids=part, labels=part).loss.backward()
            found.append(time.perf_counter() - start)
            model.zero_grad()
    print(f"torch {torch.__version__}, 1 thread, {args.repeats} interleaved repeats after one that does not count")
    base = statistics.median(times[8][1:])
    for size, found in times.items():
        middle = statistics.median(found[1:])
        print(f"passes of {size:2d} sequences: {middle:.3f} s, {middle / base - 1:+.1%} of passes of 8")


if __name__ == "__main__":
    main()
