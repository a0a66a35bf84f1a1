"""One mixture layer with experts in 16, 8 and 4 bits, and how much faster the latter are.

    python benchmarks/gpu/quant_experts.py                       # both shapes, all forms
    python benchmarks/gpu/quant_experts.py --sweep 32 256        # other tiles for these numbers of tokens, best first

A layer is routing, experts and the weighted sum, inside a CUDA graph that goes through several routings, launched
early; the median of many replays, by CUDA events. Codes are random, and every form is checked against its reference
first (err: for 2, 48 and 2048 tokens). a16: inputs of fp8 weights are never rounded to 8 bits. The first run compiles,
and takes longer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.ops import coded_experts as ops
from quire.ops import moe as moe_ops
from quire.ops.act import GATED, clamped_swiglu
from quire.ops.coded_experts import ExpertCodes
from quire.ops.mx_experts import MxCodes, shapes_of
from quire.ops.parts import whole
from quire.ops.triton import act, moe, moe_bytes, moe_coded
from quire.ops.triton.moe_bytes import BytesConfig
from quire.ops.triton.moe_coded import CodedTileConfig
from quire.ops.triton.moe_coded_few import CodedFewConfig

TOKENS = (1, 8, 32, 128, 256, 512, 2048, 8192, 16384)
BF16 = torch.bfloat16
SILU = act.gated_form(act.SILU)
CLAMPS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0}
CODES: dict[Callable, int] = {SILU: act.SILU, act.clamped_swiglu: act.CLAMPED}
Side = ExpertCodes | MxCodes | Tensor
PACKED = "mx-packed"  # MXFP4 as Hopper's kernel reads it
SIDES = ("first", "second")
Tried = tuple[str, str, NamedTuple, tuple[NamedTuple, NamedTuple]]  # how tiles are passed, which, those of it, of both


class Shape(NamedTuple):
    name: str
    experts: int
    top_k: int
    dim: int
    ffn: int
    clamped: bool
    forms: tuple[str, ...]

    @property
    def act(self) -> Callable[[Tensor], Tensor]:
        return partial(act.clamped_swiglu, **CLAMPS) if self.clamped else SILU

    @property
    def meant(self) -> Callable[[Tensor], Tensor]:
        return partial(clamped_swiglu.reference, **CLAMPS) if self.clamped else GATED["silu"].reference


SHAPES = (
    Shape("30B-A3B", 128, 8, 2048, 768, False, ("bf16", "fp8-rows", "fp8-blocks", "w4a16")),
    Shape("gpt-oss-20b", 32, 4, 2880, 2880, True, ("bf16", "fp8-rows", "mxfp4", PACKED)),
)


def make(form: str, experts: int, rows: int, width: int, *, gated: bool) -> Side:
    """Numbers of a deviation near 0.02."""
    shape = experts, rows, width
    if form == PACKED:
        words, scale = (torch.empty(size, device="cuda", dtype=torch.int32) for size in shapes_of(*shape))
        packed = MxCodes(words, scale, rows, width, gated)
        packed.fill(torch.randint(0, 256, (1 << 20,), device="cuda", dtype=torch.uint8), 120)
        return packed
    if form == "bf16":
        return torch.randn(shape, device="cuda", dtype=BF16) * 0.02
    if form.startswith("fp8"):
        codes = torch.randn(shape, device="cuda", dtype=BF16).to(torch.float8_e4m3fn)
        if form == "fp8-rows":
            return ExpertCodes("e4m3", codes, width, row_scale=torch.full((experts, rows), 0.02, device="cuda"))
        grid = torch.full((experts, -(-rows // 128), -(-width // 128)), 0.02, device="cuda")
        return ExpertCodes("e4m3", codes, width, grid, (128, 128))
    whole = ops.padded(width)
    codes = torch.randint(0, 256, (experts, rows, whole // 2), device="cuda", dtype=torch.uint8)
    if form == "mxfp4":
        grid = torch.full((experts, rows, whole // 32), 120, device="cuda", dtype=torch.uint8)
        return ExpertCodes("e2m1", codes, width, grid, (1, 32))
    grid = torch.full((experts, rows, whole // 128), 0.004, device="cuda", dtype=BF16)
    return ExpertCodes("int4", codes, width, grid, (1, 128), torch.full_like(grid, 7, dtype=torch.uint8))


class Layer(NamedTuple):
    shape: Shape
    up: Side
    down: Side
    b1: Tensor | None
    b2: Tensor | None

    @classmethod
    def of(cls, shape: Shape, form: str) -> Layer:
        up, down = (
            make(form, shape.experts, rows, width, gated=gated)
            for rows, width, gated in ((2 * shape.ffn, shape.dim, True), (shape.dim, shape.ffn, False))
        )
        if not shape.clamped:
            return cls(shape, up, down, None, None)
        biases = (torch.randn(shape.experts, rows, device="cuda", dtype=BF16) for rows in (2 * shape.ffn, shape.dim))
        return cls(shape, up, down, *biases)

    def run(self, x: Tensor, logits: Tensor, **how: Any) -> Tensor:
        weights, index = moe.route(logits, self.shape.top_k, early=True)
        how = {"early": True, **how}
        if isinstance(self.up, MxCodes) or isinstance(self.down, MxCodes):
            return self._run_packed(x, weights, index, **how)
        rest = {"b1": self.b1, "b2": self.b2, "act": self.shape.act, "codes": CODES, "stream": x, **how}
        if isinstance(self.up, Tensor):
            return whole(moe.run_experts(x, weights, index, self.up, self.down, **rest))  # type: ignore[arg-type]
        return moe_coded.run_experts(x, weights, index, self.up, self.down, **rest)

    def _run_packed(self, x: Tensor, weights: Tensor, index: Tensor, **how: Any) -> Tensor:
        from quire.ops.triton import moe_mx  # lazy

        known = moe.fused_act(self.shape.act, CODES)
        assert known is not None and isinstance(self.up, MxCodes) and isinstance(self.down, MxCodes)
        return moe_mx.run_experts(
            x, weights, index, self.up, self.down, b1=self.b1, b2=self.b2, act=known, stream=x, **how
        )

    def error(self, tokens: int, **how: Any) -> float:
        x, logits = inputs(self.shape, tokens)
        weights, index = moe_ops.route(logits, self.shape.top_k)
        biases = [None if b is None else b.float() for b in (self.b1, self.b2)]
        wanted = ops.run_coded_experts.reference(
            x.float(), weights, index, *(s.float() if isinstance(s, Tensor) else s for s in (self.up, self.down)),
            b1=biases[0], b2=biases[1], act=self.shape.meant, stream=x.float(),
        )  # fmt: skip
        found = self.run(x, logits, **how).float()
        return float((found - wanted).norm() / (wanted - x.float()).norm())


def inputs(shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, shape.dim, device="cuda", dtype=BF16), torch.randn(tokens, shape.experts, device="cuda")


def seconds(layer: Layer, tokens: int, **how: Any) -> float:
    """Of one layer; each turn routes tokens to experts of its own."""
    turns = 8 if tokens <= 4 else 2
    sets = [inputs(layer.shape, tokens) for _ in range(turns)]
    layer.run(*sets[0], **how)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [layer.run(*given, **how) for given in sets]
    graph.replay()
    times = []
    for _ in range(11):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / turns)
    del outs
    return statistics.median(times)


def compare(shape: Shape) -> None:
    plain: dict[int, float] = {}
    for form in shape.forms:
        layer = Layer.of(shape, form)
        errors = "/".join(f"{layer.error(tokens):.0e}" for tokens in (2, 48, 2048))
        line = []
        for tokens in TOKENS:
            took = seconds(layer, tokens)
            plain.setdefault(tokens, took)
            line.append(f"{tokens}: {took * 1e6:.0f}us x{plain[tokens] / took:.2f}")
        print(f"{shape.name:12} {form:10} {'  '.join(line)}  err {errors}", flush=True)
        if form.startswith("fp8"):
            line = [
                f"{tokens}: {(took := seconds(layer, tokens, round_from=None)) * 1e6:.0f}us x{plain[tokens] / took:.2f}"
                for tokens in TOKENS[1:]
            ]
            print(f"{'':12} {'  a16':10} {'  '.join(line)}", flush=True)
        del layer
        torch.cuda.empty_cache()


def sweep(shape: Shape, form: str, tokens: int) -> None:
    """The best tiles for the two matmuls, one at a time."""
    layer = Layer.of(shape, form)
    if tokens <= moe.FEW_TOKENS:
        tried = []
        for bn, size, warps in itertools.product((1, 2, 4, 8), (256, 512, 1024), (1, 2, 4)):
            for side in ("up", "down"):
                few = CodedFewConfig()._replace(**{side: (bn, size, warps)})
                tried.append((seconds(layer, tokens, few=few), f"{side} {bn, size, warps}"))
        report(shape, form, tokens, tried)
        return
    tried = []
    for name, side, config, pair in (byte_tiles if is_bytes(layer) else coded_tiles)(layer, tokens):
        try:
            tried.append((seconds(layer, tokens, **{name: pair}), f"{side} {tuple(config)}"))
        except Exception as wrong:  # too much shared memory, or registers: not a choice
            if "CUDA error" in str(wrong):
                raise
    report(shape, form, tokens, tried)


def is_bytes(layer: Layer) -> bool:
    if isinstance(layer.up, MxCodes) or isinstance(layer.down, MxCodes):
        return False
    return moe_bytes.fits(inputs(layer.shape, 2)[0], layer.up, layer.down)


def heights(layer: Layer, tokens: int, least: int) -> list[int]:
    each = tokens * layer.shape.top_k / layer.shape.experts
    return [bm for bm in (16, 32, 64, 128) if bm >= min(least, each / 4) and bm <= max(16, each * 4)]


def coded_tiles(layer: Layer, tokens: int) -> Iterator[Tried]:
    first, second = moe_coded.configs_of(tokens * layer.shape.top_k, layer.shape.experts, BF16)
    for bm, bn, (warps, stages), swap, side in itertools.product(
        heights(layer, tokens, first.bm), (32, 64, 128, 256), ((4, 3), (4, 4), (8, 3)), (True, False), (0, 1)
    ):
        config = CodedTileConfig(bm, bn, 128, warps, stages, swap)
        if bm * bn <= 128 * (256 if side else 128):
            pair = (first._replace(bm=bm), config) if side else (config, second)
            yield "configs", SIDES[side], config, pair


def byte_tiles(layer: Layer, tokens: int) -> Iterator[Tried]:
    """Those of a first matmul that does not round its results are 64 columns wide."""
    assert isinstance(layer.up, ExpertCodes) and isinstance(layer.down, ExpertCodes)
    first, second = moe_bytes.configs_of(tokens * layer.shape.top_k, layer.up, layer.down)
    for bm, bn, (warps, stages), swap, resident, side in itertools.product(
        heights(layer, tokens, first.bm), (64, 128, 256), ((4, 3), (4, 4), (8, 3), (8, 4)), (True, False), (0, 1, 2),
        (0, 1),
    ):  # fmt: skip
        config = BytesConfig(bm, bn, 128, warps, stages, swap, resident, rounds=bn == 128)
        if side or bn < 256:
            pair = (first._replace(bm=bm), config) if side else (config, second)
            yield "byte_configs", SIDES[side], config, pair


def report(shape: Shape, form: str, tokens: int, tried: list[tuple[float, str]]) -> None:
    for side in (*SIDES, "up", "down"):
        best = sorted(entry for entry in tried if entry[1].startswith(f"{side} "))[:4]
        for took, config in best:
            print(f"{shape.name:12} {form:10} {tokens:5}: {took * 1e6:7.1f} us  {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", type=int, nargs="+", metavar="TOKENS")
    parser.add_argument("--form", action="append", help="for --sweep: some forms only")
    options = parser.parse_args()
    torch.manual_seed(0)
    for shape in SHAPES:
        if options.sweep is None:
            compare(shape)
            continue
        for form, tokens in itertools.product(shape.forms[1:], options.sweep):
            if form != PACKED and (not options.form or form in options.form):
                sweep(shape, form, tokens)


if __name__ == "__main__":
    main()
