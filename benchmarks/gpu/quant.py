"""Matmuls with coded weights against bf16 ones, in the shapes of an 8B model.

    python benchmarks/gpu/quant.py [--rows 1 8 32 256 2048 8192] [--kinds fp8 int4 ...]     # one line for each shape
    python benchmarks/gpu/quant.py --sweep [--seconds 80] [--rows 1 32] [--kinds fp8 int4]  # tiles, one against another

Times as in ops.py: of one call inside a graph that goes through weights larger than the L2 cache. A line has, for each
kind, microseconds, GB/s of weights (up to 64 rows) or TFLOP/s, and how many times as fast as bf16 it is.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from ops import BF16, rand
from sweep import compile_all, sets_for, timed
from torch import Tensor

from quire.ops.coded import CodedWeight, is_packed
from quire.ops.triton import coded, few
from quire.quant.device_codes import device_codes, round_to_affine, round_to_fp8

SHAPES = ((4096, 6144), (4096, 4096), (4096, 24576), (12288, 4096))  # width, rows
ROWS = (1, 8, 32, 256, 2048, 8192)
FEW = 64


def weight_of(kind: str, rows: int, width: int) -> CodedWeight:
    numbers = rand(rows, width, scale=0.02)
    if kind == "fp8":
        return round_to_fp8(numbers)
    if kind == "fp8-blocks":
        return blocks(numbers)
    bits, group, inputs = {"int4": (4, 128, "none"), "int8": (8, width, "int8"), "int8-wo": (8, 128, "none")}[kind]
    made = device_codes(round_to_affine(numbers, bits, group, inputs))
    assert made is not None
    return made


def blocks(numbers: Tensor) -> CodedWeight:
    rows, width = numbers.shape
    made = round_to_fp8(numbers.view(-1, 128))
    scale = made.scale.view(rows, -1).t().contiguous()
    return CodedWeight("fp8", made.codes.view(rows, width), scale, None, rows, width, 128, True)


KINDS = ("fp8", "fp8-blocks", "int4", "int8", "int8-wo")


def num_bytes(weight: CodedWeight) -> int:
    return sum(t.numel() * t.element_size() for t in weight.tensors().values())


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return few.linear(x, weight)


def time_of(make: Callable[[], object], call: Callable[[object], object], size: int) -> float:
    """Over as many weights as the cache does not hold."""
    held = [make() for _ in range(sets_for(size))]
    call(held[0])
    return timed([partial(call, one) for one in held])


def compare(rows_of: list[int], kinds: list[str]) -> None:
    linear = coded.CodedLinear()
    for (width, rows), count in itertools.product(SHAPES, rows_of):
        x, flops = rand(count, width), 2.0 * count * rows * width
        base = time_of(lambda r=rows, w=width: rand(r, w), lambda w, x=x: plain(x, w), rows * width * 2)
        line = [f"{width}x{rows} rows {count}: bf16 {rate(base, rows * width * 2, flops, count)}"]
        for kind in kinds:
            one = weight_of(kind, rows, width)
            try:
                took = time_of(
                    lambda one=one: copied(one),
                    lambda w, x=x: linear(x, w),
                    num_bytes(one),
                )
                line.append(f"{kind} {rate(took, num_bytes(one), flops, count)} x{base / took:.2f}")
            except Exception as wrong:  # noqa: BLE001  # the next kind goes on
                line.append(f"{kind} {type(wrong).__name__}: {str(wrong)[:80]}")
        print(" | ".join(line), flush=True)


def copied(weight: CodedWeight) -> CodedWeight:
    zero = None if weight.zero is None else weight.zero.clone()
    return weight._replace(codes=weight.codes.clone(), scale=weight.scale.clone(), zero=zero)


def rate(took: float, size: float, flops: float, count: int) -> str:
    speed = f"{size / took / 1e9:.0f}GB/s" if count <= FEW else f"{flops / took / 1e12:.0f}TF"
    return f"{took * 1e6:.1f}us {speed}"


def tiles_for(kind: str, count: int) -> list[coded.CodedTile]:
    """Worth trying for so many rows."""
    if count <= FEW:
        inputs = 8 if count <= 8 else 16 if count <= 16 else 32 if count <= 32 else 64
        depths = (128,) if is_packed(kind) else (128, 256)
        split = itertools.product((16, 32, 64), depths, (2, 4, 8), (3, 4, 6), (2, 4, 8))
        whole = itertools.product((32, 64), depths, (2, 4), (4, 6), (0,))
        return [coded.CodedTile(inputs, *each) for each in (*split, *whole) if fits(inputs, *each)]
    return [
        coded.CodedTile(m, n, d, w, s)
        for m, n, d, w, s in itertools.product((64, 128), (64, 128, 256), (64, 128), (4, 8), (2, 3, 4))
        if m * n <= 128 * 256 and (w == 8 or m * n <= 128 * 128)
    ]


def fits(inputs: int, columns: int, depth: int, warps: int, stages: int, split: int) -> bool:
    """What is in shared memory; and a split for each warp, because more would widen the same codes."""
    held = max(1, split) * depth * (columns + 2 * inputs) * stages
    return held <= 220_000 and split in (0, warps)


def sweep(rows_of: list[int], kinds: list[str], seconds: float) -> None:
    """The best tiles of every shape; stops when the time is over."""
    end = time.monotonic() + seconds
    for kind, count, (width, rows) in itertools.product(kinds, rows_of, SHAPES):
        if time.monotonic() > end:
            print("time is over")
            return
        one, x = weight_of(kind, rows, width), rand(count, width)
        tries: dict[str, Callable[[CodedWeight], object]] = {}
        for tile in tiles_for(kind, count):
            name = "(" + ",".join(map(str, tile)) + ")"
            if count > FEW and one.rounds:
                codes, scale = coded.quantize_rows(x, one.codes.dtype, one.group)
                tries[name] = lambda w, t=tile, c=codes, s=scale: coded.multiply(c, w, None, t, x_scale=s, dtype=BF16)
            else:
                tries[name] = lambda w, t=tile, x=x: coded.multiply(x, w, None, t)
        if count > FEW and not one.rounds:
            tries["scratch"] = lambda w, x=x: F.linear(x, coded.decode_weight(w, x.dtype))
        compile_all([partial(call, one) for call in tries.values()])
        held = [copied(one) for _ in range(sets_for(num_bytes(one)))]
        found = []
        for name, call in tries.items():
            if time.monotonic() > end:
                break
            try:
                found.append((timed([partial(call, w) for w in held], repeats=5), name))
            except Exception:  # noqa: BLE001  # a tile that does not fit
                continue
        flops = 2.0 * count * rows * width
        best = "  ".join(f"{name} {rate(took, num_bytes(one), flops, count)}" for took, name in sorted(found)[:4])
        print(f"{kind} {width}x{rows} rows {count}: {best}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, nargs="+", default=None)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=80.0)
    args = parser.parse_args()
    with torch.inference_mode():
        if args.sweep:
            sweep(args.rows or [1, 32], args.kinds, args.seconds)
        else:
            compare(args.rows or list(ROWS), args.kinds)


if __name__ == "__main__":
    main()
