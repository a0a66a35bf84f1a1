"""Layers with a recurrent state on CUDA: short convolution, one step of every scan, the gated norm after them.

A step reads its state once and writes it once, in float32 registers in between; in a captured graph the blocks come
from `state_places`, padding has no block and writes nothing. The sequential form loops over a row's tokens with the
arithmetic of a step: slow for prefill, but a token's result never depends on how its prompt was chunked.
Chunked forms for prompts are in ssm_chunk.py.

Floor of a decode: states read and written once. 256 rows of a layer of 32 heads x 128 x 128 float32: 1.07 GB, 0.25 ms
at 4.3 TB/s; everything else of the step (inputs, convolution window) is under 2% of that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.copy import upload
from quire.ops.ssm import StateWork

MOST_TAPS = 8  # inputs a convolution sees
_WIDEST = 16384  # entries of a norm's group


class ScanLists(NamedTuple):
    """Pieces and rows of a step, for kernels that loop over rows. A row is one or more consecutive pieces."""

    rows: Tensor  # [M, 2] int32: first piece, end
    pieces: Tensor  # [N, 6] int32: first token, end, load, store, first chunk, first token of its row
    chunks: Tensor  # [n, 4] int32: first token, end, first token and load of its row
    num_rows: int
    num_chunks: int


def lists_of(work: StateWork, chunk: int) -> ScanLists:
    """Made once per step and chunk length, by the first layer that needs it."""
    key = f"lists {chunk}"
    if key not in work.made:
        begin, end, is_continued = work.spans.astype(np.int64).T
        counts = -(-(end - begin) // chunk)
        firsts = np.flatnonzero(is_continued == 0)
        row_of = np.cumsum(is_continued == 0) - 1
        piece_of = np.repeat(np.arange(len(begin)), counts)
        at = begin[piece_of] + (np.arange(len(piece_of)) - np.repeat(np.cumsum(counts) - counts, counts)) * chunk
        rows = np.stack((firsts, np.append(firsts[1:], len(begin))), 1)
        extra = np.stack((np.cumsum(counts) - counts, begin[firsts[row_of]]), 1)
        chunks = np.stack((at, np.minimum(at + chunk, end[piece_of]), extra[piece_of, 1], firsts[row_of[piece_of]]), 1)
        flat = np.concatenate([part.astype(np.int32).ravel() for part in (rows, extra, chunks)])
        sent = upload(flat, work.pieces.device)
        sent_rows, more, cuts = sent.split([rows.size, extra.size, chunks.size])
        pieces = torch.cat((work.pieces, more.view(-1, 2)), 1)
        cuts = cuts.view(-1, 4)
        loads = work.pieces[cuts[:, 3].long(), 2:3]
        cuts = torch.cat((cuts[:, :3], loads), 1)
        work.made[key] = ScanLists(sent_rows.view(-1, 2).contiguous(), pieces, cuts, len(rows), len(chunks))
    return work.made[key]


def step_lists(work: StateWork) -> ScanLists:
    """The same for rows of one token, for modes in which they must match longer rows bit for bit."""
    key = "steps"
    if key not in work.made:
        count, device = len(work.load), work.load.device
        number = torch.arange(count + 1, device=device)
        tokens = number[:-1] if work.tokens is None else work.tokens
        nothing = torch.zeros_like(tokens)
        rows = torch.stack((number[:-1], number[1:]), 1).int()
        pieces = torch.stack((tokens, tokens + 1, work.load, work.store, nothing, tokens), 1).int()
        chunks = torch.stack((tokens, tokens + 1, tokens, work.load), 1).int()
        work.made[key] = ScanLists(rows, pieces, chunks, count, count)
    return work.made[key]


def walks_of(work: StateWork, fixed: bool) -> list[ScanLists]:
    """Rows to process sequentially: the longer ones, and in fixed mode all."""
    lists = [step_lists(work)] if fixed and len(work.load) else []
    return [*lists, lists_of(work, 64)] if len(work.spans) else lists


@triton.jit
def _places_kernel(tables, rows, contexts, load, store, width, size, HAS_ROWS: tl.constexpr):
    entry = tl.program_id(0)
    context = tl.load(contexts + entry)
    row = entry.to(tl.int64)
    if HAS_ROWS:
        row = tl.load(rows + entry).to(tl.int64)
    table = tables + row * width
    before, last = tl.maximum(context - 2, 0) // size, tl.maximum(context - 1, 0) // size
    block = tl.load(table + before, mask=context > 1, other=-1)
    written = tl.load(table + last, mask=context > 0, other=-1)
    tl.store(load + entry, block.to(tl.int64))
    tl.store(store + entry, written.to(tl.int64))


def state_places(tables: Tensor, rows: Tensor | None, contexts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    load = torch.empty(len(contexts), dtype=torch.int64, device=contexts.device)
    store = torch.empty_like(load)
    if len(contexts):
        _places_kernel[(len(contexts),)](
            tables, rows, contexts, load, store, tables.stride(0), size, HAS_ROWS=rows is not None, num_warps=1
        )
    return load, store


# --- convolution -----------------------------------------------------------------------------------------------------


@triton.jit
def _activate(x, SILU: tl.constexpr):
    return x * tl.sigmoid(x) if SILU else x


@triton.jit
def _conv_step_kernel(
    x, weight, bias, states, out, tokens, load, store, x_stride, out_stride, block_stride, channels,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    token = entry if ALL else tl.load(tokens + entry)
    source, target = tl.load(load + entry), tl.load(store + entry)
    source_at = states + tl.maximum(source, 0) * block_stride + channel * (TAPS - 1)
    target_at = states + tl.maximum(target, 0) * block_stride + channel * (TAPS - 1)
    there, writes = inside & (source >= 0), inside & (target >= 0)
    last = tl.load(x + token * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    total = last * tl.load(weight + channel * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        value = tl.load(source_at + tap, mask=there, other=0.0).to(tl.float32)
        total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        if tap > 0:  # one thread per channel: it has read this entry's successor before overwriting it
            tl.store(target_at + tap - 1, value.to(states.dtype.element_ty), mask=writes)
    tl.store(target_at + TAPS - 2, last.to(states.dtype.element_ty), mask=writes)
    rounded = total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * out_stride + channel, _activate(rounded, SILU).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _input_at(x, states, place, row, load, channel, x_stride, block_stride, mask, TAPS: tl.constexpr):
    """The input at token `place` of a row that starts at token `row`: of this step, or of the previous state."""
    now = tl.load(x + place.to(tl.int64) * x_stride + channel, mask=mask & (place >= row), other=0.0).to(tl.float32)
    before = states + tl.maximum(load, 0).to(tl.int64) * block_stride + channel * (TAPS - 1) + (place - row + TAPS - 1)
    old = tl.load(before, mask=mask & (place < row) & (load >= 0), other=0.0).to(tl.float32)
    return now + old


@triton.jit
def _conv_chunk_kernel(
    x, weight, bias, states, out, chunks, x_stride, out_stride, block_stride, channels,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    item = chunks + tl.program_id(0) * 4
    begin, end, row, load = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = channel < channels
    for at in range(begin, end, TILE):
        token = at + tl.arange(0, TILE)[:, None]
        live = (token < end) & inside
        total = tl.zeros((TILE, BLOCK), tl.float32)
        if BIAS:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        for tap in tl.static_range(TAPS):
            first = token - (TAPS - 1) + tap
            value = _input_at(x, states, first, row, load, channel, x_stride, block_stride, live, TAPS)
            total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        rounded = total.to(out.dtype.element_ty).to(tl.float32)
        out_at = out + token.to(tl.int64) * out_stride + channel
        tl.store(out_at, _activate(rounded, SILU).to(out.dtype.element_ty), mask=live)


@triton.jit
def _conv_keep_kernel(
    x, states, rows, pieces, x_stride, block_stride, channels, TAPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the last inputs of every piece to its block; a row's last piece first, since its first may overwrite the
    state that all of them read."""
    item = rows + tl.program_id(0) * 2
    first, last = tl.load(item), tl.load(item + 1)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    load, row = tl.load(pieces + first * 6 + 2), tl.load(pieces + first * 6 + 5)
    for back in range(0, last - first):
        piece = pieces + (last - 1 - back) * 6
        end, store = tl.load(piece + 1), tl.load(piece + 3)
        target_at = states + tl.maximum(store, 0).to(tl.int64) * block_stride + channel * (TAPS - 1)
        for tap in tl.static_range(TAPS - 1):  # ascending: an entry overwrites one that was read before
            token = end - (TAPS - 1) + tap
            value = _input_at(x, states, token, row, load, channel, x_stride, block_stride, inside, TAPS)
            tl.store(target_at + tap, value.to(states.dtype.element_ty), mask=inside & (store >= 0))


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, work: StateWork, act: str, *, fixed: bool = False
) -> Tensor:
    channels, taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    silu = act in ("silu", "swish")
    common: dict[str, Any] = dict(TAPS=taps, BIAS=bias is not None, SILU=silu)
    if len(work.load) and not fixed:
        block = min(256, triton.next_power_of_2(channels))
        _conv_step_kernel[(len(work.load), triton.cdiv(channels, block))](
            x, weight, bias, states, out, work.tokens, work.load, work.store, x.stride(0), out.stride(0),
            states.stride(0), channels, BLOCK=block, ALL=work.tokens is None, num_warps=2, **common,
        )  # fmt: skip
    for lists in walks_of(work, fixed):
        block = min(128, triton.next_power_of_2(channels))
        _conv_chunk_kernel[(lists.num_chunks, triton.cdiv(channels, block))](
            x, weight, bias, states, out, lists.chunks, x.stride(0), out.stride(0), states.stride(0), channels,
            BLOCK=block, TILE=8, num_warps=4, **common,
        )  # fmt: skip
        _conv_keep_kernel[(lists.num_rows, triton.cdiv(channels, block))](
            x, states, lists.rows, lists.pieces, x.stride(0), states.stride(0), channels,
            TAPS=taps, BLOCK=block, num_warps=2,
        )  # fmt: skip
    return out


