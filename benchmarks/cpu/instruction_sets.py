"""Speed of products on every instruction set that this machine runs, beside torch's own product of bfloat16.

    python benchmarks/cpu/instruction_sets.py [--sets avx512,amx] [--rows 1,16,256] [--threads 1,2] [--seconds 0.05]

Prints GFLOP/s (2 x rows x outputs x inputs, best of several runs) for packed weights (Q4M, Q8Z, float32 input) and for
plain bfloat16: one line per set, form, shape and number of threads, one column per number of rows.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.cpu.native import DTYPES, KINDS, Segment, kernels, usable

SHAPES = ((2048, 2048), (1536, 576))  # outputs x inputs


def best(run: Callable[[], object], seconds: float) -> float:
    run()
    fastest, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        fastest = min(fastest, now - start)
        if now > end:
            return fastest


def packed(library: ctypes.CDLL, kind: str, weight: Tensor) -> Callable[[Tensor], Callable[[], object]]:
    n, k = weight.shape
    data = torch.empty(library.qc_packed_bytes(KINDS[kind], n, k), dtype=torch.uint8)
    library.qc_pack_float(KINDS[kind], weight.data_ptr(), DTYPES[weight.dtype], n, k, data.data_ptr())
    segments = (Segment * 1)(Segment(KINDS[kind], n, data.data_ptr()))

    def product(x: Tensor) -> Callable[[], object]:
        out = torch.empty(len(x), n)
        wanted = (x.data_ptr(), k, len(x), k, ctypes.addressof(segments), 1, None, out.data_ptr(), n, 0)
        return lambda held=(x, out, data, segments): library.qc_linear_packed(*wanted)

    return product


def plain(library: ctypes.CDLL, weight: Tensor) -> Callable[[Tensor], Callable[[], object]]:
    short, (n, k) = weight.bfloat16(), weight.shape

    def product(x: Tensor) -> Callable[[], object]:
        x = x.bfloat16()
        out = torch.empty(len(x), n, dtype=x.dtype)
        wanted = (x.data_ptr(), k, short.data_ptr(), k, None, out.data_ptr(), n, len(x), n, k, DTYPES[x.dtype])
        return lambda held=(x, out, short): library.qc_linear(*wanted)

    return product


def by_torch(weight: Tensor) -> Callable[[Tensor], Callable[[], object]]:
    short = weight.bfloat16()
    return lambda x: lambda given=x.bfloat16(): F.linear(given, short)


def main() -> None:
    library = kernels()
    assert library is not None, "no compiled kernels"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(usable(library)))
    parser.add_argument("--rows", default="1,4,8,16,64,256,1024")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=0.05, help="at least this long for each figure")
    args = parser.parse_args()
    rows = [int(r) for r in args.rows.split(",")]
    print(f"{'set':<11}{'form':<7}{'shape':<11}{'threads':>7}  GFLOP/s at rows " + "".join(f"{r:>9}" for r in rows))
    for n, k in SHAPES:
        weight = torch.randn(n, k)
        forms = {kind: packed(library, kind, weight) for kind in ("Q4M", "Q8Z")} | {"bf16": plain(library, weight)}
        inputs = [torch.randn(r, k) for r in rows]
        for threads in (int(t) for t in args.threads.split(",")):
            library.qc_set_threads(threads)
            torch.set_num_threads(threads)
            lines = [(isa, form, product) for isa in args.sets.split(",") for form, product in forms.items()]
            for isa, form, product in [*lines, ("torch", "bf16", by_torch(weight))]:
                if isa != "torch":
                    assert library.qc_use_isa(isa.encode()) == 0, isa
                speeds = [2e-9 * len(x) * n * k / best(product(x), args.seconds) for x in inputs]
                figures = "".join(f"{speed:>9.1f}" for speed in speeds)
                print(f"{isa:<11}{form:<7}{f'{n}x{k}':<11}{threads:>7}{'':>18}{figures}", flush=True)


if __name__ == "__main__":
    main()
