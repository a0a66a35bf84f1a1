"""Nothing a request brings takes the event loop long: every callback is timed, by its thread's own processor time,
while each attack of benchmarks/hostile_attacks.py and each body of test_event_loop.py is made.

The thread of the loop runs nothing else, so neither other programs nor other threads are in these figures. What
these do to the processor's caches and clock is, so one that is too slow is made again: a callback that does too much
does so every time, and the least of its times is compared with what is promised.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.live import Live, live_fake
from tests.server.test_event_loop import BODIES, post

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import hostile_attacks
from hostile_wire import BrokenError, Door, Rate, Tally, Target

LONGEST = 0.05  # seconds of the processor, as docs/security.md promises
ROUNDS = 6
MINE, THEIRS = "attacker-key", "honest-key"
HASTE = 20  # times faster than in the benchmark are those that do something slowly
NEEDLESS = ("stray_frames",)  # sends nothing without the sockets of an engine process
hostile_attacks.define_small()


class LoopTime:
    """The longest callback of one thread's loop."""

    def __init__(self) -> None:
        self.thread, self.longest, self.count = 0, 0.0, 0

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Works for loops that are written in Python; uvloop calls the same things."""
        plain = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            if threading.get_ident() != self.thread:
                plain(handle)
                return
            began = time.thread_time()
            plain(handle)
            self.longest = max(self.longest, time.thread_time() - began)
            self.count += 1

        patch.setattr(asyncio.Handle, "_run", timed)

    def start(self) -> None:
        self.longest, self.count = 0.0, 0

    def least(self, work: Callable[[], object]) -> float:
        """The longest callback while `work` was done, at best: it is done again as long as it takes too long."""
        least = float("inf")
        for _ in range(ROUNDS):
            self.start()
            work()
            assert self.count > 0, "nothing was measured"
            least = min(least, self.longest)
            if least < LONGEST:
                break
        return least


class Hasty:
    """asyncio, whose sleep is short."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / HASTE)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, frozen_afterwards: None) -> Iterator[tuple[Live, LoopTime]]:
    times = LoopTime()
    with pytest.MonkeyPatch.context() as patch:
        times.watch(patch)
        patch.setattr(hostile_attacks, "asyncio", Hasty())
        costly = [text for text in hostile_attacks.TEMPLATES if "range(" not in text and "999" not in text]
        patch.setattr(hostile_attacks, "TEMPLATES", costly)  # the others take their child's five seconds, no more
        options: dict[str, Any] = {"api_key": [MINE, THEIRS], "trust_request_chat_template": True}
        with live_fake(tmp_path_factory.mktemp("times"), plain_loop=True, **options) as server:
            found = threading.Event()

            def tell() -> None:
                times.thread = threading.get_ident()
                found.set()

            server.loop.call_soon_threadsafe(tell)
            assert found.wait(60)
            gc.collect()
            gc.freeze()  # as server/host.py does
            yield server, times
            gc.unfreeze()


async def once(name: str, server: Live) -> Tally:
    host, _, port = server.url.removeprefix("http://").partition(":")
    tally = Tally()
    door = Door(Target(host, int(port), MINE, THEIRS, None), tally, Rate(1e12))
    with contextlib.suppress(BrokenError, OSError, EOFError):  # what each demands of a real model, the benchmark judges
        await asyncio.wait_for(hostile_attacks.ATTACKS[name][2](door), 120)
    return tally


@pytest.mark.parametrize("name", [name for name in hostile_attacks.ATTACKS if name not in NEEDLESS])
def test_no_attack_takes_the_loop_long(measured: tuple[Live, LoopTime], name: str) -> None:
    server, times = measured
    longest = times.least(lambda: asyncio.run(once(name, server)))
    assert longest < LONGEST, f"{longest:.3f} s in one callback"


@pytest.mark.parametrize("name", BODIES)
def test_no_body_takes_the_loop_long(measured: tuple[Live, LoopTime], name: str) -> None:
    server, times = measured
    path, make = BODIES[name]
    raw = make().encode()
    longest = times.least(lambda: post(server, path, raw, MINE))
    assert longest < LONGEST, f"{longest:.3f} s in one callback"


def test_a_slow_callback_is_found(measured: tuple[Live, LoopTime]) -> None:
    """The measurement itself: work counts every time it is done, sleep does not, nor work that was slow once."""
    server, times = measured
    rounds: list[int] = []

    def work(seconds: float) -> None:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass

    def do(call: Callable[[], None]) -> None:
        rounds.append(1)
        done = threading.Event()
        server.loop.call_soon_threadsafe(call)
        server.loop.call_soon_threadsafe(done.set)
        assert done.wait(60)

    assert times.least(lambda: do(lambda: work(2 * LONGEST))) >= LONGEST and len(rounds) == ROUNDS
    assert times.least(lambda: do(lambda: time.sleep(2 * LONGEST))) < LONGEST
    rounds.clear()
    assert times.least(lambda: do(lambda: work(0.0 if len(rounds) > 1 else 2 * LONGEST))) < LONGEST
