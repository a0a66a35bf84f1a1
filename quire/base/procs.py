"""A child process that starts from nothing but an import path and a block of bytes.

The child is a fresh interpreter, not a fork: it does not run the parent's main script again, so programs need no
`if __name__ == "__main__"`. Its standard input is the parent's end of its life: the boot bytes come through it, and
when it closes, the parent is gone and the child leaves. Ctrl-C and SIGTERM, which may be sent to all of a group, belong
to the parent alone; STACKS makes any child write what its threads are doing to its standard error, even a stuck one.
A child that stands still (standstill.py) is killed, and counts as dead whether or not the system can end it.
Must not know what the child does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import IO

from quire.base import env, registry
from quire.base.clock import now
from quire.base.collector import no_collections
from quire.base.standard_streams import open_missing
from quire.base.standstill import LIMIT_S, ProcessWatch, Standstill

_BACKGROUND = (
    "import os; os.nice({nice}); import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from {module} import {function}; {function}()"
)
_BACKGROUND_NICE = 5  # a quarter of a core, where something else wants all of it
_ENTER = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM)); "
    "import sys; sys.path[:] = {path!r}; "
    "from quire.base.procs import enter; enter({target!r}, {litter!r}, {early!r})"
)
_TICKS = os.sysconf("SC_CLK_TCK")
_LENGTH_BYTES = 8
PARENT_GONE = 70  # exit code of a child whose parent vanished
STACKS = signal.SIGUSR2
_DEATH_S = 0.1  # after which a child that was killed counts as dead although it is not gone


class _Fate:
    """What becomes of a child, for all its threads; nothing of it may keep the Child alive."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name, self.process = name, process
        self.dead = threading.Event()
        self.standstill: Standstill | None = None  # that it was killed for
        self.watcher: threading.Thread | None = None
        self.limit = min(LIMIT_S, env.WORKER_TIMEOUT_S.get())  # of a standstill; 0: it may last

    @property
    def exit_code(self) -> int | None:
        code, still = self.process.returncode, self.standstill
        if code is not None or still is None:
            return code
        return -signal.SIGKILL if still.exit_code is None else still.exit_code  # as it will be

    def words(self) -> str:
        who, code, still = f"{self.name} (process {self.process.pid})", self.exit_code, self.standstill
        if still is not None and still.exit_code is None and code == -signal.SIGKILL:
            off = "not with QUIRE_WORKER_TIMEOUT_S=0"
            return f"{who} has been {still.what} for {self.limit:.1f} s, and was killed ({off})"
        return f"{who} {_in_words(code)}"


def _in_words(code: int | None) -> str:
    if code is None:
        return "is still running"
    if code >= 0:
        return f"left with exit code {code}"
    try:
        word = signal.Signals(-code).name
    except ValueError:
        word = f"signal {-code}"
    hint = "; the system kills so when memory runs out" if -code == signal.SIGKILL else ""
    return f"was killed by {word}{hint}"


class Child:
    """A running child. `notice` is a descriptor that turns readable when it has died, by whatever cause."""

    def __init__(
        self,
        target: str,
        boot: bytes | None,
        *,
        name: str,
        litter: str | None = None,
        keep: tuple[int, ...] = (),
        early: str = "",
        keep_env: str | tuple[str, ...] = "",
        before_kill: Callable[[str], None] | None = None,
    ) -> None:
        """`target` ('module:function') is called in the child with `boot`, or with what `send_boot` sends later.

        `litter`: a folder that the child removes when the parent vanishes without having done so.
        `keep`: descriptors that the child has too, under the same numbers.
        `early`: a module that the child imports while it waits for its boot bytes.
        `keep_env`: variables that begin so are handed on, secrets or not; of all others those that are none.
        `before_kill`: is told why, before a child that stands still is killed.
        """
        self.name = name
        code = _ENTER.format(path=sys.path, target=target, litter=litter, early=early)
        with _signals_blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                pass_fds=keep,
                env=env.without_secrets(keep=keep_env),
            )
        self.notice, closing = os.pipe()
        self._fate = _Fate(name, self._process)
        args = self._fate, closing, before_kill
        self._fate.watcher = threading.Thread(target=_watch, args=args, name=f"watch {name}", daemon=True)
        self._fate.watcher.start()
        self._finalizer = weakref.finalize(self, _end, self._fate, self.notice, os.getpid())
        if boot is not None:
            self.send_boot(boot)

    def send_boot(self, boot: bytes) -> None:
        """Once."""
        pipe = _stdin(self._process)
        with contextlib.suppress(BrokenPipeError):  # it died already: the notice says so
            pipe.write(len(boot).to_bytes(_LENGTH_BYTES, "little") + boot)
            pipe.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._fate.dead.is_set()

    def wait(self, timeout: float) -> bool:
        """True once it has died."""
        return self._fate.dead.wait(timeout)

    @property
    def exit_code(self) -> int | None:
        """None while it lives; negative for a signal."""
        return self._fate.exit_code

    def signal(self, number: signal.Signals) -> None:
        """Does nothing once it is dead."""
        self._process.send_signal(number)

    def why_dead(self) -> str:
        """How it ended, in words: exit code, signal or standstill."""
        self._fate.dead.wait(1.0)
        return self._fate.words()

    def stop(self, patience: float) -> None:
        """Wait `patience` seconds for it to leave by itself, then make it. `notice` stays open until `close`."""
        self.wait(patience)
        _make_leave(self._fate)

    def close(self) -> None:
        """Stop it, and give the descriptors back: nobody may be waiting for `notice` any more."""
        self._finalizer()


