"""Sampling on CUDA without waiting for the host: greedy, or seeded Gumbel noise after temperature, top_k, top_p.

A filter is one threshold per row: the smallest scaled logit that is kept (all ties of the last kept token are kept). It
is found without sorting the vocabulary: the k-th largest of the maxima of short runs bounds the k-th largest logit from
below, so only a few runs have candidates; the threshold among those is found by bisection on the bits of a float. A row
whose nucleus is larger than the candidates bisects over its full vocabulary.

    logits ──_peaks_kernel──▶ maxima of runs, softmax sums ──_edge_kernel──▶ edge [n]            (only with filters)
           ──_choose_kernel─▶ best of each part of a row   ──_best_kernel──▶ token, score [n]

Floor: the logits are read once without filters, twice with: n V b bytes. 256 rows of 151,936 float32: 156 MB, 36 us at
4.3 TB/s a pass (bfloat16: 18 us); one row: two launches, about 4 us. The noise hash is some 40 integer and float
operations an element: 256 rows, about 50 us of the arithmetic units; so a drawn step is bound by those.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.triton.sizes import cdiv, next_power_of_2

_BLOCK = 1024
_PARTS = 256  # most parts a row is split into
_LEAST_TILES = 8  # of a part, from which on it pays to look for those that cannot win
_SUMS = 64  # most parts whose softmax sums are added up
_PEAKS = 4096  # most runs of a row
_NUCLEUS = 384  # runs that are searched for the nucleus of a row without top_k
_MOST = 1024  # candidates held in registers
_ANY_ADDRESS = ["row_index", "positions"]  # slices of a step's inputs: do not specialize on their alignment


@triton.jit
def _finish64(z):
    """As ops/sample.py; shifts of signed integers keep the sign, hence the masks."""
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


@triton.jit
def noise_keys(seed, position):
    """Two int32 keys of a row."""
    mixed = _finish64(_finish64(seed) + position.to(tl.int64) * -7046029254386353131)
    return mixed.to(tl.int32), (mixed >> 32).to(tl.int32)


@triton.jit
def noise_bits(low, high, ids):
    """The bits of ops/sample.py, for int32 ids."""
    x = ids * -1640531535 + low
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = x ^ high
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    x = x ^ ((x >> 16) & 0xFFFF)
    return (x >> 1) & 0x7FFFFFFF


@triton.jit
def gumbel(bits):
    """-log(-log1p(-u)). Small u decide: there log1p is a series (u / (2 - u) is exact enough), not 1 - u."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)
    s = u / (2.0 - u)
    q = s * s
    series = 1.0 / 3 + q * (0.2 + q * (1.0 / 7 + q * (1.0 / 9 + q * (1.0 / 11 + q * (1.0 / 13 + q * (1.0 / 15))))))
    small = 2.0 * s * (1.0 + q * series)
    return -tl.log(tl.where(u < 0.5, small, -tl.log(1.0 - u)))


