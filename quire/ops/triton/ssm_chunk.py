"""Scans over prompts on CUDA, as chunked matmuls: Mamba 2 and the gated delta rule.

One program processes one row for one head and some columns of its state, chunk by chunk, with the state in registers:
it is read once, written once per piece, and never goes through memory in between. What does not depend on the state
(the inverse of the delta rule's triangular system) is computed for all chunks at once by a kernel before it.
Matmuls are float32 (exact) for float32 models, TF32 for narrower ones; sums and states are float32.

Floor: 8192 tokens of 32 value heads x 128 x 128 (bf16): 5 matmuls a chunk and head, 8.6e10 operations, 0.2 ms at half
of the TF32 rate; inputs and outputs 0.4 GB, 0.1 ms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.ssm import StateWork
from quire.ops.triton.ssm import _softplus, delta_steps, lists_of, ssd_steps

CHUNK = 64
MOST_ENTRIES, MOST_KEYS = (
    256,
    128,
)  # of a state whose chunks fit into shared memory; larger ones are processed sequentially


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


# --- Mamba 2 ---------------------------------------------------------------------------------------------------------


@triton.jit
def _ssd_rows_kernel(
    x, dt, b, c, a_log, d, dt_bias, states, out, rows, pieces,
    x_stride, dt_stride, b_stride, c_stride, block_stride, low, high,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    L: tl.constexpr, D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    p, n, i = tl.program_id(2) * BP + tl.arange(0, BP), tl.arange(0, BN), tl.arange(0, L)
    in_p, in_n = p < P, n < N
    place = head * P * N + n[:, None] + p[None, :] * N  # the state as [N, P]
    both = in_n[:, None] & in_p[None, :]
    first, last = tl.load(rows + item * 2), tl.load(rows + item * 2 + 1)
    source = tl.load(pieces + first * 6 + 2).to(tl.int64)
    old = tl.load(states + tl.maximum(source, 0) * block_stride + place, mask=both & (source >= 0), other=0.0)
    state = old.to(tl.float32)
    rate, shift = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    skip = tl.zeros((BP,), tl.float32)
    if D == 1:
        skip += tl.load(d + head).to(tl.float32)
    if D == 2:
        skip = tl.load(d + head * P + p, mask=in_p, other=0.0).to(tl.float32)
    group = head // (H // G)
    for piece in range(first, last):
        item_at = pieces + piece * 6
        begin, end, target = tl.load(item_at), tl.load(item_at + 1), tl.load(item_at + 3).to(tl.int64)
        for at in range(begin, end, L):
            token, live = (at + i).to(tl.int64), at + i < end
            step = tl.load(dt + token * dt_stride + head, mask=live, other=0.0).to(tl.float32) + shift
            step = tl.where(live, tl.minimum(tl.maximum(_softplus(step), low), high), 0.0)
            total = tl.cumsum(step * rate, 0)  # constant past the end
            final = tl.sum(step * rate, 0)
            xs = tl.load(x + token[:, None] * x_stride + head * P + p[None, :], mask=live[:, None] & in_p, other=0.0)
            xs = xs.to(tl.float32)
            there = live[:, None] & in_n
            bs = tl.load(b + token[:, None] * b_stride + group * N + n[None, :], mask=there, other=0.0).to(tl.float32)
            cs = tl.load(c + token[:, None] * c_stride + group * N + n[None, :], mask=there, other=0.0).to(tl.float32)
            pairs = tl.where(i[:, None] >= i[None, :], tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
            scores = tl.dot(cs, tl.trans(bs), input_precision=EXACT) * pairs
            inputs = xs * step[:, None]
            y = tl.dot(scores, inputs, input_precision=EXACT)
            y += tl.dot(cs * tl.exp(total)[:, None], state, input_precision=EXACT) + xs * skip[None, :]
            rest = bs * tl.exp(final - total)[:, None]
            state = state * tl.exp(final) + tl.dot(tl.trans(rest), inputs, input_precision=EXACT)
            out_at = out + (token[:, None] * H + head) * P + p[None, :]
            tl.store(out_at, y.to(out.dtype.element_ty), mask=live[:, None] & in_p)
        target_at = states + tl.maximum(target, 0) * block_stride + place
        tl.store(target_at, state.to(states.dtype.element_ty), mask=both & (target >= 0))


def ssd_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor | None, dt_bias: Tensor,
    dt_limit: tuple[float, float], states: Tensor, work: StateWork, *, fixed: bool = False,
) -> Tensor:  # fmt: skip
    """fixed: token by token, so a token's result does not depend on where chunks start."""
    tokens, heads, size = x.shape
    groups, entries = b.shape[1:]
    fixed = fixed or entries > MOST_ENTRIES
    out = torch.empty((tokens, heads, size), dtype=x.dtype, device=x.device)
    ssd_steps(x, dt, b, c, a_log, d, dt_bias, dt_limit, states, work, out, walk=fixed)
    if len(work.spans) and not fixed:
        lists = lists_of(work, CHUNK)
        pad = max(16, triton.next_power_of_2(entries))
        tile = max(16, min(64 if pad <= 128 else 32, triton.next_power_of_2(size)))
        _ssd_rows_kernel[(lists.num_rows, heads, triton.cdiv(size, tile))](
            x, dt, b, c, a_log, d, dt_bias, states, out, lists.rows, lists.pieces,
            x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0), *dt_limit,
            H=heads, G=groups, P=size, N=entries, BP=tile, BN=pad, L=CHUNK, D=0 if d is None else d.ndim,
            EXACT=_precision(x.dtype), num_warps=8, num_stages=1,
        )  # fmt: skip
    return out


