"""base/turns.py: one thread at a time, in the order of arrival, and no turn is lost to an exception."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from quire.base import turns as module
from quire.base.turns import USUAL, HeldSignals, ThreadTurns


def test_whoever_had_a_turn_queues_behind_those_who_wait():
    turns, order = ThreadTurns(), []
    is_inside, may_leave = threading.Event(), threading.Event()

    def first():
        turns.take(lambda: (is_inside.set(), may_leave.wait()))
        turns.take(order.append, "again")

    one = threading.Thread(target=first)
    other = threading.Thread(target=turns.take, args=(order.append, "other"))
    one.start()
    is_inside.wait()
    other.start()
    _await_queue(turns)
    may_leave.set()
    one.join()
    other.join()
    assert order == ["other", "again"]


def test_a_turn_within_a_turn():
    turns = ThreadTurns()
    assert turns.take(lambda: turns.take(int, "7")) == 7


def test_an_exception_ends_a_turn():
    turns = ThreadTurns()
    with pytest.raises(ZeroDivisionError):
        turns.take(divmod, 1, 0)
    assert _elsewhere(turns) == [1]


def test_an_interrupt_while_waiting_takes_no_turn():
    turns, may_leave, is_inside = ThreadTurns(), threading.Event(), threading.Event()
    other = threading.Thread(target=turns.take, args=(lambda: (is_inside.set(), may_leave.wait()),))
    other.start()
    is_inside.wait()
    caller = threading.Thread(target=lambda: (_await_queue(turns), os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        caller.start()
        turns.take(int)
    caller.join()
    may_leave.set()
    other.join()
    assert _elsewhere(turns) == [1] and turns.take(int, "3") == 3


def test_signals_are_not_held_back_for_ever_if_that_is_interrupted(monkeypatch):
    """By a handler that was still to be held back."""
    before = [signal.getsignal(number) for number in USUAL]
    held: list[int] = []

    def call(number, handler):
        signal.signal(number, handler)
        held.append(number)
        if len(held) == 2:
            raise TimeoutError

    try:
        for number in USUAL:
            signal.signal(number, lambda number, frame: None)
        own = [signal.getsignal(number) for number in USUAL]
        monkeypatch.setattr(module, "fast", SimpleNamespace(getsignal=signal.getsignal, signal=call))
        with pytest.raises(TimeoutError):
            HeldSignals().__enter__()
        assert len(held) > 2 and [signal.getsignal(number) for number in USUAL] == own
    finally:
        for number, handler in zip(USUAL, before, strict=True):
            signal.signal(number, handler)


def _await_queue(turns: ThreadTurns) -> None:
    """Until another thread is next in the queue."""
    while turns._next.acquire(blocking=False):
        turns._next.release()
        time.sleep(0.001)


def _elsewhere(turns: ThreadTurns) -> list[int]:
    """Whether another thread gets a turn."""
    done: list[int] = []
    thread = threading.Thread(target=turns.take, args=(done.append, 1))
    thread.start()
    thread.join(10)
    return done
