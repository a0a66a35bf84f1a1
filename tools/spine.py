"""Prints which files one request runs through: an offline `generate`, and a chat streamed over HTTP.

    python tools/spine.py             # per file: distinct functions and lines that ran, most lines first
    python tools/spine.py --json      # the same for programs; tests/engine/test_spine.py reads it

Both on the embedded model, each in one process, so that one tracer sees every thread. The request traced is the second:
what the first one builds once (caches, lazily imported modules) is not a request's path. Module and class bodies do not
count, nor do coroutines that were waiting already and what they call: a server looks at its engine several times a
second, whether anything is asked or not. The periodic line of throughput is put off for the same reason.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "quire"
QUESTION = "Why is the sky blue?"
ENGINE = {"max_model_len": 512, "max_num_seqs": 4}


class Trace:
    """Lines and functions of the package that run while it records, in every thread started after it was installed."""

    def __init__(self) -> None:
        self._prefix = f"{PACKAGE}/"
        self._recording = False
        self._waiting: set[FrameType] = set()  # coroutines that were there before the request
        self.lines: dict[str, set[int]] = defaultdict(set)
        self.functions: dict[str, set[CodeType]] = defaultdict(set)

    def install(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    @contextlib.contextmanager
    def record(self) -> Iterator[None]:
        self._waiting = {
            found.cr_frame for found in gc.get_objects() if inspect.iscoroutine(found) and found.cr_frame is not None
        }
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            self._waiting.clear()

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not self._recording or not code.co_filename.startswith(self._prefix) or _is_import(code):
            return None
        if self._was_waiting(frame):
            return None
        name = code.co_filename[len(self._prefix) :]
        self.functions[name].add(code)
        lines = self.lines[name]

        def line(frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line

    def _was_waiting(self, frame: FrameType | None) -> bool:
        while frame is not None and frame not in self._waiting:
            frame = frame.f_back
        return frame is not None

    def counts(self) -> dict[str, tuple[int, int]]:
        """Functions and lines per file, most lines first."""
        found = {name: (len(self.functions[name]), len(self.lines[name])) for name in self.functions}
        return dict(sorted(found.items(), key=lambda entry: -entry[1][1]))


def _is_import(code: CodeType) -> bool:
    return code.co_name == "<module>" or "__qualname__" in code.co_names[:3]  # the second: a class body


def trace_offline() -> dict[str, tuple[int, int]]:
    from quire import LLM, SamplingParams

    trace = Trace()
    trace.install()
    with LLM(**ENGINE) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        llm.generate(["Hello"], params, use_tqdm=False)
        with trace.record():
            llm.generate([QUESTION], params, use_tqdm=False)
    return trace.counts()


def trace_streamed_chat() -> dict[str, tuple[int, int]]:
    from quire.cli.main import main

    trace = Trace()
    trace.install()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"http://127.0.0.1:{port}"
    options = [f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items()]
    done = threading.Event()

    def ask() -> None:
        try:
            _wait_until_up(base)
            _chat(base, "Hello")
            with trace.record():
                _chat(base, QUESTION)
        finally:
            done.set()

    threading.Thread(target=ask, daemon=True).start()
    threading.Thread(target=_interrupt_when, args=(done,), daemon=True).start()
    main(["serve", "--host=127.0.0.1", f"--port={port}", "--disable-frontend-multiprocessing", *options])
    return trace.counts()


def _wait_until_up(base: str) -> None:
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base}/health", timeout=5):
            return
        threading.Event().wait(0.2)


def _chat(base: str, text: str) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, "stream": True}
    headers = {"content-type": "application/json"}
    question = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(question, timeout=300) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def _interrupt_when(done: threading.Event) -> None:
    done.wait()
    os.kill(os.getpid(), signal.SIGTERM)


SUBJECTS = {"offline": trace_offline, "chat": trace_streamed_chat}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=SUBJECTS, help="default: both, one after the other, each in its own process")
    args = parser.parse_args()
    names = [args.only] if args.only else list(SUBJECTS)
    if len(names) > 1:
        for name in names:
            subprocess.run([sys.executable, __file__, "--only", name, *(["--json"] if args.json else [])], check=True)
        return
    os.environ["QUIRE_LOG_STATS_INTERVAL"] = "3600"  # seconds
    with contextlib.redirect_stdout(io.StringIO()):
        counts = SUBJECTS[names[0]]()
    if args.json:
        print(json.dumps({names[0]: counts}))
        return
    print(f"{names[0]}: functions of {len(counts)} files")
    for name, (functions, lines) in counts.items():
        print(f"{lines:6} lines {functions:4} functions  {name}")


if __name__ == "__main__":
    main()