# --- gated delta rule ------------------------------------------------------------------------------------------------


@triton.jit
def _gates(a, b, token, live, head, a_stride, b_stride, rate, shift, beta_scale):
    """(log decay, beta) of some tokens; 0 if there is none."""
    raw = tl.load(a + token * a_stride + head, mask=live, other=0.0).to(tl.float32) + shift
    opened = tl.sigmoid(tl.load(b + token * b_stride + head, mask=live, other=0.0).to(tl.float32))
    return tl.where(live, rate * _softplus(raw), 0.0), tl.where(live, beta_scale * opened, 0.0)


@triton.jit
def _unit_rows(base, token, live, stride, column, inside):
    """[n, K] float32 rows, normalized to unit length."""
    x = tl.load(base + token[:, None] * stride + column[None, :], mask=live[:, None] & inside[None, :], other=0.0)
    x = x.to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]


@triton.jit
def _invert(system, PART: tl.constexpr):
    """(1 + system)^-1 of a strictly lower triangular block, row by row."""
    i, j = tl.arange(0, PART)[:, None], tl.arange(0, PART)[None, :]
    system = tl.where(i > j, system, 0.0)
    inverse = tl.where(i == j, 1.0, 0.0)
    for row in range(1, PART):
        system_row = tl.sum(tl.where(i == row, system, 0.0), 0)  # [PART]: the row, zero from the diagonal on
        new = -tl.sum(system_row[:, None] * inverse, 0)
        inverse = tl.where((i == row) & (j < row), new[None, :], inverse)
    return inverse


