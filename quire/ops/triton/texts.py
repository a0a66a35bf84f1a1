"""Attention within texts that are read at once, on CUDA: every query of a text over all of its keys, in both
directions; and sums of the vectors of texts that lie one after another.

One program takes a tile of a text's queries in one head, and goes over the keys of that text with a running maximum:
no text sees what lies beside it, so that its result does not depend on the batch. Which tiles there are is a list made
on the host, the same for all layers of a step.

Floor: 4 D operations a query, head and key at 790 TFLOP/s. 160 texts of 100 tokens, 12 heads of 64: 4.9 GFLOP, 6 us;
their queries, keys, values and results are 98 MB, 23 us at 4.3 TB/s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.attention import ragged_attention
from quire.ops.copy import upload
from quire.ops.op import FormTable, Kernels
from quire.ops.texts import text_sums
from quire.ops.triton.sizes import cdiv, next_power_of_2

MAX_SIZE = 256  # entries of a head
LOG2E = tl.constexpr(1.4426950408889634)
FIELDS = tl.constexpr(5)  # of an item: first query and key of the text, how many of each, first query of the tile
_SUM_COLUMNS = 128


@triton.jit
def _texts_kernel(
    q, k, v, out, slopes, items, q_stride, k_stride, v_stride, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, WINDOW: tl.constexpr,
    SLOPES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """grid (items, heads). SLOPES: scores fall by so much with each step of distance, as a multiple of log2(e)."""
    item, head = items + tl.program_id(0) * FIELDS, tl.program_id(1)
    first_query, first_key = tl.load(item).to(tl.int64), tl.load(item + 1).to(tl.int64)
    queries, keys, begin = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    m, e = begin + tl.arange(0, BM), tl.arange(0, WIDE)
    here, real = m < queries, e < SIZE
    at = (first_query + m)[:, None]
    rows = tl.load(q + at * q_stride + head * SIZE + e[None, :], mask=here[:, None] & real[None, :], other=0.0)
    acc = tl.zeros([BM, WIDE], tl.float32)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    kv_head = head // GROUP
    low, high = 0, keys
    if WINDOW > 0:
        low = tl.maximum(begin - WINDOW + 1, 0) // BN * BN
        high = tl.minimum(begin + BM - 1 + WINDOW, keys)
    for start in range(low, high, BN):
        n = start + tl.arange(0, BN)
        seen = n < keys
        inside = seen[:, None] & real[None, :]
        of_key = (first_key + n)[:, None]
        key = tl.load(k + of_key * k_stride + kv_head * SIZE + e[None, :], mask=inside, other=0.0)
        value = tl.load(v + of_key * v_stride + kv_head * SIZE + e[None, :], mask=inside, other=0.0)
        if EXACT:
            s = tl.dot(rows, tl.trans(key), input_precision="ieee") * scale
        else:
            s = tl.dot(rows, tl.trans(key)) * scale
        distance = n[None, :] - m[:, None]
        if SLOPES:
            s -= tl.load(slopes + head).to(tl.float32) * LOG2E * tl.abs(distance).to(tl.float32)
        visible = seen[None, :]
        if WINDOW > 0:
            visible = visible & (tl.abs(distance) < WINDOW)
        s = tl.where(visible, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == -float("inf"), 0.0, new)  # a query that has seen no key yet
        p = tl.exp2(s - safe[:, None])
        alpha = tl.exp2(top - safe)
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if EXACT:
            acc += tl.dot(p, value, input_precision="ieee")
        else:
            acc = tl.dot(p.to(value.dtype), value, acc)
        top = new
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # rows that there are not may see no key
    to = out + (at * HEADS + head) * SIZE + e[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=here[:, None] & real[None, :])


def tiles_of(size: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(queries and keys of a tile, warps) for heads of so many entries: by these alone, so that sums have one order."""
    if dtype is torch.float32:
        return (32, 32, 4) if size <= 64 else (16, 16, 4)
    return (64, 64, 4) if 64 < size <= 128 else (64, 32, 4)


