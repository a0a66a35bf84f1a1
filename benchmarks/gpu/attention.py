"""Attention on one GPU: correctness over a matrix of shapes, then times against the bytes and operations needed.

    PYTHONPATH=. python benchmarks/gpu/attention.py            check, decode, prefill, mixed
    PYTHONPATH=. python benchmarks/gpu/attention.py --sweep prompt|decode|long|prefix|library    attention_sweep.py

Decode: replays of a CUDA graph of several layers with caches of their own, so that nothing stays in the L2 between
them. floor is the time to read the keys and values once at 4.3 TB/s. Prefill: causal operations, 4 H D L^2 / 2.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Callable

import torch

from quire.attention.library import Library
from quire.attention.triton import TritonAttention, choose_tiles
from quire.base import registry
from quire.layers.batch import GroupStep
from quire.ops.triton.attention import AttentionTile
from quire.schema.kv import KVGroup, KVKind, KVSpec
from tests.attention_case import RULES, Case

MODELS = {"0.6B": (16, 8, 128), "8B": (32, 8, 128), "30B-A3B": (32, 4, 128)}
BANDWIDTH = 4.3e12
POOL = 20 << 30
DEVICE = torch.device("cuda")


class Tuned(TritonAttention):
    """With tile shapes given from outside, a number of parts against the default, and no library unless asked for."""

    def __init__(
        self, waves: float = 1.0, library: Library | None = None, fixed: bool = False, **tiles: AttentionTile
    ) -> None:
        super().__init__(fixed=fixed, library=library)
        self.library, self.waves, self.given = library, waves, tiles

    def sms(self, device):
        return int(super().sms(device) * self.waves)

    def tiles(self, *shape):
        return super().tiles(*shape)._replace(**self.given)


class Bench:
    def __init__(self, room: int = POOL) -> None:
        self.pool = torch.empty(room, dtype=torch.uint8, device=DEVICE)
        self.pool.view(torch.bfloat16).normal_()

    def setting(self, backend, model, rows, context, page, layers=8):
        """(caches, tables, group): `layers` caches with contents, one scrambled table for all."""
        _, kv_heads, size = MODELS[model]
        spec = KVSpec(
            layer="x", kind=KVKind.FULL, block_size=page, num_kv_heads=kv_heads, head_size=size, dtype="bfloat16"
        )
        width = -(-context // page)
        blocks = rows * width
        layers = max(1, min(layers, len(self.pool) // (blocks * spec.page_bytes)))
        caches = []
        for layer in range(layers):
            start = layer * blocks * spec.page_bytes
            memory = self.pool[start : start + blocks * spec.page_bytes].view(blocks, spec.page_bytes)
            caches.append(backend.make_cache(spec, blocks, memory))
        tables = torch.randperm(blocks, device=DEVICE).view(rows, width).int()
        return caches, tables, KVGroup(kind=KVKind.FULL, block_size=page, window=0, layers=("x",))

    def decode(self, backend, model, rows, context, page=64, contexts=None, shared=False) -> tuple[float, float]:
        """(microseconds per layer, bytes per layer); graph replays. shared: all rows have the blocks of the first, but
        for the last 64 tokens."""
        heads, kv_heads, size = MODELS[model]
        caches, tables, group = self.setting(backend, model, rows, context, page)
        if shared:
            tables[:, : (context - 64) // page] = tables[0, : (context - 64) // page]
        lens = torch.tensor(contexts or [context] * rows, device=DEVICE, dtype=torch.int32)
        index = torch.arange(rows, device=DEVICE, dtype=torch.int32)
        slots = torch.full((rows,), -1, device=DEVICE)
        starts = torch.arange(rows + 1, device=DEVICE, dtype=torch.int32)
        step = GroupStep(tables, starts, [context] * rows, [1] * rows, slots, row_index=index, contexts=lens,
                         is_decode=True, is_static=True)  # fmt: skip
        q = torch.randn(rows, heads, size, device=DEVICE, dtype=torch.bfloat16)
        backend.plan(step, group).run(q, None, None, caches[0], scale=size**-0.5)
        plan, graph = backend.plan(step, group), torch.cuda.CUDAGraph()
        repeats = max(1, 16 // len(caches))
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for cache in caches * repeats:
                plan.run(q, None, None, cache, scale=size**-0.5)
        took = timed(graph.replay) / (len(caches) * repeats)
        return took, int(lens.sum()) * kv_heads * size * 2 * 2

    def prefill(self, backend, model, lens, page=64, before=0) -> tuple[float, float]:
        """(microseconds, operations) of fresh prompts, or of chunks after `before` tokens."""
        heads, kv_heads, size = MODELS[model]
        longest = max(lens) + before
        caches, tables, group = self.setting(backend, model, len(lens), longest, page, layers=1)
        contexts = [n + before for n in lens]
        places = [torch.arange(before, n, device=DEVICE) for n in contexts]
        slots = torch.cat([tables[row].long()[p // page] * page + p % page for row, p in enumerate(places)])
        starts = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
        step = GroupStep(tables, starts, contexts, list(lens), slots)
        qkv = torch.randn(sum(lens), heads + 2 * kv_heads, size, device=DEVICE, dtype=torch.bfloat16)
        parts = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
        plan = backend.plan(step, group)
        took = timed(lambda: plan.run(*parts, caches[0], scale=size**-0.5))
        return took, sum(4 * heads * size * (n * before + n * (n + 1) / 2) for n in lens)


def timed(run: Callable[[], object], count: int = 20) -> float:
    """Median microseconds, by events."""
    for _ in range(3):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in pairs:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)


def check() -> None:
    """Random cases against the reference; prints the worst relative error of each kind."""
    rng = random.Random(0)
    worst: dict[str, float] = {}
    wrong = []
    shapes = [(16, 8, 128, 0), (32, 8, 128, 0), (32, 4, 128, 0), (4, 4, 64, 0), (14, 2, 64, 0), (8, 8, 80, 0),
              (12, 4, 96, 0), (6, 2, 112, 0), (8, 4, 256, 0), (16, 1, 576, -512), (128, 1, 576, -512)]  # fmt: skip
    limits = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
    for (heads, kv_heads, size, value), dtype in itertools.product(shapes, limits):
        rule = rng.choice(RULES)
        lens = [(c := rng.randint(1, 1500), rng.choice([0, 1, 1, 1, c, rng.randint(1, c)])) for _ in range(6)]
        lens.append((700, 9))
        for fixed, static in ((False, 0), (True, 0), (False, 8)):
            case = Case([(c, 1) for c, _ in lens] if static else lens, heads=heads, kv_heads=kv_heads, size=size,
                        value=value, rule=rule, dtype=dtype, device=DEVICE,
                        block_size=rng.choice([16, 32, 64]))  # fmt: skip
            found = case.run(TritonAttention(fixed=fixed), static=static)[0].float().cpu()
            wanted = case.reference()
            error = ((found[: len(wanted)] - wanted).norm() / wanted.norm()).item()
            name = f"{str(dtype)[6:]}{' fixed' * fixed}{' captured' * bool(static)}"
            worst[name] = max(worst.get(name, 0.0), error) if error == error else float("nan")
            if not error < limits[dtype]:
                wrong.append(f"{name} heads {heads}/{kv_heads} size {size} {rule} {lens}: {error:.2e}")
    print("check, worst |error| / |reference|:", ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))
    print("WRONG:\n  " + "\n  ".join(wrong) if wrong else "all within limits")


def show_decode(bench: Bench) -> None:
    print(f"\ndecode {'model':8} batch context |   us  TB/s floor | page 16: us  TB/s | fixed: us")
    for model, rows, context in itertools.product(MODELS, (1, 32, 256), (512, 2048, 8192)):
        (a, size), (b, _) = (bench.decode(Tuned(), model, rows, context, page) for page in (64, 16))
        c, _ = bench.decode(Tuned(fixed=True), model, rows, context)
        print(f"       {model:8} {rows:5} {context:7} | {a:6.1f} {size / a / 1e6:5.2f} {size / BANDWIDTH * 1e6:6.1f} "
              f"| {b:6.1f} {size / b / 1e6:5.2f} | {c:6.1f}", flush=True)  # fmt: skip
    ragged = [256] * 250 + [16000] * 6
    took, size = bench.decode(Tuned(), "8B", 256, 16000, contexts=ragged)
    print(f"       8B, 250 rows of 256 and 6 of 16000: {took:.1f} us, {size / took / 1e6:.2f} TB/s")


def show_prefill(bench: Bench) -> None:
    print(f"\nprefill {'model':8} lengths     | Triton us TFLOP/s | library us TFLOP/s | fixed us")
    for model, (lens, before) in itertools.product(
        MODELS, [((2048,), 0), ((8192,), 0), ((2048,) * 4, 0), ((512,) * 16, 0), ((64,), 8000), ((2048,), 6144)]
    ):
        a, work = bench.prefill(Tuned(), model, lens, before=before)
        b, _ = bench.prefill(Tuned(library=Library(least=64, worth=0)), model, lens, before=before)
        c, _ = bench.prefill(Tuned(fixed=True), model, lens, before=before)
        name = f"{len(lens)}x{lens[0]}" + (f"+{before}" if before else "")
        rates = [f"{t:8.1f} {work / t / 1e6:7.0f}" for t in (a, b)]
        print(f"        {model:8} {name:11} | {rates[0]} | {rates[1]}  | {c:8.1f}", flush=True)


def show_mixed(bench: Bench) -> None:
    """One chunk among decodes, eagerly: device time, and what the host spends to launch a layer."""
    heads, kv_heads, size = MODELS["0.6B"]
    backend, lens, before = Tuned(), [512] + [1] * 255, 1000
    caches, tables, group = bench.setting(backend, "0.6B", 256, before + 512, 16, layers=1)
    starts = torch.tensor([0, *lens], device=DEVICE).cumsum(0).int()
    slots = torch.full((sum(lens),), -1, device=DEVICE)
    qkv = torch.randn(sum(lens), heads + 2 * kv_heads, size, device=DEVICE, dtype=torch.bfloat16)
    parts = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
    step = GroupStep(tables, starts, [before + n for n in lens], lens, slots)
    began = time.perf_counter()
    plan = backend.plan(step, group)
    plan.run(*parts, caches[0], scale=1.0)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    took = timed(lambda: plan.run(*parts, caches[0], scale=1.0))
    began = time.perf_counter()
    for _ in range(50):
        plan.run(*parts, caches[0], scale=1.0)
    host = (time.perf_counter() - began) / 50
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        backend.plan(step, group).run(*parts, caches[0], scale=1.0)
    planned = (time.perf_counter() - began) / 20 - host
    print(f"\nmixed 0.6B, 512 queries + 255 decodes over 1000: {took:.1f} us; host {host * 1e6:.0f} us a layer, "
          f"plan {planned * 1e6:.0f} us a step; first call {first:.2f} s")  # fmt: skip


def attempt(run: Callable[[], tuple[float, float]]) -> str:
    try:
        return f"{run()[0]:8.1f}"
    except Exception as wrong:  # noqa: BLE001  # a shape that does not fit the chip is a result
        return f"{type(wrong).__name__[:8]:>8}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=("prompt", "decode", "long", "prefix", "library"))
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--only", choices=("check", "decode", "prefill", "mixed"))
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.sweep:
        sweeps = registry.load("benchmarks.gpu.attention_sweep:run")  # it imports this file
        sweeps(asked.sweep, asked.compile, __file__)
        return
    print(torch.cuda.get_device_name(), torch.__version__, "default tiles",
          *choose_tiles(torch.bfloat16, 128, 128, latent=False, group=2))  # fmt: skip
    if asked.only in (None, "check"):
        check()
        if asked.only:
            return
    bench = Bench()
    for name, show in (("decode", show_decode), ("prefill", show_prefill), ("mixed", show_mixed)):
        if asked.only in (None, name):
            show(bench)


if __name__ == "__main__":
    main()