@triton.jit
def _mul(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _delta_system_kernel(
    k, a, b, a_log, dt_bias, inverse, chunks, k_stride, a_stride, b_stride, beta_scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The triangular system of one chunk and head: beta_i (k_i k_j) e^(total_i - total_j) where j < i. [L, L]."""
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunks + chunk * 4), tl.load(chunks + chunk * 4 + 1)
    column, i = tl.arange(0, BK), tl.arange(0, L)
    token, live = (begin + i).to(tl.int64), begin + i < end
    rate, shift = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    keys = _unit_rows(k + (head // (HV // HK)) * K, token, live, k_stride, column, column < K)
    decay, beta = _gates(a, b, token, live, head, a_stride, b_stride, rate, shift, beta_scale)
    total = tl.cumsum(decay, 0)
    pairs = tl.where(i[:, None] > i[None, :], tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
    system = tl.dot(keys, tl.trans(keys), input_precision=EXACT) * pairs * beta[:, None]
    spot = inverse + (chunk * HV + head).to(tl.int64) * L * L
    tl.store(spot + i[:, None] * L + i[None, :], system)


@triton.jit
def _solve_kernel(inverse, HV: tl.constexpr, PART: tl.constexpr):
    """(1 + system)^-1 over the system, in 4 x 4 parts: the parts of the diagonal row by row, the others by matmuls."""
    width: tl.constexpr = 4 * PART
    step: tl.constexpr = PART * width
    i = tl.arange(0, PART)
    at = (tl.program_id(0) * HV + tl.program_id(1)).to(tl.int64) * width * width
    spot = inverse + at + i[:, None] * width + i[None, :]
    i00, i11 = _invert(tl.load(spot), PART), _invert(tl.load(spot + step + PART), PART)
    i22 = _invert(tl.load(spot + 2 * step + 2 * PART), PART)
    i33 = _invert(tl.load(spot + 3 * step + 3 * PART), PART)
    a10, a20, a21 = tl.load(spot + step), tl.load(spot + 2 * step), tl.load(spot + 2 * step + PART)
    a30, a31, a32 = tl.load(spot + 3 * step), tl.load(spot + 3 * step + PART), tl.load(spot + 3 * step + 2 * PART)
    i10 = -_mul(i11, _mul(a10, i00))
    i21 = -_mul(i22, _mul(a21, i11))
    i20 = -_mul(i22, _mul(a20, i00) + _mul(a21, i10))
    i32 = -_mul(i33, _mul(a32, i22))
    i31 = -_mul(i33, _mul(a31, i11) + _mul(a32, i21))
    i30 = -_mul(i33, _mul(a30, i00) + _mul(a31, i10) + _mul(a32, i20))
    tl.debug_barrier()  # values overwritten below were read above, possibly by other threads
    tl.store(spot, i00)
    tl.store(spot + step, i10)
    tl.store(spot + step + PART, i11)
    tl.store(spot + 2 * step, i20)
    tl.store(spot + 2 * step + PART, i21)
    tl.store(spot + 2 * step + 2 * PART, i22)
    tl.store(spot + 3 * step, i30)
    tl.store(spot + 3 * step + PART, i31)
    tl.store(spot + 3 * step + 2 * PART, i32)
    tl.store(spot + 3 * step + 3 * PART, i33)


@triton.jit
def _delta_rows_kernel(
    q, k, v, a, b, a_log, dt_bias, inverse, states, out, rows, pieces,
    q_stride, k_stride, v_stride, a_stride, b_stride, block_stride, scale, beta_scale,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    item, head = tl.program_id(0), tl.program_id(1)
    column, j, i = tl.arange(0, BK), tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, L)
    in_k, in_v = column < K, j < V
    place = head * K * V + column[:, None] * V + j[None, :]
    both = in_k[:, None] & in_v[None, :]
    first, last = tl.load(rows + item * 2), tl.load(rows + item * 2 + 1)
    source = tl.load(pieces + first * 6 + 2).to(tl.int64)
    old = tl.load(states + tl.maximum(source, 0) * block_stride + place, mask=both & (source >= 0), other=0.0)
    state = old.to(tl.float32)
    rate, shift = -tl.exp(tl.load(a_log + head).to(tl.float32)), tl.load(dt_bias + head).to(tl.float32)
    shared = (head // (HV // HK)) * K
    for piece in range(first, last):
        item_at = pieces + piece * 6
        begin, end, target = tl.load(item_at), tl.load(item_at + 1), tl.load(item_at + 3).to(tl.int64)
        chunk = tl.load(item_at + 4)
        for at in range(begin, end, L):
            token, live = (at + i).to(tl.int64), at + i < end
            qs = _unit_rows(q + shared, token, live, q_stride, column, in_k) * scale
            ks = _unit_rows(k + shared, token, live, k_stride, column, in_k)
            there = live[:, None] & in_v[None, :]
            vs = tl.load(v + token[:, None] * v_stride + head * V + j[None, :], mask=there, other=0.0).to(tl.float32)
            decay, beta = _gates(a, b, token, live, head, a_stride, b_stride, rate, shift, beta_scale)
            total, final = tl.cumsum(decay, 0), tl.sum(decay, 0)
            grown = tl.exp(total)[:, None]
            solved = inverse + ((chunk + (at - begin) // L) * HV + head).to(tl.int64) * L * L
            system = tl.load(solved + i[:, None] * L + i[None, :])
            known = (vs - tl.dot(ks * grown, state, input_precision=EXACT)) * beta[:, None]
            change = tl.dot(system, known, input_precision=EXACT)
            pairs = tl.where(i[:, None] >= i[None, :], tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
            scores = tl.dot(qs, tl.trans(ks), input_precision=EXACT) * pairs
            y = tl.dot(qs * grown, state, input_precision=EXACT) + tl.dot(scores, change, input_precision=EXACT)
            rest = ks * tl.exp(final - total)[:, None]
            state = state * tl.exp(final) + tl.dot(tl.trans(rest), change, input_precision=EXACT)
            tl.store(out + (token[:, None] * HV + head) * V + j[None, :], y.to(out.dtype.element_ty), mask=there)
        target_at = states + tl.maximum(target, 0) * block_stride + place
        tl.store(target_at, state.to(states.dtype.element_ty), mask=both & (target >= 0))


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, beta_scale: float,
    states: Tensor, work: StateWork, *, fixed: bool = False,
) -> Tensor:  # fmt: skip
    (_, key_heads, keys), (tokens, heads, values) = q.shape, v.shape
    fixed = fixed or keys > MOST_KEYS
    out = torch.empty((tokens, heads, values), dtype=v.dtype, device=v.device)
    delta_steps(q, k, v, a, b, a_log, dt_bias, beta_scale, states, work, out, walk=fixed)
    if len(work.spans) and not fixed:
        lists = lists_of(work, CHUNK)
        inverse = torch.empty((lists.num_chunks, heads, CHUNK, CHUNK), dtype=torch.float32, device=v.device)
        pad = max(16, triton.next_power_of_2(keys))
        _delta_system_kernel[(lists.num_chunks, heads)](
            k, a, b, a_log, dt_bias, inverse, lists.chunks, k.stride(0), a.stride(0), b.stride(0), beta_scale,
            HK=key_heads, HV=heads, K=keys, BK=pad, L=CHUNK, EXACT=_precision(v.dtype), num_warps=4, num_stages=1,
        )  # fmt: skip
        _solve_kernel[(lists.num_chunks, heads)](inverse, HV=heads, PART=CHUNK // 4, num_warps=4)
        tile = max(16, min(32, triton.next_power_of_2(values)))
        _delta_rows_kernel[(lists.num_rows, heads, triton.cdiv(values, tile))](
            q, k, v, a, b, a_log, dt_bias, inverse, states, out, lists.rows, lists.pieces,
            q.stride(0), k.stride(0), v.stride(0), a.stride(0), b.stride(0), states.stride(0), keys**-0.5, beta_scale,
            HK=key_heads, HV=heads, K=keys, V=values, BK=pad, BV=tile, L=CHUNK, EXACT=_precision(v.dtype),
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return out
