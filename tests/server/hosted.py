"""`quire serve` as a program of its own, as an operator runs it: flags in, a URL, a log and an exit status out.

By default over the fake worker (an answer repeats its prompt; `vllm_xargs` make things happen, see
tests/fake_engine.py), so that a server is up soon. The port is the system's choice, read from the server's own line.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.fake_engine import write_model
from tests.warm_python import SHARED, Fork, WarmPython

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 120.0, 60.0
_FAKE = (
    "import sys; import quire.engine.process_client as c; c.MAIN = 'tests.fake_engine:main'; c.EARLY = ''; "
    "from tests.fake_engine import FakeExecutor; from quire.executor.base import BACKENDS; "
    "BACKENDS.register('uni', FakeExecutor); from quire.cli.main import main; sys.exit(main(sys.argv[1:]))"
)
_REAL = "import sys; from quire.cli.main import main; sys.exit(main(sys.argv[1:]))"


class Hosted:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str] | Fork) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for_line(self, pattern: str, seconds: float = START_S) -> re.Match[str]:
        """The first line, past or future, that matches."""
        end, seen = time.monotonic() + seconds, 0
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = len(self.lines)
                left = end - time.monotonic()
                assert left > 0 and (self._reader.is_alive() or seen < len(self.lines)), self.log
                self._news.wait(min(left, 0.5))

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def engine_pid(self) -> int:
        return next(pid for pid, command in self.children() if "fake_engine" in command or "engine.proc" in command)

    def api_pids(self) -> list[int]:
        return [pid for pid, command in self.children() if "server.host" in command]

    def children(self) -> list[tuple[int, str]]:
        return children_of(self.process.pid)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = STOP_S) -> int:
        """The exit status, once its log is complete."""
        status = self.process.wait(seconds)
        self._reader.join(seconds)
        return status

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=False, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, verify=False, **kwargs)

    def complete(self, prompt: str = "abc", max_tokens: int = 6, **more: Any) -> httpx.Response:
        return self.post("/v1/completions", completion(prompt, max_tokens, **more))


def completion(prompt: str = "abc", max_tokens: int = 6, *, stream: bool = False, **xargs: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    return body | ({"vllm_xargs": xargs} if xargs else {})


def children_of(pid: int) -> list[tuple[int, str]]:
    """Process ids and commands, in the order in which they were started: ids begin anew after the highest."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process of somebody else that ended meanwhile
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append((int(fields[19]), int(folder.name), (folder / "cmdline").read_text()))
    return [(child, command) for _, child, command in sorted(found)]


@contextlib.contextmanager
def started(
    *flags: str, fake: bool = True, env: dict[str, str] | None = None, within: tuple[str, ...] = ()
) -> Iterator[Hosted]:
    """A server that may still be starting, in a fork of the test run's interpreter if there is one. `within`: a command
    that runs it, in an interpreter of its own."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    code, address = _FAKE if fake else _REAL, os.environ.get(SHARED)
    process: subprocess.Popen[str] | Fork | None = None
    if address and not within:
        process = WarmPython.start_apart(address, code, "serve", *flags, env=variables, cwd=ROOT)
    process = process or subprocess.Popen(
        [*within, sys.executable, "-c", code, "serve", *flags],
        env=variables, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), start_new_session=True,
    )  # fmt: skip
    hosted = Hosted(process)
    try:
        yield hosted
    finally:
        if process.poll() is None:
            process.kill()
        hosted.wait()


@contextlib.contextmanager
def hosted(folder: Path | None, *flags: str, fake: bool = True, env: dict[str, str] | None = None) -> Iterator[Hosted]:
    """A server that is ready. `folder`: where the fake model is written."""
    model = [write_model(folder), "--generation-config", "vllm"] if folder is not None else []  # no cap of 33 tokens
    with started(*model, "--port", "0", *flags, fake=fake, env=env) as server:
        server.url = server.wait_for_line(r"Listening at (\S+) ")[1].replace("//0.0.0.0:", "//127.0.0.1:")
        yield server


def free_address() -> tuple[socket.socket, int]:
    """A port that is taken for as long as the socket is open."""
    taken = socket.create_server(("127.0.0.1", 0))
    return taken, taken.getsockname()[1]


def wait_until(test: Any, seconds: float = 60.0) -> None:
    """For what can only be asked again and again."""
    end = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
