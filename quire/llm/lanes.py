"""Lanes: threads for reading what callers send, so that no event loop waits for it.

What is heavy has lanes of its own: a light text never waits behind one of many megabytes. The work must be such that
threads can change: tokenizers let go of the interpreter, and Python code does; a long call into other C code would hold
up the event loop all the same. In: a size and a function. Out: what it returns. Must not know: what is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_NUM_LIGHT, _NUM_HEAVY = 4, 2
HEAVY = 1 << 18  # characters or bytes
Given = ParamSpec("Given")
Found = TypeVar("Found")


class Lanes:
    def __init__(self) -> None:
        self._light = ThreadPoolExecutor(_NUM_LIGHT, thread_name_prefix="light lane")
        self._heavy = ThreadPoolExecutor(_NUM_HEAVY, thread_name_prefix="heavy lane")

    async def run(self, size: int, work: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """`size`: in characters or bytes of what is read."""
        pool = self._heavy if size >= HEAVY else self._light
        return await asyncio.get_running_loop().run_in_executor(pool, lambda: work(*args, **kwargs))

    def close(self) -> None:
        for pool in (self._light, self._heavy):
            pool.shutdown(wait=False, cancel_futures=True)
