"""Signs of life: what a worker process says of itself while it computes, and what an executor makes of it.

In: a `WorkerBeat` every few seconds from a thread of each worker. Out: which workers hang. One that is silent is
stopped or never lets go of the interpreter (`Pulses`); one that speaks, and says that its step does not end, waits for
something that does not come (`StepLimit`). Must not know: the wire, or what a step computes.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from quire.base.clock import now

_CHECKS = 4  # of signs of life, within the limit of silence
_BEATS = 8  # signs of life within the limit of a step
_MOST_BEAT_S = 2.5


class WorkerBeat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """A sign of life."""

    rank: int
    doing: str = ""  # of a step: forward, sample or result; "": nothing
    seconds: float = 0.0  # for how long
    at: str = ""  # where the thread is that does it


class Pulses:
    """When each worker was last heard of. A worker that shows no sign of life for `limit` seconds hangs: its process is
    stopped, or never lets go of the interpreter. Nobody is watched before `watch`: a start may be busy for longer.
    `limit` 0: nobody ever is."""

    def __init__(self, num_workers: int, limit: float) -> None:
        self.limit = limit
        self.patience = limit / _CHECKS if limit > 0 else None  # seconds between two calls of `silent`, at most
        self._heard = [0.0] * num_workers
        self._checked = 0.0
        self._is_watching = False

    def watch(self) -> None:
        self._is_watching = self.limit > 0

    def hear(self, rank: int) -> None:
        self._heard[rank] = now()

    def silent(self) -> list[int]:
        """The ranks that hang. None does if this process itself was stopped meanwhile."""
        last, self._checked = self._checked, now()
        if not self._is_watching or self._checked - last > self.limit / 2:
            self._heard = [self._checked] * len(self._heard)
        return [rank for rank, heard in enumerate(self._heard) if self._checked - heard > self.limit]


class StepLimit:
    """A step that has not ended within `limit` seconds, although the process lives, never will: ranks wait for one that
    does not come. 0: nothing is limited. `most`: seconds between two signs of life, if there is a limit on them.
    Workers log their stacks at the limit, and are given time for it."""

    def __init__(self, limit: float, most: float | None) -> None:
        self.limit = limit
        self.beat_s = min(limit / _BEATS, _MOST_BEAT_S if most is None else most) if limit > 0 else 0.0
        self._last: dict[int, WorkerBeat] = {}

    def exceeded(self, beat: WorkerBeat, name: Callable[[int], str], num_workers: int) -> str:
        """What to say of it; nothing where all is well."""
        self._last[beat.rank] = beat
        if not self.limit or beat.seconds < self.limit + 2 * self.beat_s:
            return ""
        ranks = [f"{name(rank)} {_in_words(self._last.get(rank))}" for rank in range(num_workers)]
        return (
            f"a step did not end within {self.limit:g} s (QUIRE_EXECUTE_MODEL_TIMEOUT_SECONDS): {'; '.join(ranks)}; "
            "the workers' logs have their stacks"
        )


def _in_words(beat: WorkerBeat | None) -> str:
    if beat is None or not beat.doing:
        return "waits for the next call"
    return f"has been in {beat.doing!r} for {beat.seconds:.1f} s, at {beat.at}"


class Activity:
    """What one thread does, for another that looks."""

    def __init__(self) -> None:
        self._now: tuple[str, float, int] | None = None

    def begin(self, what: str) -> None:
        self._now = what, now(), threading.get_ident()

    def end(self) -> None:
        self._now = None

    def as_beat(self, rank: int) -> WorkerBeat:
        doing = self._now
        if doing is None:
            return WorkerBeat(rank)
        what, since, thread = doing
        return WorkerBeat(rank, what, now() - since, _place(thread))


def _place(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "its end"
    code = frame.f_code
    return f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"


def stacks() -> str:
    """Of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for number, frame in sys._current_frames().items()
    )