@lru_cache(maxsize=8)
def items_of(query_lens: tuple[int, ...], key_lens: tuple[int, ...], tile: int, device: torch.device) -> Tensor:
    """[items, FIELDS] int32: tiles of all texts, the longest texts first."""
    queries, keys = np.array(query_lens, dtype=np.int64), np.array(key_lens, dtype=np.int64)
    first_queries, first_keys = queries.cumsum() - queries, keys.cumsum() - keys
    tiles = -(-queries // tile)
    text = np.repeat(np.arange(len(queries)), tiles)
    begin = (np.arange(len(text)) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile
    fields = (first_queries[text], first_keys[text], queries[text], keys[text], begin)
    items = np.stack(fields, 1).astype(np.int32)[np.argsort(-keys[text], kind="stable")]
    return upload(items, device)


def _fits(q: Tensor, k: Tensor, v: Tensor, near: Tensor | None) -> bool:
    alike = q.dtype is k.dtype is v.dtype and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    size = q.shape[2]
    return alike and 16 <= size <= MAX_SIZE and v.shape[2] == size and (near is None or near.ndim == 1)


def _rows(heads: Tensor) -> Tensor:
    """[T, H, D] with the heads of a token side by side."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


def ragged_form(before: Callable[..., Tensor], kernels: Kernels) -> Callable[..., Tensor]:
    """Of ops.attention.ragged_attention; `before` takes what the kernel does not: capped scores, sinks, learned
    distances."""

    def ragged(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_lens: Sequence[int],
        key_lens: Sequence[int],
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        near: Tensor | None = None,
    ) -> Tensor:
        if softcap or sinks is not None or not _fits(q, k, v, near) or (window and query_lens != key_lens):
            return before(
                q, k, v, query_lens, key_lens, scale=scale, window=window, softcap=softcap, sinks=sinks, near=near
            )
        return attend_texts(q, k, v, tuple(query_lens), tuple(key_lens), scale, window, near)

    return ragged


def attend_texts(
    q: Tensor, k: Tensor, v: Tensor, query_lens: tuple[int, ...], key_lens: tuple[int, ...], scale: float,
    window: int = 0, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    heads, size = q.shape[1:]
    q, k, v = _rows(q), _rows(k), _rows(v)
    out = torch.empty((q.shape[0], heads, size), dtype=q.dtype, device=q.device)
    bm, bn, warps = tiles_of(size, q.dtype)
    items = items_of(query_lens, key_lens, bm, q.device)
    if not len(items):
        return out
    _texts_kernel[(len(items), heads)](
        q, k, v, out, slopes, items, q.stride(0), k.stride(0), v.stride(0), scale * LOG2E.value,
        HEADS=heads, GROUP=heads // k.shape[1], SIZE=size, WIDE=next_power_of_2(size), WINDOW=window,
        SLOPES=slopes is not None, BM=bm, BN=bn, EXACT=q.dtype is torch.float32, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width"])
def _sums_kernel(x, out, ends, counts, width, BLOCK: tl.constexpr):
    """grid (texts, blocks of columns): rows of a text one after another, four at a time."""
    text = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    end, count = tl.load(ends + text).to(tl.int64), tl.load(counts + text)
    first = end - count
    total = tl.zeros([4, BLOCK], tl.float32)
    for row in range(0, count, 4):
        r = row + tl.arange(0, 4)
        at = (first + r)[:, None] * width + column[None, :]
        total += tl.load(x + at, mask=(r < count)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(out + text.to(tl.int64) * width + column, tl.sum(total, 0), mask=inside)


def text_sums_cuda(x: Tensor, counts: Sequence[int]) -> Tensor:
    x = x.contiguous()
    lens = np.array(counts, dtype=np.int32)
    both = upload(np.stack((lens.cumsum(dtype=np.int32), lens)), x.device)
    out = torch.empty((len(counts), x.shape[1]), dtype=torch.float32, device=x.device)
    grid = (len(counts), cdiv(x.shape[1], _SUM_COLUMNS))
    _sums_kernel[grid](x, out, both[0], both[1], x.shape[1], BLOCK=_SUM_COLUMNS, num_warps=4)
    return out


def add_forms(table: FormTable) -> None:
    table.made(ragged_attention)(ragged_form)
    table.form(text_sums)(text_sums_cuda)
