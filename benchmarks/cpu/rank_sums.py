"""One sum over ranks that are processes of this machine, by size: through shared memory and over gloo, in turns.

    python benchmarks/cpu/rank_sums.py --ranks 2             # each rank on a processor of its own, as far as there are
    python benchmarks/cpu/rank_sums.py --ranks 2 --cpus 0    # all of them on one

Prints microseconds of one sum (median over the rounds) and of processor time per rank (mean). Ranks do nothing between
two sums, so none comes late: what is measured is the exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

SIZES = (2, 4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes
BUDGET = 0.15  # seconds of a size in a round


def rank(place: int, ranks: int, folder: str, rounds: int, dtype: str) -> None:
    from torch import distributed

    from quire.worker.ranks import _sum_over, join, leave

    torch.set_num_threads(1)
    shared = join(place, ranks, f"file://{folder}/meeting", torch.device("cpu")).group.reduce
    ways = {"shared": shared, "gloo": _sum_over(None)}
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for size in SIZES:
            x = torch.zeros(
                max(1, size // torch.empty((), dtype=getattr(torch, dtype)).element_size()), dtype=getattr(torch, dtype)
            )
            for name, reduce in ways.items():
                reduce(x)
                count = torch.tensor([0.0])
                began = time.perf_counter()
                for _ in range(5):
                    reduce(x)
                count[0] = max(5.0, BUDGET / ((time.perf_counter() - began) / 5))
                distributed.broadcast(count, 0)  # all do as many
                times = int(min(count.item(), 20_000))
                distributed.barrier()
                began, worked = time.perf_counter(), time.process_time()
                for _ in range(times):
                    reduce(x)
                wall, work = time.perf_counter() - began, time.process_time() - worked
                found.setdefault(f"{name} {size}", []).append((wall / times * 1e6, work / times * 1e6))
    if place == 0:
        print(json.dumps({"way": type(shared).__name__, "found": found}), flush=True)
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpus", default=",".join(map(str, sorted(os.sched_getaffinity(0)))), help="as in 0,1,8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--child", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        rank(int(args.child[0]), args.ranks, args.child[1], args.rounds, args.dtype)
        return
    cpus = [int(cpu) for cpu in args.cpus.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for place in range(args.ranks):
            own = str(cpus[place % len(cpus)]) if args.ranks <= len(cpus) else args.cpus
            bound = {"QUIRE_CPU_OMP_THREADS_BIND": "|".join([own] * args.ranks if args.ranks <= len(cpus) else [own])}
            command = ["taskset", "-c", own, sys.executable, __file__, "--ranks", str(args.ranks), "--rounds",
                       str(args.rounds), "--dtype", args.dtype, "--child", str(place), folder]  # fmt: skip
            children.append(subprocess.Popen(
                command, env=os.environ | bound, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            ))  # fmt: skip
        said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("a rank has failed")
    told = json.loads(said[0])
    print(f"{args.ranks} ranks on processors {args.cpus}, {args.dtype}; shared memory is {told['way']}")
    for size in SIZES:
        parts = []
        for name in ("shared", "gloo"):
            both = told["found"][f"{name} {size}"]
            wall, work = statistics.median(one for one, _ in both), statistics.fmean(one for _, one in both)
            parts.append(f"{name} {wall:9.1f} us, {work:8.1f} us of a processor")
        print(f"{size:9d} bytes: {'; '.join(parts)}")


if __name__ == "__main__":
    main()
