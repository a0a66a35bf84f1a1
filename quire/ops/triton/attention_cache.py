"""Writing keys and values into paged caches.

A cache is viewed as [num_blocks, tokens per block, kv heads, entries]; in memory the tokens of one block and head are
adjacent, so a tile of keys is read in long runs. A slot is block * tokens per block + offset; nothing is written to a
negative slot.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.sizes import next_power_of_2


@triton.jit
def _write_kernel(
    k, v, keys, values, slots, k_token, k_head, v_token, v_head, page_stride, cache_k_head, cache_v_head,
    HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page, offset = slot // PAGE * page_stride, slot % PAGE
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (h < HEADS) & (d < DK)
    key = tl.load(k + token * k_token + h * k_head + d, mask=mask)
    tl.store(keys + page + offset * DK + h * cache_k_head + d, key.to(keys.dtype.element_ty), mask=mask)
    if DV:
        e = tl.arange(0, BLOCK_V)[None, :]
        mask = (h < HEADS) & (e < DV)
        value = tl.load(v + token * v_token + h * v_head + e, mask=mask)
        tl.store(values + page + offset * DV + h * cache_v_head + e, value.to(values.dtype.element_ty), mask=mask)


def write_pages(k: Tensor, v: Tensor | None, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
    """k [T, Hkv, D], v [T, Hkv, Dv] (last stride 1) into keys and values [num_blocks, page, Hkv, size] at slots [T]."""
    tokens, heads, dk = k.shape
    if not tokens:
        return
    dv = 0 if v is None else v.shape[2]
    source, stored = (k, keys) if v is None or values is None else (v, values)
    _write_kernel[(tokens,)](
        k, source, keys, stored, slots, k.stride(0), k.stride(1), source.stride(0), source.stride(1),
        keys.stride(0), keys.stride(2), stored.stride(2), HEADS=heads, DK=dk, DV=dv, PAGE=keys.shape[1],
        BLOCK_H=next_power_of_2(heads), BLOCK_D=next_power_of_2(dk),
        BLOCK_V=next_power_of_2(max(1, dv)), num_warps=4,
    )  # fmt: skip
