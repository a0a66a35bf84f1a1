"""The sum over ranks in one kernel, on a GPU: ranks are streams of this process, which run and wait for each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu
ROOM = 4096


class Ranks:
    def __init__(self, count: int) -> None:
        from quire.ops.triton.peer_sum import MOST_PROGRAMS

        self.count = count
        self._memory = [torch.zeros(8 * MOST_PROGRAMS * ROOM, dtype=torch.uint8, device="cuda") for _ in range(count)]
        self._flags = [torch.zeros(MOST_PROGRAMS, count, dtype=torch.int32, device="cuda") for _ in range(count)]
        self._turns = [torch.zeros(MOST_PROGRAMS, dtype=torch.int32, device="cuda") for _ in range(count)]
        self._pieces, self._told = (
            torch.tensor([one.data_ptr() for one in all_], device="cuda") for all_ in (self._memory, self._flags)
        )
        self._streams = [torch.cuda.Stream() for _ in range(count)]

    def sum(self, parts: list[Tensor]) -> None:
        """In place, all at the same time."""
        from quire.ops.triton.peer_sum import peer_sum

        current = torch.cuda.current_stream()
        for rank, (part, stream) in enumerate(zip(parts, self._streams, strict=True)):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                peer_sum(
                    part, self._pieces, self._told, self._turns[rank], rank=rank, ranks=self.count,
                    room=4 * ROOM // part.element_size(),
                )  # fmt: skip
        for stream in self._streams:
            current.wait_stream(stream)


def in_order(parts: list[Tensor]) -> Tensor:
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_rank_has_the_same_bits(count: int, dtype: torch.dtype) -> None:
    ranks = Ranks(count)
    for turn, size in enumerate((4096, 16, 131072, 1000, 40960, 131072, 7) * 6):
        parts = [torch.randn(size, device="cuda").to(dtype) * 10**rank for rank in range(count)]
        wanted = in_order(parts)
        ranks.sum(parts)
        for part in parts:
            assert torch.equal(part, wanted), (turn, size)


def test_a_captured_sum_goes_on_counting() -> None:
    ranks, parts = Ranks(2), [torch.zeros(20000, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    ranks.sum(parts)  # compiled
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(3):
            ranks.sum(parts)
    for _ in range(20):
        drawn = [torch.randn_like(part) for part in parts]
        for part, one in zip(parts, drawn, strict=True):
            part.copy_(one)
        graph.replay()
        first = in_order(drawn)
        wanted = in_order([in_order([first, first])] * 2)
        assert torch.equal(parts[0], wanted) and torch.equal(parts[1], wanted)
