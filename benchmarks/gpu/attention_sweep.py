"""Tile shapes of the attention kernels, timed at the shapes of the workloads: what the table of choose_tiles is from.

    PYTHONPATH=. python benchmarks/gpu/attention.py --sweep prompt | decode | long | prefix | library

Kernels are compiled first, by processes beside each other that run every variant once on a small problem; then one
process times them. A row is a variant, a column a model and shape. Prompts: TFLOP/s of the causal operations. Decodes:
TB/s of keys and values read once (shared: by every row, as if nothing were). library: torch's own attention.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu.attention import DEVICE, MODELS, Bench, Tuned, attempt, timed
from quire.attention.library import Dense, dense_attention
from quire.ops.triton.attention import AttentionTile

PROCESSES = 14


class Variant(NamedTuple):
    page: int
    tiles: dict[str, AttentionTile]  # by their name in a TileSet
    waves: float = 1.0  # of parts, against the default

    def backend(self) -> Tuned:
        return Tuned(self.waves, **self.tiles)  # type: ignore[arg-type]

    def label(self) -> str:
        parts = [f"p{self.page}"]
        for name, tiles in self.tiles.items():
            how = "".join((" ahead" * tiles.ahead, " tma" * tiles.tma, f" r{tiles.max_regs}" if tiles.max_regs else ""))
            parts.append(f"{name} " + "x".join(str(n) for n in tiles[:4]) + how)
        return " ".join(parts) + (f" waves {self.waves:g}" if self.waves != 1 else "")


class Shape(NamedTuple):
    name: str
    run: Callable[[Bench, Variant, bool], tuple[float, float]]  # (bench, variant, small) -> microseconds, work


def prompts(model: str, count: int, length: int, before: int = 0) -> Shape:
    def run(bench: Bench, variant: Variant, small: bool) -> tuple[float, float]:
        lens = (200,) if small else (length,) * count
        return bench.prefill(
            variant.backend(), model, lens, page=variant.page, before=256 if small and before else before
        )

    return Shape(f"{model} {count}x{length}" + (f"+{before}" if before else ""), run)


def decodes(model: str, rows: int, context: int, *, shared: bool = False) -> Shape:
    def run(bench: Bench, variant: Variant, small: bool) -> tuple[float, float]:
        sizes = (rows, 900 if shared else 300) if small else (rows, context)
        return bench.decode(variant.backend(), model, *sizes, page=variant.page, shared=shared)

    return Shape(f"{model} {rows}x{context}" + " shared" * shared, run)


def many(*shape: int, page: int = 64, tma: bool = True, ahead: bool = False, max_regs: int | None = None) -> Variant:
    return Variant(page, {"many": AttentionTile(*shape, True, ahead, tma, max_regs)})  # type: ignore[call-arg, arg-type]


def few(*shape: int, pages: tuple[int, ...] = (64,), waves: tuple[float, ...] = (1.0,)) -> list[Variant]:
    tiles = AttentionTile(*shape)  # type: ignore[arg-type]
    return [Variant(page, {"few": tiles, "crowd": tiles}, wave) for page in pages for wave in waves]


def shared(*shape: int, page: int = 64, tma: bool = True, ahead: bool = False) -> Variant:
    return Variant(page, {"shared": AttentionTile(*shape, False, ahead, tma)})  # type: ignore[call-arg, arg-type]


PROMPT_TILES = [
    many(64, 64, 4, 3), many(64, 64, 4, 2), many(64, 64, 4, 3, max_regs=168), many(64, 64, 4, 2, max_regs=168),
    many(64, 64, 4, 3, ahead=True), many(64, 64, 4, 2, ahead=True), many(128, 64, 8, 3, ahead=True),
    many(128, 64, 8, 4, ahead=True), many(128, 64, 8, 3, max_regs=128), many(64, 64, 4, 3, ahead=True, tma=False),
    many(128, 64, 8, 3, ahead=True, tma=False), many(64, 64, 4, 3, page=16, ahead=True, tma=False),
    many(128, 128, 8, 3, page=128, ahead=True), many(128, 128, 8, 2, page=128, ahead=True),
    many(64, 128, 4, 2, page=128, ahead=True), many(128, 128, 8, 3, page=16, ahead=True, tma=False),
]  # fmt: skip
DECODE_TILES = [
    *few(16, 64, 4, 3, pages=(16, 64)), *few(16, 64, 4, 5, pages=(16, 64)), *few(16, 64, 2, 4), *few(16, 32, 2, 5),
    *few(16, 128, 4, 3), *few(16, 128, 8, 3), *few(16, 64, 8, 5),
]  # fmt: skip
LONG_TILES = [
    *few(16, 64, 4, 3, waves=(1.0, 1.5)), *few(16, 64, 4, 5, waves=(1.0, 2.0)), *few(16, 64, 8, 4), *few(16, 64, 2, 4),
]  # fmt: skip
SHARED_TILES = [
    shared(64, 64, 4, 3), shared(64, 64, 4, 3, tma=False), shared(64, 64, 4, 3, page=16, tma=False),
    shared(64, 64, 4, 3, ahead=True), shared(128, 64, 8, 3), shared(128, 64, 8, 3, ahead=True),
    shared(128, 128, 8, 3, page=128, ahead=True),
]  # fmt: skip
SWEEPS: dict[str, tuple[list[Variant], list[Shape]]] = {
    "prompt": (PROMPT_TILES, [
        prompts("0.6B", 4, 2048), prompts("0.6B", 1, 8000), prompts("8B", 4, 2048), prompts("8B", 1, 8000),
        prompts("8B", 1, 4096, 4000), prompts("30B-A3B", 4, 2048), prompts("0.6B", 128, 64, 8000),
    ]),
    "decode": (DECODE_TILES, [
        decodes("0.6B", 256, 800), decodes("8B", 256, 800), decodes("30B-A3B", 256, 800), decodes("0.6B", 32, 256),
        decodes("8B", 32, 256), decodes("0.6B", 1, 256), decodes("8B", 1, 256),
    ]),
    "long": (LONG_TILES, [decodes("0.6B", 32, 8128), decodes("8B", 32, 8128), decodes("30B-A3B", 32, 8128)]),
    "prefix": (SHARED_TILES, [
        decodes("0.6B", 128, 8064, shared=True), decodes("8B", 128, 8064, shared=True),
        decodes("30B-A3B", 128, 8064, shared=True), decodes("8B", 32, 2048, shared=True), decodes("8B", 128, 8064),
    ]),
    "library": ([], []),
}  # fmt: skip


def compile_share(name: str, share: str) -> None:
    """Run the share-th of all variants once, small, so that their kernels lie in the cache on disk."""
    index, of = (int(n) for n in share.split("/"))
    variants, shapes = SWEEPS[name]
    bench = Bench(1 << 30)
    for i, (variant, shape) in enumerate((v, s) for v in variants for s in shapes):
        if i % of == index:
            attempt(lambda s=shape, v=variant: s.run(bench, v, True))


def run(name: str, share: str | None, script: str) -> None:
    if share is not None:
        compile_share(name, share)
    elif name == "library":
        show_libraries()
    else:
        sweep(name, script)


def sweep(name: str, script: str) -> None:
    began = time.perf_counter()
    command = [sys.executable, script, "--sweep", name, "--compile"]
    children = [subprocess.Popen([*command, f"{i}/{PROCESSES}"]) for i in range(PROCESSES)]
    for child in children:
        child.wait()
    compiled = time.perf_counter()
    bench = Bench()
    variants, shapes = SWEEPS[name]
    print(
        f"\nsweep {name}: us, TFLOP/s of prompts, TB/s of decodes\n{'':36}" + "".join(f"{s.name:>24}" for s in shapes)
    )
    for variant in variants:
        cells = [f"{rate(lambda s=shape, v=variant: s.run(bench, v, False)):>24}" for shape in shapes]
        print(f"{variant.label():36}" + "".join(cells), flush=True)
    print(f"compiled in {compiled - began:.0f} s, timed in {time.perf_counter() - compiled:.0f} s")


def rate(run: Callable[[], tuple[float, float]]) -> str:
    try:
        took, work = run()
    except Exception as wrong:  # noqa: BLE001  # a shape that does not fit the chip is a result
        return type(wrong).__name__[:20]
    return f"{took:.1f} {work / took / 1e6:7.2f}"


def show_libraries() -> None:
    """cuDNN on fresh prompts as attention/library.py calls it: the first call of a shape, then the median."""
    print("cuDNN, dense batches: first call ms, then us and TFLOP/s")
    for model, (heads, kv_heads, size) in MODELS.items():
        for count, length in ((8, 2048), (4, 2048), (16, 1024), (32, 512), (64, 256), (1, 8000), (2, 8000), (1, 1000)):
            qkv = torch.randn(count * length, heads + 2 * kv_heads, size, device=DEVICE, dtype=torch.bfloat16)
            q, k, v = qkv[:, :heads].contiguous(), qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
            call = partial(dense_attention, q, k, v, Dense(0, count, length, length), size**-0.5)
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            first, took = time.perf_counter() - began, timed(call)
            began = time.perf_counter()
            for _ in range(20):
                call()
            host = (time.perf_counter() - began) / 20
            torch.cuda.synchronize()
            work = 4 * heads * size * length * (length + 1) / 2 * count
            print(f"  {model:8} {count}x{length}: first {first * 1e3:.1f} ms, {took:.1f} us, {work / took / 1e6:.0f} "
                  f"TFLOP/s, host {host * 1e6:.0f} us", flush=True)  # fmt: skip
