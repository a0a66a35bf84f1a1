"""Lockstep: engines that have experts together run every step together, whoever has requests.

An engine with tokens needs the experts of all others, so each of them takes part in its steps, with tokens of its own
or without (idle steps). After a step in which no engine had a token, all rest; all know, because a step tells everybody
how many tokens the others had. The first that gets work again wakes the others, by the number of the step that comes.

    engine 0   step 7: 12 tokens   step 8: 1 token   step 9: none   rests ...... wakes the others; step 10: 5 tokens
    engine 1   step 7: none        step 8: 3 tokens  step 9: none   rests ...... is woken          step 10: none

Nobody waits for one that rests: an engine rests after step n only if all do, and the word that wakes it says n + 1. It
may come while step n is still being taken in; then it does not rest at all. A word that comes late names a step that is
over, and says nothing new. In: plans with or without tokens, words from others. Must not know: what carries the words.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.executor.base import Executor, WorkerProtocol


class Lockstep:
    def __init__(self, executor: Executor, wake: Callable[[int], None]) -> None:
        """`wake`: tells every other engine that this step comes."""
        self._executor, self._wake = executor, wake
        self.num_steps = 0  # that this engine has begun
        self.is_resting = True
        self._woken_for = 0

    def begin(self) -> None:
        """A step with tokens of this engine is about to start."""
        self.num_steps += 1
        if self.is_resting:
            self.is_resting = False
            self._wake(self.num_steps)

    def idle(self) -> None:
        """A step without."""
        self.num_steps += 1
        is_busy = self._executor.ask(WorkerProtocol.idle_step)[0]
        self.is_resting = not is_busy and self._woken_for <= self.num_steps

    def wake(self, step: int) -> None:
        """Another engine says that this step comes."""
        self._woken_for = max(self._woken_for, step)
        if step > self.num_steps:
            self.is_resting = False
