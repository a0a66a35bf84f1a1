"""Sums over ranks through shared memory (csrc/cpu/sums.h), against torch's. Ranks are threads here, each inside of the
library without the interpreter's lock; tests/worker/test_shared_sums.py has processes."""

from __future__ import annotations

import mmap
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.ops.cpu.native import KernelError, kernels, usable
from quire.ops.cpu.rank_sums import LINE_BYTES, NativeSum, memory_bytes

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiled kernels")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GUARD = 7.5  # around what is summed


def refused(x: Tensor) -> Tensor:
    raise AssertionError(f"{x.dtype} was left to somebody else")


def make_ranks(
    ranks: int,
    room: int,
    *,
    spin_us: int = 20,
    patience_s: float = 60.0,
    otherwise: Callable[[Tensor], Tensor] = refused,
) -> list[NativeSum]:
    library = kernels()
    assert library is not None
    size = memory_bytes(ranks, room)
    kept = torch.zeros(size + 128, dtype=torch.uint8)
    memory = kept[-kept.data_ptr() % 128 :][:size]
    return [
        NativeSum(library, memory, rank, ranks, otherwise, spin_us=spin_us, patience_s=patience_s)
        for rank in range(ranks)
    ]


def at_once(works: Sequence[Callable[[], object]]) -> None:
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as failed:  # noqa: BLE001  # raised by the test's own thread
            errors.append(failed)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a sum does not end"
    if errors:
        raise errors[0]


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """The oracle: float32, rank by rank, rounded once."""
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part.float()
    return total.to(parts[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def drawn(generator: torch.Generator, count: int, dtype: torch.dtype) -> Tensor:
    """Of all sizes: sums in another order differ."""
    scales = 10.0 ** torch.randint(-3, 4, (count,), generator=generator)
    return (torch.randn(count, generator=generator) * scales).to(dtype)


@contextmanager
def threads_of_kernels(count: int) -> Iterator[None]:
    library = kernels()
    assert library is not None
    before = library.qc_threads()
    library.qc_set_threads(count)
    try:
        yield
    finally:
        library.qc_set_threads(before)


# half slots of one line, of an odd size, and such that ranks add up shares for each other
@pytest.mark.parametrize("room", [64, 4160, 128 << 10])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_has_the_bits_of_sums_in_order(ranks: int, room: int) -> None:
    sums = make_ranks(ranks, room)
    choose, generator = random.Random(ranks * room), torch.Generator().manual_seed(ranks + room)
    most = 40 * room // 4 if room < 10_000 else 3 * room
    cases = []
    for turn in range(60):
        dtype = choose.choice(DTYPES)
        count = choose.choice((0, 1, 15, 16, 17, 33, most, choose.randrange(1, most)))
        offset = choose.randrange(5)
        parts = [drawn(generator, count, dtype) for _ in range(ranks)]
        held = [torch.full((count + offset + 9,), GUARD, dtype=dtype) for _ in range(ranks)]
        for own, part in zip(held, parts, strict=True):
            own[offset : offset + count] = part
        cases.append((turn, offset, count, parts, held))

    def work(rank: int) -> None:
        late = random.Random(rank)
        for _, offset, count, _, held in cases:
            if late.random() < 0.1:
                time.sleep(late.random() * 2e-3)
            own = held[rank][offset : offset + count]
            assert sums[rank](own) is own

    with threads_of_kernels(2):
        at_once([partial(work, rank) for rank in range(ranks)])
    for turn, offset, count, parts, held in cases:
        expected = sum_in_order(parts)
        for rank, own in enumerate(held):
            assert same_bits(own[offset : offset + count], expected), (turn, rank, count, own.dtype)
            rest = torch.cat((own[:offset], own[offset + count :]))
            assert (rest == GUARD).all(), (turn, rank, count)


def test_what_is_no_number_arrives() -> None:
    sums = make_ranks(2, 4096)
    first = [torch.tensor([float("inf"), float("nan"), -0.0, 3e38, 1.0]) for _ in range(2)]
    first[1][0], first[1][4] = -float("inf"), float("nan")
    expected = first[0] + first[1]
    at_once([partial(sums[rank], first[rank]) for rank in range(2)])
    for own in first:
        assert torch.equal(own.isnan(), expected.isnan()) and own[3] == float("inf") and str(own[2].item()) == "-0.0"


def test_every_instruction_set_gives_the_same_bits() -> None:
    library = kernels()
    assert library is not None
    before = library.qc_isa()
    generator = torch.Generator().manual_seed(1)
    parts = {dtype: [drawn(generator, 5000, dtype) for _ in range(3)] for dtype in DTYPES}
    try:
        for isa in usable(library):
            library.qc_use_isa(isa.encode())
            sums = make_ranks(3, 4096)
            for dtype in DTYPES:
                own = [part.clone() for part in parts[dtype]]
                at_once([partial(sums[rank], own[rank]) for rank in range(3)])
                assert all(same_bits(one, sum_in_order(parts[dtype])) for one in own), (isa, dtype)
    finally:
        library.qc_use_isa(before)


def test_what_kernels_cannot_sum_is_left_to_others() -> None:
    left: list[Tensor] = []
    (sums,) = make_ranks(1, 64, otherwise=lambda x: left.append(x) or x)  # type: ignore[func-returns-value]
    others = [torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.float64), torch.ones(4, 4)[:, :2]]
    for x in others:
        assert sums(x) is x
    assert left == others


def test_a_rank_that_waits_sleeps() -> None:
    """And wakes when the other one comes."""
    sums, spent = make_ranks(2, 4096, spin_us=50), []

    def waits() -> None:
        before = time.thread_time()
        for _ in range(3):
            sums[0](torch.ones(8))
        spent.append(time.thread_time() - before)

    def comes_late() -> None:
        for _ in range(3):
            time.sleep(0.3)
            sums[1](torch.ones(8))

    at_once([waits, comes_late])
    assert spent[0] < 0.2, "of 0.9 s"


def test_a_rank_that_does_not_come_ends_the_sum() -> None:
    sums = make_ranks(2, 4096, patience_s=0.05)
    with pytest.raises(KernelError, match="a rank that did not come to a sum in time"):
        sums[0](torch.ones(8))


def test_a_rank_that_has_given_up_does_not_sum_again() -> None:
    """The others come to the sum that it has left, and take its next turn for the second of that one: they would read
    what it has not added up."""
    count, sums = 1 << 15, make_ranks(3, 128 << 10)
    sums[0].work.patience_ms, sums[1].work.patience_ms, sums[2].work.patience_ms = 50, 500, 500
    with pytest.raises(KernelError, match="a rank that did not come to a sum in time"):
        sums[0](torch.ones(count))

    def goes_on() -> None:
        with pytest.raises(KernelError, match="after a sum that was given up"):
            sums[0](torch.ones(count))

    def comes_late(rank: int) -> None:
        with pytest.raises(KernelError, match="a rank that did not come to a sum in time"):
            sums[rank](torch.ones(count))

    at_once([goes_on, partial(comes_late, 1), partial(comes_late, 2)])


def test_two_sums_of_one_rank_at_once_are_refused() -> None:
    sums, x = make_ranks(2, 4096), torch.ones(8)
    waiting = threading.Thread(target=lambda: sums[0](x))
    waiting.start()
    line = sums[0]._memory.view(torch.int32)  # turn, sleepers, busy
    while not line[2]:
        time.sleep(0.01)
    with pytest.raises(KernelError, match="two sums at once"):
        sums[0](torch.ones(8))
    sums[1](torch.ones(8))
    waiting.join(60)
    assert not waiting.is_alive() and (x == 2).all() and not line[2]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "other",
    [torch.ones(9), torch.ones(1), torch.ones(8, dtype=torch.bfloat16), torch.ones(24)],
    ids=["longer", "shorter", "other dtype", "more rounds"],
)
def test_ranks_that_sum_different_things_are_all_refused(other: Tensor, ranks: int) -> None:
    """And sum again, once they agree."""
    sums = make_ranks(ranks, 64)  # 16 numbers
    parts, said = [*(torch.ones(17 if len(other) > 16 else 8) for _ in range(ranks - 1)), other], list[str]()

    def work(rank: int) -> None:
        with pytest.raises(KernelError) as failed:
            sums[rank](parts[rank])
        said.append(str(failed.value))

    at_once([partial(work, rank) for rank in range(ranks)])
    assert len(said) == ranks and all("ranks that sum different sizes or dtypes at once" in one for one in said)
    agreed = [torch.ones(8) for _ in range(ranks)]
    at_once([partial(sums[rank], agreed[rank]) for rank in range(ranks)])
    assert all((one == ranks).all() for one in agreed)


