"""Grouped matmuls on CUDA whose operands are read by TMA: as `product` in moe.py, for weights of 16 bits.

Weights are read as full tiles through a descriptor; so are
the rows of the second matmul, which are in order, while those of the first are gathered. Programs are persistent and
take one tile after another, so the next tile's loads overlap this one's epilogue.

Floor: 6 P dim F operations a layer at 800 TFLOP/s. 16,384 tokens, k = 8, 2048 x 768: 1.55 ms.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.ops.triton.act import gate_up


class MoeManyConfig(NamedTuple):
    """BN counts result columns. `resident`: persistent programs take several tiles; `flat`: with flattened loops."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    group: int = 8
    resident: bool = True
    flat: bool = True


FIRST = MoeManyConfig(128, 128, 64, 8, 3)
SECOND = MoeManyConfig(128, 256, 64, 8, 3)
MOST_K = 128  # of a tile; the inner dimension is a multiple of it


@triton.jit
def tile_of(work, tiles, columns: tl.constexpr, GROUP: tl.constexpr):
    """(tile of pairs, column): down GROUP tiles, then to the next column."""
    band, inner = work // (GROUP * columns), work % (GROUP * columns)
    height = tl.minimum(tiles - band * GROUP, GROUP)
    return band * GROUP + inner % height, inner // height


@triton.jit
def _end_of(
    acc, bias, out, order, end, expert, first, column, alpha, limit,
    N: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Bias, activation and store of a tile. FIRST: gate columns, then up columns; results in sorted order."""
    n, row = column * BN + tl.arange(0, BN), first + tl.arange(0, BM)
    live = row < tl.load(end + expert)
    if FIRST:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN)), (0, 2, 1)))
        if BIAS:
            biases = bias + expert * 2 * N + n
            gate += tl.load(biases, mask=n < N, other=0.0).to(tl.float32)[None, :]
            up += tl.load(biases + N, mask=n < N, other=0.0).to(tl.float32)[None, :]
        result = gate_up(gate, up, alpha, limit, ACT)
        target = row
    else:
        result = acc
        if BIAS:
            result += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        target = tl.load(order + row, mask=live, other=0)
    at = out + target.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["programs"])
def _many_kernel(
    a, w, bias, out, order, tile_expert, tile_start, end, programs, a_stride, alpha, limit,
    EXPERTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr, ACT: tl.constexpr,
    BIAS: tl.constexpr, FIRST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, FLAT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """grid (programs,). w: a descriptor; a: one too, or with FIRST the tokens themselves."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    columns: tl.constexpr = (N + BN - 1) // BN
    parts: tl.constexpr = 2 if FIRST else 1
    tiles = tl.load(end + EXPERTS)
    k = tl.arange(0, BK)
    for work in tl.range(tl.program_id(0), tiles * columns, programs, flatten=FLAT):
        tile, column = tile_of(work, tiles, columns, GROUP)
        expert, first = tl.load(tile_expert + tile), tl.load(tile_start + tile)
        acc = tl.zeros((BM, parts * BN), tl.float32)
        if FIRST:
            row = first + tl.arange(0, BM)
            pair = tl.load(order + row, mask=row < tl.load(end + expert), other=0)
            source = a + (pair // TOP_K).to(tl.int64)[:, None] * a_stride + k[None, :]
            for start in range(0, K, BK):
                x = tl.load(source + start)
                y = w.load([expert * parts, column * BN, start]).reshape(parts * BN, BK)
                acc = tl.dot(x, y.T, acc)
        else:
            for start in range(0, K, BK):
                x = a.load([first, start])
                y = w.load([expert * parts, column * BN, start]).reshape(parts * BN, BK)
                acc = tl.dot(x, y.T, acc)
        _end_of(
            acc, bias, out, order, end, expert, first, column, alpha, limit, N, ACT, BIAS, FIRST, BM, BN
        )  # fmt: skip


def fits(x: Tensor, w1: Tensor, w2: Tensor) -> bool:
    """Whether both matmuls of a layer can use this kernel."""
    return (
        x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous() and w1.is_contiguous() and w2.is_contiguous()
        and w1.shape[2] % MOST_K == 0 and w2.shape[2] % MOST_K == 0
        and all(t.data_ptr() % 16 == 0 for t in (x, w1, w2))
    )  # fmt: skip


def num_programs(most: int, device: torch.device, resident: int) -> int:
    """For so many tiles at most; `resident`: how many persistent programs a multiprocessor has."""
    return min(most, resident * _sms(device)) if resident else most


@cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def product(
    a: Tensor, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor, Tensor, Tensor], top_k: int,
    *, pairs: int, act: tuple[int, float, float] | None, config: MoeManyConfig, early: bool = False,
) -> Tensor:  # fmt: skip
    """As moe.product: with `act` the first matmul (a are tokens), without it the second (a are sorted pairs). `tiles`:
    order, expert and start of each tile, end of each expert and finally the number of tiles."""
    order, expert, start, end = tiles
    code, alpha, limit = act or (0, 0.0, 0.0)
    first = act is not None
    experts, rows, k = w.shape
    n = rows // 2 if first else rows
    bm, bn, bk = config.bm, config.bn, config.bk
    out = torch.empty((pairs, n), dtype=a.dtype, device=a.device)
    parts = 2 if first else 1
    weights = TensorDescriptor(w, [experts * parts, n, k], [n * k, k, 1], [parts, bn, bk])
    source = a if first else TensorDescriptor(a, [pairs, k], [k, 1], [bm, bk])
    programs = num_programs(expert.shape[0] * triton.cdiv(n, bn), a.device, config.resident)
    _many_kernel[(programs,)](
        source, weights, bias, out, order, expert, start, end, programs, a.stride(0), alpha, limit,
        EXPERTS=experts, N=n, K=k, TOP_K=top_k, ACT=code, BIAS=bias is not None, FIRST=first, BM=bm, BN=bn, BK=bk,
        GROUP=config.group, FLAT=config.flat and config.resident, EARLY=early, num_warps=config.warps,
        num_stages=config.stages, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out
