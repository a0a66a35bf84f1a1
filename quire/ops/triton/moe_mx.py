"""Experts in MXFP4 on Hopper: grouped matmuls whose weights go from memory to the registers of `wgmma`.

    route, sort_pairs (moe.py) ──_mx_kernel──▶ act(x w1) [P, F], sorted
                               ──_mx_kernel──▶ (.. w2) [P, dim] or [parts, P, dim], by pair ──_combine_kernel──▶

Rows of a matrix are the M side of the instruction and tokens its N side of 8 to 128, so that a code is decoded once for
all tokens of a tile. A thread reads with one load of 16 bytes what it has of 16 rows and UNIT columns in the left
operand; nothing of the matrix goes through shared memory, and K keeps its order, so tokens are read as they are.

How codes and scales lie: ops/mx_experts.py. One AND, after a shift, leaves two codes in the places of bfloat16's bits,
and one multiplication by a power of two repairs their exponent and applies the scale of the block.

Results do not depend on how pairs are sorted, but on the tile, which is chosen by their number: not for batch-invariant
mode. Floor: 4.25 bits a code. 32 experts of 3 x 2880 x 2880: 423 MB, 101 us at 4.2 TB/s; 4 of them 12.6 us.
Needs: bfloat16, widths that are multiples of UNIT, gates with silu or clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quire.ops import coded_experts as coded_ops
from quire.ops import mx_experts as mx_ops
from quire.ops.coded_experts import ExpertCodes
from quire.ops.mx_experts import MxCodes
from quire.ops.op import Fits, FormTable, Kernels
from quire.ops.triton import moe
from quire.ops.triton.act import CLAMPED, SILU
from quire.ops.triton.sizes import cdiv

UNIT = gl.constexpr(mx_ops.UNIT)  # columns that are decoded at once: a row of shared memory
FEW_TOKENS = 2  # up to which each pair reads its expert separately: no sorting
_RESTORE = gl.constexpr(2.0**64)
_ACTS = (SILU, CLAMPED)


class MxConfig(NamedTuple):
    bm: int  # pairs of a tile: 8, 16, 32, 64 or 128
    warps: int  # 4 or 8: 16 rows of the matrix each
    ahead: int  # units that are loaded at once, while as many are multiplied: a power of two
    parts: int = 1  # splits of K, of a matmul without activation; at most, since they are equal
    registers: int = 0  # of a thread at most; 0: as many as the compiler wants


# --- the kernel


def _decoded() -> str:
    """$16 to $19: 4 words of codes, of two rows and two blocks each; $20: their scales, a byte each. Register 2 k + r
    of the results has pair k of row r."""
    lines = ["{", ".reg .b32 t, u, f;"]
    for word in range(4):
        row, block, w = word // 2, word % 2, f"${16 + word}"
        to = [f"${2 * (4 * block + pair) + row}" for pair in range(4)]
        lines += [
            f"prmt.b32 f, $20, 0, 0x444{word};",
            "mul.lo.u32 f, f, 0x00800080;",
            f"and.b32 t, {w}, 0x81C081C0;",
            f"mul.bf16x2 {to[0]}, t, f;",
            f"shl.b32 t, {w}, 6;",
            "and.b32 t, t, 0x81C081C0;",
            f"mul.bf16x2 {to[1]}, t, f;",
            f"prmt.b32 t, {w}, 0, 0x2301;",  # bytes of the halves change places: 3, 2, 6, 5
            "and.b32 t, t, 0x006C006C;",
            "mul.lo.u32 t, t, 0x1042;",  # 12, 6, 1 and 1 to the left; no two bits come to the same place
            "and.b32 t, t, 0x81C081C0;",
            f"mul.bf16x2 {to[2]}, t, f;",
            f"shl.b32 t, {w}, 3;",
            "and.b32 t, t, 0x81C081C0;",
            f"mul.bf16x2 {to[3]}, t, f;",
        ]
    return "\n".join([*lines, "}"])


_DECODED = gl.constexpr(_decoded())
_REGISTERS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))

# From Triton 3.9 on they have other names.
_synchronize = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


@gluon.constexpr_function
def _words_layout(warps):
    """[warps, 8, 4, 4]: a warp has 16 rows, of each of which four threads have two words."""
    return gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [warps, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _along(layout, dim):
    """The layout of a vector along one of four dimensions of this one."""
    for other in (3, 2, 1, 0):
        if other != dim:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def _rows_layout(warps, pieces):
    """Of rows of inputs, 16 bytes a thread."""
    lanes = min(pieces, 32)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _load_units(
    codes, scale, expert, tile, unit, COUNT: gl.constexpr, UNITS: gl.constexpr, WARPS: gl.constexpr,
    LOADED: gl.constexpr,
):  # fmt: skip
    """Codes and scales of LOADED times UNIT columns, 16 rows a warp from `tile` on. The matrix has COUNT such tiles,
    and warps past them read the last one."""
    own: gl.constexpr = _words_layout(WARPS)
    warp = tile + gl.arange(0, WARPS, layout=_along(own, 0))[:, None, None, None]
    if COUNT % WARPS != 0:
        warp = gl.minimum(warp, COUNT - 1)
    row = gl.arange(0, 8, layout=_along(own, 1))[None, :, None, None]
    thread = gl.arange(0, 4, layout=_along(own, 2))[None, None, :, None]
    word = gl.arange(0, 4, layout=_along(own, 3))[None, None, None, :]
    place = (expert * COUNT + warp) * UNITS + unit
    at, at_scale = codes + place * 128 + row * 16 + thread * 4 + word, scale + place * 8 + row
    loaded = ()
    for i in gl.static_range(LOADED):
        loaded = loaded + (gl.load(at + i * 128), gl.load(at_scale + i * 8))  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _decode(words, by, WARPS: gl.constexpr, operand: gl.constexpr):
    """[16 WARPS, UNIT] numbers, where each thread has what it needs of them."""
    o0, o1, o2, o3, o4, o5, o6, o7 = gl.inline_asm_elementwise(
        _DECODED, _REGISTERS, [words, by], dtype=(gl.bfloat16,) * 8, is_pure=True, pack=4
    )
    first = gl.join(gl.join(o0, o1), gl.join(o2, o3))
    second = gl.join(gl.join(o4, o5), gl.join(o6, o7))
    # warp, row, thread, (row or that 8 further, column of the pair), 8 columns further, 16, 32
    both = gl.join(first, second).reshape([WARPS, 8, 4, 2, 2, 2, 2, 2])
    both = both.permute((0, 3, 1, 7, 6, 5, 2, 4)).reshape([16 * WARPS, UNIT])
    return gl.convert_layout(both, operand, assert_trivial=True)


@gluon.jit
def _copy_rows(at, staged, place, unit, live, k, LOADED: gl.constexpr):
    """The columns of LOADED units, of the rows that there are."""
    inside = live[:, None]
    if staged.shape[2] != LOADED * UNIT:
        inside = inside & (k < LOADED * UNIT)[None, :]
    _copy(staged.index(place), at + unit * UNIT, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _multiply(
    acc, loaded, rows, COUNT: gl.constexpr, WARPS: gl.constexpr, operand: gl.constexpr
):  # fmt: skip
    """acc + COUNT units; while one is multiplied, the next is decoded."""
    left = _decode(loaded[0], loaded[1], WARPS, operand)
    for i in gl.static_range(COUNT):
        right = rows.slice(i * UNIT, UNIT, 1).permute((1, 0))
        acc = warpgroup_mma(left, right, acc, is_async=True)
        following = left
        if i + 1 < COUNT:
            following = _decode(loaded[2 * i + 2], loaded[2 * i + 3], WARPS, operand)
        acc, left = warpgroup_mma_wait(0, deps=(acc, left))
        left = following
    return acc


@gluon.jit
def _arrived():
    """A thread's copies of rows are there, for tensor cores too; then all warps must meet."""
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def _act(gate, up, alpha, limit, ACT: gl.constexpr):
    """As act.gate_up."""
    if ACT == CLAMPED_CODE:
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        return (up + 1.0) * gate / (1.0 + gl.exp(-gate * alpha))
    return gate / (1.0 + gl.exp(-gate)) * up


