"""Attention arithmetic: scores, masks and weighted values, over padded tensors and over paged rows.

`paged_attention` is the reference: any mix of rows, each reading its context through a block table. `padded_attention`
is the building block of backends: a batch of equally long (masked) problems. Softmax is in float32 everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.op import cpu_dtypes, op

MAX_SCORES = 1 << 24  # elements of one score tensor; larger problems are split along the queries


@op
def padded_attention(
    q: Tensor,  # [B, Hq, M, D]
    k: Tensor,  # [B, Hkv, L, D], Hkv divides Hq
    v: Tensor,  # [B, Hkv, L, Dv]
    mask: Tensor | None,  # float32, added to the scores; broadcasts to [B, Hq, M, L]; -inf hides
    *,
    scale: float,
    causal: bool = False,  # M == L: query i attends to keys up to i
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # broadcasts to [Hq, M]: a score that takes weight and has no value
) -> Tensor:  # [B, Hq, M, Dv]
    """softmax(cap(q k scale) + mask) v, with an optional sink."""
    (batch, heads, m, _), (kv_heads, length) = q.shape, k.shape[1:3]
    if causal:
        shape = (m, length)
        mask = torch.full(shape, float("-inf"), device=q.device).triu_(1) if mask is None else mask
    if batch * heads * m * length > MAX_SCORES and m > 1:
        return _in_slices(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
    scores = _scores(q, k, mask, scale=scale, softcap=softcap)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        column = sinks.float().expand(batch, heads, m)[..., None]
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :length]
    weights = weights.view(batch, kv_heads, -1, length)
    return torch.matmul(weights, v.float()).view(batch, heads, m, -1).to(q.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, *, scale: float, softcap: float) -> Tensor:
    """[batch, heads, m, length] float32: what softmax is taken of."""
    batch, heads, m, _ = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    folded = q.reshape(batch, kv_heads, heads // kv_heads * m, -1)
    scores = torch.matmul(folded.float(), k.float().transpose(-1, -2)).mul_(scale).view(batch, heads, m, length)
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    return scores if mask is None else scores + mask


def _in_slices(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    m = q.shape[2]
    rows = max(1, MAX_SCORES * m // (q.shape[0] * q.shape[1] * m * k.shape[2]))
    outputs = []
    for start in range(0, m, rows):
        part = slice(start, min(start + rows, m))
        cut = mask if mask is None or mask.shape[-2] == 1 else mask[..., part, :]
        sink = sinks if sinks is None or sinks.shape[-1] == 1 else sinks[..., part]
        outputs.append(
            padded_attention.reference(q[:, :, part], k, v, cut, scale=scale, softcap=softcap, sinks=sink)
        )  # fmt: skip
    return torch.cat(outputs, 2)


@op
def partial_attention(
    q: Tensor,  # [B, Hq, M, D]
    k: Tensor,  # [B, Hkv, L, D], Hkv divides Hq: some of the keys
    v: Tensor,  # [B, Hkv, L, Dv]
    mask: Tensor | None,  # float32, added to the scores; broadcasts to [B, Hq, M, L]; -inf hides
    *,
    scale: float,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # float32 [B, Hq, M, Dv] and [B, Hq, M]
    """Attention over some of the keys, and the logarithm of the sum of their exp(score), by which `merge_attention`
    weighs it. Of a query that sees none of them: zeros, and -inf."""
    (batch, heads, m, _), (kv_heads, length) = q.shape, k.shape[1:3]
    rows = max(1, MAX_SCORES // (batch * heads * max(length, 1)))
    if m > rows:
        cut = [None] * (-(-m // rows)) if mask is None else mask.expand(*mask.shape[:-2], m, length).split(rows, -2)
        parts = [
            partial_attention.reference(part, k, v, hidden, scale=scale, softcap=softcap)
            for part, hidden in zip(q.split(rows, 2), cut, strict=True)
        ]
        return torch.cat([out for out, _ in parts], 2), torch.cat([total for _, total in parts], 2)
    scores = _scores(q, k, mask, scale=scale, softcap=softcap)
    total = scores.logsumexp(-1)
    weights = (scores - total.clamp(min=torch.finfo(torch.float32).min)[..., None]).exp_()
    out = torch.matmul(weights.view(batch, kv_heads, -1, length), v.float()).view(batch, heads, m, -1)
    return out, total


@op
def merge_attention(parts: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Of N disjoint sets of keys, parts [N, .., Dv] and totals [N, ..] as `partial_attention` has them: the same of all
    keys together."""
    total = totals.logsumexp(0)
    weights = (totals - total.clamp(min=torch.finfo(torch.float32).min)).exp_()
    return (parts * weights[..., None]).sum(0), total


