"""Memory that ranks share for their sums: made, mapped by all or by none, and gone with the last of them."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.base import env
from quire.base.procs import Child
from quire.ops.cpu.native import kernels
from quire.ops.cpu.rank_sums import NativeSum
from quire.worker import ranks, shared_sum
from quire.worker.shared_sum import share_sums
from quire.worker.threads import processors_of_ranks
from tests.thread_ranks import on_ranks

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")


# ---- processes -------------------------------------------------------------------------------------------------


def start(folder: Path, count: int, **asked: Any) -> list[Child]:
    known = {"folder": str(folder), "ranks": count, "stages": 1, "seed": 1, "turns": 60} | asked
    return [
        Child("tests.summing_rank:main", json.dumps(known | {"rank": rank}).encode(), name=f"rank {rank}")
        for rank in range(count)
    ]


def end(children: list[Child]) -> None:
    for child in children:
        child.close()


def written(folder: Path, rank: int, kind: str) -> Any:
    path, deadline = folder / f"{rank}.{kind}", time.monotonic() + 120
    while not path.is_file() or not path.read_text():
        assert time.monotonic() < deadline, f"rank {rank} has not {kind}"
        time.sleep(0.02)
    return json.loads(path.read_text())


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(("count", "stages"), [(3, 1), (4, 2)])
def test_processes_sum_by_seed(count: int, stages: int, tmp_path: Path) -> None:
    """Sizes, dtypes and delays are drawn; every rank knows what the others have. Each stage has memory of its own."""
    children = start(tmp_path, count, stages=stages)
    try:
        for rank in range(count):
            assert written(tmp_path, rank, "joined") == {"native": True, "descriptors": 1, "maps": 1}
        assert [written(tmp_path, rank, "done") for rank in range(count)] == [[]] * count
        assert all(child.wait(60) for child in children) and {child.exit_code for child in children} == {0}
    finally:
        end(children)


@pytest.mark.usefixtures("warm_children")
def test_a_killed_rank_leaves_nothing_and_the_other_asleep(tmp_path: Path) -> None:
    """Whoever started both hears of the death (tests/engine/test_ranks_engine.py); until then the other sleeps."""
    children = start(tmp_path, 2, turns=5, stays=True)
    try:
        assert [written(tmp_path, rank, "done") for rank in (0, 1)] == [[], []]
        children[1].signal(signal.SIGKILL)
        assert children[1].wait(30) and children[0].alive
        time.sleep(0.2)
        before = worked(children[0].pid)
        time.sleep(1.0)
        assert children[0].alive and worked(children[0].pid) - before < 0.3
    finally:
        end(children)
    assert not [name for name in os.listdir("/dev/shm") if "quire-sums" in name]


def worked(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- agreement -------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged."""
    said: list[str] = []
    monkeypatch.setattr(shared_sum._log, "info", lambda line, *args: said.append(line % args))
    env.forget_all()
    yield said
    env.forget_all()


def shared(monkeypatch: pytest.MonkeyPatch, count: int = 3) -> list[NativeSum | None]:
    """What ranks, which are threads of this process, come to."""
    group_of: dict[int, Callable[[Tensor], Tensor]] = {}

    def all_reduce(x: Tensor, group: Any) -> None:
        x.copy_(group_of[threading.get_ident()](x.clone()))

    monkeypatch.setattr(shared_sum.distributed, "all_reduce", all_reduce)

    def work(group: Any) -> NativeSum | None:
        group_of[threading.get_ident()] = group.reduce
        return share_sums(group.rank, group.size, None, lambda x: x)

    return on_ranks(count, work)


