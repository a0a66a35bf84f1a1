"""Kernels compiled before they are wanted: by several processes at once, from a list that a dry run makes.

    Compilers       child processes (compile_child.py) that turn jobs into files of Triton's cache
    Recorder        Triton's own hook: notes every kernel that is wanted and not there, as a job, and compiles nothing
    Manifest        the jobs of one model and configuration, kept beside the kernels; a start that finds it current
                    needs no compilers, and one that finds it made by other kernel sources compiles from it at once

All on disk is JSON or written by Triton, whose names depend on its version, the sources, the GPU and the options, so
nothing old is ever loaded. Imports neither torch nor triton: it is used while those are still being imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from quire.base import env
from quire.base.log import logger

MOST_CHILDREN = 16
LEAST_CORES = 4  # with fewer, children would only be in the way of the process they are to help
_CODE = "import sys; sys.path[:] = {path!r}; from quire.ops.triton.compile_child import main; main({folder!r})"
_log = logger(__name__)
Job = dict[str, Any]


def cache_dir() -> str:
    """Where kernels are kept: TRITON_CACHE_DIR, else a folder of Quire's own cache."""
    return env.TRITON_CACHE_DIR.get() or os.path.join(os.path.expanduser(env.CACHE_ROOT.get()), "triton")


@cache
def code_name() -> str:
    """Changes whenever the kernels' sources, Triton or Python do."""
    found = hashlib.sha256(sys.version.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        found.update(path.read_bytes())
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("_C/libtriton*")):
            found.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return found.hexdigest()[:32]


class Manifest:
    """What one model and configuration needs, as found by the last start that had to compile."""

    def __init__(self, about: Any, folder: str | None = None) -> None:
        """`about`: plain data; whatever decides which kernels are wanted."""
        name = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = Path(cache_dir() if folder is None else folder) / "quire" / f"{name}.json"
        self.jobs: list[Job] = []
        self.current = False
        try:
            kept = json.loads(self.path.read_text())
            self.jobs, self.current = list(kept["jobs"]), kept["code"] == code_name()
        except (OSError, ValueError, KeyError, TypeError):
            self.jobs = []  # absent, or not ours: as good as empty

    def write(self, jobs: Iterable[Job]) -> None:
        """Whole or not at all; a folder that cannot be written to costs the next start some seconds, nothing else."""
        beside = self.path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"code": code_name(), "jobs": list(jobs)}))
            beside.replace(self.path)
        except OSError as wrong:
            _log.warning("The list of kernels cannot be kept in %s: %s", self.path.parent, wrong)


class Recorder:
    """Triton calls it with each kernel that it has not loaded yet. True: leave it for later."""

    def __init__(self, arch: int, tell: Callable[[Job], None] | None = None) -> None:
        """`tell` hears of each new job at once."""
        self._arch, self._tell = arch, tell
        self.jobs: dict[str, Job] = {}

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        text = compile["specialization_data"]
        if text not in self.jobs:
            known = json.loads(text)
            wanted = ("signature", "constant_keys", "constant_vals", "attrs_keys", "attrs_vals", "options")
            job = {"module": fn.module, "name": fn.name, "arch": self._arch} | {k: known[k] for k in wanted}
            self.jobs[text] = job
            if self._tell is not None:
                self._tell(job)
        return True


def num_children() -> int:
    """As many as there are cores for, beside the process they work for; 0: do not bother."""
    asked = env.COMPILE_PROCESSES.get()
    if asked is not None:
        return max(0, asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if cores < LEAST_CORES else min(cores - 1, MOST_CHILDREN)


class Compilers:
    """Child processes, each served by a thread of this one."""

    def __init__(self, count: int, folder: str, key: Future[str] | None = None) -> None:
        """`key`: Triton's name for itself, once this process knows it; "" or None: each child finds out by itself."""
        self._key = key
        code = _CODE.format(path=sys.path, folder=folder)
        self._children: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._all = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=env.without_secrets(),
            )
            for _ in range(count)
        ]
        for child in self._all:
            self._children.put(child)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compile")
        self._running: dict[str, Future[float | None]] = {}

    def submit(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.begin(job)

    def begin(self, job: Job) -> None:
        """Unless it was asked for before."""
        name = json.dumps(job, sort_keys=True)
        if name not in self._running:
            self._running[name] = self._threads.submit(self._compile, job)

    def wait(self) -> list[float]:
        """Until all that was submitted is done; the seconds of each that could be."""
        return [seconds for future in list(self._running.values()) if (seconds := future.result()) is not None]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for child in self._all:
            if child.stdin is not None:
                child.stdin.close()  # the child leaves when it sees this
        for child in self._all:
            try:
                child.wait(3.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def _compile(self, job: Job) -> float | None:
        line = json.dumps(job | {"triton_key": "" if self._key is None else self._key.result()})
        child = self._children.get()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline() or "{}")
        except (OSError, ValueError) as wrong:
            answer = {"error": str(wrong)}
        finally:
            self._children.put(child)
        if "seconds" not in answer:
            told = answer.get("error", "it is gone").partition("\n")[0]
            gone = told.startswith("ImportError")  # an older version's list may name kernels that are no more
            say = _log.debug if gone else _log.warning
            say("A process could not compile %s ahead: %s", job.get("name", "the driver's part"), told)
            return None
        return float(answer["seconds"])
