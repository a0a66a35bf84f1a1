"""Which GPU a rank has, when several may share one, and where ranks cannot sum through each other's memory; no GPU is
needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from quire.base import env
from quire.schema.errors import ConfigError
from quire.worker import ranks
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


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Warnings of a rank that joins others which are not there."""
    lines: list[str] = []
    monkeypatch.setattr(ranks._log, "warning", lambda line, *args: lines.append(line % args))
    monkeypatch.setattr(ranks, "_choose_interface", lambda meeting: None)
    monkeypatch.setattr(ranks, "_sums_of", lambda *_: ranks.as_it_is)
    for name in ("init_process_group", "new_group"):
        monkeypatch.setattr(ranks.distributed, name, lambda *args, **named: None)
    monkeypatch.setattr(ranks.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(ranks.distributed, "get_rank", lambda: 0)
    monkeypatch.setenv("QUIRE_PEER_SUMS", "1")
    env.forget_all()
    yield lines
    env.forget_all()


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
JOINS: dict[str, Callable[[int], object]] = {
    "it is for GPUs, not for ranks on cpu": lambda rank: ranks.join(rank, 2, "file:///there", CPU),
    "pipeline stages": lambda rank: ranks.join(rank, 2, "file:///there", GPU, stages=2),
    "not all ranks are processes of one machine": lambda rank: ranks.join(rank, 2, "tcp://10.0.0.7:4000", GPU),
    "a launcher has started": lambda rank: ranks.join(rank, 2, ranks.LAUNCHED, GPU),
    "engines that have experts together": lambda rank: ranks.join_engines(0, 1, rank, 2, "file:///there", GPU),
}


@pytest.mark.parametrize("why", JOINS)
def test_peer_sums_that_cannot_be_say_why(why: str, said: list[str]) -> None:
    JOINS[why](0)
    (line,) = said
    assert line.startswith("QUIRE_PEER_SUMS has no effect: ") and why in line


def test_peer_sums_on_gpus_that_ranks_share(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SHARE_GPUS", "1")
    ranks.join(0, 2, "file:///there", GPU)
    assert said == ["QUIRE_PEER_SUMS has no effect: ranks that share a GPU (QUIRE_SHARE_GPUS) sum over gloo"]
    ranks.join(1, 2, "file:///there", GPU)
    assert len(said) == 1, "one of the ranks says it"


@pytest.mark.parametrize("why", JOINS)
def test_nothing_is_said_of_peer_sums_that_nobody_asked_for(
    why: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUIRE_PEER_SUMS")
    env.forget_all()
    JOINS[why](0)
    assert not said
