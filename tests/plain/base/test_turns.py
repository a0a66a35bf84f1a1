"""base/turns.py: one thread at a time, in the order of arrival, and no turn is lost to an exception."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from quire.base.turns import ThreadTurns


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
    while turns._next.acquire(blocking=False):  # until the other is in the queue
        turns._next.release()
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
    threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        turns.take(int)
    assert time.monotonic() - began < 10
    may_leave.set()
    other.join()
    assert _elsewhere(turns) == [1] and turns.take(int, "3") == 3


def _elsewhere(turns: ThreadTurns) -> list[int]:
    """Whether another thread gets a turn."""
    done: list[int] = []
    thread = threading.Thread(target=turns.take, args=(done.append, 1))
    thread.start()
    thread.join(10)
    return done