def test_all_map_the_same_memory(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = shared(monkeypatch)
    assert all(isinstance(one, NativeSum) for one in found) and lines == [
        "Sums of 3 ranks go through shared memory (1536 KiB)"
    ]
    memories = [one._memory for one in found if one is not None]
    memories[0][500_000] = 77
    assert [int(memory[500_000]) for memory in memories] == [77] * 3
    assert len({memory.data_ptr() for memory in memories}) == 3
    assert len(os.listdir("/proc/self/fd")) <= before + 3, "a map keeps one of its own"


def test_memory_has_no_name_and_cannot_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that cuts it would end the others by SIGBUS."""
    descriptor = shared_sum._make(4096)
    try:
        about = os.fstat(descriptor)
        assert about.st_mode & 0o777 == 0o600 and about.st_nlink == 0 and about.st_size == 4096
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)


def test_a_python_built_with_an_older_libc_shares_memory_too(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    """As those of conda and of uv were."""
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.delattr(os, "MFD_ALLOW_SEALING", raising=False)
    assert all(isinstance(one, NativeSum) for one in shared(monkeypatch))
    assert lines == ["Sums of 3 ranks go through shared memory (1536 KiB)"]


def no_memory(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_no_memory_is_said_once_and_sums_go_through_the_group(
    monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(os, "ftruncate", no_memory)
    assert shared(monkeypatch) == [None] * 3
    reason = "there is no shared memory of 1573248 bytes ([Errno 28] No space left on device)"
    assert lines == [f"Sums of ranks go through gloo: {reason}"]


def test_one_rank_that_cannot_open_it_keeps_all_from_it(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    opened, refusals = shared_sum._open, iter([True])

    def sometimes(told: list[int], size: int) -> Tensor:
        return opened([told[0], 10_000, *told[2:]], size) if next(refusals, False) else opened(told, size)

    monkeypatch.setattr(shared_sum, "_open", sometimes)
    assert shared(monkeypatch) == [None] * 3
    failed = f"/proc/{os.getpid()}/fd/10000, the memory of rank 0, cannot be opened (No such file or directory)"
    others = "another rank cannot map shared memory, and says why"
    assert sorted(lines) == sorted(f"Sums of ranks go through gloo: {why}" for why in (failed, others))


def test_another_file_is_not_mapped(tmp_path: Path) -> None:
    with open(tmp_path / "other", "wb+") as other, pytest.raises(shared_sum._UnsharedError, match="not the memory of"):
        other.truncate(4096)
        shared_sum._open([os.getpid(), other.fileno(), 1, 2], 4096)


@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("QUIRE_CPU_KERNELS", "off", "no compiled CPU kernels, which sum in shared memory: QUIRE_CPU_KERNELS is off"),
        ("QUIRE_SHARED_SUMS", "0", "QUIRE_SHARED_SUMS is 0"),
    ],
)
def test_what_is_off(variable: str, value: str, why: str, monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setenv(variable, value)
    env.forget_all()
    assert shared(monkeypatch) == [None] * 3
    assert lines == [f"Sums of ranks go through gloo: {why}"]


def test_more_ranks_than_share(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    monkeypatch.setattr(shared_sum, "MOST_RANKS", 2)
    assert shared(monkeypatch) == [None] * 3
    assert lines == ["Sums of ranks go through gloo: 3 ranks share no memory, at most 2 do"]


@pytest.mark.parametrize("meeting", ["tcp://10.0.0.7:4000", "env://"])
def test_ranks_of_several_machines_or_of_a_launcher_sum_over_their_group(
    meeting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_sum, "share_sums", lambda *_: pytest.fail("memory cannot be shared"))
    reduce = ranks._sums_of("a group", 0, 2, meeting, torch.device("cpu"))
    summed: list[Any] = []
    monkeypatch.setattr(ranks.distributed, "all_reduce", lambda x, group: summed.append(group))
    reduce(torch.ones(3))
    assert summed == ["a group"]


@pytest.mark.parametrize(
    ("bound", "expected"), [("auto", [3, 3]), ("0-2", [3, 3]), ("0|1|2|3", [6, 12])], ids=["all", "one", "own"]
)
def test_how_many_processors_ranks_have(
    bound: str, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank sees those that it is bound to."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setenv("QUIRE_CPU_OMP_THREADS_BIND", bound)
    env.forget_all()
    assert [processors_of_ranks(count, tmp_path) for count in (2, 4)] == expected
    env.forget_all()
