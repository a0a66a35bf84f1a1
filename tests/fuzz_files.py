"""Hostile files through the real front door, in children that may die: `python -m tests.fuzz_files --kind gguf`.

Each file of tests/hostile_files.py is opened as a user would (`LLM(path)`), and answers a short prompt where it opens.
Allowed is an answer, or one QuireError that names what is wrong. Not allowed: any other exception, an engine that died,
a signal, more than SECONDS of processor time for a file, MEMORY more memory, an error that prints without end.
`--only 17` does one file again, with what was done to it and the stack.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quire.base.registry import load
from tests.hostile_files import KINDS, Damage, write_bases

SECONDS = 10  # of processor time, for one file
WALL = 120  # seconds, however busy the machine is
MEMORY = 2 << 30  # bytes that a child may take more than it had before its first file
OPENER = "tests.open_hostile:Opener"  # once the environment is set
SANITIZERS = ("runtime error:", "ERROR: AddressSanitizer", "Fatal Python error")  # how what they say begins
ROOT = Path(__file__).resolve().parents[1]
_TICK = os.sysconf("SC_CLK_TCK")


class Found(NamedTuple):
    """A file that did what none may."""

    index: int
    what: str  # that was done to the file
    how: str  # it ended


class Tally(NamedTuple):
    files: int
    ends: Counter[str]  # answered, or the class of the error
    found: list[Found]


def fuzz(
    kind: str, *, files: int, seconds: float, children: Sequence[Child],
    tell: Callable[[Found], object] = lambda found: None, start: int = 0,
) -> Tally:  # fmt: skip
    """Up to so many files, and no more begun when the time is over."""
    until, ends, found = time.monotonic() + seconds, Counter[str](), list[Found]()
    waiting = iter(range(start, start + files))
    while any(child.busy for child in children) or time.monotonic() < until:
        if time.monotonic() < until:
            for child in children:
                if not child.busy and (index := next(waiting, None)) is not None:
                    child.begin(kind, index)
        if not any(child.busy for child in children):
            break
        ready = select.select([child.out for child in children if child.busy], [], [], 0.5)[0]
        for child in children:
            if child.busy and (end := child.look(child.out in ready)) is not None:
                how = end["how"]
                ends[how.partition(":")[0]] += 1
                if not end["fine"]:
                    found.append(Found(end["index"], end["what"], how))
                    tell(found[-1])
    return Tally(sum(ends.values()), ends, found)


@contextlib.contextmanager
def started(jobs: int, seed: int, bases: Path, scratch: Path) -> Iterator[list[Child]]:
    """Each imports all that a model needs, for seconds, so they open files of every kind."""
    children = [Child(seed, bases, scratch / str(job)) for job in range(jobs)]
    try:
        yield children
    finally:
        for child in children:
            child.close()


class Child:
    """A process that opens files one after another; another one once it died."""

    def __init__(self, seed: int, bases: Path, folder: Path) -> None:
        self._arguments = [str(seed), str(bases), str(folder)]
        self._start()
        self.busy = False

    def _start(self) -> None:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz_files", "--child", *self._arguments]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, cwd=ROOT,
            env={**os.environ, "QUIRE_ENABLE_V1_MULTIPROCESSING": "0", "QUIRE_CPU_PACKED_CACHE": "0",
                 "QUIRE_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        assert self._process.stdout is not None
        self.out, self._files = self._process.stdout, 0

    def begin(self, kind: str, index: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {index}\n".encode())
        self._process.stdin.flush()
        self.busy, self._index, self._began, self._spent = True, index, time.monotonic(), self._processor_time()

    def look(self, ready: bool) -> dict[str, Any] | None:
        """How the file ended, once it has."""
        if ready:
            line = self.out.readline()
            self.busy = False
            if line:
                self._files += 1
                return dict(json.loads(line))
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").splitlines()
            at = next((i for i, line in enumerate(said) if any(word in line for word in SANITIZERS)), len(said) - 20)
            return self._again(f"the process ended with {code}: " + "\n    ".join(said[max(at, 0) :][:20]))
        first = 0 if self._files else 60  # imports and the first model
        if self._processor_time() - self._spent > SECONDS + first or time.monotonic() - self._began > WALL + first:
            self.busy = False
            return self._again(f"took longer than {SECONDS} s")
        return None

    def _again(self, how: str) -> dict[str, Any]:
        self.close()
        self._start()
        return {"index": self._index, "what": "", "how": how, "fine": False}

    def _processor_time(self) -> float:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / _TICK
        return 0.0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def child(seed: int, bases: Path, folder: Path) -> None:
    says = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    damages, opener = {kind: Damage(bases, kind) for kind in KINDS}, load(OPENER)()
    opener.open(bases / "LlamaForCausalLM")
    gc.collect()
    gc.freeze()  # what imports left, which is looked through in vain
    usual = _resident()
    _limit_memory()
    for line in sys.stdin:
        kind, index = line.split()
        path, what = damages[kind].make(seed, int(index), folder / kind)
        how, fine = opener.open(path)
        if fine and _resident() > usual + MEMORY:
            how, fine = f"took {(_resident() - usual) >> 20} MiB more", False
        gc.collect()  # models go with their last reference or here
        print(json.dumps({"index": int(index), "what": what, "how": how, "fine": fine}), file=says, flush=True)


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _limit_memory() -> None:
    """Of addresses; a sanitizer takes terabytes of those."""
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 4 * MEMORY,) * 2)


@contextlib.contextmanager
def bases_in(folder: str | None) -> Iterator[Path]:
    """Made once where a folder is named."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as made:
        bases = Path(folder or made) / "bases"
        if not (bases / "gguf" / "plain.gguf").exists():
            bases.mkdir(parents=True, exist_ok=True)
            write_bases(bases)
        yield bases


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--kind", choices=KINDS, action="append")
    options.add_argument("--files", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=3600)
    options.add_argument("--jobs", type=int, default=2)
    options.add_argument("--start", type=int, default=0, help="index of the first file")
    options.add_argument("--only", type=int)
    options.add_argument("--folder", help="where bases are kept between runs")
    options.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        seed, bases, folder = given.child
        child(int(seed), Path(bases), Path(folder))
        return 0
    with bases_in(given.folder) as bases, tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        if given.only is not None:
            return _one(given.kind[0], given.seed, given.only, bases, Path(scratch))
        with started(given.jobs, given.seed, bases, Path(scratch)) as children:
            wrong = sum(_all_of(kind, given, children) for kind in given.kind or KINDS)
    return 1 if wrong else 0