@triton.jit
def _ordered(x):
    """A float as an int32 with the same order, and back (the same function)."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _as_float(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return (low & high) + ((low ^ high) >> 1)


@triton.jit
def _scaled(logits, column, vocab, heat):
    """Logits divided by the temperature (bitwise as in torch); -inf past the vocabulary."""
    x = tl.load(logits + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x, heat)


# --- selection


@triton.jit
def _may_win(x, bits, inverse, most):
    """Whether one of these logits may reach `most` with noise of these bits, which is at most -log(u); `least`, the
    upper bits, is at most u, and the margin is above what float32 rounds. What is no number may."""
    least = ((bits >> 8) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    x = (x * inverse - most) * 1.4426950408889634
    slack = tl.exp2(x + (0.02 + 1e-5 * tl.abs(x))) - least
    return tl.max(tl.where(slack != slack, float("inf"), slack), 0) >= 0.0


@triton.jit
def _better(x, column, top, top_at):
    """The best of each lane and where it is, the first among equals; NaN, which _best_kernel detects, is above all."""
    x = tl.where(x != x, float("inf"), x)
    return tl.maximum(x, top), tl.where(x > top, column, top_at)


@triton.jit(do_not_specialize=["parts", "tiles"], do_not_specialize_on_alignment=_ANY_ADDRESS)
def _choose_kernel(
    logits, row_index, positions, seeds, temperature, edges, best, best_at, stride, vocab, parts, tiles,
    FILTERS: tl.constexpr, SKIPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid (n, parts): the best of `tiles` tiles, with noise if the row is sampled. SKIPS: noise, which costs most of
    the time, is computed only for tiles that may hold something better than those before."""
    n, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_index + n)
    heat = tl.load(temperature + row)
    low, high = noise_keys(tl.load(seeds + row), tl.load(positions + n))
    draws = heat > 0
    heat = tl.where(draws, heat, 1.0)
    inverse = 1.0 / heat
    edge = -float("inf")
    if FILTERS:
        edge = tl.load(edges + n)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    top_at = part * tiles * BLOCK + lane
    most = tl.full((), -float("inf"), tl.float32)
    base = logits + n.to(tl.int64) * stride
    for tile in range(part * tiles, part * tiles + tiles):
        column = tile * BLOCK + lane
        x = tl.load(base + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
        if draws:
            bits = noise_bits(low, high, column)
            may_win = _may_win(x, bits, inverse, most) if SKIPS else True
            if may_win:
                x = tl.div_rn(x, heat)
                if FILTERS:
                    x = tl.where(x < edge, -float("inf"), x)
                top, top_at = _better(x + gumbel(bits), column, top, top_at)
                if SKIPS:
                    most = tl.max(top, 0)
        else:
            top, top_at = _better(x, column, top, top_at)
    most = tl.max(top, 0)
    tl.store(best + n * parts + part, most)
    tl.store(best_at + n * parts + part, tl.min(tl.where(top == most, top_at, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=[*_ANY_ADDRESS, "out", "scores"])
def _best_kernel(
    logits, row_index, positions, best, best_at, out, scores, tokens, stride, token_stride, parts,
    WRITE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """grid (n,): the best of a row's parts, the lowest id among ties. WRITE: into the row's tokens too."""
    n = tl.program_id(0)
    part = tl.arange(0, PARTS)
    value = tl.load(best + n * parts + part, mask=part < parts, other=-float("inf"))
    at = tl.load(best_at + n * parts + part, mask=part < parts, other=0x7FFFFFFF)
    most = tl.max(value, 0)
    token = tl.min(tl.where(value == most, at, 0x7FFFFFFF), 0)
    raw = tl.load(logits + n.to(tl.int64) * stride + token).to(tl.float32)
    tl.store(scores + n, tl.where(raw != raw, raw, most))
    tl.store(out + n, token.to(out.dtype.element_ty))
    if WRITE:
        row = tl.load(row_index + n).to(tl.int64)
        tl.store(tokens + row * token_stride + tl.load(positions + n), token.to(tokens.dtype.element_ty))


# --- filters


@triton.jit
def _filters(heat, k, p):
    """Whether a row filters anything."""
    return (heat > 0) & ((k > 0) | (p < 1.0))


@triton.jit(do_not_specialize=["parts", "tiles"], do_not_specialize_on_alignment=_ANY_ADDRESS[:1])
def _peaks_kernel(
    logits, row_index, temperature, top_k, top_p, peaks, part_max, part_sum, stride, vocab, parts, tiles,
    RUN: tl.constexpr, PEAKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid (n, parts): maxima of runs of RUN scaled logits; and each part's maximum and sum of exp(x - maximum). Rows
    without filters only read their parameters, so a captured step may always include this."""
    n, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_index + n)
    heat = tl.load(temperature + row)
    if not _filters(heat, tl.load(top_k + row), tl.load(top_p + row)):
        return
    base = logits + n.to(tl.int64) * stride
    lane, run = tl.arange(0, BLOCK), tl.arange(0, BLOCK // RUN)
    top = tl.full((BLOCK,), -1e30, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for tile in range(part * tiles, part * tiles + tiles):
        x = _scaled(base, tile * BLOCK + lane, vocab, heat)
        peak = tl.max(tl.reshape(x, (BLOCK // RUN, RUN)), 1)
        at = tile * (BLOCK // RUN) + run
        tl.store(peaks + n.to(tl.int64) * PEAKS + at, peak, mask=at < PEAKS)
        above = tl.maximum(x, top)
        total = total * tl.exp(top - above) + tl.exp(x - above)
        top = above
    most = tl.max(top, 0)
    tl.store(part_max + n * parts + part, most)
    tl.store(part_sum + n * parts + part, tl.sum(total * tl.exp(top - most), 0))


@triton.jit
def _bound(peak, needed, most):
    """The largest value that at least `needed` peaks reach."""
    low, high = _ordered(tl.min(peak, 0)) - 1, _ordered(most) + 1  # invariant: enough reach low; too few reach high
    while low + 1 < high:
        middle = _middle(low, high)
        enough = tl.sum((peak >= _as_float(middle)).to(tl.int32), 0) >= needed
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _measure(base, vocab, heat, edge, least, most, BLOCK: tl.constexpr):
    """Over a full row, of values of at least `least`: how many exceed `edge`, and their sum of exp(x - most)."""
    lane = tl.arange(0, BLOCK)
    count = tl.zeros((BLOCK,), tl.int32)
    mass = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _scaled(base, start + lane, vocab, heat)
        above = (x > edge) & (x >= least)
        count += above.to(tl.int32)
        mass += tl.where(above, tl.exp(x - most), 0.0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _wide_edge(base, vocab, heat, k, p, most, BLOCK: tl.constexpr):
    """The threshold by bisection over the full vocabulary: first top_k (0: none), then top_p of the rest (1: none)."""
    edge = -float("inf")
    if k > 0:
        low, high = _ordered(-3.0e38 + 0.0 * most), _ordered(most)
        while low + 1 < high:
            middle = _middle(low, high)
            count, _ = _measure(base, vocab, heat, _as_float(middle), -float("inf"), most, BLOCK)
            low, high = tl.where(count < k, low, middle), tl.where(count < k, middle, high)
        edge = _as_float(high)
    if p < 1.0:
        _, total = _measure(base, vocab, heat, -float("inf"), edge, most, BLOCK)
        low, high = _ordered(most - 128.0), _ordered(most)  # lower values have no weight in float32
        while low + 1 < high:
            middle = _middle(low, high)
            _, mass = _measure(base, vocab, heat, _as_float(middle), edge, most, BLOCK)
            low, high = tl.where(mass < p * total, low, middle), tl.where(mass < p * total, middle, high)
        edge = tl.maximum(edge, _as_float(high))
    return edge


@triton.jit
def _near_edge(c, low, k, p, total, most):
    """The same among candidates c (absent ones are -inf), all of them above the key `low`."""
    edge = -float("inf")
    weight = tl.exp(c - most)
    if k > 0:
        under, high = low, _ordered(most)
        while under + 1 < high:
            middle = _middle(under, high)
            few = tl.sum((c > _as_float(middle)).to(tl.int32), 0) < k
            under, high = tl.where(few, under, middle), tl.where(few, middle, high)
        edge = _as_float(high)
        weight = tl.where(c >= edge, weight, 0.0)
        total = tl.sum(weight, 0)
    if p < 1.0:
        under, high = low, _ordered(most)
        while under + 1 < high:
            middle = _middle(under, high)
            light = tl.sum(tl.where(c > _as_float(middle), weight, 0.0), 0) < p * total
            under, high = tl.where(light, under, middle), tl.where(light, middle, high)
        edge = tl.maximum(edge, _as_float(high))
    return edge


@triton.jit
def _collect(base, vocab, heat, peak, least, runs, out, RUN: tl.constexpr, PEAKS: tl.constexpr, MOST: tl.constexpr):
    """Write the scaled logits of at least `least` to out [MOST], in ascending order of ids; returns their number."""
    BLOCK: tl.constexpr = 1024
    index = tl.arange(0, PEAKS)
    open_ = peak >= least
    order = tl.cumsum(open_.to(tl.int32), 0) - 1
    tl.store(runs + order, index, mask=open_)
    tl.debug_barrier()
    num_runs = tl.sum(open_.to(tl.int32), 0)
    lane = tl.arange(0, BLOCK)
    count = 0
    for start in range(0, num_runs * RUN, BLOCK):
        at = start + lane
        run = tl.load(runs + at // RUN, mask=at // RUN < num_runs, other=PEAKS)
        column = tl.where(at // RUN < num_runs, run * RUN + at % RUN, vocab)
        x = _scaled(base, column, vocab, heat)
        valid = (x >= least) & (column < vocab)
        to = count + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(out + to, x, mask=valid & (to < MOST))
        count += tl.sum(valid.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=_ANY_ADDRESS[:1])
def _edge_kernel(
    logits, row_index, temperature, top_k, top_p, peaks, part_max, part_sum, runs, found, edges, stride, vocab, parts,
    RUN: tl.constexpr, PEAKS: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr, NUCLEUS: tl.constexpr,
):  # fmt: skip
    """grid (n,): the smallest scaled logit that top_k and then top_p keep; -inf for a row without filters."""
    n = tl.program_id(0)
    row = tl.load(row_index + n)
    heat, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    k = tl.where(k < vocab, k, 0)
    if not _filters(heat, k, p):
        tl.store(edges + n, -float("inf"))
        return
    part = tl.arange(0, PARTS)
    tops = tl.load(part_max + n * parts + part, mask=part < parts, other=-1e30)
    sums = tl.load(part_sum + n * parts + part, mask=part < parts, other=0.0)
    most = tl.max(tops, 0)
    total = tl.sum(sums * tl.exp(tops - most), 0)
    base = logits + n.to(tl.int64) * stride
    index = tl.arange(0, PEAKS)
    needed = tl.where(k > 0, k, NUCLEUS)
    far = (needed > MOST) | (needed * RUN > vocab)  # the candidates cannot be enough
    edge = -float("inf")
    if not far:
        peak = tl.load(peaks + n.to(tl.int64) * PEAKS + index, mask=index * RUN < vocab, other=-3.0e38)
        low = _bound(peak, needed, most)
        count = _collect(base, vocab, heat, peak, _as_float(low), runs + n * PEAKS, found + n * MOST, RUN, PEAKS, MOST)
        some = tl.arange(0, MOST)
        c = tl.load(found + n * MOST + some, mask=some < count, other=-float("inf"))
        mass = tl.sum(tl.exp(c - most), 0)
        far = (count > MOST) | ((k <= 0) & (mass < p * total))
        if not far:
            edge = _near_edge(c, low - 1, k, p, total, most)
    if far:
        edge = _wide_edge(base, vocab, heat, k, p, most, 4096)
    tl.store(edges + n, edge)


def find_edges(logits: Tensor, row_index: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[n] float32: the smallest kept logit of each row, after temperature. Columns are indexed by row_index."""
    (n, vocab), device = logits.shape, logits.device
    tiles = cdiv(cdiv(vocab, _BLOCK), _SUMS)
    parts = cdiv(vocab, _BLOCK * tiles)  # the same for any n: sums must not depend on other rows
    run = max(16, next_power_of_2(cdiv(vocab, _PEAKS)))
    peaks = torch.empty((n, _PEAKS), dtype=torch.float32, device=device)
    part_max, part_sum, candidates, edges = (
        torch.empty((n, size), dtype=torch.float32, device=device) for size in (parts, parts, _MOST, 1)
    )
    runs = torch.empty((n, _PEAKS), dtype=torch.int32, device=device)
    _peaks_kernel[(n, parts)](
        logits, row_index, temperature, top_k, top_p, peaks, part_max, part_sum, logits.stride(0), vocab, parts, tiles,
        RUN=run, PEAKS=_PEAKS, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _edge_kernel[(n,)](
        logits, row_index, temperature, top_k, top_p, peaks, part_max, part_sum, runs, candidates, edges,
        logits.stride(0), vocab, parts, RUN=run, PEAKS=_PEAKS, PARTS=_PARTS, MOST=_MOST, NUCLEUS=_NUCLEUS, num_warps=8,
    )  # fmt: skip
    return edges.squeeze(1)


def _cut(n: int, vocab: int) -> tuple[int, int]:
    """(parts of a row, tiles of a part): about 1024 programs."""
    tiles = cdiv(vocab, _BLOCK)
    parts = min(tiles, _PARTS, max(1, 1024 // n))
    each = cdiv(tiles, parts)
    return cdiv(tiles, each), each


def sample_rows(
    logits: Tensor,
    row_index: Tensor,
    positions: Tensor,
    seeds: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    filters: bool,
    out: Tensor | None = None,  # [n] any integer type: the tokens
    scores: Tensor | None = None,  # [n] float32
    tokens: Tensor | None = None,  # [rows, width]: the choice is also written to tokens[row_index, positions]
) -> tuple[Tensor, Tensor]:
    n, vocab = logits.shape
    out = torch.empty(n, dtype=torch.int64, device=logits.device) if out is None else out
    scores = torch.empty(n, dtype=torch.float32, device=logits.device) if scores is None else scores
    if not n:
        return out, scores
    parts, tiles = _cut(n, vocab)
    best = torch.empty((n, parts), dtype=torch.float32, device=logits.device)
    best_at = torch.empty((n, parts), dtype=torch.int32, device=logits.device)
    edges = find_edges(logits, row_index, temperature, top_k, top_p) if filters else None
    _choose_kernel[(n, parts)](
        logits, row_index, positions, seeds, temperature, edges, best, best_at, logits.stride(0), vocab, parts, tiles,
        FILTERS=filters, SKIPS=tiles >= _LEAST_TILES, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    _best_kernel[(n,)](
        logits, row_index, positions, best, best_at, out, scores, tokens, logits.stride(0),
        0 if tokens is None else tokens.stride(0), parts, WRITE=tokens is not None, PARTS=_PARTS, num_warps=1,
    )  # fmt: skip
    return out, scores
