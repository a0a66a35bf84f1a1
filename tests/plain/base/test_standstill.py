"""base/standstill.py: what Linux tells of processes that stand still, and for how long they have."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.base.standstill import LIMIT_S, LOOK_S, ProcessWatch, Standstill, StandstillCount, standstill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="what /proc tells")
STOPPED, DEBUGGED = "stopped by a signal", "stopped by a debugger"
ENDED, NOT_ENDED = 0x400004, 0x400000  # of the kernel's flags of a thread


@contextlib.contextmanager
def running(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A program that has written a process id, which need not be its own."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def awaited(pid: int) -> Standstill:
    for _ in range(6000):
        if (found := standstill(pid)) is not None:
            return found
        time.sleep(0.01)
    raise AssertionError(f"process {pid} never stood still")


# ---- processes that there are


def test_a_process_that_waits_or_computes_does_not_stand_still() -> None:
    with running("import os; print(os.getpid(), flush=True); input()") as (_, pid):
        assert standstill(pid) is None
    with running("import os; print(os.getpid(), flush=True)\nwhile True: pass") as (_, pid):
        assert standstill(pid) is None
    assert standstill(pid) is None  # it is gone
    assert standstill(os.getpid()) is None


def test_a_stopped_process_stands_still_until_it_runs() -> None:
    with running("import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(0.001)") as (_, pid):
        os.kill(pid, signal.SIGSTOP)
        first = awaited(pid)
        assert first.what == STOPPED and first.exit_code is None
        time.sleep(0.05)
        assert standstill(pid) == first  # it has not run
        os.kill(pid, signal.SIGCONT)
        while standstill(pid) is not None:
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
        again = awaited(pid)
        assert again.what == STOPPED and again != first  # it has


def test_a_process_that_a_debugger_has_stopped() -> None:
    """Its parent is the debugger, and never looks."""
    code = (
        "import ctypes, os, signal, time\n"
        "if child := os.fork(): print(child, flush=True); time.sleep(600)\n"
        "if ctypes.CDLL(None).ptrace(0, 0, 0, 0): os._exit(1)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    with running(code) as (_, pid):
        try:
            for _ in range(6000):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state in "tTZ":
                    break
                time.sleep(0.01)
            if state == "Z":
                pytest.skip("no process may debug another here")
            assert awaited(pid).what == DEBUGGED
        finally:
            os.kill(pid, signal.SIGKILL)


_WITHOUT_MAIN_THREAD = (
    "import ctypes, os, threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,)).start()\n"
    "print(os.getpid(), flush=True)\n"
    "ctypes.CDLL(None).pthread_exit(None)\n"
)


def test_a_process_whose_main_thread_has_ended() -> None:
    with running(_WITHOUT_MAIN_THREAD) as (process, pid):
        assert awaited(pid) == Standstill("without its main thread")
        assert process.poll() is None
    with running("import os; print(os.getpid(), flush=True)") as (process, pid):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert standstill(pid) is None  # a zombie, and nothing is left of it


@pytest.mark.parametrize("is_whole", [True, False], ids=["", "a Python without these calls"])
def test_a_process_is_watched_until_it_stands_still_or_ends(is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_whole:  # as it is where headers of an older system were there to build it
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    with running("import os, time; print(os.getpid(), flush=True); time.sleep(600)") as (process, pid):
        watch = ProcessWatch(pid)
        try:
            os.kill(pid, signal.SIGSTOP)
            found = watch.await_standstill(0.3)
            assert found is not None and found.what == STOPPED and not watch.has_ended()
            watch.kill()
            assert watch.has_ended(60.0) and watch.await_standstill(0.3) is None
            assert process.wait() == -signal.SIGKILL
            watch.kill()  # nobody else is hit
        finally:
            watch.close()
    with pytest.raises(OSError):
        ProcessWatch(pid)


# ---- processes as they may be


class Proc:
    """A folder of what the system would tell of process 7."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, tid: int, state: str, *lines: str, flags: int = NOT_ENDED, status: int = 0) -> None:
        text = "\n".join([f"State:\t{state}", *lines, ""])
        stat = f"{tid} (a ) b) {state[0]} 1 1 1 0 -1 {flags} {' '.join(['0'] * 42)} {status}\n"
        for place in [self.folder / "7" / "task" / str(tid), *([self.folder / "7"] if tid == 7 else [])]:
            place.mkdir(parents=True, exist_ok=True)
            (place / "status").write_text(text)
            (place / "stat").write_text(stat)

    def read(self) -> Standstill | None:
        return standstill(7, str(self.folder))


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


