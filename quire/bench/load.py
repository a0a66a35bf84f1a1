"""The load generator: sends prepared requests when they are due, at most so many at once, and records every answer.

In: requests as bytes and their arrival times. Out: Outcomes in the order of the requests, and the run's duration.
One event loop, one connection per request in flight. Must not know: what a request says.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.base.clock import now
from quire.base.registry import load
from quire.bench.datasets import Sample
from quire.bench.endpoints import MeasuredResponse
from quire.bench.http_client import HTTPError, Pool
from quire.schema.errors import InputError, QuireError

T = TypeVar("T")
_BETWEEN_TRIES_S = 0.5
_FILES_PER_REQUEST = 1
_SPARE_FILES = 64


@dataclass(frozen=True)
class TimedRequest:
    sample: Sample
    data: bytes


class Generator:
    def __init__(self, pool: Pool, *, stream: bool, max_concurrency: int | None = None) -> None:
        if max_concurrency is not None and max_concurrency < 1:
            raise InputError(f"--max-concurrency must be at least 1, got {max_concurrency}", param="max_concurrency")
        self._pool, self._stream = pool, stream
        self._limit = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)

    async def one(self, request: TimedRequest) -> MeasuredResponse:
        """Send it now. Whatever goes wrong is in the outcome."""
        outcome = MeasuredResponse(request.sample, now(), stream=self._stream)
        try:
            reply = await self._pool.exchange(request.data, outcome.feed)
        except HTTPError as wrong:
            outcome.fail(str(wrong))
        else:
            outcome.end(reply)
        return outcome

    async def run(
        self, requests: Sequence[TimedRequest], times: Sequence[float], tell: Callable[[], object]
    ) -> tuple[list[MeasuredResponse], float]:
        """All of them, each at its time after the start (or when a place is free); `tell` hears of each end."""
        began = now()
        tasks: list[asyncio.Task[MeasuredResponse]] = []
        try:
            for request, time in zip(requests, times, strict=True):
                wait = began + time - now()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.append(asyncio.create_task(self._limited(request, tell)))
            outcomes = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
        return outcomes, now() - began

    async def _limited(self, request: TimedRequest, tell: Callable[[], object]) -> MeasuredResponse:
        if self._limit is None:
            outcome = await self.one(request)
        else:
            async with self._limit:
                outcome = await self.one(request)
        tell()
        return outcome

    async def wait_ready(self, request: TimedRequest, seconds: float) -> None:
        """Until one request succeeds."""
        end = now() + seconds
        while True:
            remaining = end - now()
            try:
                outcome = await asyncio.wait_for(self.one(request), max(remaining, 0.001))
                why = outcome.error
            except TimeoutError:
                why = "no answer in time"
            else:
                if outcome.success:
                    return
            if now() + _BETWEEN_TRIES_S > end:
                raise QuireError(f"the server was not ready within {seconds:g} s; the last try: {why}")
            await asyncio.sleep(_BETWEEN_TRIES_S)


def allow_files(count: int) -> None:
    """Every connection is an open file; the soft limit is often 1024."""
    needed = count * _FILES_PER_REQUEST + _SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """With uvloop where it is installed: it takes less from the server beside it."""
    try:
        new_loop = load("uvloop:new_event_loop")
    except ImportError:
        new_loop = None
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)