@padded_attention.form("cpu")
def padded_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """torch's fused CPU kernel if it supports the problem (it accumulates in float32)."""
    if softcap or sinks is not None:
        return padded_attention.reference(q, k, v, mask, scale=scale, causal=causal, softcap=softcap, sinks=sinks)
    dtype = q.dtype
    if dtype not in cpu_dtypes():
        q, k, v = q.float(), k.float(), v.float()
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.to(dtype)


def alibi_slopes(heads: int) -> Tensor:
    """[heads] float32: the geometric slopes of the ALiBi paper, extended to any number of heads."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]
    return torch.tensor(slopes)


def by_distance(alibi: Tensor, gap: Tensor) -> Tensor:
    """The bias of scores, [Hq, *gap]: minus slope times distance, or learned values [Hq, G] of the distances
    0, 1, .. G - 1, the last of them for all longer ones. gap: position of the query minus that of the key."""
    if alibi.dim() == 1:
        return -alibi.view(-1, *[1] * gap.dim()) * gap
    return alibi[:, gap.clamp(0, alibi.shape[1] - 1)]


def visible(queries: Tensor, keys: Tensor, *, window: int = 0, chunk: int = 0) -> Tensor:
    """[M, L] bool: may a query at this position read a key at that position."""
    gap = queries[:, None] - keys[None]
    seen = gap >= 0
    if window:
        seen &= gap < window
    if chunk:
        seen &= queries[:, None] // chunk == keys[None] // chunk
    return seen


@op
def write_cache(cache: Tensor, slots: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Store k [T, Hkv, D] and v [T, Hkv, Dv] side by side in rows `slots` of cache [num_slots, Hkv * (D + Dv)]."""
    rows = k.flatten(1) if v is None else torch.cat((k.flatten(1), v.flatten(1)), 1)
    cache.index_copy_(0, slots, rows.to(cache.dtype))


