"""Products on one core: processor time of each kind of weight and number of rows, and its share of the core's peak.

    python benchmarks/cpu/products.py [--kinds Q4M Q8Z bfloat16] [--rows 1 8 32 352] [--shapes 3072x576 576x1536]

The peak is measured beside it: bare sdot instructions for packed kinds, fused multiply-adds of float32 for plain ones
(a C program that the machine's compiler builds; without one, on other machines, only rates are printed). Of several
rounds the best counts, in processor time, so that other work on the machine matters little. `--library` takes another
build of the kernels, and then both run in turns and results are compared bit for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from quire.ops.cpu.native import _FUNCTIONS, DTYPES, KINDS, Segment, kernels

SHAPES = ["960x576", "576x576", "3072x576", "576x1536", "49152x576"]
ROUNDS, WORK = 7, 2e8
PEAK = r"""
#include <stdio.h>
#include <time.h>
#define TEN(a) a(0) a(1) a(2) a(3) a(4) a(5) a(6) a(7) a(8) a(9)
#define SDOT(r) "sdot v" #r ".4s, v30.16b, v31.4b[0]\n"
#define FMLA(r) "fmla v" #r ".4s, v30.4s, v31.4s\n"
#define USED "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9"
static double spent(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}
int main(void) {
  double dot = 1e9, fma = 1e9;
  for (int round = 0; round < 5; ++round) {
    double a = spent();
    for (int i = 0; i < 3000000; ++i) __asm__ volatile(TEN(SDOT)::: USED);
    double b = spent();
    for (int i = 0; i < 3000000; ++i) __asm__ volatile(TEN(FMLA)::: USED);
    double c = spent();
    dot = b - a < dot ? b - a : dot, fma = c - b < fma ? c - b : fma;
  }
  printf("%.1f %.1f\n", 32 * 30e6 / dot / 1e9, 8 * 30e6 / fma / 1e9);
  return 0;
}
"""


def peaks() -> tuple[float, float] | None:
    """(integer, float) billions of operations a second."""
    if platform.machine() not in ("aarch64", "arm64"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "peak.c")
        source.write_text(PEAK)
        try:
            subprocess.run(["cc", "-O2", "-march=armv8.2-a+dotprod", source, "-o", source.with_suffix("")], check=True)
            found = subprocess.run([source.with_suffix("")], check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
    dot, fma = map(float, found.split())
    return dot, fma


def another(path: str, isa: bytes) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    for name, (result, arguments) in _FUNCTIONS.items():
        if hasattr(library, name):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    assert library.qc_use_isa(isa) == 0
    return library


class Weight:
    """A random matrix of a kind (packed, or the name of a dtype), ready for any library."""

    def __init__(self, library: ctypes.CDLL, kind: str, n: int, k: int) -> None:
        self.kind, self.n, self.k = kind, n, k
        self.dtype = torch.float32 if kind in KINDS else getattr(torch, kind)
        self.numbers = torch.randn(n, k).to(self.dtype)
        if kind in KINDS:
            data = torch.empty(library.qc_packed_bytes(KINDS[kind], n, k), dtype=torch.uint8)
            if library.qc_pack_float(KINDS[kind], self.numbers.data_ptr(), 0, n, k, data.data_ptr()):
                data.random_(0, 255)
                data.view(torch.int16).bitwise_and_(0x3BFF)  # whatever is read as a scale is a small number
            self.numbers = data
            self.segments = (Segment * 1)(Segment(KINDS[kind], n, data.data_ptr()))

    def times(self, library: ctypes.CDLL, x: torch.Tensor, out: torch.Tensor) -> None:
        m, n, k, dtype = len(x), self.n, self.k, DTYPES[self.dtype]
        if self.kind in KINDS:
            at = ctypes.addressof(self.segments)
            library.qc_linear_packed(x.data_ptr(), k, m, k, at, 1, None, out.data_ptr(), n, dtype)
        else:
            weight = self.numbers.data_ptr()
            library.qc_linear(x.data_ptr(), k, weight, k, None, out.data_ptr(), n, m, n, k, dtype)


def seconds(weight: Weight, libraries: list[ctypes.CDLL], m: int) -> tuple[list[float], bool]:
    """The best time of each library, and whether all gave the same bits."""
    x = torch.randn(m, weight.k).to(weight.dtype)
    outs = [torch.empty(m, weight.n, dtype=weight.dtype) for _ in libraries]
    best = [float("inf")] * len(libraries)
    times = max(1, int(WORK / (m * weight.n * weight.k)))
    for _ in range(ROUNDS):
        for i, library in enumerate(libraries):
            began = time.process_time()
            for _ in range(times):
                weight.times(library, x, outs[i])
            best[i] = min(best[i], (time.process_time() - began) / times)
    return best, all(torch.equal(outs[0].nan_to_num(), out.nan_to_num()) for out in outs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kinds", nargs="+", default=["Q4M", "Q8Z", "bfloat16"], choices=[*KINDS, "bfloat16", "float16", "float32"]
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64, 128, 352, 1024])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--library", action="append", default=[])
    asked = parser.parse_args()
    library = kernels()
    assert library is not None, "no compiled kernels"
    library.qc_set_threads(1)
    libraries = [library, *(another(path, library.qc_isa()) for path in asked.library)]
    top = peaks()
    print(f"{library.qc_isa().decode()}, peak GOP/s of integers and floats:", *(top or ["unknown"]))
    for kind in asked.kinds:
        for shape in asked.shapes:
            n, k = map(int, shape.split("x"))
            weight = Weight(library, kind, n, k)
            for m in asked.rows:
                best, same = seconds(weight, libraries, m)
                rates = [2e-9 * m * n * k / spent for spent in best]
                share = [f" {100 * rate / top[kind not in KINDS]:3.0f} %" if top else "" for rate in rates]
                shown = "   ".join(f"{1e6 * spent:9.1f} us {rate:6.1f} GOP/s{part}"
                                   for spent, rate, part in zip(best, rates, share, strict=True))  # fmt: skip
                print(f"{kind:9}{shape:>11} x {m:<5}{shown}{'' if same else '   other bits'}", flush=True)


if __name__ == "__main__":
    main()