def background_command(target: str) -> list[str]:
    """Of an interpreter that calls `target` ('module:function'), after everyone else in line for the processor."""
    module, function = target.split(":")
    code = _BACKGROUND.format(nice=_BACKGROUND_NICE, module=module, function=function)
    return [sys.executable, "-P", "-c", code, json.dumps(sys.path)]


def processor_seconds(pid: int) -> float:
    """What a process, all its threads together, has had of the processor; 0.0 once it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS  # utime, stime


def enter(target: str, litter: str | None, early: str) -> None:
    """First code of a child: read the boot bytes, watch the parent, call the target."""
    open_missing()
    faulthandler.enable()
    faulthandler.register(STACKS, all_threads=True)
    life = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if early:
        env.let_idle_threads_sleep()
        threading.Thread(target=_import, args=(early,), name="early import", daemon=True).start()
    boot = _read(life, int.from_bytes(_read(life, _LENGTH_BYTES), "little"))
    threading.Thread(target=_leave_with_parent, args=(life, litter), name="watch parent", daemon=True).start()
    registry.load(target)(boot)


def _import(module: str) -> None:
    with no_collections(), contextlib.suppress(ImportError):  # whoever needs it will say so
        importlib.import_module(module)


def _read(source: int, count: int) -> bytes:
    parts = []
    while count:
        piece = os.read(source, min(count, 1 << 20))
        if not piece:
            os._exit(PARENT_GONE)
        parts.append(piece)
        count -= len(piece)
    return b"".join(parts)


def _leave_with_parent(life: int, litter: str | None) -> None:
    while os.read(life, 1024):
        pass
    if litter is not None:
        shutil.rmtree(litter, ignore_errors=True)
    os._exit(PARENT_GONE)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """A child begins with what its parent's thread has blocked, and its interpreter runs a while before `_ENTER` does.

    The parent gets what came meanwhile afterwards, or another thread of it does at once.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # may raise what a handler does
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdin is None:
        raise RuntimeError("the child was started without a pipe")
    return process.stdin


def _watch(fate: _Fate, closing: int, before_kill: Callable[[str], None] | None) -> None:
    """The root of a thread: until the child is gone. Its parent hears of its death no later than that."""
    try:
        if fate.limit > 0:
            _end_standstill(fate, before_kill)
    finally:
        if fate.standstill is None:
            fate.process.wait()
        fate.dead.set()
        os.close(closing)
    fate.process.wait()  # the system may take its time, or wait for a debugger


def _end_standstill(fate: _Fate, before_kill: Callable[[str], None] | None) -> None:
    """Returns when the child has ended, was killed, or nothing can be known of it."""
    try:
        watch = ProcessWatch(fate.process.pid)
    except OSError:  # another system, or an older one
        return
    try:
        fate.standstill = watch.await_standstill(fate.limit)
        if fate.standstill is None:
            return
        try:
            if before_kill is not None:
                before_kill(fate.words())
        finally:
            watch.kill()
        if watch.has_ended(_DEATH_S):
            _reap(fate.process, _DEATH_S)
    finally:
        watch.close()


def _reap(process: subprocess.Popen[bytes], patience: float) -> None:
    """A debugger may keep a child that has ended."""
    until = now() + patience
    while process.poll() is None and now() < until:
        time.sleep(0.001)


def _end(fate: _Fate, notice: int, parent: int) -> None:
    """Runs at most once, also when the parent's interpreter ends."""
    if os.getpid() != parent:  # a fork of the parent ends; the child is not its own
        return
    _make_leave(fate)
    os.close(notice)


def _make_leave(fate: _Fate) -> None:
    """Let go, then force."""
    with contextlib.suppress(BrokenPipeError):
        _stdin(fate.process).close()  # the child leaves when it sees this
    if threading.current_thread() is fate.watcher:  # the collector has come to a lost Child there
        fate.process.kill()
        return
    if not fate.dead.wait(3.0):
        fate.process.kill()
    if fate.watcher is not None:
        fate.watcher.join(10.0)  # it is gone, with what it held
