"""Work that no second thread enters and no signal's handler cuts in two.

`ThreadTurns`: threads that use one thing take turns, in the order in which they came. Whatever ends a turn passes it
on, an exception that a signal's handler raises as well, even while a thread waits. The thread whose turn it is may
take another within it. `HeldSignals`: Python calls handlers of signals in the middle of whatever runs, and a handler
may raise; they are held back until the work is done, and called then with the frames that they were for. Must not know:
what the work is.
"""

from __future__ import annotations

import _signal as fast  # type: ignore[import-not-found]  # what `signal` wraps; see `HeldSignals`
import contextlib
import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

Result = TypeVar("Result")
Given = ParamSpec("Given")


class TakesTurns(Protocol):
    @property
    def turns(self) -> ThreadTurns: ...


User = TypeVar("User", bound=TakesTurns)


class _Mine(threading.local):
    is_inside = False


class ThreadTurns:
    def __init__(self) -> None:
        self._next = threading.RLock()  # held by who comes next: whoever has just had a turn queues behind
        self._now = threading.RLock()
        self._mine = _Mine()

    def take(self, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Result:
        """What `work` returns, once it is this thread's turn."""
        if self._mine.is_inside:
            return work(*args, **kwargs)
        try:
            with self._next:
                self._now.acquire()
            self._mine.is_inside = True
            return work(*args, **kwargs)
        finally:
            self._mine.is_inside = False
            try:  # noqa: SIM105  # the first call here has to be this one: a signal may raise after any
                self._now.release()
            except RuntimeError:  # interrupted before it was its turn
                pass


def in_turn(method: Callable[Concatenate[User, Given], Result]) -> Callable[Concatenate[User, Given], Result]:
    """A method that waits for the turn of its caller's thread."""

    @functools.wraps(method)
    def run(self: User, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return self.turns.take(method, self, *args, **kwargs)

    return run


_NAMES = ("SIGINT", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGVTALRM", "SIGPROF")
USUAL = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))
Handler = Callable[[int, FrameType | None], Any]


class HeldSignals:
    """While entered, the handlers of the usual signals are held back; not that of a second Ctrl-C.

    It is entered for every step. To look at eight handlers and to change one takes 1 us by `_signal`, and 19 us by
    `signal`, which turns what it is given into enumerations."""

    __slots__ = ("_came", "_handlers", "_is_over")

    def __enter__(self) -> None:
        self._came: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Handler] = {}
        self._is_over = False
        if threading.current_thread() is not threading.main_thread():
            return  # no handler is called here
        try:
            for number in USUAL:
                if callable(handler := fast.getsignal(number)):
                    self._handlers[number] = handler
                    fast.signal(number, self._take)
        except BaseException:  # that of a handler which was not held back yet: nobody would leave what is not entered
            self.__exit__(None, None, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Call the handlers of what came, every one even if one raises."""
        self._is_over = True
        try:
            for number, handler in self._handlers.items():
                fast.signal(number, handler)
        finally:
            if self._came:
                self._call_handlers()

    def _call_handlers(self) -> None:
        with contextlib.ExitStack() as calls:
            for number, frame in reversed(self._came):
                calls.callback(self._handlers[number], number, frame)

    def _take(self, number: int, frame: FrameType | None) -> None:
        is_second = number == signal.SIGINT and any(earlier == number for earlier, _ in self._came)
        if self._is_over or is_second:  # the former: it was not put back, because another's handler raised meanwhile
            self._handlers[number](number, frame)
        else:
            self._came.append((number, frame))