CLAMPED_CODE = gl.constexpr(CLAMPED)


@gluon.jit
def _pairs_of(
    order, start, stop, tile, layout: gl.constexpr, TOP_K: gl.constexpr, FIRST: gl.constexpr, DIRECT: gl.constexpr,
    BM: gl.constexpr,
):  # fmt: skip
    """Of a tile's pairs: whether there is one, its number, the row of `a` and (FIRST) that of the result."""
    i = gl.arange(0, BM, layout=layout)
    row = start + i
    live = row < stop
    if DIRECT:
        pair = gl.where(live, row, tile)
    else:
        pair = gl.load(order + row, mask=live, other=0)
    source = pair // TOP_K if FIRST else gl.where(live, row, 0)
    return live, pair, source, row


@gluon.jit(do_not_specialize=["most_tiles", "pairs"])
def _mx_kernel(
    a, codes, scale, bias, out, order, tile_expert, tile_start, end, most_tiles, pairs, alpha, limit,
    N: gl.constexpr, K: gl.constexpr, TOP_K: gl.constexpr, ACT: gl.constexpr, BIAS: gl.constexpr,
    FIRST: gl.constexpr, GATED: gl.constexpr, DIRECT: gl.constexpr, BM: gl.constexpr, WARPS: gl.constexpr,
    AHEAD: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """grid (tiles * columns, PARTS): a tile of pairs times 16 WARPS rows; FIRST, GATED and DIRECT as in moe.py. `out`
    of PARTS: float32 [PARTS, pairs, N]. EARLY: the first matmul lets the second start when routing and sorting are
    done, so that one may read its experts and their first codes before it waits."""
    COUNT: gl.constexpr = (2 * N if GATED else N) // 16
    UNITS: gl.constexpr = K // UNIT
    MINE: gl.constexpr = UNITS // PARTS
    TURNS: gl.constexpr = (MINE + AHEAD - 1) // AHEAD
    LEFT: gl.constexpr = MINE - (TURNS - 1) * AHEAD  # units of the last turn
    BEGIN: gl.constexpr = LEFT if TURNS == 1 else AHEAD  # of the first
    RESULTS: gl.constexpr = 8 * WARPS if GATED else 16 * WARPS
    columns: gl.constexpr = (N + RESULTS - 1) // RESULTS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    copied: gl.constexpr = _rows_layout(WARPS, 8 * AHEAD)
    staged = gl.allocate_shared_memory(gl.bfloat16, [2, BM, AHEAD * UNIT], gl.NVMMASharedLayout(128, 16, 2))
    if EARLY and FIRST:
        gdc_wait()
    if EARLY:
        gdc_launch_dependents()
    program, part = gl.program_id(0), gl.program_id(1)
    group, inner = program // (TILES * columns), program % (TILES * columns)
    size = gl.minimum(most_tiles - group * TILES, TILES)
    tile, column = group * TILES + inner % size, inner // size
    expert = gl.load(tile_expert + tile, cache_modifier=".cg").to(gl.int64)  # L1 may be older than the launch before
    if expert >= 0:
        begin = part * MINE
        loaded = _load_units(codes, scale, expert, column * WARPS, begin, COUNT, UNITS, WARPS, BEGIN)
        start, stop = tile, tile + 1
        if not DIRECT:
            start = gl.load(tile_start + tile, cache_modifier=".cg")
            stop = gl.load(end + expert, cache_modifier=".cg")
        if EARLY and not FIRST:
            gdc_wait()
        live, _pair, source, _row = _pairs_of(
            order, start, stop, tile, gl.SliceLayout(1, copied), TOP_K, FIRST, DIRECT, BM
        )  # fmt: skip
        k = gl.arange(0, AHEAD * UNIT, layout=gl.SliceLayout(0, copied))
        at = a + source.to(gl.int64)[:, None] * K + k[None, :]
        _copy_rows(at, staged, 0, begin, live, k, BEGIN)
        acc = gl.zeros([16 * WARPS, BM], gl.float32, layout=mma)
        if TURNS > 2:  # of fewer, the loop would be compiled nevertheless, for units that were not loaded
            for turn in range(0, TURNS - 2):
                unit = begin + (turn + 1) * AHEAD
                _arrived()  # a fence, which waits for loads too: so the next ones come after it
                after = _load_units(codes, scale, expert, column * WARPS, unit, COUNT, UNITS, WARPS, AHEAD)
                _synchronize()  # all have used the rows of the turn before, whose place the next ones take
                _copy_rows(at, staged, (turn + 1) % 2, unit, live, k, AHEAD)
                acc = _multiply(acc, loaded, staged.index(turn % 2), AHEAD, WARPS, operand)
                loaded = after
        if TURNS > 1:
            unit = begin + (TURNS - 1) * AHEAD
            _arrived()
            after = _load_units(codes, scale, expert, column * WARPS, unit, COUNT, UNITS, WARPS, LEFT)
            _synchronize()
            _copy_rows(at, staged, (TURNS - 1) % 2, unit, live, k, LEFT)
            acc = _multiply(acc, loaded, staged.index(TURNS % 2), AHEAD, WARPS, operand)
            loaded = after
        _arrived()
        _synchronize()
        acc = _multiply(acc, loaded, staged.index((TURNS - 1) % 2), LEFT, WARPS, operand)
        acc = acc * _RESTORE
        if GATED:
            gate, up = gl.split(acc.reshape([WARPS, 2, 8, BM]).permute((0, 2, 3, 1)))
            gate, up = gate.reshape([8 * WARPS, BM]), up.reshape([8 * WARPS, BM])
            own: gl.constexpr = gate.type.layout
            n = column * RESULTS + gl.arange(0, RESULTS, layout=gl.SliceLayout(1, own))
            if BIAS:
                at_bias = bias + expert * (2 * N) + n
                gate += gl.load(at_bias, mask=n < N, other=0.0).to(gl.float32)[:, None]
                up += gl.load(at_bias + N, mask=n < N, other=0.0).to(gl.float32)[:, None]
            y = _act(gate, up, alpha, limit, ACT)
            _store(out, y, n, order, start, stop, tile, part, pairs, own, N, TOP_K, FIRST, DIRECT, BM)
        else:
            n = column * RESULTS + gl.arange(0, RESULTS, layout=gl.SliceLayout(1, mma))
            if BIAS:
                inside = (n < N) & (part == 0)
                acc += gl.load(bias + expert * N + n, mask=inside, other=0.0).to(gl.float32)[:, None]
            _store(out, acc, n, order, start, stop, tile, part, pairs, mma, N, TOP_K, FIRST, DIRECT, BM)


@gluon.jit
def _store(
    out, y, n, order, start, stop, tile, part, pairs, own: gl.constexpr, N: gl.constexpr, TOP_K: gl.constexpr,
    FIRST: gl.constexpr, DIRECT: gl.constexpr, BM: gl.constexpr,
):  # fmt: skip
    live, pair, _source, row = _pairs_of(
        order, start, stop, tile, gl.SliceLayout(0, own), TOP_K, FIRST, DIRECT, BM
    )  # fmt: skip
    target = part * pairs + (row if FIRST else pair)
    at = out + target.to(gl.int64)[None, :] * N + n[:, None]
    gl.store(at, y.to(out.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


@triton.jit
def _combine_kernel(
    y, weights, index, stream, out, pairs, DIM: tl.constexpr, TOP_K: tl.constexpr, PARTS: tl.constexpr,
    SHARE: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As that of moe.py, of y in PARTS."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DIM
    kind: tl.constexpr = out.dtype.element_ty
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        one = tl.zeros((BLOCK,), tl.float32)
        live = inside
        if SHARE:
            live = inside & (tl.load(index + token * TOP_K + j) >= 0)
        for part in tl.static_range(PARTS):
            row = part * pairs + token * TOP_K + j
            one += tl.load(y + row * DIM + column, mask=live, other=0.0).to(tl.float32)
        acc += tl.load(weights + token * TOP_K + j).to(tl.float32) * one.to(kind).to(tl.float32)
    if ADD:
        acc = acc.to(kind).to(tl.float32)
        acc += tl.load(stream + token * DIM + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + column, acc.to(kind), mask=inside)


# --- calls


def product(
    a: Tensor, w: MxCodes, bias: Tensor | None, tiles: moe.ExpertTiles, top_k: int, config: MxConfig, *, pairs: int,
    first: bool, act: tuple[int, float, float] | None = None, early: bool = False,
) -> Tensor:  # fmt: skip
    """As moe.product; with config.parts above 1 float32 [parts, pairs, N], with fewer parts if they do not divide K."""
    code, alpha, limit = act or (SILU, 0.0, 0.0)
    n = w.rows // 2 if w.gated else w.rows
    units = w.width // UNIT.value
    parts = next(parts for parts in range(config.parts, 0, -1) if units % parts == 0)
    shape = (pairs, n) if parts == 1 else (parts, pairs, n)
    out = torch.empty(shape, dtype=a.dtype if parts == 1 else torch.float32, device=a.device)
    most_tiles = pairs if tiles.direct else tiles.expert.shape[0]
    results = (8 if w.gated else 16) * config.warps
    _mx_kernel[(most_tiles * cdiv(n, results), parts)](
        a, w.codes, w.scale, bias, out, tiles.order, tiles.expert, tiles.start, tiles.end, most_tiles, pairs, alpha,
        limit, N=n, K=w.width, TOP_K=top_k, ACT=code, BIAS=bias is not None, FIRST=first, GATED=w.gated,
        DIRECT=tiles.direct, BM=config.bm, WARPS=config.warps, AHEAD=config.ahead, PARTS=parts, TILES=8,
        EARLY=early, num_warps=config.warps, maxnreg=config.registers or None,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def combine(
    y: Tensor, weights: Tensor, stream: Tensor | None = None, *, index: Tensor | None = None, early: bool = False
) -> Tensor:
    """As moe.combine, of y [T * k, dim] or float32 [parts, T * k, dim]: [T, dim] of the dtype of `stream`."""
    if y.dim() == 2:
        return moe.combine(y, weights, stream, index=index, early=early)
    (tokens, top_k), (parts, pairs, dim) = weights.shape, y.shape
    out = torch.empty((tokens, dim), dtype=torch.bfloat16, device=y.device)
    block = 256
    _combine_kernel[(tokens, cdiv(dim, block))](
        y, weights, index, stream, out, pairs, DIM=dim, TOP_K=top_k, PARTS=parts, SHARE=index is not None,
        ADD=stream is not None, BLOCK=block, EARLY=early, num_warps=1, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return out


def configs_of(tokens: int, pairs: int, experts: int) -> tuple[MxConfig, MxConfig]:
    """The best of those tried on an H200 with gpt-oss-20b's shape and 1 to 2,048 tokens, routed evenly or to a quarter
    of the experts: docs/log.md."""
    each = pairs / experts
    if tokens <= FEW_TOKENS:
        return MxConfig(8, 4, 8), MxConfig(8, 4, 8, parts=3)
    if each <= 2:
        return (MxConfig(8, 4, 4),) * 2
    if each <= 12:
        return (MxConfig(16, 4, 4),) * 2
    if each <= 26:
        return (MxConfig(32, 8, 4, registers=128),) * 2
    if each <= 512:
        return (MxConfig(64, 8, 2, registers=128),) * 2
    return (MxConfig(128, 8, 2),) * 2  # more than was timed


def run_experts(
    x: Tensor, weights: Tensor, index: Tensor, w1: MxCodes, w2: MxCodes, *, b1: Tensor | None, b2: Tensor | None,
    act: tuple[int, float, float], stream: Tensor | None = None, all_experts: int = 0, early: bool = False,
    configs: tuple[MxConfig, MxConfig] | None = None, direct: bool | None = None,
) -> Tensor:  # fmt: skip
    """As moe.run_experts; `act`: SILU or CLAMPED, alpha, limit. `direct`: whether tile i is pair i, by default if there
    are few tokens."""
    (tokens, top_k), pairs = index.shape, index.numel()
    experts, share = w1.codes.shape[0], all_experts > 0
    if not tokens:
        return torch.empty_like(x)
    first, second = configs or configs_of(tokens, pairs, all_experts or experts)
    if tokens <= FEW_TOKENS if direct is None else direct:
        tiles = moe.ExpertTiles(index, index, index, index, direct=True)
    else:
        tiles = moe.sort_pairs(index, experts, first.bm, share=share, early=early)
    h = product(x, w1, b1, tiles, top_k, first, pairs=pairs, first=True, act=act, early=early)
    y = product(h, w2, b2, tiles, top_k, second._replace(bm=first.bm), pairs=pairs, first=False, early=early)
    return combine(y, weights, stream, index=index if share else None, early=early)


def add_forms(table: FormTable, codes: dict[Callable, int], fits: Fits, *, early: bool) -> None:
    """MxCodes are what `run_coded_experts` takes here beside other forms."""

    @table.form(mx_ops.multiplies_mx, fits)
    def multiplies_mx(dtype: torch.dtype, width: int, ffn: int, act: Callable[[Tensor], Tensor]) -> bool:
        known = moe.fused_act(act, codes)
        whole = width % mx_ops.UNIT == 0 and ffn % mx_ops.UNIT == 0
        return dtype is torch.bfloat16 and whole and known is not None and known[0] in _ACTS

    @table.made(coded_ops.run_coded_experts, fits)
    def make(otherwise: Callable[..., Tensor], kernels: Kernels) -> Callable[..., Tensor]:
        def run(
            x: Tensor, weights: Tensor, index: Tensor, up: ExpertCodes | MxCodes | Tensor,
            down: ExpertCodes | MxCodes | Tensor, *, b1: Tensor | None, b2: Tensor | None,
            act: Callable[[Tensor], Tensor], stream: Tensor | None = None, all_experts: int = 0, **rest: Any,
        ) -> Tensor:  # fmt: skip
            if not isinstance(up, MxCodes) or not isinstance(down, MxCodes):
                rest |= {"stream": stream, "all_experts": all_experts}
                return otherwise(x, weights, index, up, down, b1=b1, b2=b2, act=act, **rest)
            known = moe.fused_act(act, codes)
            assert known is not None  # as multiplies_mx has it
            return run_experts(
                x.contiguous(), weights.contiguous(), index.to(torch.int32).contiguous(), up, down, b1=b1, b2=b2,
                act=known, stream=None if stream is None else stream.contiguous(), all_experts=all_experts,
                early=early,
            )  # fmt: skip

        return run
