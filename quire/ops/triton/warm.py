"""Kernels compiled ahead of time: by several processes in parallel, from a list that a dry run makes.

    Compilers       child processes (compile_child.py) that turn jobs into files of Triton's cache
    Recorder        Triton's hook: records every missing kernel as a job, and compiles nothing
    Manifest        the jobs of one model and configuration, stored next to the kernels; a start that finds it current
                    needs no compilers, and one that finds it made by other kernel sources compiles from it at once

Everything on disk is JSON or written by Triton, whose names depend on its version, the sources, the GPU and the
options, so nothing outdated is ever loaded. Imports neither torch nor triton: it is used while those are imported.
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
LEAST_CORES = 4  # with fewer, children would only compete with the main process
_CODE = "import sys; sys.path[:] = {path!r}; from quire.ops.triton.compile_child import main; main({folder!r})"
_log = logger(__name__)
Job = dict[str, Any]


def cache_dir() -> str:
    """Where kernels are cached: TRITON_CACHE_DIR, else a folder of Quire's cache."""
    return env.TRITON_CACHE_DIR.get() or os.path.join(os.path.expanduser(env.CACHE_ROOT.get()), "triton")


@cache
def code_name() -> str:
    """Changes whenever the kernels' sources, Triton or Python do."""
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    spec = importlib.util.find_spec("triton")
    if spec is not None and spec.origin is not None:
        for path in sorted(Path(spec.origin).parent.glob("_C/libtriton*")):
            digest.update(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


class Manifest:
    """The kernels of one model and configuration, as recorded by the last start that had to compile."""

    def __init__(self, about: Any, folder: str | None = None) -> None:
        """`about`: plain data that determines which kernels are needed."""
        name = hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]
        self.path = Path(cache_dir() if folder is None else folder) / "quire" / f"{name}.json"
        self.jobs: list[Job] = []
        self.current = False
        try:
            stored = json.loads(self.path.read_text())
            self.jobs, self.current = list(stored["jobs"]), stored["code"] == code_name()
        except (OSError, ValueError, KeyError, TypeError):
            self.jobs = []  # absent or invalid: the same as empty

    def write(self, jobs: Iterable[Job]) -> None:
        """Atomically; if the folder is not writable, the next start takes some seconds longer."""
        beside = self.path.with_suffix(f".{uuid.uuid4().hex}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(json.dumps({"code": code_name(), "jobs": list(jobs)}))
            beside.replace(self.path)
        except OSError as wrong:
            _log.warning("The list of kernels cannot be stored in %s: %s", self.path.parent, wrong)


class Recorder:
    """Triton calls it with each kernel that it has not loaded yet. True: leave it for later."""

    def __init__(self, arch: int, tell: Callable[[Job], None] | None = None) -> None:
        """`tell` is called with each new job at once."""
        self._arch, self._tell = arch, tell
        self.jobs: dict[str, Job] = {}

    def __call__(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        text = compile["specialization_data"]
        if text not in self.jobs:
            known = json.loads(text)
            keys = ("signature", "constant_keys", "constant_vals", "attrs_keys", "attrs_vals", "options")
            job = {"module": fn.module, "name": fn.name, "arch": self._arch} | {k: known[k] for k in keys}
            self.jobs[text] = job
            if self._tell is not None:
                self._tell(job)
        return True


def num_children() -> int:
    """As many as there are cores for, besides the main process; 0: none."""
    requested = env.COMPILE_PROCESSES.get()
    if requested is not None:
        return max(0, requested)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if cores < LEAST_CORES else min(cores - 1, MOST_CHILDREN)


class Compilers:
    """Child processes, each served by a thread of this one."""

    def __init__(self, count: int, folder: str, key: Future[str] | None = None) -> None:
        """`key`: Triton's hash of itself, if this process knows it; "" or None: each child computes it."""
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
        """Unless it was submitted before."""
        name = json.dumps(job, sort_keys=True)
        if name not in self._running:
            self._running[name] = self._threads.submit(self._compile, job)

    def wait(self) -> list[float]:
        """Wait until all submitted jobs are done; the seconds of each that succeeded."""
        return [seconds for future in list(self._running.values()) if (seconds := future.result()) is not None]

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for child in self._all:
            if child.stdin is not None:
                child.stdin.close()  # the child exits when it sees this
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
            error = answer.get("error", "it exited").partition("\n")[0]
            gone = error.startswith("ImportError")  # an older version's list may have kernels that no longer exist
            say = _log.debug if gone else _log.warning
            say("A process could not compile %s ahead: %s", job.get("name", "the driver's part"), error)
            return None
        return float(answer["seconds"])
