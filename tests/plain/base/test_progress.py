"""base/progress.py: a bar on a terminal, lines in a log, nothing for what is short; and who uses it."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from quire.base import clock
from quire.base import progress as shown
from quire.base.fetch import FetchPolicy, download
from quire.base.log import logger
from quire.llm.progress import Progress

LOG = logger("quire.test_progress")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(clock, "now", made)
    monkeypatch.setattr(shown, "now", made)
    monkeypatch.setattr("sys.stderr", io.StringIO())  # no terminal
    return made


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(LOG, "info", lambda words, *args: said.append(words % args))
    return said


def test_a_log_gets_a_line_every_few_seconds(ticking: Clock, lines: list[str]) -> None:
    with shown.progress(LOG, "Loading weights", 40_000_000_000) as advance:
        for _ in range(20):
            ticking.now += 1.0
            advance(2_000_000_000)
    assert lines == [
        "Loading weights: 10 GB of 40 GB (25%), 2 GB/s, 15 s left",
        "Loading weights: 20 GB of 40 GB (50%), 2 GB/s, 10 s left",
        "Loading weights: 30 GB of 40 GB (75%), 2 GB/s, 5 s left",
        "Loading weights: 40 GB of 40 GB (100%), 2 GB/s, 0 s left",
    ]


def test_other_units_and_an_unknown_end(ticking: Clock, lines: list[str]) -> None:
    with shown.progress(LOG, "Answering", None, "requests") as advance:
        ticking.now += 6.0
        advance(9)
    assert lines == ["Answering: 9 requests, 1.5 requests/s"]


def test_what_is_short_says_nothing(ticking: Clock, lines: list[str]) -> None:
    with shown.progress(LOG, "Loading weights", 10) as advance:
        for _ in range(10):
            ticking.now += 0.4
            advance(1)
    assert lines == []


def test_threads_may_share_it(ticking: Clock, lines: list[str]) -> None:
    with shown.progress(LOG, "Reading", 80_000, "pieces") as advance:
        workers = [threading.Thread(target=lambda: [advance(1) for _ in range(10_000)]) for _ in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        ticking.now += 10.0
        advance(0)
    assert lines == ["Reading: 80000 pieces of 80000 pieces (100%), 8000.0 pieces/s, 0 s left"]


def test_waiting_says_that_it_goes_on(lines: list[str]) -> None:
    with shown.waiting(LOG, "Fetching x", seconds=0.01):
        end = threading.Event()
        while len(lines) < 2 and not end.wait(0.01):
            pass
    assert re.fullmatch(r"Fetching x: \d+ s so far", lines[0])


def test_a_terminal_gets_a_bar() -> None:
    code = (
        "import termios, time; from quire.base import progress as p; from quire.base.log import logger\n"
        "termios.tcsetwinsize(2, (24, 100))\n"
        "p._BAR_AFTER_S = 0\n"
        "with p.progress(logger('quire.x'), 'Loading weights', 4_000_000) as advance:\n"
        "    for _ in range(4): time.sleep(0.15); advance(1_000_000)\n"
        "print('over')"
    )
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], {**os.environ, "TERM": "xterm", "COLUMNS": "100"})
    seen = b""
    while True:
        try:
            piece = os.read(fd, 4096)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    os.waitpid(pid, 0)
    os.close(fd)
    text = seen.decode()
    assert "Loading weights:" in text and "%|" in text and "B/s" in text and "over" in text


def test_without_a_terminal_there_is_no_bar() -> None:
    code = (
        "from quire.base import progress as p; from quire.base.log import logger\n"
        "with p.progress(logger('quire.x'), 'Loading weights', 4) as advance: advance(4)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_download_shows_itself(ticking: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.base import fetch

    said: list[str] = []
    monkeypatch.setattr(fetch.log, "info", lambda words, *args: said.append(words % args))

    class Answer(io.BytesIO):
        status = 200

        def getheader(self, name: str) -> str | None:
            return "3000000" if name == "content-length" else None

        def read1(self, size: int | None = -1) -> bytes:
            ticking.now += 6.0
            return super().read1(size)

    class Asked:
        def __enter__(self) -> Answer:
            return Answer(b"x" * 3_000_000)

        def __exit__(self, *_: Any) -> None: ...

    monkeypatch.setattr(fetch, "_ask", lambda *_, **__: Asked())
    into = io.BytesIO()
    assert download("https://files.example/a", into, FetchPolicy(max_bytes=10_000_000)) == 3_000_000
    assert said[0].startswith("Fetching from files.example: 1.05 MB of 3 MB (34%)")


def test_a_program_whose_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with shown.progress(LOG, "Loading", 10) as advance:
        advance(10)
    bar = Progress.make(True, total=1, words="Prompts")
    bar.advance()
    bar.close()


@pytest.mark.parametrize(
    "module, words",
    [
        ("loader/load.py", "Loading weights"),
        ("loader/packed_cache.py", "Keeping packed weights"),
        ("loader/packed_cache.py", "Reading packed weights"),
        ("worker/graphs.py", "Capturing decode graphs"),
        ("cli/batch.py", "Answering"),
    ],
)
def test_who_shows_progress(module: str, words: str) -> None:
    """The work itself is tested with its package; here, that it reports through this module."""
    text = (Path(shown.__file__).parents[1] / module).read_text()
    assert f'progress(_log, "{words}"' in text or f'progress(log, "{words}"' in text