def _all_of(kind: str, given: argparse.Namespace, children: Sequence[Child]) -> int:
    """How many files of a kind did what none may."""
    tell = partial(_print, f"--kind {kind} --seed {given.seed}")
    tally = fuzz(kind, files=given.files, seconds=given.seconds, children=children, start=given.start, tell=tell)
    print(f"{kind}: {tally.files} files, {len(tally.found)} wrong; {dict(tally.ends.most_common())}", flush=True)
    return len(tally.found)


def _print(again: str, found: Found) -> None:
    text = f"  {again} --only {found.index}: {found.what}\n    {found.how}"
    print(text.encode("utf-8", "backslashreplace").decode(), flush=True)


def _one(kind: str, seed: int, index: int, bases: Path, scratch: Path) -> int:
    os.environ.update({"QUIRE_ENABLE_V1_MULTIPROCESSING": "0", "QUIRE_CPU_PACKED_CACHE": "0"})
    path, what = Damage(bases, kind).make(seed, index, scratch / "one")
    print(what.encode("utf-8", "backslashreplace").decode())
    try:
        print(load(OPENER)().answer(path))
    except Exception:  # noqa: BLE001  # printed: this runs one file to see what it raises
        traceback.print_exc()
    return 0


if __name__ == "__main__":
    sys.exit(main())
