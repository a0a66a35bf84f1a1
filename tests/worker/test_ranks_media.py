"""A model's own encoder, whose layers sum over ranks: a rank that cannot end it does not go on to the step alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.quant.shard import ShardGroup
from quire.schema.kv import KVGroup, KVKind
from quire.schema.media import ArrayData, MediaItem
from quire.schema.step import EncodeItem, StepPlan
from quire.worker.media import OwnEncoder, WorkerMedia
from quire.worker.rows import Rows
from tests.thread_ranks import on_ranks

WIDTH = 4
ITEM = MediaItem(
    modality="audio", key="sound", offset=0, length=3, arrays={"frames": ArrayData((2,), "float32", bytes(8))}
)
PLAN = StepPlan(step=1, grants=(), encode=(EncodeItem("asked", ITEM),))


class Layers:
    """An encoder of two layers, with a sum each. `fails`: between them."""

    width = WIDTH

    def __init__(self, group: ShardGroup, fails: Exception | None) -> None:
        self._group, self._fails = group, fails

    def encode_item(self, modality: str, arrays: Mapping[str, Tensor]) -> Tensor:
        vectors = self._group.reduce(torch.ones(3, WIDTH))
        if self._fails is not None:
            raise self._fails
        return self._group.reduce(vectors)

    def encode_nothing(self, num_tokens: int) -> None: ...


def media_of(group: ShardGroup, fails: Exception | None) -> tuple[WorkerMedia, Rows]:
    cross = KVGroup(kind=KVKind.CROSS, block_size=4, window=0, layers=("a",))
    rows = Rows((cross,), 2, 31, torch.device("cpu"))
    encoder: Any = OwnEncoder(Layers(group, fails))
    return WorkerMedia(encoder, rows, WIDTH, torch.float32, answers=False), rows


@pytest.mark.parametrize(
    "failed",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
)
def test_a_rank_without_memory_fails_instead_of_leaving_the_sums(failed: Exception) -> None:
    def step(group: ShardGroup) -> None:
        media, _ = media_of(group, failed if group.rank == 1 else None)
        media.follow(PLAN)
        group.reduce(torch.ones(7))  # of the step itself

    with pytest.raises(type(failed)):
        on_ranks(2, step)


def test_what_all_ranks_find_wrong_is_the_requests_fault() -> None:
    def step(group: ShardGroup) -> list[float]:
        media, rows = media_of(group, ValueError("frames of no sound"))
        assert media.follow(PLAN) == {}  # whoever answers learns of it from numbers that are none
        group.reduce(torch.ones(7))
        found: list[float] = rows.encoded["sound"].flatten().tolist()
        return found

    for found in on_ranks(2, step):
        assert len(found) == 3 * WIDTH and all(map(math.isnan, found))
