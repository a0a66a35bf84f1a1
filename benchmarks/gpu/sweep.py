"""Tile shapes tried one against another, so that the tables in quire/ops/triton can be set by measurement.

    python benchmarks/gpu/sweep.py few [--rows 1 2 4]     # products of a few rows with what stands around them
    python benchmarks/gpu/sweep.py chain                  # the products of a whole model in one graph, one row
    python benchmarks/gpu/sweep.py moe [--tokens 1 32]    # grouped products of a mixture, each for itself
    python benchmarks/gpu/sweep.py rows                   # norm, activation, qkv pass of long prompts

Times as in ops.py: inside a graph that goes through inputs larger than the L2 cache. Kernels are compiled in threads
first. The last lines repeat the best of each.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from ops import BANDWIDTH, BF16, CACHE, LAUNCH, MATMUL, apart, rand
from torch import Tensor

from quire.ops.few import NormRule
from quire.ops.qkv import QkvPrep
from quire.ops.triton import act, few, moe, moe_few, moe_many, norm, rope

Call = Callable[[], object]


def compile_all(calls: Iterable[Call]) -> None:
    """Run every call once, in threads, so that compiling overlaps. What fails here fails again when it is timed."""

    def one(call: Call) -> None:
        with torch.inference_mode(), contextlib.suppress(Exception):
            call()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, list(calls)))
    torch.cuda.synchronize()


def timed(calls: Sequence[Call], repeats: int = 9) -> float:
    """Seconds of one call, over a graph of all of them."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    del kept
    return statistics.median(times)