@op
def paged_attention(
    q: Tensor,  # [T, Hq, D]
    cache: Tensor,  # [num_slots, Hkv * (D + Dv)], this step's keys and values included
    block_tables: Tensor,  # [R, max_blocks]
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    block_size: int,
    kv_heads: int,
    scale: float,
    v_size: int = 0,  # latent attention: values are the first v_size entries of the (only) keys
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [Hq]
    alibi: Tensor | None = None,  # [Hq] or [Hq, G]: see by_distance
) -> Tensor:  # [T, Hq, Dv]
    """Causal attention of each row's queries over its full context, row by row: slow, and the reference."""
    out, start, size = [], 0, q.shape[-1]
    for row, (count, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        if not count:
            continue
        keys = torch.arange(context, device=q.device)
        queries = torch.arange(context - count, context, device=q.device)
        seen = visible(queries, keys, window=window, chunk=chunk)
        used = seen.any(0)  # blocks that no query reads may have been freed
        keys, seen = keys[used], seen[:, used]
        blocks = block_tables[row].long()[keys // block_size]
        kv = cache[blocks * block_size + keys % block_size].to(q.dtype)
        k = kv[:, : kv_heads * size].view(len(keys), kv_heads, size)
        v = k[..., :v_size] if v_size else kv[:, kv_heads * size :].view(len(keys), kv_heads, -1)
        mask = torch.zeros(seen.shape, device=q.device).masked_fill_(~seen, float("-inf"))
        if alibi is not None:
            mask = mask + by_distance(alibi, queries[:, None] - keys[None])
        row_out = padded_attention.reference(
            q[start : start + count].transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], mask,
            scale=scale, softcap=softcap, sinks=None if sinks is None else sinks[:, None],
        )  # fmt: skip
        out.append(row_out[0].transpose(0, 1))
        start += count
    return torch.cat(out)


@op
def ragged_attention(
    q: Tensor,  # [T, Hq, D], rows one after another
    k: Tensor,  # [S, Hkv, D]
    v: Tensor,  # [S, Hkv, Dv]
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    *,
    scale: float,
    window: int = 0,  # keys at this distance or further, on either side, are masked; 0: none are
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [Hq]
    near: Tensor | None = None,  # [Hq, 2 G + 1]: added to scores by distance, key minus query from -G to G and beyond;
    # or [Hq]: scores fall by so much with each step of distance (ALiBi)
) -> Tensor:  # [T, Hq, Dv]
    """Every query of a row over every key of that row, in both directions."""
    out = torch.empty((q.shape[0], q.shape[1], v.shape[-1]), dtype=q.dtype, device=q.device)
    attend, begin, first = padded_attention.on(q.device), 0, 0
    for count, keys in zip(query_lens, key_lens, strict=True):
        end, last = begin + count, first + keys
        if not count:
            first = last
            continue
        seen, values = (t.transpose(0, 1)[None] for t in (k[first:last], v[first:last]))
        # A mask of all queries of a long text would be larger than the model.
        step = count if near is None and not window else max(1, MAX_SCORES // (q.shape[1] * keys))
        for start in range(0, count, step):
            part = slice(begin + start, min(begin + start + step, end))
            mask = _mask_around(start, part.stop - part.start, keys, window, near, q.device)
            attended = attend(
                q[part].transpose(0, 1)[None], seen, values, mask, scale=scale, softcap=softcap,
                sinks=None if sinks is None else sinks[:, None],
            )  # fmt: skip
            out[part] = attended[0].transpose(0, 1)
        begin, first = end, last
    return out


def _mask_around(
    start: int, count: int, keys: int, window: int, near: Tensor | None, device: torch.device
) -> Tensor | None:
    """What is added to the scores of queries [start, start + count) of a row of so many keys."""
    if near is None and not window:
        return None
    gap = torch.arange(keys, device=device)[None] - torch.arange(start, start + count, device=device)[:, None]
    if near is None:
        mask = torch.zeros(gap.shape, device=device)
    elif near.dim() == 1:
        mask = gap.abs() * -near.float()[:, None, None]
    else:
        reach = near.shape[1] // 2
        mask = near.float()[:, gap.clamp(-reach, reach) + reach]
    return mask.masked_fill(gap.abs() >= window, float("-inf")) if window else mask


@op
def packed_attention(
    q: Tensor,  # [T, H, D], as k and v: texts one after another
    k: Tensor,
    v: Tensor,
    ends: Tensor,  # [N + 1] int32, from 0 to T
    longest: int,
    scale: float,
) -> Tensor:  # [T, H, D]
    """Every query of a text over every key of that text; where texts end is known to the device."""
    lens = (ends[1:] - ends[:-1]).tolist()
    return ragged_attention.reference(q, k, v, lens, lens, scale=scale)


@packed_attention.form("cuda")
def packed_attention_cuda(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    """torch's flash attention, which takes 16 bits and heads of at most 256."""
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return packed_attention.reference(q, k, v, ends, longest, scale)
    flash = torch.ops.aten._flash_attention_forward
    out: Tensor = flash(q, k, v, ends, ends, longest, longest, 0.0, False, False, scale=scale)[0]
    return out
