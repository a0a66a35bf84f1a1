"""Jobs: which grammar is compiled next, whom a running one has to make way for, and when nobody wants it any more.

    put(spec) ──▶ new ──▶ take() ──▶ done(job)
                           └─ took long while new ones waited, or was dropped ──▶ give_back(job) ──▶ long, or gone
How long a grammar takes is not known before, so each gets a short first try; one that outlives it while others wait
starts again among the long ones, which leave at least one worker to the new. The queue is bounded. Every method may
be called by any thread. Must not know: processes, backends, requests.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from quire.schema.errors import OverloadedError
from quire.schema.grammar import GrammarSpec

_NEW_PER_LONG = 4  # new ones that go first while a long one waits and a worker is free for it


@dataclass(eq=False)
class CompileJob:
    spec: GrammarSpec
    is_long: bool = False  # it outlived its first try
    dropped: bool = False  # nobody waits for it


class Jobs:
    def __init__(self, *, num_workers: int, most_queued: int, first_seconds: float) -> None:
        self._most_long = max(1, num_workers - 1)
        self._most_queued = most_queued
        self._first_seconds = first_seconds
        self._new: dict[GrammarSpec, CompileJob] = {}  # in the order they came
        self._long: dict[GrammarSpec, CompileJob] = {}
        self._running: dict[GrammarSpec, CompileJob] = {}
        self._new_since_long = 0
        self._closed = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Those that wait, and those that run."""
        with self._changed:
            return len(self._new) + len(self._long) + len(self._running)

    def put(self, spec: GrammarSpec) -> None:
        """Once, however often it is asked for. OverloadedError: too many wait already."""
        with self._changed:
            if (running := self._running.get(spec)) is not None:
                running.dropped = False
                return
            if spec in self._new or spec in self._long:
                return
            queued = len(self._new) + len(self._long)
            if queued >= self._most_queued:
                raise OverloadedError(f"{queued} constraints are waiting to be compiled; try again later")
            self._new[spec] = CompileJob(spec)
            self._changed.notify_all()

    def take(self) -> CompileJob | None:
        """The next, once there is one; None: there will be no more."""
        with self._changed:
            while True:
                if self._closed:
                    return None
                if (job := self._pick()) is not None:
                    self._running[job.spec] = job
                    return job
                self._changed.wait()

    def drop(self, spec: GrammarSpec) -> None:
        """Nobody waits for it any more."""
        with self._changed:
            self._new.pop(spec, None)
            self._long.pop(spec, None)
            if (running := self._running.get(spec)) is not None:
                running.dropped = True

    def must_stop(self, job: CompileJob, seconds: float) -> bool:
        """Whether a job that has run so long is to be given back."""
        if job.dropped or self._closed:
            return True
        return not job.is_long and seconds > self._first_seconds and bool(self._new)

    def give_back(self, job: CompileJob) -> None:
        """It was stopped: it waits again, unless nobody waits for it."""
        with self._changed:
            self._running.pop(job.spec, None)
            if not job.dropped:
                job.is_long = True
                self._long[job.spec] = job
            self._changed.notify_all()

    def done(self, job: CompileJob) -> None:
        with self._changed:
            self._running.pop(job.spec, None)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _pick(self) -> CompileJob | None:
        num_long = sum(job.is_long for job in self._running.values())
        may_be_long = bool(self._long) and num_long < self._most_long
        if may_be_long and (not self._new or self._new_since_long >= _NEW_PER_LONG):
            self._new_since_long = 0
            return self._long.pop(next(iter(self._long)))
        if self._new:
            self._new_since_long += 1
            return self._new.pop(next(iter(self._new)))
        return None