_WAITING_RANK = """
import mmap, sys, torch
from quire.ops.cpu.native import kernels
from quire.ops.cpu.rank_sums import NativeSum
with open(sys.argv[1], "r+b") as file:
    memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
x = torch.ones(8)
NativeSum(kernels(), memory, 0, 2, None, spin_us=0, patience_s=4.0)(x)
print(x.tolist())
"""


def test_a_rank_does_not_wait_while_it_is_stopped(tmp_path: Path) -> None:
    library, path = kernels(), tmp_path / "memory"
    assert library is not None
    path.write_bytes(bytes(memory_bytes(2, 4096)))
    with path.open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    command = [sys.executable, "-c", _WAITING_RANK, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as waiting:
        try:
            sleepers = memory.view(torch.int32)[LINE_BYTES // 4 + 1 :]  # of the line of rank 1
            while not sleepers[0]:
                assert waiting.poll() is None, waiting.communicate()
                time.sleep(0.01)
            waiting.send_signal(signal.SIGSTOP)
            time.sleep(4.5)  # longer than it waits
            waiting.send_signal(signal.SIGCONT)
            x = torch.ones(8)
            NativeSum(library, memory, 1, 2, refused, spin_us=0, patience_s=60.0)(x)
            said, errors = waiting.communicate(timeout=60)
        finally:
            waiting.kill()
    assert said.strip() == str([2.0] * 8) == str(x.tolist()), errors
