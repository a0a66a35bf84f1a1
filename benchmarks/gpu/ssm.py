"""Mixers with running states on one GPU: kernel times against the bytes and operations they need.

    PYTHONPATH=. python benchmarks/gpu/ssm.py

Decode: a CUDA graph of several layers with states of their own, so that nothing stays in the L2 between them; floor is
reading and writing every state once at 4.3 TB/s. Prompt: one row, and eight of an eighth each; floor is reading inputs
and writing outputs once, and the products of the chunks at half the TF32 rate (250e12 operations a second).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from quire.ops.ssm import StateWork
from quire.ops.triton import ssm, ssm_chunk

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
BANDWIDTH, RATE = 4.3e12, 250e12
LAYERS = 4


def milliseconds(run: Callable[[], object], repeat: int = 20) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured(run: Callable[[], object]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def decode_work(rows: int) -> StateWork:
    blocks = torch.randperm(rows, device=DEVICE)
    return StateWork(None, blocks, blocks, torch.empty((0, 4), dtype=torch.int32, device=DEVICE), np.empty((0, 3), int))


def prompt_work(lengths: list[int]) -> StateWork:
    ends = np.cumsum(lengths)
    spans = np.stack((ends - lengths, ends, np.zeros_like(ends)), 1).astype(np.int32)
    own = np.concatenate((spans[:, :2], np.stack((np.full(len(ends), -1), np.arange(len(ends))), 1)), 1)
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    return StateWork(none, none, none, torch.tensor(own, dtype=torch.int32, device=DEVICE), spans)


def delta_inputs(tokens: int, key_heads: int, heads: int, size: int) -> tuple:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=DTYPE, device=DEVICE)

    fixed = (torch.randn(heads, device=DEVICE), torch.randn(heads, device=DEVICE), 1.0)
    qk = (draw(tokens, key_heads, size), draw(tokens, key_heads, size))
    return (*qk, draw(tokens, heads, size), draw(tokens, heads), draw(tokens, heads), *fixed)


def ssd_inputs(tokens: int, heads: int, size: int, groups: int, entries: int) -> tuple:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=DTYPE, device=DEVICE)

    parts = (
        draw(tokens, heads, size),
        draw(tokens, heads),
        draw(tokens, groups, entries),
        draw(tokens, groups, entries),
    )
    a_log, skip, bias = torch.randn(3, heads, device=DEVICE).unbind()
    return (*parts, a_log, skip, bias, (0.0, float("inf")))


def size_of(args: tuple) -> int:
    return sum(t.numel() * t.element_size() for t in args if isinstance(t, Tensor))


def measure(name: str, scan: Callable, make: Callable[[int], tuple], state: tuple[int, ...], flops: float) -> None:
    """flops: of one token's share of a chunk."""
    for rows in (1, 32, 256):
        work, args = decode_work(rows), make(rows)
        states = [torch.randn(rows, *state, device=DEVICE) * 0.1 for _ in range(LAYERS)]
        run = captured(lambda args=args, work=work, states=states: [scan(*args, s, work) for s in states])
        floor = 2 * states[0].numel() * 4 / BANDWIDTH * 1e3
        print(f"{name:22} decode {rows:5} rows   {milliseconds(run) / LAYERS:8.4f} ms   floor {floor:8.4f} ms")
        del states
    for lengths in ([8192], [1024] * 8, [128] * 64):
        work, args = prompt_work(lengths), make(sum(lengths))
        fresh = torch.zeros(len(lengths), *state, device=DEVICE)
        taken = milliseconds(lambda args=args, work=work, fresh=fresh: scan(*args, fresh, work))
        floor = max(size_of(args) * 1.3 / BANDWIDTH, flops * sum(lengths) / RATE) * 1e3
        print(f"{name:22} prompt {len(lengths):3} x {lengths[0]:5}   {taken:8.4f} ms   floor {floor:8.4f} ms")


def main() -> None:
    measure("delta 16/32 x 128x128", ssm_chunk.delta_scan, lambda n: delta_inputs(n, 16, 32, 128), (32, 128, 128),
            32 * 2 * (3 * 128 * 128 + 3 * 64 * 128))  # fmt: skip
    measure("mamba2 128 x 64x128", ssm_chunk.ssd_scan, lambda n: ssd_inputs(n, 128, 64, 8, 128), (128, 64, 128),
            128 * 2 * (2 * 64 * 128 + 64 * (64 + 128)))  # fmt: skip
    for tokens, work in ((256, decode_work(256)), (8192, prompt_work([8192]))):
        x, weight = (
            torch.randn(tokens, 8192, dtype=DTYPE, device=DEVICE),
            torch.randn(8192, 4, dtype=DTYPE, device=DEVICE),
        )
        states = torch.zeros(tokens, 8192, 3, dtype=DTYPE, device=DEVICE)
        taken = milliseconds(lambda x=x, w=weight, s=states, work=work: ssm.causal_conv(x, w, None, s, work, "silu"))
        moved = 2 * x.numel() * 2 + (2 * states.numel() * 2 if tokens == 256 else 0)
        print(
            f"conv 8192 x 4          {tokens:5} tokens        {taken:8.4f} ms   floor {moved / BANDWIDTH * 1e3:8.4f} ms"
        )


if __name__ == "__main__":
    main()