ALIVE = ("VmSize:\t 100 kB", "CoreDumping:\t0", "Threads:\t2")


def test_a_core_dump(proc: Proc) -> None:
    proc.write(7, "D (disk sleep)", "VmSize:\t 100 kB", "CoreDumping:\t1", "Threads:\t2")
    assert proc.read() == Standstill("writing a core dump")


def test_threads_are_looked_at_where_the_main_one_is_inside_of_the_kernel(proc: Proc) -> None:
    proc.write(7, "D (disk sleep)", *ALIVE)
    proc.write(8, "S (sleeping)", *ALIVE)
    assert proc.read() is None
    proc.write(9, "T (stopped)", *ALIVE, "voluntary_ctxt_switches:\t4", "nonvoluntary_ctxt_switches:\t5")
    found = proc.read()
    assert found is not None and found.what == STOPPED and {"9", "4", "5"} <= set(found.mark)
    proc.write(7, "S (sleeping)", *ALIVE)  # a debugger may hold one thread and let the process go on
    assert proc.read() is None


def test_a_process_that_dies_slowly_says_what_of(proc: Proc) -> None:
    proc.write(7, "Z (zombie)", "Threads:\t2", flags=ENDED, status=9)
    proc.write(8, "D (disk sleep)", "Threads:\t2", flags=ENDED, status=9)
    found = proc.read()
    assert found is not None and found.exit_code == -signal.SIGKILL
    proc.write(7, "D (disk sleep)", "Threads:\t1", flags=ENDED, status=0x80 | signal.SIGSEGV)  # its memory is gone
    found = proc.read()
    assert found is not None and found.exit_code == -signal.SIGSEGV
    proc.write(7, "Z (zombie)", "Threads:\t2", flags=ENDED, status=3 << 8)
    found = proc.read()
    assert found is not None and found.exit_code == 3


def test_a_process_that_leaves_as_it_should_may_take_its_time(proc: Proc) -> None:
    proc.write(7, "Z (zombie)", "Threads:\t2", flags=ENDED)
    proc.write(8, "D (disk sleep)", "Threads:\t2", flags=ENDED)
    assert proc.read() is None
    proc.write(8, "S (sleeping)", "Threads:\t2", flags=NOT_ENDED)
    assert proc.read() == Standstill("without its main thread")


def test_a_system_that_tells_less_is_not_believed_to_tell_more(proc: Proc) -> None:
    proc.write(7, "S (sleeping)", "Threads:\t2")  # no memory, but not ended either
    assert proc.read() is None
    (proc.folder / "7" / "stat").write_text("nothing of use")
    assert proc.read() is None
    (proc.folder / "7" / "status").write_text("nothing of use")
    assert proc.read() is None


# ---- how long


def seconds(*looks: tuple[float, Standstill | None]) -> list[float]:
    count = StandstillCount()
    return [round(count.seconds(seen, time), 6) for time, seen in looks]


def test_time_is_counted_from_the_first_look_that_found_it_still() -> None:
    one, other = Standstill(STOPPED, ("7", "1")), Standstill(STOPPED, ("7", "2"))
    assert seconds((5.0, one), (5.2, one), (5.4, one)) == [0, 0.2, 0.4]
    assert seconds((5.0, None), (5.2, one), (5.4, one), (5.6, None), (5.8, one)) == [0, 0, 0.2, 0, 0]
    assert seconds((5.0, one), (5.2, one), (5.4, other), (5.6, other)) == [0, 0.2, 0, 0.2]  # it has run meanwhile


def test_time_in_which_nobody_looked_does_not_count() -> None:
    """Whoever looks was stopped with all others, and goes on before they do."""
    still = Standstill(STOPPED, ("7", "1"))
    assert seconds((5.0, None), (3600.0, still), (3600.2, still)) == [0, 0, 0.2]
    assert seconds((5.0, still), (5.6, still), (3600.0, still), (3600.2, still)) == [0, 0.6, 0, 0.2]
    late = [(5.0 + 3 * LOOK_S * number, still) for number in range(4)]  # a crowded machine: looks come late, but come
    assert seconds(*late)[-1] >= LIMIT_S
