"""A process at a pseudo-terminal, typed to and read by a test."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Mapping


class Terminal:
    def __init__(self, *command: str, environment: Mapping[str, str] | None = None, seconds: float = 120.0) -> None:
        """`seconds`: the longest wait for a text. environment None: this process's own."""
        self._seconds, self.seen = seconds, ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], command, os.environ if environment is None else environment)

    def wait_for(self, text: str, seconds: float | None = None) -> str:
        """Everything up to and with `text`; it is then forgotten."""
        seconds = self._seconds if seconds is None else seconds
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no {text!r} within {seconds} s; saw {self.seen!r}"
            self.seen += os.read(self.fd, 4096).decode(errors="replace")
        found, _, self.seen = self.seen.partition(text)
        return found + text

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
