"""Which GPU a rank has, and when several may share one; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from quire.base import env
from quire.schema.errors import ConfigError
from quire.worker.ranks import gpu_of


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_has_a_gpu_of_its_own() -> None:
    assert [gpu_of(rank, 2) for rank in range(2)] == [0, 1]
    with pytest.raises(ConfigError, match="worker 2 of 4 has no GPU: 2 are visible"):
        gpu_of(2, 4, 1 << 20)


@pytest.mark.usefixtures("two_gpus")
def test_ranks_share_gpus_where_asked_and_told_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SHARE_GPUS", "1")
    env.forget_all()
    assert [gpu_of(rank, 4, 1 << 20) for rank in range(4)] == [0, 1, 0, 1]
    assert [gpu_of(rank, 2) for rank in range(2)] == [0, 1]  # enough for all: nothing is shared
    with pytest.raises(ConfigError, match="4 workers share 2 GPUs; give kv_cache_memory_bytes"):
        gpu_of(0, 4)
