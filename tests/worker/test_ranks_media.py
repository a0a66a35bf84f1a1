"""What sums over ranks and may fail for one request (a model's own encoder, heads of pooled vectors): a rank that
cannot end it for reasons of its own does not go on alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.config.model import PoolerConfig
from quire.ops.cpu.native import WRONG, KernelError
from quire.quant.shard import ShardGroup
from quire.schema.kv import KVGroup, KVKind
from quire.schema.media import ArrayData, MediaItem
from quire.schema.params import PoolingParams
from quire.schema.step import EncodeItem, StepPlan
from quire.worker.media import OwnEncoder, WorkerMedia
from quire.worker.pooling_results import Complete, ResultRules, results_of
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


OWN_FAULTS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    *(KernelError(f"qc_linear: the CPU kernels were given {WRONG[code]}", code) for code in (-14, -15, -16, -17)),
]


@pytest.mark.parametrize("failed", OWN_FAULTS)
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


def pooled(group: ShardGroup, fails: Exception | None) -> list[str]:
    """Those of three requests whose results could not be computed; a head that is cut sums what it computes."""

    def embed(vectors: Tensor) -> Tensor:
        summed = group.reduce(vectors)
        if fails is not None and bool((vectors == 13).any()):
            raise fails
        return summed

    params = PoolingParams(task="embed", use_activation=False)
    complete = Complete(["a", "b", "c"], [params] * 3, torch.tensor([1.0, 13.0, 3.0])[:, None].repeat(1, 2))
    model: Any = SimpleNamespace(embed=embed, storage=SimpleNamespace(group=group))
    coming = results_of(model, ResultRules(PoolerConfig(), ("embed",), ""), complete)
    group.reduce(torch.ones(7))  # of the next step
    return list(coming.failed)


@pytest.mark.parametrize("failed", OWN_FAULTS)
def test_a_rank_without_memory_does_not_try_pooled_requests_again_alone(failed: Exception) -> None:
    with pytest.raises(type(failed)):
        on_ranks(2, lambda group: pooled(group, failed if group.rank == 1 else None))


@pytest.mark.parametrize("failed", [IndexError("no such row"), KernelError(f"qc_linear: {WRONG[-12]}", -12)])
def test_what_all_ranks_cannot_pool_they_try_again_together(failed: Exception) -> None:
    assert on_ranks(2, lambda group: pooled(group, failed)) == [["b"], ["b"]]