def sets_for(num_bytes: float) -> int:
    return max(2, min(24, int(CACHE // max(num_bytes, 1)) + 1))


def best_of(
    name: str, tries: dict[Any, Callable[[int], object]], sets: int, num_bytes: float, flops: float = 0.0
) -> str:
    """Times every try (a function of the set's number); prints each, returns a line about the best."""
    floor = max(num_bytes / BANDWIDTH, flops / MATMUL, LAUNCH)
    found = []
    for config, call in tries.items():
        try:
            took = timed([lambda i=i, call=call: call(i) for i in range(sets)])
        except Exception as wrong:  # noqa: BLE001  # the sweep goes on
            print(f"    {name:34s} {config!s:30s} {type(wrong).__name__}: {str(wrong)[:80]}", flush=True)
            continue
        found.append((took, config))
    found.sort(key=lambda pair: pair[0])
    named = [pair for pair in found[6:] if isinstance(pair[1], str)]
    shown = "  ".join(f"{_short(config)} {took * 1e6:.1f}" for took, config in found[:6] + named)
    worst = f" .. {_short(found[-1][1])} {found[-1][0] * 1e6:.1f}" if len(found) > 6 else ""
    print(f"    {name:30s} floor {floor * 1e6:.1f}: {shown}{worst}", flush=True)
    took, config = found[0]
    by_bytes = num_bytes / BANDWIDTH >= flops / MATMUL
    rate = f"{num_bytes / took / 1e9:.0f} GB/s" if by_bytes else f"{flops / took / 1e12:.0f} TF"
    floor_us, ratio = floor * 1e6, took / floor
    return f"{name:34s} {took * 1e6:9.1f} us  floor {floor_us:8.1f}  x{ratio:5.2f}  {rate:>10s}  {_short(config)}"


def _short(config: Any) -> str:
    return "(" + ",".join(map(str, config)) + ")" if isinstance(config, tuple) else str(config)


# --- products of a few rows


class Product(NamedTuple):
    name: str
    n: int
    k: int
    norm: bool = False
    gated: bool = False
    add: bool = False


SHAPES = {
    "0.6B": [
        Product("qkv", 4096, 1024, norm=True), Product("o", 1024, 2048, add=True),
        Product("up", 3072, 1024, norm=True, gated=True), Product("down", 1024, 3072, add=True),
        Product("head", 151936, 1024),
    ],
    "8B": [
        Product("qkv", 6144, 4096, norm=True), Product("o", 4096, 4096, add=True),
        Product("up", 12288, 4096, norm=True, gated=True), Product("down", 4096, 12288, add=True),
        Product("head", 151936, 4096),
    ],
    "30B": [
        Product("qkv", 5120, 2048, norm=True), Product("o", 2048, 4096, add=True), Product("router", 128, 2048),
        Product("head", 151936, 2048),
    ],
}  # fmt: skip
LAYERS = {"0.6B": 28, "8B": 36, "30B": 48}
FEW = [(1, 1024, 2), (2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (4, 512, 4), (8, 512, 4), (16, 512, 4), (16, 256, 4),
       (2, 2048, 4), (4, 2048, 8), (8, 1024, 8), (1, 2048, 4), (4, 1024, 2), (2, 512, 2), (8, 512, 8)]  # fmt: skip


def inputs_of(shape: Product, rows: int, count: int) -> list[tuple[Tensor, Tensor, NormRule | None, Tensor | None]]:
    made = []
    for _ in range(count):
        weight = rand(shape.n * (2 if shape.gated else 1), shape.k, scale=0.02)
        rule = NormRule(rand(shape.k), 1e-6, 0.0, False) if shape.norm else None
        made.append((rand(rows, shape.k), weight, rule, rand(rows, shape.n) if shape.add else None))
    return made


SILU = (act.SILU, 0.0, 0.0)


def fused(shape: Product, given: tuple, config: few.FewRowsConfig | None = None, early: bool = False) -> Tensor:
    x, weight, rule, stream = given
    return few.few_linear(
        x, weight, norm=rule, act=SILU if shape.gated else None, stream=stream, config=config, early=early
    )


def plain(shape: Product, given: tuple) -> Tensor:
    """The same by a library product and the kernels around it."""
    x, weight, rule, stream = given
    h = x if rule is None else norm.rms_norm(x, rule.weight, rule.eps)
    y = F.linear(h, weight)
    if shape.gated:
        y = act.gated(y, act.SILU)
    return y if stream is None else stream + y


def sweep_few(rows_list: Sequence[int], models: Sequence[str]) -> Iterator[str]:
    for rows, model in itertools.product(rows_list, models):
        todo = []
        for shape in SHAPES[model]:
            weight_bytes = 2.0 * shape.n * shape.k * (2 if shape.gated else 1)
            given = inputs_of(shape, rows, sets_for(weight_bytes))
            configs = [few.FewRowsConfig(*c) for c in FEW if c[1] <= 2 * shape.k]
            if shape.gated:
                configs = [c for c in configs if c.bn * c.bk <= 8192]
            if rows > 1:
                configs = [c for c in configs if c.bn >= 4]
            todo.append((shape, weight_bytes, given, configs))
        compile_all(
            lambda s=s, g=g, c=c, e=e: fused(s, g[0], c, e) for s, _, g, cs in todo for c in cs for e in (False, True)
        )
        for shape, weight_bytes, given, configs in todo:
            name = f"{model} {shape.name} {shape.n}x{shape.k} rows {rows}"
            error = apart(fused(shape, given[0]), plain(shape, given[0]))
            yield best_of(name, few_tries(shape, given, configs), len(given), weight_bytes) + f"  error {error:.1e}"
            given.clear()


def few_tries(shape: Product, given: list, configs: list[few.FewRowsConfig]) -> dict[Any, Callable[[int], object]]:
    tries: dict[Any, Callable[[int], object]] = {
        "library": lambda i: F.linear(given[i][0], given[i][1]), "plain": lambda i: plain(shape, given[i]),
    }  # fmt: skip
    for config in configs:
        tries[config] = lambda i, c=config: fused(shape, given[i], c)
        tries[("early", *config)] = lambda i, c=config: fused(shape, given[i], c, True)
    return tries


# --- a model's products one after another


def sweep_chain(rows_list: Sequence[int], models: Sequence[str]) -> Iterator[str]:
    """All products of a model's layers, without attention, in one graph."""
    for rows, model in itertools.product(rows_list, models):
        shapes = [shape for shape in SHAPES[model] if shape.name != "head"]
        layers = [[inputs_of(shape, rows, 1)[0] for shape in shapes] for _ in range(LAYERS[model])]
        size = sum(given[1].numel() * 2 for layer in layers for given in layer)
        for name, way in (
            ("plain", plain),
            ("fused", fused),
            ("fused early", lambda s, g: fused(s, g, early=True)),
        ):
            run = [partial(way, s, g) for layer in layers for s, g in zip(shapes, layer, strict=True)]
            compile_all(run[: len(shapes)])
            took = timed(run) * len(run)
            yield (
                f"{model} rows {rows} {name:12s} {took * 1e3:7.3f} ms for {len(run)} products, floor "
                f"{size / BANDWIDTH * 1e3:.3f}, {size / took / 1e9:.0f} GB/s"
            )
        del layers


# --- mixtures


EXPERTS, TOP_K, DIM, FFN = 128, 8, 2048, 768


def tiles_for(tokens: int) -> tuple[list[moe.MoeTileConfig], list[moe.MoeTileConfig]]:
    """Candidates of the first and the second product."""
    c = moe.MoeTileConfig
    if tokens <= 64:
        first = [c(16, bn, bk, warps, stages) for bn, bk, warps, stages in (
            (32, 128, 4, 4), (32, 128, 4, 3), (32, 64, 4, 6), (32, 256, 4, 3), (64, 64, 4, 5), (64, 128, 4, 3),
            (64, 128, 8, 3), (16, 256, 4, 4), (16, 256, 2, 3), (16, 128, 2, 6), (32, 128, 2, 4), (32, 256, 8, 3),
        )]  # fmt: skip
        second = [c(16, bn, bk, warps, stages) for bn, bk, warps, stages in (
            (64, 128, 4, 4), (64, 128, 4, 3), (32, 128, 4, 4), (32, 256, 4, 3), (128, 64, 4, 4), (128, 128, 4, 3),
            (128, 128, 8, 3), (64, 256, 4, 2), (64, 64, 4, 6), (32, 128, 2, 5), (64, 256, 8, 3),
        )]  # fmt: skip
        return first, second
    if tokens <= 1024:
        first = [c(bm, bn, bk, warps, stages) for bm, bn, bk, warps, stages in (
            (16, 64, 128, 4, 3), (32, 32, 128, 4, 4), (32, 64, 64, 4, 4), (32, 64, 128, 4, 3), (64, 32, 128, 4, 4),
            (64, 64, 64, 4, 4), (64, 64, 64, 8, 4), (64, 64, 128, 8, 3), (64, 128, 64, 8, 3), (64, 64, 64, 4, 3),
            (128, 64, 64, 8, 3),
        )]  # fmt: skip
        second = [c(bm, bn, bk, warps, stages) for bm, bn, bk, warps, stages in (
            (16, 128, 128, 4, 3), (32, 64, 128, 4, 4), (32, 128, 64, 4, 4), (32, 128, 128, 4, 3), (64, 64, 128, 4, 4),
            (64, 128, 64, 4, 4), (64, 128, 64, 4, 3), (64, 128, 128, 8, 3), (64, 256, 64, 8, 3), (128, 128, 64, 8, 3),
            (128, 64, 64, 4, 4),
        )]  # fmt: skip
        return first, second
    first = [c(bm, bn, bk, warps, stages) for bm, bn, bk, warps, stages in (
        (64, 64, 64, 4, 4), (64, 128, 64, 4, 3), (64, 128, 64, 8, 4), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4),
        (128, 64, 128, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 32, 8, 5), (128, 64, 64, 4, 3),
    )]  # fmt: skip
    second = [c(bm, bn, bk, warps, stages) for bm, bn, bk, warps, stages in (
        (64, 128, 64, 4, 4), (64, 256, 64, 4, 4), (64, 256, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3),
        (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 128, 8, 3), (128, 128, 64, 4, 4),
    )]  # fmt: skip
    return first, second


class Mixed(NamedTuple):
    """One set of inputs of a mixture's products."""

    x: Tensor
    h: Tensor
    weights: Tensor
    index: Tensor  # type: ignore[assignment]  # a tuple has a method of this name, which nobody calls
    w1: Tensor
    w2: Tensor


def mixed_inputs(tokens: int, w1: Tensor, w2: Tensor) -> Mixed:
    weights, index = moe.route(rand(tokens, EXPERTS, dtype=torch.float32), TOP_K)
    return Mixed(rand(tokens, DIM), rand(tokens * TOP_K, FFN), weights, index, w1, w2)


def first_product(given: Mixed, config: moe.MoeTileConfig, tiles: moe.ExpertTiles) -> Tensor:
    return moe.product(given.x, given.w1, None, tiles, TOP_K, config, pairs=len(given.h), first=True, act=SILU)


def second_product(given: Mixed, config: moe.MoeTileConfig, tiles: moe.ExpertTiles) -> Tensor:
    return moe.product(given.h, given.w2, None, tiles, TOP_K, config, pairs=len(given.h), first=False)


def sweep_moe(tokens_list: Sequence[int]) -> Iterator[str]:
    w1, w2 = rand(EXPERTS, 2 * FFN, DIM, scale=0.02), rand(EXPERTS, DIM, FFN, scale=0.02)
    warm = mixed_inputs(256, w1, w2)
    wanted = {config for tokens in tokens_list for config in tiles_for(tokens)[0]}
    wanted_second = {config for tokens in tokens_list for config in tiles_for(tokens)[1]}
    sorted_by = {bm: moe.sort_pairs(warm.index, EXPERTS, bm) for bm in (16, 32, 64, 128)}
    compile_all(
        [lambda c=c: first_product(warm, c, sorted_by[c.bm]) for c in wanted]
        + [lambda c=c: second_product(warm, c, sorted_by[c.bm]) for c in wanted_second]
    )
    for tokens in tokens_list:
        yield from sweep_mixture(
            tokens, [mixed_inputs(tokens, w1, w2) for _ in range(16 if tokens <= 4 else 4 if tokens < 2048 else 2)]
        )


def sweep_mixture(tokens: int, sets: list[Mixed]) -> Iterator[str]:
    tiles = {bm: [moe.sort_pairs(given.index, EXPERTS, bm) for given in sets] for bm in (16, 32, 64, 128)}
    pairs = tokens * TOP_K
    touched = EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** tokens)
    for name, configs, function, inner in (
        ("first", tiles_for(tokens)[0], first_product, 2 * FFN),
        ("second", tiles_for(tokens)[1], second_product, FFN),
    ):
        tries: dict[Any, Callable[[int], object]] = {
            c: (lambda i, c=c, f=function: f(sets[i], c, tiles[c.bm][i])) for c in configs
        }
        size, flops = touched * inner * DIM * 2, 2.0 * pairs * inner * DIM
        yield best_of(f"moe {tokens} tokens {name}", tries, len(sets), size, flops)
    if tokens <= 4:
        yield from sweep_few_tokens(tokens, sets)
    if tokens >= 1024:
        yield from sweep_many_tokens(tokens, sets, tiles)
    logits = [rand(tokens, EXPERTS, dtype=torch.float32) for _ in sets]
    y = rand(pairs, DIM)
    parts: dict[str, Callable[[int], object]] = {
        "route": lambda i: moe.route(logits[i], TOP_K),
        "sort": lambda i: moe.sort_pairs(sets[i].index, EXPERTS, 64),
        "combine": lambda i: moe.combine(y, sets[i].weights),
    }
    took = {name: timed([partial(call, i) for i in range(len(sets))]) * 1e6 for name, call in parts.items()}
    yield f"moe {tokens} tokens: " + ", ".join(f"{name} {us:.1f} us" for name, us in took.items())


def sweep_few_tokens(tokens: int, sets: list[Mixed]) -> Iterator[str]:
    """Every pair for itself, on the plain units."""
    config, size = moe_few.MoeFewConfig, 2.0 * tokens * TOP_K * DIM * FFN
    shapes = [(2, 1024, 4), (4, 1024, 4), (8, 1024, 4), (4, 2048, 4), (4, 2048, 8), (2, 2048, 4), (8, 512, 4),
              (4, 512, 4), (4, 512, 2), (2, 1024, 2), (8, 1024, 8)]  # fmt: skip
    ups: dict[Any, Callable[[int], object]] = {
        (early, *shape): (
            lambda i, c=config(up=shape), e=early: moe_few.up(
                sets[i].x, sets[i].index, sets[i].w1, None, SILU, config=c, early=e
            )
        )
        for shape, early in itertools.product(shapes, (False, True))
    }
    shapes = [(4, 256, 4), (2, 256, 4), (2, 256, 2), (1, 256, 2), (8, 256, 8), (4, 128, 4), (8, 128, 4), (4, 256, 8)]
    downs: dict[Any, Callable[[int], object]] = {
        (early, *shape): (
            lambda i, c=config(down=shape), e=early: moe_few.down(
                sets[i].h, sets[i].weights, sets[i].index, sets[i].w2, None, sets[i].x, config=c, early=e
            )
        )
        for shape, early in itertools.product(shapes, (False, True))
    }
    compile_all([partial(call, 0) for call in (*ups.values(), *downs.values())])
    yield best_of(f"moe {tokens} tokens up, each", ups, len(sets), 2 * size)
    yield best_of(f"moe {tokens} tokens down, each", downs, len(sets), size)


def sweep_many_tokens(tokens: int, sets: list[Mixed], tiles: dict[int, list[moe.ExpertTiles]]) -> Iterator[str]:
    """Tiles read by the copy engine."""
    c = moe_many.MoeManyConfig
    shapes = [(128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (64, 128, 64, 4, 3), (64, 128, 64, 8, 4)]
    ways = [(8, True, True), (8, True, False), (8, False, False), (16, True, True), (4, True, True)]
    firsts = [c(*shape, *way) for shape, way in itertools.product(shapes, ways) if way[0] == 8 or shape[0] == 128]
    shapes = [(128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (64, 256, 64, 4, 3), (128, 128, 64, 4, 3)]
    seconds = [c(*shape, *way) for shape, way in itertools.product(shapes, ways) if way[0] == 8 or shape[0] == 128]
    pairs = tokens * TOP_K

    def first(config: moe_many.MoeManyConfig, i: int) -> Tensor:
        given = sets[i]
        order = tiles[config.bm][i][:4]
        return moe_many.product(given.x, given.w1, None, order, TOP_K, pairs=pairs, act=SILU, config=config)

    def second(config: moe_many.MoeManyConfig, i: int) -> Tensor:
        given = sets[i]
        order = tiles[config.bm][i][:4]
        return moe_many.product(given.h, given.w2, None, order, TOP_K, pairs=pairs, act=None, config=config)

    compile_all([partial(first, config, 0) for config in firsts] + [partial(second, config, 0) for config in seconds])
    for name, function, configs, inner in (("first", first, firsts, 2 * FFN), ("second", second, seconds, FFN)):
        plain = first_product if name == "first" else second_product
        config = configs[0]
        wanted = plain(sets[0], moe.configs_of(pairs, EXPERTS, BF16)[name == "second"]._replace(bm=128), tiles[128][0])
        error = apart(function(config, 0), wanted)
        tries: dict[Any, Callable[[int], object]] = {tuple(c): partial(function, c) for c in configs}
        line = best_of(f"moe {tokens} tokens {name}, TMA", tries, len(sets), 0.0, 2.0 * pairs * inner * DIM)
        yield f"{line}  error {error:.1e}"


# --- long prompts


def sweep_rows() -> Iterator[str]:
    for tokens, width in itertools.product((8192, 16384), (1024, 2048, 4096)):
        yield sweep_norm(tokens, width)
    for tokens, width in itertools.product((8192, 16384), (3072, 12288)):
        yield sweep_act(tokens, width)
    for tokens, (heads, kv_heads) in itertools.product((8192, 16384), ((16, 8), (32, 8), (32, 4))):
        yield sweep_prepare(tokens, heads, kv_heads)


def sweep_norm(tokens: int, width: int) -> str:
    size, weight = 8.0 * tokens * width, rand(width)
    sets = [(rand(tokens, width), rand(tokens, width, scale=1e-3)) for _ in range(sets_for(size))]
    tries: dict[Any, Callable[[int], object]] = {
        warps: (lambda i, w=warps: norm.add_rms_norm(*sets[i], weight, 1e-6, warps=w)) for warps in (1, 2, 4, 8, 16)
    }
    return best_of(f"add+rms_norm {tokens}x{width}", tries, len(sets), size)


def sweep_act(tokens: int, width: int) -> str:
    size = 6.0 * tokens * width
    sets = [rand(tokens, 2 * width) for _ in range(sets_for(size))]
    tries: dict[Any, Callable[[int], object]] = {
        (block, warps): (lambda i, b=block, w=warps: act.gated(sets[i], act.SILU, tile=(b, w)))
        for block, warps in ((1024, 4), (512, 2), (1024, 2), (2048, 4), (2048, 8), (4096, 8))
    }
    return best_of(f"silu-mul {tokens}x{width}", tries, len(sets), size)


def sweep_prepare(tokens: int, heads: int, kv_heads: int) -> str:
    width = (heads + 2 * kv_heads) * 128
    size, weight = 4.0 * tokens * width, rand(128)
    inverse = 1.0 / 1e6 ** (torch.arange(0, 128, 2, device="cuda") / 128)
    cos, sin = rope.rope_tables(torch.randint(0, 8000, (tokens,), device="cuda"), inverse, 1.0, False, BF16)
    prep = QkvPrep(heads, kv_heads, weight, weight, 1e-6, 0.0, False, cos, sin, False)
    sets = []
    for _ in range(sets_for(size)):
        keys, values = rand(2, tokens // 16 + 1, kv_heads, 16, 128).transpose(2, 3)
        slots = torch.randperm((tokens // 16 + 1), device="cuda")[:, None] * 16 + torch.arange(16, device="cuda")
        sets.append((rand(tokens, width), prep, keys, values, slots.flatten()[:tokens].contiguous()))
    tries: dict[Any, Callable[[int], object]] = {
        (tile, warps): (lambda i, t=tile, w=warps: rope.prepare_qkv(*sets[i], tile=(t, w)))
        for tile, warps in ((2048, 4), (1024, 4), (1024, 2), (1024, 1), (2048, 2), (4096, 4), (4096, 8), (512, 1))
    }
    return best_of(f"qkv pass {tokens}x({heads}+{kv_heads})", tries, len(sets), size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", choices=["few", "chain", "moe", "rows"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[1, 8, 32, 128, 256, 512, 2048, 8192, 16384], help="moe only"
    )
    given = parser.parse_args()
    torch.manual_seed(0)
    began = time.perf_counter()
    found = {
        "few": lambda: sweep_few(given.rows, given.models), "chain": lambda: sweep_chain(given.rows, given.models),
        "moe": lambda: sweep_moe(given.tokens), "rows": sweep_rows,
    }[given.which]()  # fmt: skip
    lines = list(found)
    print(f"best, {given.which}, {time.perf_counter() - began:.0f} s:")
    print("\n".join(lines))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
