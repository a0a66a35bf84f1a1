"""What a sum over CPU ranks takes by itself: all-reduce through gloo, by size, each rank on a processor of its own.

    python benchmarks/cpu/sums.py --cpus 0-3 --ranks 2,4

Prints the median of each size in microseconds, in bfloat16, as the blocks of a model sum: tokens x width.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cpu.ranks import processors
from quire.base import env
from quire.worker.ranks import join

SIZES = (2048, 16 * 2048, 512 * 2048, 128256)


def work(rank: int, ranks: int, cpus: list[int], folder: str) -> None:
    os.sched_setaffinity(0, {cpus[rank]})
    torch.set_num_threads(1)
    env.let_idle_threads_sleep()
    reduce = join(rank, ranks, f"file://{folder}/meeting", torch.device("cpu")).group.reduce
    told = []
    for size in SIZES:
        x = torch.randn(size).bfloat16()
        count, taken = (200 if size < 1 << 18 else 20), []
        for turn in range(count + 5):
            began = time.perf_counter()
            reduce(x.clone())
            if turn >= 5:
                taken.append(time.perf_counter() - began)
        told.append(f"{size}: {1e6 * statistics.median(taken):.0f} ({1e6 * sorted(taken)[int(0.9 * count)]:.0f})")
    if rank == 0:
        print(f"{ranks} ranks, entries: us (9 of 10 below): {', '.join(told)}", flush=True)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cpus", default=",".join(map(str, sorted(os.sched_getaffinity(0)))))
    parser.add_argument("--ranks", default="2,4")
    args = parser.parse_args()
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            spawn(work, (ranks, processors(args.cpus), folder), ranks)


if __name__ == "__main__":
    main()
