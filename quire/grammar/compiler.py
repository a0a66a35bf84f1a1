"""Compiler: specs to compiled grammars, outside of steps, in child processes that are killed when they take too long.

    submit(spec) ──▶ a worker thread ──▶ its child: backend.compile ──▶ the thread: backend.load ──▶ Compiled
jobs.py decides which is next; a job that nobody waits for any more is stopped, and its child killed. Results are
cached (cache.py), including refusals, so a hostile grammar costs its time only once. Threads and children start
with the first spec; children have the lowest priority, so their limits are CPU time. Must not know:
requests, steps.
"""

from __future__ import annotations

import contextlib
import io
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.base import allocator
from quire.base.clock import now
from quire.base.env import sandbox_environment
from quire.base.log import logger
from quire.base.procs import background_command, processor_seconds
from quire.grammar.backend import Backend, GrammarVocabulary, make_backend
from quire.grammar.cache import GrammarCache
from quire.grammar.child import LENGTH_BYTES, CompileReply, Job, JobBoot
from quire.grammar.jobs import CompileJob, Jobs
from quire.schema.errors import InputError, QuireError
from quire.schema.grammar import GrammarSpec

log = logger(__name__)
_MAIN = "quire.grammar.child:main"
_START_SECONDS = 120.0  # for imports and the vocabulary
_WALL_FACTOR = 3.0  # wall-clock seconds per CPU second, for a busy machine
_PARAM = "structured_outputs"
_REFUSAL_BYTES = 1000
_LARGE = 1 << 20  # bytes of a compiled grammar; loading it takes about ten times that, which is then freed
_LOOK_SECONDS = 0.05  # between two checks whether a job must continue


@dataclass(frozen=True)
class CompileLimits:
    seconds: float = 10.0  # of CPU time
    memory_bytes: int = 1 << 30  # that a child may grow by
    compiled_bytes: int = 1 << 26  # of one compiled grammar
    cache_bytes: int = 1 << 29  # of all that are kept
    num_workers: int = 2
    most_queued: int = 256  # that wait for a worker; more are refused
    first_seconds: float = 1.0  # after which a grammar yields to those that have not been tried


@dataclass(frozen=True)
class Compiled:
    backend: Backend
    name: str
    loaded: Any
    num_bytes: int = 0  # that it was read from


Outcome = Compiled | QuireError


class _TimeoutError(Exception):
    pass


class _StoppedError(Exception):
    """The job must be returned to the queue."""


