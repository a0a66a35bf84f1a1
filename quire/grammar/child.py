"""The child process that compiles: whatever a grammar breaks here, it breaks only this process.

    stdin:  frames of JobBoot, then Job …      stdout: one CompileReply each     end of stdin: the parent is gone, leave
Its memory may grow by a fixed amount; the parent limits its time. Neither torch nor
transformers is loaded: xgrammar imports both by name and its compiler uses neither, and they cost seconds.
"""

from __future__ import annotations

import importlib.machinery
import os
import resource
import sys
import types
from typing import Any, BinaryIO

import msgspec
import numpy as np

from quire.base import allocator
from quire.grammar.backend import Backend, GrammarVocabulary, make_backend
from quire.schema.grammar import GrammarSpec

LENGTH_BYTES = 8
_TRIAL_STEPS = 12


class JobBoot(msgspec.Struct, frozen=True, kw_only=True):
    vocabulary: GrammarVocabulary
    memory_bytes: int


class Job(msgspec.Struct, frozen=True, kw_only=True):
    backend: str
    spec: GrammarSpec | None = None  # None: only get the backend ready


class CompileReply(msgspec.Struct, frozen=True, kw_only=True):
    compiled: bytes = b""
    refused: str | None = None  # what is wrong with the grammar
    failed: str | None = None  # what is wrong with this process


class _AbsentType(type):
    """Every attribute and call returns the object itself, and it is false: enough to be imported and not used."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return False


class _Absent(metaclass=_AbsentType):
    pass


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0"
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent


def main() -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the replies
    for name in ("torch", "transformers"):
        module = _AbsentModule(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    boot = msgspec.msgpack.decode(_read(source), type=JobBoot)
    made: dict[str, Backend] = {}
    while True:
        job = msgspec.msgpack.decode(_read(source), type=Job)
        answer = _work(job, boot, made)
        payload = msgspec.msgpack.encode(answer)
        sink.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
        sink.flush()
        del job, answer, payload
        allocator.trim()  # it may be idle from now on


def _work(job: Job, boot: JobBoot, made: dict[str, Backend]) -> CompileReply:
    try:
        if job.backend not in made:
            _limit_memory(None)
            made[job.backend] = make_backend(job.backend, boot.vocabulary)
            _limit_memory(boot.memory_bytes)
        if job.spec is None:
            return CompileReply()
        return _compiled(made[job.backend], job.spec, boot.vocabulary)
    except MemoryError:
        return CompileReply(refused=f"compiling it needs more than {boot.memory_bytes >> 20} MiB")
    except ValueError as wrong:
        return CompileReply(refused=str(wrong))
    except Exception as wrong:  # noqa: BLE001  # the answer says that the backend failed, and how
        return CompileReply(failed=f"{type(wrong).__name__}: {wrong}")


def _compiled(backend: Backend, spec: GrammarSpec, vocabulary: GrammarVocabulary) -> CompileReply:
    """Any exception of a backend is a refusal of the constraint: the constraint is its only input."""
    try:
        compiled = backend.compile(spec)
        _try_out(backend, spec, compiled, vocabulary)
    except (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError) as wrong:
        return CompileReply(refused=f"{type(wrong).__name__}: {wrong}")
    return CompileReply(compiled=compiled)


def _try_out(backend: Backend, spec: GrammarSpec, compiled: bytes, vocabulary: GrammarVocabulary) -> None:
    """Accept a few tokens: a matcher that hangs or crashes should do so here, not in the engine."""
    matcher = backend.start(backend.load(spec, compiled))
    rows = np.zeros((1, vocabulary.words), np.int32)
    for step in range(_TRIAL_STEPS):
        backend.fill([matcher], rows, [0])
        if (fault := matcher.fault()) is not None:
            raise ValueError(fault)
        following = np.flatnonzero(np.unpackbits(rows.view(np.uint8)[0], bitorder="little"))
        allowed = following[~np.isin(following, vocabulary.ends)]
        if not allowed.size:
            if step == 0 and not matcher.can_end():
                raise ValueError("no token of this model can follow it")
            return
        matcher.accept(int(allowed[(step * 7919) % allowed.size]))


def _limit_memory(more: int | None) -> None:
    """Limit the address space to what is used now and this much more."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if more is None:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + more
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _read(source: BinaryIO) -> bytes:
    head = source.read(LENGTH_BYTES)
    body = source.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else b""
    if not body:
        os._exit(0)
    return body
