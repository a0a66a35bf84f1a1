"""ClipFlow: the clips of one audio as requests of the engine, some at a time, and their results as one flow.

Opening a clip makes its features, which are large; so only as many clips are open as keep the engine busy, and the next
begins when one ends. In: a function that opens a clip. Out: a flow of results (flow.py). Must not know: audio, answers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from quire.schema.outputs import RequestOutput
from quire.server.flow import Results

MOST_OPEN = 32  # a step reads every weight once, however many clips are written
Open = Callable[[int], Awaitable[tuple[str, Results]]]  # clip -> the id of its request, and its flow


class ClipFlow:
    """As a Flow. `clip_of` tells which clip a request is of."""

    def __init__(self, num_clips: int, open_clip: Open) -> None:
        self._open_clip, self._num_clips = open_clip, num_clips
        self._next_clip = self._num_done = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: deque[RequestOutput] = deque()
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self.clip_of: dict[str, int] = {}

    @property
    def finished(self) -> bool:
        return self._num_done == self._num_clips and not self._waiting and self._error is None

    async def next(self) -> list[RequestOutput]:
        """What is new of any clip. May be left and called again at any time."""
        while not self._waiting and self._error is None:
            self._begin()
            self._changed.clear()
            await self._changed.wait()
        if not self._waiting:
            assert self._error is not None
            raise self._error
        results = list(self._waiting)
        self._waiting.clear()
        self._begin()
        return results

    def _begin(self) -> None:
        while self._error is None and len(self._tasks) < MOST_OPEN and self._next_clip < self._num_clips:
            task = asyncio.get_running_loop().create_task(self._run(self._next_clip))
            self._next_clip += 1
            self._tasks.add(task)
            task.add_done_callback(self._end)

    async def _run(self, clip: int) -> None:
        request_id, flow = await self._open_clip(clip)
        self.clip_of[request_id] = clip
        with flow:
            while not flow.finished:
                results = await flow.next()
                self._waiting.extend(results)
                self._changed.set()
        self._num_done += 1

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stop(error)
        self._changed.set()

    def _stop(self, error: BaseException) -> None:
        self._error = self._error or error
        for task in self._tasks:
            task.cancel()
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._stop(error)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def __enter__(self) -> ClipFlow:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()
