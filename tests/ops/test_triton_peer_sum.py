"""The sum over ranks in one kernel, under Triton's interpreter: programs run one after another there, so the others
have told of their pieces before. tests/device/test_peer_sum_gpu.py lets ranks wait for each other."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
ROOM = 1 << 13


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (2, 4)])
def test_sums_in_the_order_of_ranks(rank: int, ranks: int) -> None:
    from quire.ops.triton.peer_sum import MOST_PROGRAMS, num_programs, peer_sum

    pieces = [torch.full((2, MOST_PROGRAMS, ROOM), 7.0) for _ in range(ranks)]
    told = [torch.zeros(MOST_PROGRAMS, ranks, dtype=torch.int32) for _ in range(ranks)]
    turns = torch.full((MOST_PROGRAMS,), (1 << 31) - 2, dtype=torch.int32)  # the second turn wraps around
    addresses = [torch.tensor([one.data_ptr() for one in all_], dtype=torch.int64) for all_ in (pieces, told)]
    for count in (5000, 1, 2048, 300_000, 5000):
        programs, tile, _ = num_programs(count)
        parts = [torch.randn(count) * 10.0**other for other in range(ranks)]
        before = turns.clone()
        for other in range(ranks):
            if other != rank:
                for program, piece in enumerate(parts[other].split(tile)):
                    pieces[other][int(before[program]) & 1, program, : len(piece)] = piece
                told[rank][:programs, other] = before[:programs] + 1
        found = peer_sum(parts[rank].clone(), *addresses, turns, rank=rank, ranks=ranks, room=ROOM)
        wanted = torch.zeros(count)
        for part in parts:
            wanted += part
        assert torch.equal(found, wanted), count
        assert all((one[:programs, rank] == before[:programs] + 1).all() for one in told)  # everybody was told
        assert (turns[:programs] == before[:programs] + 1).all() and (turns[programs:] == before[programs:]).all()


def test_few_programs_for_any_size() -> None:
    from quire.ops.triton.peer_sum import MOST_PROGRAMS, num_programs

    for count in (1, 2047, 2049, 131072, 131073, 1 << 20):
        programs, tile, _ = num_programs(count)
        assert programs <= MOST_PROGRAMS and programs * tile >= count > (programs - 1) * tile
