"""Partial sums of a split-K matmul on CUDA, added up for whoever takes no parts: a sum over ranks, say.

As norm.py adds them up: in float32, in the order of the parts, rounded once. So a block whose results are summed over a
group of one rank has the bits of one without a group.

Floor: a launch, about 1.4 us inside a graph; 32 rows of 4096 in 4 parts are 2 MB.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops.parts import PartialSums
from quire.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK = 512  # entries of a program, at most


@triton.jit
def _sum_kernel(
    sums, out, part_stride, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """grid (rows, blocks of a row). out [rows, WIDTH] = the sum of sums [PARTS, rows, WIDTH]."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    total = tl.load(sums + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * part_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def sum_parts(product: PartialSums, *, early: bool = False) -> Tensor:
    """ops.few.sum_parts."""
    parts, rows, width = product.sums.shape
    out = torch.empty((rows, width), dtype=product.dtype, device=product.sums.device)
    if not out.numel():
        return out
    if not product.sums.is_contiguous():
        return product.whole()
    block = min(_BLOCK, next_power_of_2(width))
    _sum_kernel[(rows, cdiv(width, block))](
        product.sums, out, rows * width, WIDTH=width, PARTS=parts, BLOCK=block, EARLY=early,
        num_warps=max(1, block // 128), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
