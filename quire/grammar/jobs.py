"""Jobs: which grammar is compiled next, when a running one must yield, and when it is no longer needed.

    put(spec) ──▶ new ──▶ take() ──▶ done(job)
                           └─ took long while new ones waited, or was dropped ──▶ give_back(job) ──▶ long, or gone
How long a grammar takes is not known in advance, so each gets a short first attempt; one that exceeds it while others
wait is requeued among the long ones, which leave at least one worker to new ones. The queue is bounded. Thread-safe.
Must not know: processes, backends, requests.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from quire.schema.errors import OverloadedError
from quire.schema.grammar import GrammarSpec

_NEW_PER_LONG = 4  # new ones that go first while a long one is waiting


@dataclass(eq=False)
class CompileJob:
    spec: GrammarSpec
    is_long: bool = False  # it exceeded its first attempt
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
        """Enqueue it, once. OverloadedError: too many are queued."""
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
        """The next job, once there is one; None: closed."""
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
        """Whether a job that has run this long must be returned to the queue."""
        if job.dropped or self._closed:
            return True
        return not job.is_long and seconds > self._first_seconds and bool(self._new)

    def give_back(self, job: CompileJob) -> None:
        """It was stopped: queue it again, unless nobody waits for it."""
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
