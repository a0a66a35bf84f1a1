"""Python's garbage collector while much is made that stays: modules that are imported, a vocabulary that is read.

Importing torch makes hundreds of thousands of objects. In: nothing. Out: when the collector runs, and what it need not
look at. Must not know: what is imported or read.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Pause:
    """Threads that want no collections, counted: the last one to leave turns them on again."""

    def __init__(self) -> None:
        self._count, self._was_on = 0, False
        self.someone_freezes = False  # seen once: to count frozen objects is to visit them all, a million or more
        # Reentrant: a collection while it is held may run a finalizer that pauses collections itself.
        self._lock = threading.RLock()

    def begin(self) -> None:
        with self._lock:
            if self._count == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            if self._count == 0:  # begun before a fork, which ended it
                return
            self._count -= 1
            if self._count == 0 and self._was_on:
                self.someone_freezes = self.someone_freezes or not _age()
                gc.enable()

    def end_in_child(self) -> None:
        """A fork has none of the threads that would end it, nor the one that holds the lock."""
        self._lock = threading.RLock()
        if self._count and self._was_on:
            gc.enable()
        self._count = 0


_pause = _Pause()
os.register_at_fork(after_in_child=_pause.end_in_child)


@contextmanager
def no_collections() -> Iterator[None]:
    """Nothing is collected meanwhile, which is a tenth of what importing torch would take; afterwards every object is
    old. Left young, all would be traversed by the next two collections, 80 ms each, both due at once."""
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()


def _age() -> bool:
    """Every object joins the oldest generation, unvisited: what is unfrozen goes there. False: nothing was done, for
    whoever uses frozen objects for something else keeps them frozen."""
    if gc.get_freeze_count() > 0:
        return False
    gc.freeze()
    gc.unfreeze()
    return True
