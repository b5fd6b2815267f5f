# SPDX-License-Identifier: Apache-2.0
"""How long saving and loading 1 GB of state takes, against torch.save of the same state in one process.

    python benchmarks/checkpoint.py [--ranks 2] [--gigabytes 1] [--repeat 5] [--folder DIR]

Variants take turns within each repetition; medians are printed. All writes wait until the disk has the bytes (fsync),
torch.save's too, except in the row that says so. Files are in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from holmes_core.runtime.checkpoint import Reads, begin, load_file, load_tree, save_parts, tree_bytes
from holmes_core.runtime.checkpoint_parts import Part, local_chunks, part_of, parts_in, placeholder
from holmes_core.runtime.checkpoint_place import remove
from holmes_core.runtime.checkpoint_saver import Saver, save_file

ROWS = 4096  # tensors of 16 MB, as weights and Adam's states of a model with hidden size 1024


def names(gigabytes: float) -> list[str]:
    return [f"layer.{index}" for index in range(max(4, int(gigabytes * 1e9 / (ROWS * 1024 * 4))))]


def worker(rank: int, ranks: int, arguments: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    world = dist.group.WORLD
    assert world is not None
    folder, every = Path(arguments.folder), names(arguments.gigabytes)
    torch.manual_seed(rank)
    mine = {name: torch.randn(ROWS, 1024) for index, name in enumerate(every) if index % ranks == rank}
    whole = {name: torch.randn(ROWS, 1024) for name in every} if rank == 0 else {}

    def tree() -> dict[str, Any]:
        made = {}
        for name in every:
            part = Part(name=name, shape=(ROWS, 1024), dtype=torch.float32, tensor=mine.get(name))
            part.chunks = local_chunks(part.shape) if name in mine else ()
            made[name] = placeholder(part)
        return made

    def torch_save(sync: bool) -> None:
        if rank == 0:
            with open(folder / "plain.pt", "wb") as file:
                torch.save(whole, file)
                file.flush()
                if sync:
                    os.fsync(file.fileno())

    def single() -> None:
        if rank == 0:
            save_file(folder / "single.ckpt", whole)

    def sharded() -> None:
        made, path = tree(), folder / "sharded.ckpt"
        temporary = begin(path, world)
        files = {"state.pt": tree_bytes(made)} if rank == 0 else {}
        save_parts(path, temporary, parts_in(made), files=files, group=world)

    saver = Saver(background=True, timeout=120)

    def background() -> None:
        saver.save_sharded(folder / "sharded.ckpt", tree(), world=world)

    def torch_load() -> None:
        if rank == 0:
            torch.load(folder / "plain.pt", weights_only=True)

    def single_load() -> None:
        if rank == 0:
            for value in load_file(folder / "single.ckpt").values():
                value.clone()

    def sharded_load() -> None:
        found, reads = load_tree(folder / "sharded.ckpt"), Reads()
        for name in mine:
            part = part_of(found[name])
            assert part is not None
            reads.want(part)
        reads.run()

    variants: list[tuple[str, Callable[[], None]]] = [
        ("save: torch.save, one process, no fsync", lambda: torch_save(False)),
        ("save: torch.save, one process", lambda: torch_save(True)),
        ("save: single", single),
        (f"save: sharded, {ranks} ranks", sharded),
        (f"save: sharded in the background, {ranks} ranks, until training goes on", background),
        ("load: torch.load, one process", torch_load),
        ("load: single, checksums compared", single_load),
        (f"load: sharded, {ranks} ranks, checksums compared", sharded_load),
    ]
    times: dict[str, list[float]] = {name: [] for name, _ in variants}
    for repeat in range(arguments.repeat + 1):
        for name, run in variants:
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            if repeat:  # the first round makes files and connections
                times[name].append(time.perf_counter() - start)
            saver.wait()
    if rank == 0:
        size = len(every) * ROWS * 1024 * 4
        print(f"{size / 1e9:.2f} GB, {ranks} ranks, median (fastest - slowest) of {arguments.repeat}, in {folder}")
        for name, found in times.items():
            middle = statistics.median(found)
            print(f"{name:75} {middle:6.2f} s ({min(found):.2f} - {max(found):.2f}) {size / 1e9 / middle:6.2f} GB/s")
        for path in folder.iterdir():
            remove(path)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", default="/tmp/holmes-benchmark")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    os.makedirs(arguments.folder)
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        mp.spawn(worker, args=(arguments.ranks, arguments, port), nprocs=arguments.ranks)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
