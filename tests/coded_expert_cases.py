"""Kernels of experts in 8 and 4 bits against their reference: cases that run interpreted and on a GPU."""

from __future__ import annotations

from functools import partial

import torch

from quire.ops import act as act_ops
from quire.ops import coded_experts as ops
from quire.ops import moe as moe_ops
from quire.ops.coded_experts import ExpertCodes
from quire.ops.mx_experts import MxCodes, shapes_of
from quire.ops.triton import act, moe, moe_bytes, moe_coded
from quire.ops.triton.moe_coded_few import CodedFewConfig
from tests.fused_cases import Draw

LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
ROUNDED_LIMIT = 6e-2  # inputs in 8 bits
KINDS = (
    "fp8-rows", "fp8-blocks", "fp8-narrow-blocks", "int4-32", "int4-64-zeros", "int4-128", "int4-128-zeros",
    "int4-64-between", "int4-rows-between", "int4-rows", "mxfp4", "nvfp4",
)  # fmt: skip


def make_codes(kind: str, draw: Draw, experts: int, rows: int, width: int) -> ExpertCodes:
    """Random codes whose numbers have a standard deviation of about 1 / sqrt(width)."""
    size, device = width**-0.5, draw.device
    scales = partial(_scales, draw, size)
    if kind.startswith("fp8"):
        codes = draw.normal(experts, rows, width, dtype=torch.float32).to(torch.float8_e4m3fn)
        if kind == "fp8-rows":
            return ExpertCodes("e4m3", codes, width, row_scale=scales(experts, rows))
        block = (128, 128) if kind == "fp8-blocks" else (1, 128)
        grid = scales(experts, -(-rows // block[0]), -(-width // 128))
        return ExpertCodes("e4m3", codes, width, grid, block)
    plain = draw.whole(0, 16, experts * rows * width).to(torch.uint8).view(experts * rows, width)
    codes = ops.close_chunks(plain).view(experts, rows, -1)
    whole = ops.padded(width)
    if kind == "mxfp4":
        exponents = draw.whole(-4, 0, experts * rows * (whole // 32)) + 127 - width.bit_length() // 2
        grid = exponents.to(torch.uint8).view(experts, rows, -1)
        return ExpertCodes("e2m1", codes, width, grid, (1, 32))
    if kind == "nvfp4":
        grid = scales(experts, rows, whole // 16, spread=20 / size).to(torch.float8_e4m3fn)
        return ExpertCodes("e2m1", codes, width, grid, (1, 16), row_scale=scales(experts, rows, spread=0.03))
    group = whole if kind.startswith("int4-rows") else int(kind.split("-")[1])
    grid = scales(experts, rows, whole // group, spread=0.3).to(torch.bfloat16)
    zero = None
    if kind.endswith(("zeros", "between")):
        zero = draw.whole(0, 17, grid.numel()).to(torch.uint8).view(grid.shape).to(device)
    if kind.endswith("between"):
        zero = zero + draw.normal(*grid.shape, dtype=torch.float32).sigmoid()
    return ExpertCodes("int4", codes, width, grid, (1, group), zero)


def as_mx(w: ExpertCodes, *, gated: bool) -> MxCodes:
    """The same codes for the kernel of Hopper."""
    packed = MxCodes(*(torch.empty(shape, dtype=torch.int32, device=w.codes.device) for shape in shapes_of(*w.shape)),
                     w.shape[1], w.width, gated)  # fmt: skip
    for expert in range(w.shape[0]):
        codes = ops.open_chunks(w.codes[expert])[:, : w.width]
        assert packed.put(expert, 0, codes, w.scale[expert][:, : w.width // 32])
    return packed


def sorted_pairs(index: torch.Tensor, experts: int, bm: int) -> moe.ExpertTiles:
    """As moe.sort_pairs; -1: on another rank."""
    flat = index.flatten()
    order = torch.argsort(flat, stable=True).int()[int((flat < 0).sum()) :]
    counts = torch.bincount(flat[flat >= 0], minlength=experts)
    end = counts.cumsum(0)
    expert, start = [], []
    for e in range(experts):
        for first in range(0, int(counts[e]), bm):
            expert.append(e)
            start.append(int(end[e] - counts[e]) + first)
    spare = min(len(flat), experts) + len(flat) // bm - len(expert)
    return moe.ExpertTiles(
        order, torch.tensor(expert + [-1] * spare).int(), torch.tensor(start + [0] * spare).int(), end.int()
    )


def summed(
    y: torch.Tensor, weights: torch.Tensor, stream: torch.Tensor, *, index: torch.Tensor | None, early: bool
) -> torch.Tensor:
    """As moe_mx.combine."""
    y = y if y.dim() == 2 else y.sum(0).bfloat16()
    if index is not None:
        y = y.masked_fill(index.view(-1, 1) < 0, 0)
    return ((y.view(*weights.shape, -1).float() * weights[..., None].float()).sum(1) + stream.float()).bfloat16()


def _scales(draw: Draw, size: float, *shape: int, spread: float = 1.0) -> torch.Tensor:
    """Between a half and one and a half of `size` * `spread`."""
    return (draw.normal(*shape, dtype=torch.float32).sigmoid() + 0.5) * size * spread


def check_coded(
    device, dtype, kind, tokens, experts, top_k, dim, ffn, *, bias=False, configs=None, fixed=False, early=False,
    byte_configs=None, round_from=None, few=CodedFewConfig(), acts=3, seed=0,
):  # fmt: skip
    """Up to two activations that the first matmul applies and one that it does not; with and without the stream."""
    draw = Draw(seed, device, dtype)
    x, stream = draw.normal(tokens, dim), draw.normal(tokens, dim)
    w1, w2 = make_codes(kind, draw, experts, 2 * ffn, dim), make_codes(kind, draw, experts, dim, ffn)
    b1, b2 = (draw.normal(experts, 2 * ffn), draw.normal(experts, dim)) if bias else (None, None)
    weights, index = moe_ops.route(draw.normal(tokens, experts, dtype=torch.float32), top_k)
    silu, gelu = act.gated_form(act.SILU), act_ops.GATED["gelu"].reference
    codes = {silu: act.SILU, act.clamped_swiglu: act.CLAMPED}
    clamps = {"alpha": 1.702, "limit": 2.0}
    every = (
        (partial(act.clamped_swiglu, **clamps), partial(act_ops.clamped_swiglu.reference, **clamps)),
        (silu, act_ops.GATED["silu"].reference),
        (gelu, gelu),
    )
    for used, meant in every[:acts]:
        rest = {"b1": b1, "b2": b2, "act": used, "codes": codes, "configs": configs, "fixed": fixed, "early": early,
                "byte_configs": byte_configs, "round_from": round_from, "few": few}  # fmt: skip
        found = moe_coded.run_experts(x, weights, index, w1, w2, **rest)
        wide = [None if t is None else t.float() for t in (x, b1, b2)]
        wanted = ops.run_coded_experts.reference(
            wide[0], weights, index, w1, w2, b1=wide[1], b2=wide[2], act=meant
        )  # fmt: skip
        error = (found.float() - wanted).norm() / wanted.norm()
        limit = LIMITS[dtype] if round_from is None else ROUNDED_LIMIT
        assert error < limit, f"{kind}: relative error {error:.2e}"
        joined = moe_coded.run_experts(x, weights, index, w1, w2, stream=stream, **rest)
        assert torch.equal(joined, stream + found)


def check_rounded(device, dtype, error, smallest):
    """Scales reach the largest of their columns; `error`: of a code, to its number; `smallest`: what may become 0."""
    x = Draw(0, device, dtype).normal(5, 300)
    x[2] = 0
    for size in (128, 300):
        codes, scale = moe_bytes.round_rows(x, size)
        spread = scale.repeat_interleave(size, 1)[:, :300]
        largest = torch.nn.functional.pad(x, (0, -300 % size)).unflatten(1, (-1, size)).abs().amax(-1).float()
        torch.testing.assert_close(scale * 448, largest.clamp(min=1e-12), rtol=1e-6, atol=0)
        found = (codes.float() * spread - x.float()).abs()
        assert bool((found <= x.float().abs() * error + spread * smallest).all())
