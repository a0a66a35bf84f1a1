"""Checks of the state-space ops, shared by tests on CPU (interpreter) and on the GPU: a form against the reference, and
the reference against plain recurrences written out token by token."""

from __future__ import annotations

import numpy as np
import torch

from quire.attention.state import mixed_work
from quire.layers.batch import GroupStep
from quire.ops import ssm
from quire.ops.ssm import StateWork


def make_work(
    rows: list[tuple[int, int]], block_size: int, device: str, seed: int = 0, *, single: bool = False
) -> tuple[StateWork, int]:
    """(work of rows (start, count) over scrambled blocks, number of blocks)."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-(start + count) // block_size) for start, count in rows)
    num = len(rows) * width + 2
    blocks = torch.randperm(num, generator=generator)[: len(rows) * width].view(len(rows), width)
    counts = [count for _, count in rows]
    starts = torch.tensor(np.concatenate(((0,), np.cumsum(counts))), dtype=torch.int32)
    contexts = [start + count for start, count in rows]
    tables = blocks.int().to(device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    return mixed_work(GroupStep(tables, starts.to(device), contexts, counts, none), block_size, single=single), num


ROWS = [[(0, 70), (5, 1), (3, 40), (0, 1), (64, 1), (10, 90)], [(7, 1), (0, 1), (31, 1)], [(0, 3), (2, 2), (1, 67)]]


class Draw:
    def __init__(self, seed: int, device: str) -> None:
        self.generator, self.device = torch.Generator().manual_seed(seed), device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(self.device, dtype)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert torch.isfinite(got).all()
    error = (got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-3)
    assert error <= tolerance, f"relative error {error:.2e}"


def written(work: StateWork) -> torch.Tensor:
    """Blocks that a step writes."""
    return torch.cat((work.store, work.pieces[:, 3].long())).cpu()


def compare(form, op, args, states: torch.Tensor, work: StateWork, tail: tuple = (), tolerance: float = 1e-5) -> None:
    """A form and the reference on the same states: outputs, blocks written, and blocks that must not be touched."""
    own, theirs = states.clone(), states.clone()
    want = op.reference(*args, theirs, work, *tail)
    got = form(*args, own, work, *tail)
    close(got, want, tolerance)
    close(own[written(work)], theirs[written(work)], tolerance)
    rest = torch.ones(len(states), dtype=torch.bool)
    rest[written(work)] = False
    assert torch.equal(own[rest], states[rest])


def conv_case(rows, block_size, device, dtype, *, channels=70, taps=4, bias=True, seed=0):
    draw, (work, num) = Draw(seed, device), make_work(rows, block_size, device, seed)
    total = sum(count for _, count in rows)
    x = draw(total, channels + 9, dtype=dtype)[:, 4 : 4 + channels]  # rows of a wider product
    weight = draw(channels, taps, dtype=dtype, scale=0.5)
    return (x, weight, draw(channels, dtype=dtype) if bias else None), draw(num, channels, taps - 1, dtype=dtype), work


def ssd_case(rows, block_size, device, dtype, *, heads=6, size=20, groups=2, entries=24, seed=0):
    draw, (work, num) = Draw(seed, device), make_work(rows, block_size, device, seed)
    total = sum(count for _, count in rows)
    x, dt = draw(total, heads, size, dtype=dtype), draw(total, heads + 3, dtype=dtype)[:, :heads]
    b, c = (draw(total, groups, entries, dtype=dtype, scale=0.5) for _ in range(2))
    args = (x, dt, b, c, draw(heads), draw(heads), draw(heads), (0.0, 5.0))
    return args, draw(num, heads, size, entries), work


def delta_case(rows, block_size, device, dtype, *, key_heads=2, heads=4, keys=24, values=20, seed=0):
    draw, (work, num) = Draw(seed, device), make_work(rows, block_size, device, seed)
    total = sum(count for _, count in rows)
    q, k = (draw(total, key_heads, keys, dtype=dtype) for _ in range(2))
    v, ba = draw(total, heads, values, dtype=dtype), draw(total, 2 * heads, dtype=dtype)
    args = (q, k, v, ba[:, heads:], ba[:, :heads], draw(heads), draw(heads), 1.0)
    return args, draw(num, heads, keys, values, scale=0.3), work


def selective_case(rows, block_size, device, dtype, *, channels=50, entries=12, seed=0):
    draw, (work, num) = Draw(seed, device), make_work(rows, block_size, device, seed)
    total = sum(count for _, count in rows)
    x, dt = draw(total, channels, dtype=dtype), draw(total, channels, dtype=dtype)
    b, c = (draw(total, entries, dtype=dtype) for _ in range(2))
    args = (x, dt, b, c, draw(channels, entries), draw(channels), draw(channels))
    return args, draw(num, channels, entries), work


def norm_case(device, dtype, *, tokens=5, groups=3, group=40, shared=False, seed=0):
    draw = Draw(seed, device)
    x, wide = draw(tokens, groups * group, dtype=dtype), draw(tokens, groups * group + 8, dtype=dtype)
    return x, wide[:, 8:], draw(group if shared else groups * group, dtype=dtype), 1e-5, group


def places(device: str) -> tuple:
    tables = torch.tensor([[3, 4, 5, -1], [9, -1, -1, -1], [7, 8, 1, 2], [-1, -1, -1, -1]], dtype=torch.int32)
    rows = torch.tensor([2, 0, 1, 2, 3], dtype=torch.int32)
    contexts = torch.tensor([9, 5, 1, 13, 0], dtype=torch.int32)
    return tables.to(device), rows.to(device), contexts.to(device), 4


def check_places(form) -> None:
    for args in [places("cpu")]:
        load, store = form(*args)
        assert load.tolist() == [8, 3, -1, 1, -1] and store.tolist() == [1, 4, 9, 2, -1]
    want = ssm.state_places.reference(*places("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(form(*places("cpu")), want, strict=True))
