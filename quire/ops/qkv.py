"""From one fused projection [q | k | v] to queries, and to keys and values in the paged cache.

The part of attention between the projection and the attention itself, as one op that a device may run in one pass:
norm of query and key heads, rotary embedding, cache write. Must not know rows, requests or how blocks are allocated.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.ops.kv_codes import CacheScales, rounded, write_codes
from quire.ops.norm import rms_norm, rms_norm_wide
from quire.ops.op import op
from quire.ops.parts import PartialSums, whole
from quire.ops.rope import rotate


class QkvPrep(NamedTuple):
    """What is applied to a layer's fused projection. Weights None: no norm. cos None: no rotary embedding."""

    heads: int
    kv_heads: int
    q_weight: Tensor | None  # [D], or [heads, D]
    k_weight: Tensor | None  # [D], or [kv_heads, D]
    eps: float
    offset: float  # added to the weights
    wide: bool  # multiply the weight before rounding
    cos: Tensor | None  # [T, 1, dim]
    sin: Tensor | None  # [T, 1, dim], signed
    pairs: bool


@op
def prepare_qkv(
    qkv: Tensor | PartialSums,  # [T, (heads + 2 * kv_heads) * D]
    prep: QkvPrep,
    keys: Tensor,  # [num_blocks, block_size, kv_heads, D], any strides
    values: Tensor,
    slots: Tensor,  # [T] block * block_size + offset; -1: this token's keys and values are not stored
    keep: bool = False,
    scales: CacheScales | None = None,  # of a cache in 8 bits
) -> Tensor:  # [T, heads, D]
    """Returns the queries and writes keys and values to their slots. `keep`: keys replace their part of qkv too, and
    with a cache in 8 bits so do values, both as they will be read."""
    qkv = whole(qkv)
    heads, kv_heads = prep.heads, prep.kv_heads
    parts = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1)
    q, k, v = parts[:, :heads], parts[:, heads:-kv_heads], parts[:, -kv_heads:]
    q, k = _normed(q, prep.q_weight, prep), _normed(k, prep.k_weight, prep)
    if prep.cos is not None and prep.sin is not None:
        q, k = rotate.reference(q, prep.cos, prep.sin, prep.pairs), rotate.reference(k, prep.cos, prep.sin, prep.pairs)
    there = slots >= 0
    block, offset = slots[there] // keys.shape[1], slots[there] % keys.shape[1]
    if scales is None:
        keys[block, offset] = k[there].to(keys.dtype)
        values[block, offset] = v[there].to(values.dtype)
    else:
        write_codes(keys, scales.keys, block, offset, k[there])
        write_codes(values, scales.values, block, offset, v[there])
        if keep:
            k = rounded(k, scales.keys, keys.dtype)
            parts[:, -kv_heads:] = rounded(v, scales.values, values.dtype)
    if keep:
        parts[:, heads:-kv_heads] = k
    return q.contiguous()


def _normed(x: Tensor, weight: Tensor | None, prep: QkvPrep) -> Tensor:
    if weight is None:
        return x
    if prep.wide or prep.offset:
        return rms_norm_wide.reference(x, weight, prep.eps, prep.offset)
    return rms_norm.reference(x, weight, prep.eps)
