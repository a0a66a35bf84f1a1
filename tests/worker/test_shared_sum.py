"""Sums through shared memory: ranks are threads here; tests/engine/test_ranks_engine.py has processes."""

from __future__ import annotations

import mmap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.worker import shared_sum
from quire.worker.shared_sum import PIECE, SMALL, SharedSum


def in_order(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.promote_types(parts[0].dtype, torch.float32))
    for part in parts:
        total += part
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_has_the_same_bits(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    size = ranks * 64 + 2 * (ranks + 1) * PIECE
    assert shared_sum._made(path, size) and not shared_sum._made(path, size)
    memories = [shared_sum._opened(path, size) for _ in range(ranks)]
    cases = [(torch.bfloat16, SMALL // 2), (torch.float32, 1), (torch.float64, 3), (torch.bfloat16, SMALL // 2 + 1),
             (torch.float32, PIECE // 4 + 7), (torch.float16, 5 * ranks), (torch.float32, 40_001)]  # fmt: skip
    drawn = [[(torch.randn(count) * 10**rank).to(kind) for kind, count in cases] for rank in range(ranks)]
    found: dict[int, list[Tensor]] = {}

    def work(rank: int, memory: mmap.mmap) -> None:
        reduce = SharedSum(rank, ranks, memory, lambda x: x)
        found[rank] = [reduce(x.clone()) for x in drawn[rank]]

    threads = []
    for rank, memory in enumerate(memories):
        assert memory is not None
        threads.append(threading.Thread(target=work, args=(rank, memory), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for at, (kind, count) in enumerate(cases):
        wanted = in_order([drawn[rank][at] for rank in range(ranks)])
        for rank in range(ranks):
            assert torch.equal(found[rank][at], wanted), (kind, count, rank)


def test_what_it_does_not_sum_goes_through_the_group(tmp_path: Path) -> None:
    path, passed = tmp_path / "memory", []
    assert shared_sum._made(path, 64 + 4 * PIECE)
    memory = shared_sum._opened(path, 64 + 4 * PIECE)
    assert memory is not None

    def otherwise(x: Tensor) -> Tensor:
        passed.append(x.dtype)
        return x

    reduce = SharedSum(0, 1, memory, otherwise)
    reduce(torch.arange(4))
    reduce(torch.ones(4, 4).T[:2])
    assert passed == [torch.int64, torch.float32]


def test_no_room_is_no_error(tmp_path: Path) -> None:
    assert not shared_sum._made(tmp_path / "missing" / "memory", 64)
    assert shared_sum._opened(tmp_path / "missing", 64) is None
