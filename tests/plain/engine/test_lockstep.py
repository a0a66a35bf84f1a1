"""engine/lockstep.py: engines that run every step together neither wait for ever nor come to different steps."""

from __future__ import annotations

import queue
import random
import threading
from typing import Any

import pytest

from quire.engine.lockstep import Lockstep

_PATIENCE = 60.0


class Meeting:
    """What a collective is: everybody brings its number of tokens, and learns those of all."""

    def __init__(self, size: int) -> None:
        self.barrier, self.brought = threading.Barrier(size), [(0, 0)] * size

    def gather(self, engine: int, step: int, tokens: int) -> bool:
        self.brought[engine] = step, tokens
        self.barrier.wait(_PATIENCE)
        steps, counts = zip(*self.brought, strict=True)
        self.barrier.wait(_PATIENCE)
        assert len(set(steps)) == 1, f"engines are in different steps: {steps}"
        return any(counts)


class Engine(threading.Thread):
    """A loop like the real one: it waits for its inbox only if nothing is to be done."""

    def __init__(self, number: int, meeting: Meeting, engines: list[Engine]) -> None:
        super().__init__(daemon=True)
        self.number, self._meeting, self._engines = number, meeting, engines
        self.inbox: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.lockstep = Lockstep(self, self._wake)  # type: ignore[arg-type]
        self.work, self.done, self.rests, self.failed = 0, 0, 0, ""

    def ask(self, verb: Any) -> list[bool]:
        assert verb.__name__ == "idle_step"
        return [self._meeting.gather(self.number, self.lockstep.num_steps, 0)]

    def _wake(self, step: int) -> None:
        for other in self._engines:
            if other is not self:
                other.inbox.put(("wake", step))

    def run(self) -> None:
        try:
            while self._drain():
                self._step()
        except BaseException as wrong:  # noqa: BLE001  # the test tells it
            self.failed = repr(wrong)
            self._meeting.barrier.abort()

    def _drain(self) -> bool:
        waits = not self.work and self.lockstep.is_resting
        self.rests += waits
        while waits or not self.inbox.empty():
            kind, number = self.inbox.get(timeout=_PATIENCE)
            waits = False
            if kind == "stop":
                return False
            if kind == "wake":
                self.lockstep.wake(number)
            elif kind == "abort":
                self.work = 0
            else:
                self.work += number
        return True

    def _step(self) -> None:
        if self.work:
            self.lockstep.begin()
            assert self._meeting.gather(self.number, self.lockstep.num_steps, 1)
            self.work -= 1
            self.done += 1
        elif not self.lockstep.is_resting:
            self.lockstep.idle()


@pytest.mark.parametrize("seed", range(6))
def test_engines_with_different_loads_all_get_on(seed: int) -> None:
    rng, size = random.Random(seed), 2 + seed % 3
    meeting, engines = Meeting(size), list[Engine]()
    engines += [Engine(number, meeting, engines) for number in range(size)]
    for engine in engines:
        engine.start()
    wanted = [0] * size
    for _ in range(60):
        number, amount = rng.randrange(size), rng.randrange(1, 9)
        wanted[number] += amount
        engines[number].inbox.put(("work", amount))
        if rng.random() < 0.4:  # until all rest, or nearly so
            _until(lambda: all(engine.done == want for engine, want in zip(engines, wanted, strict=True)), engines)
    _until(lambda: all(engine.done == want for engine, want in zip(engines, wanted, strict=True)), engines)
    _until(lambda: all(engine.lockstep.is_resting and engine.inbox.empty() for engine in engines), engines)
    assert len({engine.lockstep.num_steps for engine in engines}) == 1
    for engine in engines:
        engine.inbox.put(("stop", 0))
        engine.join(_PATIENCE)
    assert not any(engine.failed for engine in engines) and all(engine.rests > 1 for engine in engines)


def test_a_word_that_comes_before_its_step_and_one_that_comes_late() -> None:
    busy = [True]

    class Executor:
        def ask(self, verb: Any) -> list[bool]:
            if not busy[0]:
                lockstep.wake(3)  # of a faster engine, while step 2 is still being taken in here
            return list(busy)

    said: list[int] = []
    lockstep = Lockstep(Executor(), said.append)  # type: ignore[arg-type]
    lockstep.wake(1)
    assert not lockstep.is_resting
    lockstep.idle()
    busy[0] = False
    lockstep.idle()
    assert lockstep.num_steps == 2 and not lockstep.is_resting  # step 3 comes
    lockstep.idle()
    assert lockstep.is_resting
    lockstep.wake(3)  # late: that step is over
    assert lockstep.is_resting and not said
    lockstep.begin()
    assert said == [4] and not lockstep.is_resting
    lockstep.begin()
    assert said == [4]  # nobody rests


def _until(is_so: Any, engines: list[Engine]) -> None:
    waiting = threading.Event()
    for _ in range(int(_PATIENCE * 200)):
        if is_so():
            return
        assert not any(engine.failed for engine in engines), [engine.failed for engine in engines]
        waiting.wait(0.005)
    raise AssertionError([(e.number, e.work, e.done, e.lockstep.num_steps, e.lockstep.is_resting) for e in engines])
