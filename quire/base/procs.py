"""A child process that starts from nothing but an import path and a block of bytes.

The child is a fresh interpreter, not a fork: it does not run the parent's main script again, so programs need no
`if __name__ == "__main__"`. Its standard input is the parent's end of its life: the boot bytes come through it, and
when it closes, the parent is gone and the child leaves. Ctrl-C belongs to the parent alone.
Must not know what the child does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import IO

from quire.base import registry

_ENTER = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; sys.path[:] = {path!r}; "
    "from quire.base.procs import enter; enter({target!r}, {litter!r})"
)
_LENGTH_BYTES = 8
PARENT_GONE = 70  # exit code of a child whose parent vanished


class Child:
    """A running child. `notice` is a descriptor that turns readable when it has died, by whatever cause."""

    def __init__(self, target: str, boot: bytes, *, name: str, litter: str | None = None) -> None:
        """`target` ('module:function') is called in the child with `boot`.

        `litter`: a folder that the child removes when the parent vanishes without having done so.
        """
        self.name = name
        code = _ENTER.format(path=sys.path, target=target, litter=litter)
        self._process = subprocess.Popen([sys.executable, "-P", "-c", code], stdin=subprocess.PIPE)
        self.notice, closing = os.pipe()
        self._watch = threading.Thread(target=_watch, args=(self._process, closing), name=f"watch {name}", daemon=True)
        self._watch.start()
        self._finalizer = weakref.finalize(self, _end, self._process, self._watch, self.notice, os.getpid())
        pipe = _stdin(self._process)
        with contextlib.suppress(BrokenPipeError):  # it died already: the notice says so
            pipe.write(len(boot).to_bytes(_LENGTH_BYTES, "little") + boot)
            pipe.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._watch.is_alive()

    def wait(self, timeout: float) -> bool:
        """True once it has died."""
        self._watch.join(timeout)
        return not self._watch.is_alive()

    def why_dead(self) -> str:
        """How it ended, in words: exit code or signal."""
        self._watch.join(1.0)
        code = self._process.returncode
        who = f"{self.name} (process {self.pid})"
        if code is None:
            return f"{who} is still running"
        if code >= 0:
            return f"{who} left with exit code {code}"
        try:
            word = signal.Signals(-code).name
        except ValueError:
            word = f"signal {-code}"
        hint = "; the system kills so when memory runs out" if -code == signal.SIGKILL else ""
        return f"{who} was killed by {word}{hint}"

    def stop(self, patience: float) -> None:
        """Wait `patience` seconds for it to leave by itself, then make it."""
        self.wait(patience)
        self._finalizer()


@contextlib.contextmanager
def held_interrupt() -> Iterator[None]:
    """Hold back a first Ctrl-C until the block is done; a second one interrupts at once."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        raise KeyboardInterrupt


def enter(target: str, litter: str | None) -> None:
    """First code of a child: read the boot bytes, watch the parent, call the target."""
    faulthandler.enable()
    life = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    boot = _read(life, int.from_bytes(_read(life, _LENGTH_BYTES), "little"))
    threading.Thread(target=_leave_with_parent, args=(life, litter), name="watch parent", daemon=True).start()
    registry.load(target)(boot)


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


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdin is None:
        raise RuntimeError("the child was started without a pipe")
    return process.stdin


def _watch(process: subprocess.Popen[bytes], closing: int) -> None:
    process.wait()
    os.close(closing)


def _end(process: subprocess.Popen[bytes], watch: threading.Thread, notice: int, parent: int) -> None:
    """Ask, then force. Runs at most once, also when the parent's interpreter ends."""
    if os.getpid() != parent:  # a fork of the parent ends; the child is not its own
        return
    for send, patience in ((process.terminate, 3.0), (process.kill, 10.0)):
        if not watch.is_alive():
            break
        send()
        watch.join(patience)
    with contextlib.suppress(BrokenPipeError):
        _stdin(process).close()
    os.close(notice)
