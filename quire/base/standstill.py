"""Processes that stand still: of which the system says that they cannot go on, and not only that they are silent.

In: process ids, and what Linux tells of them in /proc. Out: why a process stands still, and for how long it has. Never
said of one that computes, waits, swaps or is starved; where the system tells nothing, of none. Must not know what the
processes do, or what becomes of them.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import NamedTuple

from quire.base.clock import now

LIMIT_S = 1.0
LOOK_S = 0.15  # between two looks
_LATE_S = 0.75  # between two looks of a process that was itself stopped, or did not get to run
_EXITING = 0x4  # of the kernel's flags of a thread (PF_EXITING)
_OPEN, _SEND = 434, 424  # system calls pidfd_open and pidfd_send_signal, the same on x86 and ARM
_NUM_SWITCHES = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


class Standstill(NamedTuple):
    what: str  # the process has been since
    mark: tuple[str, ...] = ()  # the same at two looks: no thread that it tells of has run between them
    exit_code: int | None = None  # of a process that has ended but is not gone, as subprocess has it


def standstill(pid: int, proc: str = "/proc") -> Standstill | None:
    """None: it may go on, or it is gone."""
    main = _read_status(f"{proc}/{pid}/status")
    if main is None:
        return None
    if main.get("CoreDumping") == "1":
        return Standstill("writing a core dump")
    state = main["State"][:1]
    if (state == "Z" and main.get("Threads") != "1") or (state != "Z" and "VmSize" not in main):
        return _ending(f"{proc}/{pid}")
    if state != "D":
        return _stopped(main, str(pid))
    # The main thread is inside of the kernel and stops when it comes out; others may have stopped already.
    for tid in _threads(f"{proc}/{pid}"):
        thread = _read_status(f"{proc}/{pid}/task/{tid}/status")
        if thread is not None and (still := _stopped(thread, tid)) is not None:
            return still
    return None


def _stopped(thread: dict[str, str], tid: str) -> Standstill | None:
    what = {"T": "stopped by a signal", "t": "stopped by a debugger"}.get(thread["State"][:1])
    if what is None:
        return None
    return Standstill(what, (tid, what, *(thread.get(name, "") for name in _NUM_SWITCHES)))


def _ending(folder: str) -> Standstill | None:
    """The main thread has ended, or gives back what it had; with the others that may take seconds, or for ever."""
    flags, status = _flags_and_status(f"{folder}/stat") or (0, 0)
    if not flags & _EXITING:
        return None
    if status:
        return Standstill("at its end", exit_code=os.waitstatus_to_exitcode(status & 0xFF7F))  # but for the core's bit
    others = (_flags_and_status(f"{folder}/task/{tid}/stat") for tid in _threads(folder))
    if all(other is None or other[0] & _EXITING for other in others):
        return None  # it leaves as it should
    return Standstill("without its main thread")


def _flags_and_status(path: str) -> tuple[int, int] | None:
    """Of a thread: the kernel's flags and what it ended with."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return int(fields[6]), int(fields[-1])
    except (OSError, ValueError, IndexError):
        return None


def _threads(folder: str) -> list[str]:
    try:
        return os.listdir(f"{folder}/task")
    except OSError:
        return []


def _read_status(path: str) -> dict[str, str] | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            pairs = (line.partition(":") for line in file.read().splitlines())
    except OSError:
        return None
    fields = {name: value.strip() for name, _, value in pairs}
    return fields if fields.get("State") else None


class StandstillCount:
    """For how long a process has stood still. Only time counts in which somebody looked: where a look comes late, the
    process that looks was perhaps stopped, and all others with it."""

    def __init__(self) -> None:
        self._last, self._since = -float("inf"), 0.0
        self._seen: Standstill | None = None

    def seconds(self, seen: Standstill | None, time: float) -> float:
        if seen is None or seen != self._seen or time - self._last > _LATE_S:
            self._seen, self._since = seen, time
        self._last = time
        return time - self._since


class ProcessWatch:
    """A process, by a descriptor that no other process can come to have. OSError: the system has no such, or the
    process is gone."""

    def __init__(self, pid: int) -> None:
        if sys.platform != "linux":
            raise OSError(f"nothing is known of other processes on {sys.platform}")
        self._pid, self._descriptor = pid, _open(pid)
        self._end = select.poll()
        self._end.register(self._descriptor, select.POLLIN)

    def has_ended(self, patience: float = 0.0) -> bool:
        return bool(self._end.poll(1000 * patience))

    def await_standstill(self, limit: float) -> Standstill | None:
        """Until the process has stood still for so many seconds. None: it has ended."""
        count, spent = StandstillCount(), 0.0
        while not self.has_ended(min(LOOK_S, limit - spent)):
            seen = standstill(self._pid)
            spent = count.seconds(seen, now())
            if seen is not None and spent >= limit and not self.has_ended():
                return seen
        return None

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            _send(self._descriptor, signal.SIGKILL)

    def close(self) -> None:
        os.close(self._descriptor)


def _open(pid: int) -> int:
    return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else _called(_OPEN, pid, 0)


def _send(descriptor: int, number: signal.Signals) -> None:
    if hasattr(signal, "pidfd_send_signal"):
        signal.pidfd_send_signal(descriptor, number)
    else:
        _called(_SEND, descriptor, number, 0, 0)


def _called(number: int, *args: int) -> int:
    """A system call that Python lacks where it was built with headers older than it."""
    import ctypes  # lazy

    result = int(ctypes.CDLL(None, use_errno=True).syscall(*map(ctypes.c_long, (number, *args))))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