class Compiler:
    def __init__(
        self, vocabulary: Callable[[], GrammarVocabulary], limits: CompileLimits, done: Callable[[], None]
    ) -> None:
        """`done` is called from a worker thread whenever a result is ready."""
        self._make_vocabulary = vocabulary
        self.limits = limits
        self._done = done
        self._jobs = Jobs(
            num_workers=limits.num_workers, most_queued=limits.most_queued, first_seconds=limits.first_seconds
        )
        self._lock = threading.Lock()
        self._cache: GrammarCache[Outcome] = GrammarCache(limits.cache_bytes)
        self._loading = threading.Lock()  # one at a time: it needs much more memory than its result
        self._vocabulary: GrammarVocabulary | None = None
        self._backends: dict[str, Backend] = {}
        self._making = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._children: list[_CompilerProcess] = []
        self.num_compiled = 0

    def submit(self, spec: GrammarSpec) -> None:
        """Start it, unless it is cached or in progress. OverloadedError: too many are queued."""
        with self._lock:
            if spec in self._cache:
                return
            self._jobs.put(spec)
            if len(self._threads) < min(self.limits.num_workers, len(self._jobs)):
                name = f"grammar {len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def drop(self, spec: GrammarSpec) -> None:
        """Nobody waits for it any more: it need not be compiled."""
        self._jobs.drop(spec)

    def fetch(self, spec: GrammarSpec) -> Outcome | None:
        """The result, for one request; None while it is in progress."""
        with self._lock:
            return self._cache.use(spec)

    def vocabulary(self) -> GrammarVocabulary:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            return self._vocabulary

    def close(self) -> None:
        self._jobs.close()
        with self._lock:
            children = list(self._children)
        for child in children:
            child.kill()

    def _run(self) -> None:
        child: _CompilerProcess | None = None
        while (job := self._jobs.take()) is not None:
            outcome: Outcome
            began = now()
            try:
                child = child or self._new_child()
                outcome = self._compile(child, job)
            except _StoppedError:
                log.debug("A %s grammar was stopped after %.3f s", job.spec.kind, now() - began)
                self._jobs.give_back(job)
                continue
            except QuireError as refused:
                outcome = refused
            except Exception as broken:
                log.exception("A grammar could not be compiled")
                outcome = QuireError(f"the grammar could not be compiled: {type(broken).__name__}: {broken}")
            log.debug("A %s grammar took %.3f s to compile", job.spec.kind, now() - began)
            self._keep(job, outcome)
            self._done()
        if child is not None:
            child.kill()

    def _new_child(self) -> _CompilerProcess:
        child = _CompilerProcess(JobBoot(vocabulary=self.vocabulary(), memory_bytes=self.limits.memory_bytes))
        with self._lock:
            self._children.append(child)
        return child

    def _compile(self, child: _CompilerProcess, job: CompileJob) -> Compiled:
        """With the first backend that succeeds."""
        refusals: list[InputError] = []
        for name in job.spec.backends:
            try:
                return self._compile_with(name, child, job)
            except InputError as refused:
                refusals.append(refused)
                log.info("Grammar backend %s: %.200s", name, refused)
            except QuireError as failed:
                if not refusals:
                    raise
                log.warning("Grammar backend %s: %.200s", name, failed)
        raise refusals[0]

    def _compile_with(self, name: str, child: _CompilerProcess, job: CompileJob) -> Compiled:
        spec = job.spec
        made = child.ask(Job(backend=name), _START_SECONDS)
        if made.failed or made.refused:
            raise QuireError(f"the grammar backend {name!r} does not start: {made.failed or made.refused}")
        limits = self.limits
        try:
            answer = child.ask(
                Job(backend=name, spec=spec), limits.seconds, lambda spent: self._jobs.must_stop(job, spent)
            )
        except _TimeoutError:
            raise InputError(
                f"the {spec.kind} constraint is too complex: compiling it takes over {limits.seconds:g} seconds",
                param=_PARAM,
            ) from None
        except EOFError:
            raise InputError(
                f"the {spec.kind} constraint is too complex: compiling it ended its process (the limit is "
                f"{limits.memory_bytes >> 20} MiB of memory)",
                param=_PARAM,
            ) from None
        if answer.refused is not None:
            raise InputError(f"the {spec.kind} constraint cannot be used: {answer.refused}", param=_PARAM)
        if answer.failed is not None:
            raise QuireError(f"the {spec.kind} constraint could not be compiled: {answer.failed}")
        if len(answer.compiled) > limits.compiled_bytes:
            raise InputError(
                f"the {spec.kind} constraint is too complex: compiled it has {len(answer.compiled)} bytes, and the "
                f"limit is {limits.compiled_bytes}",
                param=_PARAM,
            )
        return self._load(name, spec, answer.compiled)

    def _load(self, name: str, spec: GrammarSpec, compiled: bytes) -> Compiled:
        backend = self._backend(name)
        with self._loading:
            try:
                return Compiled(backend, name, backend.load(spec, compiled), len(compiled))
            except ValueError as wrong:
                raise InputError(f"the {spec.kind} constraint cannot be used: {wrong}", param=_PARAM) from None
            finally:
                if len(compiled) > _LARGE:
                    allocator.trim()

    def _backend(self, name: str) -> Backend:
        vocabulary = self.vocabulary()
        with self._making:
            if name not in self._backends:
                began = now()
                self._backends[name] = make_backend(name, vocabulary)
                log.info("Grammar backend %s ready in %.1f s", name, now() - began)
            return self._backends[name]

    def _keep(self, job: CompileJob, outcome: Outcome) -> None:
        cost = sys.getsizeof(job.spec.text) + (_cost(outcome) if isinstance(outcome, Compiled) else _REFUSAL_BYTES)
        with self._lock:
            self._jobs.done(job)
            if isinstance(outcome, Compiled):
                self.num_compiled += 1
            self._cache.put(job.spec, outcome, cost)


def _cost(compiled: Compiled) -> int:
    """Bytes it keeps. What a library counts itself may leave out most of it; a grammar that was read from some bytes
    keeps about as many, small ones half as many again."""
    return max(compiled.backend.cost(compiled.loaded), compiled.num_bytes * 3 // 2)


class _CompilerProcess:
    """A compiling process, started on demand."""

    def __init__(self, boot: JobBoot) -> None:
        self._boot = boot
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: Job, seconds: float, stop: Callable[[float], bool] = lambda spent: False) -> CompileReply:
        """`seconds` of the processor. EOFError: it died over it. _TimeoutError: it was killed. _StoppedError: `stop`
        said so of the seconds spent, and it was killed if it had begun."""
        if stop(0.0):
            raise _StoppedError
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = self._open()
        _write(process, job)
        began, before = now(), processor_seconds(process.pid)

        def look() -> float:
            """How long to wait before the next check."""
            spent = processor_seconds(process.pid) - before
            if stop(spent):
                raise _StoppedError
            if spent > seconds or now() - began > seconds * _WALL_FACTOR:
                raise _TimeoutError
            return _LOOK_SECONDS

        try:
            size = int.from_bytes(_read(process, LENGTH_BYTES, look), "little")
            return msgspec.msgpack.decode(_read(process, size, look), type=CompileReply)
        except (_TimeoutError, _StoppedError, EOFError):
            self.kill()
            raise

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _open(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            background_command(_MAIN),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=sandbox_environment(),
        )  # fmt: skip
        _write(process, self._boot)
        return process


def _read(process: subprocess.Popen[bytes], count: int, look: Callable[[], float]) -> bytes:
    pipe, parts = process.stdout, []
    assert isinstance(pipe, io.BufferedReader)
    while count:
        if not select.select([pipe], [], [], look())[0]:
            continue
        chunk = pipe.read1(min(count, 1 << 20))
        if not chunk:
            raise EOFError
        parts.append(chunk)
        count -= len(chunk)
    return b"".join(parts)


def _write(process: subprocess.Popen[bytes], message: JobBoot | Job) -> None:
    payload = msgspec.msgpack.encode(message)
    pipe = process.stdin
    assert pipe is not None
    with contextlib.suppress(BrokenPipeError):  # it died; reading the answer says so
        pipe.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
        pipe.flush()
