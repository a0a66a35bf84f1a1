"""Long work shows itself: a bar on a terminal, in a log a line every few seconds, and nothing for what is over at once.

In: what is done, how much of it there is, and calls that say how much is done. Out: lines on stderr, or records of the
caller's logger. Calls may come from any thread. Must not know: what the work is.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.base.clock import Throttle, now
from quire.base.registry import load

BYTES = "B"
LINE_SECONDS = 5.0
_BAR_AFTER_S = 0.5
Advance = Callable[[int], None]


@contextmanager
def progress(
    log: logging.Logger, words: str, total: int | None, unit: str = BYTES, *, shown: bool = True, before: int = 0
) -> Iterator[Advance]:
    """Calls take what was done since the last. `unit`: B for bytes, else a word such as requests. No `total`: unknown.

    `shown` False is a bar that nobody wants: a terminal then gets the lines of a log. `before`: what was done already
    when this work began; it counts towards `total` and not towards the rate.
    """
    lock = threading.Lock()
    if shown and sys.stderr is not None and sys.stderr.isatty():  # None: closed
        bar = load("tqdm:tqdm")(
            total=total, desc=words, unit=unit if unit == BYTES else f" {unit}", unit_scale=unit == BYTES,
            dynamic_ncols=True, leave=False, delay=_BAR_AFTER_S,
            initial=before,
        )  # fmt: skip
        with bar:

            def advance(done: int) -> None:
                with lock:
                    bar.update(done)

            yield advance
        return
    lines = _Lines(log, words, total, unit, before)

    def note(done: int) -> None:
        with lock:
            lines.advance(done)

    yield note


class _Lines:
    """The first comes after LINE_SECONDS: what is over by then needs none."""

    def __init__(self, log: logging.Logger, words: str, total: int | None, unit: str, before: int) -> None:
        self._log, self._words, self._total, self._unit = log, words, total, unit
        self._began, self._done, self._before = now(), before, before
        self._throttle = Throttle(LINE_SECONDS)
        self._throttle.ready()

    def advance(self, done: int) -> None:
        self._done += done
        if self._throttle.ready():
            self._log.info("%s: %s", self._words, self._state())

    def _state(self) -> str:
        rate = (self._done - self._before) / max(now() - self._began, 1e-9)
        speed = f"{amount(rate, self._unit)}/s" if self._unit == BYTES else f"{rate:.1f} {self._unit}/s"
        if not self._total:
            return f"{amount(self._done, self._unit)}, {speed}"
        left = max(0.0, self._total - self._done) / max(rate, 1e-9)
        share = min(100, math.floor(100 * self._done / self._total))
        done, whole = amount(self._done, self._unit), amount(self._total, self._unit)
        return f"{done} of {whole} ({share}%), {speed}, {left:.0f} s left"


@contextmanager
def waiting(log: logging.Logger, words: str, seconds: float | None = None) -> Iterator[None]:
    """For work that cannot say how far it is: a line every few seconds says that it goes on."""
    ended, began = threading.Event(), now()

    def speak() -> None:
        while not ended.wait(LINE_SECONDS if seconds is None else seconds):
            log.info("%s: %.0f s so far", words, now() - began)

    thread = threading.Thread(target=speak, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def amount(number: float, unit: str = BYTES) -> str:
    """'3.21 GB', or '42 requests'."""
    if unit != BYTES:
        return f"{number:.0f} {unit}"
    power = min(int(math.log(number, 1000)), 4) if number >= 1 else 0
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