def conv_fits(x: Tensor, weight: Tensor, act: str) -> bool:
    return x.stride(1) == 1 and 2 <= weight.shape[1] <= MOST_TAPS and act in ("", "silu", "swish")


# --- steps -----------------------------------------------------------------------------------------------------------


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _walk(item, tokens, load, store, rows, pieces, STEP: tl.constexpr, ALL: tl.constexpr):
    """(first piece, end, load) of a program's row; a step is one piece whose number is its entry.

    With an else, because Triton also compiles the code after a return in a branch.
    """
    if STEP:
        return item, item + 1, tl.load(load + item).to(tl.int64)
    else:
        first, last = tl.load(rows + item * 2), tl.load(rows + item * 2 + 1)
        return first, last, tl.load(pieces + first * 6 + 2).to(tl.int64)


@triton.jit
def _span(piece, tokens, store, pieces, STEP: tl.constexpr, ALL: tl.constexpr):
    """(first token, end, store) of a piece."""
    if STEP:
        token = piece if ALL else tl.load(tokens + piece).to(tl.int32)
        return token, token + 1, tl.load(store + piece).to(tl.int64)
    else:
        begin, end = tl.load(pieces + piece * 6), tl.load(pieces + piece * 6 + 1)
        return begin, end, tl.load(pieces + piece * 6 + 3).to(tl.int64)


