"""The threads that fetch, decode and process media, and the queue before them.

Pillow, numpy and FFmpeg release the interpreter while they work. Must not know: what the work is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from quire.base import env
from quire.schema.errors import InputError, OverloadedError

Result = TypeVar("Result")


class MediaWorkers:
    def __init__(self, num_threads: int | None = None, queue: int | None = None) -> None:
        self._num = num_threads or env.MEDIA_LOADING_THREAD_COUNT.get()
        self._most = self._num + (env.MEDIA_QUEUE.get() if queue is None else queue)
        self._pool = ThreadPoolExecutor(self._num, thread_name_prefix="media")
        self._count = 0
        self._lock = threading.Lock()

    def submit_all(self, jobs: list[Callable[[], Result]]) -> list[Future[Result]]:
        """All of them, or none if there is no room."""
        if len(jobs) > self._most:
            raise InputError(
                f"the prompt has {len(jobs)} media items; the limit is {self._most} (QUIRE_MEDIA_QUEUE)",
                param="multi_modal_data",
            )
        with self._lock:
            if self._count + len(jobs) > self._most:
                raise OverloadedError(
                    f"{self._count} media items are processed or wait for it; the limit is {self._most} "
                    "(QUIRE_MEDIA_QUEUE)"
                )
            self._count += len(jobs)
        futures = [self._pool.submit(job) for job in jobs]
        for future in futures:
            future.add_done_callback(self._leave)
        return futures

    def _leave(self, future: Future[Result]) -> None:
        with self._lock:
            self._count -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
