"""Fused CUDA ops: each is checked against its reference, then timed against its floor (bytes or operations).

    python benchmarks/gpu/ops.py                     # everything
    python benchmarks/gpu/ops.py norm moe            # some: norm act qkv sample filter moe share
    python benchmarks/gpu/ops.py moe --sweep         # and try other tiles for the grouped products

A time is that of one call inside a CUDA graph that goes through several sets of inputs, together larger than the L2
cache; the median of many replays, by CUDA events. Floor: 4.3 TB/s, 800 TFLOP/s in bfloat16, and 1.4 us for a launch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.ops import act as act_ops
from quire.ops import moe as moe_ops
from quire.ops import norm as norm_ops
from quire.ops import qkv as qkv_ops
from quire.ops import sample as sample_ops
from quire.ops.parts import whole
from quire.ops.triton import act, moe, norm, rope, sample

BANDWIDTH, MATMUL, LAUNCH = 4.3e12, 8e14, 1.4e-6
CACHE = 120 << 20
BF16 = torch.bfloat16


class Line(NamedTuple):
    name: str
    call: Callable[..., object]
    make: Callable[[], tuple]  # one set of inputs
    num_bytes: float  # of one call, and so of one set
    flops: float = 0.0
    launches: int = 1
    error: float | None = None  # relative, against the reference


def rand(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def apart(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def seconds(line: Line) -> float:
    """Of one call."""
    sets = [line.make() for _ in range(max(2, min(64, int(CACHE // max(line.num_bytes, 1)) + 1)))]
    for given in sets[:2]:
        line.call(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [line.call(*given) for given in sets]
    graph.replay()
    times = []
    for _ in range(15):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(sets))
    del kept
    return statistics.median(times)


def show(line: Line) -> None:
    took = seconds(line)
    floor = max(line.num_bytes / BANDWIDTH, line.flops / MATMUL, line.launches * LAUNCH)
    rate = f"{line.flops / took / 1e12:6.0f} TF" if line.flops / MATMUL > line.num_bytes / BANDWIDTH else (
        f"{line.num_bytes / took / 1e9:6.0f} GB/s"
    )  # fmt: skip
    error = "" if line.error is None else f"{line.error:.1e}"
    print(
        f"{line.name:44s} {took * 1e6:9.1f} {floor * 1e6:9.1f} {took / floor:6.2f} {rate:>12s} {error:>9s}", flush=True
    )


def norms() -> Iterator[Line]:
    for tokens, width in itertools.product((1, 256, 8192), (1024, 4096)):
        weight = rand(width)
        x, delta = rand(tokens, width), rand(tokens, width)
        found, _ = norm.add_rms_norm(x.clone(), delta, weight, 1e-6)
        error = apart(found, norm_ops.add_rms_norm(x, delta, weight, 1e-6)[0])

        def add(x: Tensor, delta: Tensor, weight: Tensor = weight) -> object:
            return norm.add_rms_norm(x, delta, weight, 1e-6)

        def make(tokens: int = tokens, width: int = width) -> tuple:
            return rand(tokens, width), rand(tokens, width, scale=1e-3)

        yield Line(f"add+rms_norm {tokens}x{width}", add, make, 8 * tokens * width, error=error)


def acts() -> Iterator[Line]:
    form = act.gated_form(act.SILU)
    for tokens, width in itertools.product((1, 256, 8192), (3072, 12288)):
        x = rand(tokens, 2 * width)
        error = apart(form(x), act_ops.GATED["silu"].reference(x))

        def make(tokens: int = tokens, width: int = width) -> tuple:
            return (rand(tokens, 2 * width),)

        yield Line(f"silu-mul {tokens}x{width}", form, make, 6 * tokens * width, error=error)


def products() -> Iterator[Line]:
    """Between qkv and attention: head norms, rotation, cache write."""
    for tokens, (heads, kv_heads) in itertools.product((1, 256, 8192), ((16, 8), (32, 8))):
        size, width = 128, (heads + 2 * kv_heads) * 128
        weight = rand(size)
        inverse = 1.0 / 1e6 ** (torch.arange(0, size, 2, device="cuda") / size)

        def make(tokens: int = tokens, width: int = width, kv: int = kv_heads, inv: Tensor = inverse) -> tuple:
            cos, sin = rope.rope_tables(torch.randint(0, 8000, (tokens,), device="cuda"), inv, 1.0, False, BF16)
            memory = rand(2, tokens // 16 + 1, kv, 16, 128).transpose(2, 3)
            slots = torch.randperm((tokens // 16 + 1) * 16, device="cuda")[:tokens]
            return rand(tokens, width), cos, sin, memory[0], memory[1], slots

        def call(
            qkv: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
            heads: int = heads, kv: int = kv_heads, weight: Tensor = weight, op: Callable = rope.prepare_qkv,
        ) -> Tensor:  # fmt: skip
            prep = qkv_ops.QkvPrep(heads, kv, weight, weight, 1e-6, 0.0, False, cos, sin, False)
            return op(qkv, prep, keys, values, slots)

        given = make()
        error = apart(call(*given), call(*given, op=qkv_ops.prepare_qkv))
        yield Line(f"qk-norm+rope+kv write {tokens}x({heads}+{kv_heads})", call, make, 4 * tokens * width, error=error)


def choices(filters: bool) -> Iterator[Line]:
    vocab = 151936
    rules = ((0.7, 20, 0.95), (0.7, 0, 0.9)) if filters else ((0.0, 0, 1.0), (0.6, 0, 1.0))
    for rows, dtype, (heat, k, p) in itertools.product((1, 32, 256), (torch.float32, BF16), rules):
        index = torch.arange(rows, device="cuda", dtype=torch.int32)
        seeds = torch.randint(0, 2**60, (rows,), device="cuda")
        columns = (
            torch.full((rows,), heat, device="cuda"), torch.full((rows,), k, device="cuda", dtype=torch.int32),
            torch.full((rows,), p, device="cuda"),
        )  # fmt: skip

        def make(rows: int = rows, dtype: torch.dtype = dtype) -> tuple:
            return (rand(rows, vocab, dtype=dtype, scale=3.0),)

        def call(
            logits: Tensor, index: Tensor = index, seeds: Tensor = seeds, columns: tuple = columns,
            op: Callable = sample.sample_rows,
        ) -> tuple:  # fmt: skip
            return op(logits, index, index, seeds, *columns, filters=filters)

        given = make()
        wrong = float((call(*given)[0] != call(*given, op=sample_ops.sample_rows)[0]).float().mean())
        size = rows * vocab * given[0].element_size()
        name = f"choose {rows} rows {str(dtype)[6:]} t={heat} k={k} p={p}"
        yield Line(name, call, make, size * (2 if filters else 1), launches=4 if filters else 2, error=wrong)


class Mixture(NamedTuple):
    w1: Tensor
    w2: Tensor
    top_k: int

    @property
    def experts(self) -> int:
        return self.w1.shape[0]


def experts(sweep: bool) -> Iterator[Line]:
    """Qwen3-30B-A3B: 128 experts of 2048 x 768, 8 chosen. `sweep`: other tiles too."""
    mixture = Mixture(rand(128, 1536, 2048, scale=0.02), rand(128, 2048, 768, scale=0.02), 8)
    for tokens in (1, 8, 32, 128, 256, 1024, 4096, 16384):
        pairs = tokens * mixture.top_k
        plain = moe.configs_of(pairs, mixture.experts, BF16)
        chosen = plain if tokens == 1 else moe.tma_configs_of(pairs, mixture.experts)
        for configs in (chosen, *(_others(chosen, tokens) if sweep else ())):
            yield _layer(mixture, tokens, configs, check=configs is chosen and tokens <= 1024)


def shares() -> Iterator[Line]:
    """The same on one of 2 or 8 ranks that have whole experts. Beside `moe`: what pairs of other ranks cost."""
    for ranks in (2, 8):
        own = 128 // ranks
        mixture = Mixture(rand(own, 1536, 2048, scale=0.02), rand(own, 2048, 768, scale=0.02), 8)
        for tokens in (1, 8, 32, 128, 1024, 16384):
            yield _share(mixture, tokens, ranks)


def _share(mixture: Mixture, tokens: int, ranks: int) -> Line:
    form = act.gated_form(act.SILU)
    w1, w2, top_k = mixture
    count = ranks * mixture.experts
    places = torch.arange(count, dtype=torch.int32, device=w1.device)
    places[mixture.experts :] = -1

    def call(x: Tensor, logits: Tensor) -> Tensor:
        weights, index = moe.route(logits, top_k)
        here = places.index_select(0, index.flatten()).view(index.shape)
        rest = {"b1": None, "b2": None, "act": form, "codes": {form: act.SILU}, "all_experts": count}
        return whole(moe.run_experts(x, weights, here, w1, w2, **rest))  # type: ignore[arg-type]

    def make() -> tuple:
        return rand(tokens, 2048), rand(tokens, count, dtype=torch.float32)

    x, logits = make()
    weights, index = moe_ops.route(logits, top_k)
    reference = act_ops.GATED["silu"].reference
    wanted = whole(moe_ops.run_experts(x, weights, places[index], w1, w2, b1=None, b2=None, act=reference))
    error = apart(call(x, logits), wanted) if wanted.any() else None
    touched = mixture.experts * (1 - (1 - top_k / count) ** tokens)
    flops = 6.0 * tokens * top_k * 2048 * 768 / ranks
    return Line(f"moe {tokens} tokens, 1 of {ranks} ranks", call, make, touched * 6 * 2048 * 768, flops, 6, error)


def _others(chosen: tuple[moe.Config, moe.Config], tokens: int) -> Iterator[tuple[moe.Config, moe.Config]]:
    config = moe.MoeTileConfig
    if tokens <= 128:
        tries = [
            (config(16, bn, bk, warps, stages), config(16, 2 * bn, bk, warps, stages))
            for bn, bk, warps, stages in (
                (32, 64, 4, 6), (32, 128, 4, 3), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 4), (64, 128, 8, 4),
                (32, 128, 8, 4), (16, 256, 4, 4),
            )
        ]  # fmt: skip
    elif tokens <= 1024:
        tries = [
            (config(bm, bn, bk, warps, stages), config(bm, 2 * bn, bk, warps, stages))
            for bm, bn, bk, warps, stages in (
                (16, 64, 128, 4, 4), (32, 64, 64, 4, 4), (32, 32, 128, 4, 4), (64, 64, 64, 4, 4), (64, 64, 64, 8, 4),
                (64, 128, 64, 8, 3), (128, 64, 64, 8, 4),
            )
        ]  # fmt: skip
    else:
        tries = [
            (config(128, 128, 64, 8, 4), config(128, 256, 64, 8, 3)),
            (config(128, 64, 64, 4, 4), config(128, 128, 64, 4, 4)),
            (config(64, 128, 64, 4, 4), config(64, 256, 64, 4, 4)),
            (config(128, 64, 64, 8, 4), config(128, 128, 64, 8, 3)),
            (config(128, 128, 32, 8, 5), config(128, 128, 32, 8, 5)),
        ]
    return (pair for pair in tries if pair != chosen)


def _layer(mixture: Mixture, tokens: int, configs: tuple[moe.Config, moe.Config], *, check: bool) -> Line:
    form = act.gated_form(act.SILU)
    w1, w2, top_k = mixture

    def call(x: Tensor, logits: Tensor) -> Tensor:
        weights, index = moe.route(logits, top_k)
        rest = {"b1": None, "b2": None, "act": form, "codes": {form: act.SILU}, "configs": configs}
        return whole(moe.run_experts(x, weights, index, w1, w2, **rest))  # type: ignore[arg-type]

    def make() -> tuple:
        return rand(tokens, 2048), rand(tokens, mixture.experts, dtype=torch.float32)

    x, logits = make()
    error = None
    if check:
        reference = act_ops.GATED["silu"].reference
        wanted = moe_ops.run_experts(x, *moe_ops.route(logits, top_k), w1, w2, b1=None, b2=None, act=reference)
        error = apart(call(x, logits), whole(wanted))
    touched = mixture.experts * (1 - (1 - top_k / mixture.experts) ** tokens)
    pairs = tokens * top_k
    shapes = " ".join(",".join(map(str, config)) for config in configs)
    return Line(
        f"moe {tokens} tokens [{shapes}]", call, make, touched * 6 * 2048 * 768, 6.0 * pairs * 2048 * 768, 5, error
    )


TABLES: dict[str, Callable[[bool], Iterator[Line]]] = {
    "norm": lambda sweep: norms(), "act": lambda sweep: acts(), "qkv": lambda sweep: products(),
    "sample": lambda sweep: choices(False), "filter": lambda sweep: choices(True), "moe": experts,
    "share": lambda sweep: shares(),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", choices=[*TABLES, []], help="which ops; all if none is named")
    parser.add_argument("--sweep", action="store_true", help="moe: time other tile shapes too")
    given = parser.parse_args()
    torch.manual_seed(0)
    print(f"{'op':44s} {'us':>9s} {'floor us':>9s} {'ratio':>6s} {'rate':>12s} {'error':>9s}")
    for name in given.which or TABLES:
        for line in TABLES[name](given.sweep):
            show(line)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