@triton.jit
def _ssd_kernel(
    x, dt, b, c, a_log, d, dt_bias, states, out, tokens, load, store, rows, pieces,
    x_stride, dt_stride, b_stride, c_stride, block_stride, low, high,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    D: tl.constexpr, STEP: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """D: the skip connection's weights, 0 none, 1 one per head, 2 one per entry."""
    head, item = tl.program_id(1), tl.program_id(0)
    p, n = tl.program_id(2) * BP + tl.arange(0, BP), tl.arange(0, BN)
    in_p, in_n = p < P, n < N
    place = head * P * N + p[:, None] * N + n[None, :]
    both = in_p[:, None] & in_n[None, :]
    first, last, source = _walk(item, tokens, load, store, rows, pieces, STEP, ALL)
    old = tl.load(states + tl.maximum(source, 0) * block_stride + place, mask=both & (source >= 0), other=0.0)
    state = old.to(tl.float32)
    rate, shift = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    group = head // (H // G)
    skip = tl.zeros((BP,), tl.float32)
    if D == 1:
        skip += tl.load(d + head).to(tl.float32)
    if D == 2:
        skip = tl.load(d + head * P + p, mask=in_p, other=0.0).to(tl.float32)
    for piece in range(first, last):
        begin, end, target = _span(piece, tokens, store, pieces, STEP, ALL)
        for at in range(begin, end):
            token = at + tl.full((), 0, tl.int64)
            step = tl.load(dt + token * dt_stride + head).to(tl.float32) + shift
            step = tl.minimum(tl.maximum(_softplus(step), low), high)
            xs = tl.load(x + token * x_stride + head * P + p, mask=in_p, other=0.0).to(tl.float32)
            bs = tl.load(b + token * b_stride + group * N + n, mask=in_n, other=0.0).to(tl.float32)
            cs = tl.load(c + token * c_stride + group * N + n, mask=in_n, other=0.0).to(tl.float32)
            state = state * tl.exp(step * rate) + (xs * step)[:, None] * bs[None, :]
            y = tl.sum(state * cs[None, :], 1) + xs * skip
            tl.store(out + (token * H + head) * P + p, y.to(out.dtype.element_ty), mask=in_p)
        target_at = states + tl.maximum(target, 0) * block_stride + place
        tl.store(target_at, state.to(states.dtype.element_ty), mask=both & (target >= 0))


def ssd_steps(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor | None, dt_bias: Tensor,
    dt_limit: tuple[float, float], states: Tensor, work: StateWork, out: Tensor, *, walk: bool,
) -> None:  # fmt: skip
    """Rows that compute one token; with `walk` all rows, token by token."""
    _, heads, size = x.shape
    groups, entries = b.shape[1:]
    pad = triton.next_power_of_2(entries)
    tile = min(triton.next_power_of_2(size), max(4, 4096 // pad))
    for num, lists in _launches(work, walk):
        _ssd_kernel[(num, heads, triton.cdiv(size, tile))](
            x, dt, b, c, a_log, d, dt_bias, states, out, work.tokens, work.load, work.store, lists and lists.rows,
            lists and lists.pieces, x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0), *dt_limit,
            H=heads, G=groups, P=size, N=entries, BP=tile, BN=pad,
            D=0 if d is None else d.ndim, STEP=lists is None, ALL=work.tokens is None, num_warps=4,
        )  # fmt: skip


def _launches(work: StateWork, walk: bool) -> list[tuple[int, ScanLists | None]]:
    """(programs, lists): steps without lists, or everything sequentially."""
    if walk:
        return [(lists.num_rows, lists) for lists in walks_of(work, True)]
    return [(len(work.load), None)] if len(work.load) else []


@triton.jit
def _delta_kernel(
    q, k, v, a, b, a_log, dt_bias, states, out, tokens, load, store, rows, pieces,
    q_stride, k_stride, v_stride, a_stride, b_stride, block_stride, scale, beta_scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STEP: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    head, item = tl.program_id(1), tl.program_id(0)
    i, j = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV)
    in_k, in_v = i < K, j < V
    place = head * K * V + i[:, None] * V + j[None, :]
    both = in_k[:, None] & in_v[None, :]
    first, last, source = _walk(item, tokens, load, store, rows, pieces, STEP, ALL)
    old = tl.load(states + tl.maximum(source, 0) * block_stride + place, mask=both & (source >= 0), other=0.0)
    state = old.to(tl.float32)
    rate, shift = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    shared = head // (HV // HK)
    for piece in range(first, last):
        begin, end, target = _span(piece, tokens, store, pieces, STEP, ALL)
        for at in range(begin, end):
            token = at + tl.full((), 0, tl.int64)
            qs = tl.load(q + token * q_stride + shared * K + i, mask=in_k, other=0.0).to(tl.float32)
            ks = tl.load(k + token * k_stride + shared * K + i, mask=in_k, other=0.0).to(tl.float32)
            vs = tl.load(v + token * v_stride + head * V + j, mask=in_v, other=0.0).to(tl.float32)
            qs = qs * (scale * tl.rsqrt(tl.sum(qs * qs, 0) + 1e-6))
            ks = ks * tl.rsqrt(tl.sum(ks * ks, 0) + 1e-6)
            decay = tl.exp(rate * _softplus(tl.load(a + token * a_stride + head).to(tl.float32) + shift))
            beta = beta_scale * tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
            state = state * decay
            change = (vs - tl.sum(state * ks[:, None], 0)) * beta
            state += ks[:, None] * change[None, :]
            y = tl.sum(state * qs[:, None], 0)
            tl.store(out + (token * HV + head) * V + j, y.to(out.dtype.element_ty), mask=in_v)
        target_at = states + tl.maximum(target, 0) * block_stride + place
        tl.store(target_at, state.to(states.dtype.element_ty), mask=both & (target >= 0))


def delta_steps(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, beta_scale: float,
    states: Tensor, work: StateWork, out: Tensor, *, walk: bool,
) -> None:  # fmt: skip
    _, key_heads, keys = q.shape
    _, heads, values = v.shape
    pad = triton.next_power_of_2(keys)
    tile = min(triton.next_power_of_2(values), max(4, 4096 // pad))
    for num, lists in _launches(work, walk):
        _delta_kernel[(num, heads, triton.cdiv(values, tile))](
            q, k, v, a, b, a_log, dt_bias, states, out, work.tokens, work.load, work.store, lists and lists.rows,
            lists and lists.pieces, q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0),
            keys**-0.5, beta_scale, HK=key_heads, HV=heads, K=keys, V=values, BK=pad, BV=tile,
            STEP=lists is None, ALL=work.tokens is None, num_warps=4,
        )  # fmt: skip


@triton.jit
def _selective_kernel(
    x, dt, b, c, a_log, d, dt_bias, states, out, tokens, load, store, rows, pieces,
    x_stride, dt_stride, b_stride, c_stride, block_stride, channels,
    N: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, STEP: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    i, n = tl.program_id(1) * BC + tl.arange(0, BC), tl.arange(0, BN)
    inside, in_n = i < channels, n < N
    place = i[:, None] * N + n[None, :]
    both = inside[:, None] & in_n[None, :]
    first, last, source = _walk(item, tokens, load, store, rows, pieces, STEP, ALL)
    old = tl.load(states + tl.maximum(source, 0) * block_stride + place, mask=both & (source >= 0), other=0.0)
    state = old.to(tl.float32)
    rate = -tl.exp(tl.load(a_log + place, mask=both, other=0.0).to(tl.float32))
    skip = tl.load(d + i, mask=inside, other=0.0).to(tl.float32)
    shift = tl.zeros((BC,), tl.float32)
    if HAS_BIAS:
        shift = tl.load(dt_bias + i, mask=inside, other=0.0).to(tl.float32)
    for piece in range(first, last):
        begin, end, target = _span(piece, tokens, store, pieces, STEP, ALL)
        for at in range(begin, end):
            token = at + tl.full((), 0, tl.int64)
            step = _softplus(tl.load(dt + token * dt_stride + i, mask=inside, other=0.0).to(tl.float32) + shift)
            xs = tl.load(x + token * x_stride + i, mask=inside, other=0.0).to(tl.float32)
            bs = tl.load(b + token * b_stride + n, mask=in_n, other=0.0).to(tl.float32)
            cs = tl.load(c + token * c_stride + n, mask=in_n, other=0.0).to(tl.float32)
            state = state * tl.exp(step[:, None] * rate) + (xs * step)[:, None] * bs[None, :]
            y = tl.sum(state * cs[None, :], 1) + xs * skip
            tl.store(out + token * channels + i, y.to(out.dtype.element_ty), mask=inside)
        target_at = states + tl.maximum(target, 0) * block_stride + place
        tl.store(target_at, state.to(states.dtype.element_ty), mask=both & (target >= 0))


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor | None, states: Tensor,
    work: StateWork, *, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """Every state entry has a separate decay, so there is no matmul form: rows are processed sequentially."""
    channels, entries = a_log.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pad = triton.next_power_of_2(entries)
    longer = [] if fixed or not len(work.spans) else [(lists_of(work, 64).num_rows, lists_of(work, 64))]
    for num, lists in (*_launches(work, fixed), *longer):
        tile = min(triton.next_power_of_2(channels), max(8, (2048 if lists is None else 512) // pad))
        _selective_kernel[(num, triton.cdiv(channels, tile))](
            x, dt, b, c, a_log, d, dt_bias, states, out, work.tokens, work.load, work.store, lists and lists.rows,
            lists and lists.pieces, x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0), channels,
            N=entries, BC=tile, BN=pad, HAS_BIAS=dt_bias is not None, STEP=lists is None, ALL=work.tokens is None,
            num_warps=4 if lists is None else 1,
        )  # fmt: skip
    return out


# --- norm ------------------------------------------------------------------------------------------------------------


@triton.jit
def _norm_kernel(
    x, gate, weight, out, x_stride, gate_stride, weight_stride, eps, width,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    inside = i < GROUP
    at = part * GROUP + i
    kind = out.dtype.element_ty
    h = tl.load(x + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    opened = opened * tl.sigmoid(opened)
    if not FIRST:
        h = h * opened
    h = (h * tl.rsqrt(tl.sum(h * h, 0) / GROUP + eps)).to(kind).to(tl.float32)
    w = tl.load(weight + part * weight_stride + i, mask=inside, other=0.0).to(tl.float32)
    h = (h * w).to(kind).to(tl.float32)
    if FIRST:
        h = h * opened
    tl.store(out + token * width + at, h.to(kind), mask=inside)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group: int, norm_first: bool) -> Tensor:
    tokens, width = x.shape
    out = torch.empty((tokens, width), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(group)
    if tokens:
        _norm_kernel[(tokens, width // group)](
            x, gate, weight, out, x.stride(0), gate.stride(0), 0 if weight.numel() == group else group, eps, width,
            GROUP=group, BLOCK=block, FIRST=norm_first, num_warps=max(1, min(16, block // 512)),
        )  # fmt: skip
    return out


def norm_fits(x: Tensor, gate: Tensor, group: int) -> bool:
    return group <= _WIDEST and x.ndim == 2 and x.stride(1) == 1 and gate.stride(1) == 1
