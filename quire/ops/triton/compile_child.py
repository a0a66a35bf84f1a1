"""A process that compiles kernels for another one: jobs in, one JSON line each; files of Triton's cache out.

It needs no GPU and no torch, so it is ready in half a second: kernels use torch only where they are launched, and a
stub module is enough to import their source. A job is Triton's own description of a kernel it is about to compile
(warm.py). Answers are lines too: {"seconds": ...} or {"error": ...}. On an error the caller compiles it itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from time import perf_counter
from types import ModuleType
from typing import Any

from quire.base.registry import load


class Anything(type):
    """Classes that have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__module__": "torch"})


class StandIn(ModuleType):
    """A module with every attribute; all of them are inert."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {"__module__": self.__name__})


class StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """`import torch` and its submodules, without torch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "torch":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def compile_job(job: dict[str, Any]) -> None:
    """Into Triton's cache: the kernel, and the stub of C that launches it."""
    from quire.ops.triton.cache_keys import settle  # lazy: Triton is imported once torch has its stand-in

    kernel = load(f"{job['module']}:{job['name']}")
    settle(kernel)
    is_gluon = kernel.is_gluon()
    source = load("triton.experimental.gluon._runtime:GluonASTSource" if is_gluon else "triton.compiler:ASTSource")(
        kernel,
        {name: _tuples(kind) for name, kind in job["signature"].items()},
        {tuple(at): _constant(value) for at, value in zip(job["constant_keys"], job["constant_vals"], strict=True)},
        {tuple(at): value for at, value in zip(job["attrs_keys"], job["attrs_vals"], strict=True)},
    )
    options = {name: _tuples(value) for name, value in job["options"].items()}
    target = load("triton.backends.compiler:GPUTarget")("cuda", job["arch"], 32)
    made = load("triton.compiler:compile")(source, target=target, options=options)
    load("triton.backends.nvidia.driver:CudaLauncher")(made.src, made.metadata)


def _constant(value: Any) -> Any:
    """As Triton parses its own descriptions."""
    language = load("triton.language:core")
    if isinstance(value, dict) and "constexpr" in value:
        return language.constexpr(value["constexpr"])
    return language.dtype(value) if isinstance(value, str) and language.dtype.is_dtype(value) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def use_key(key: str) -> None:
    """Triton's cache key includes a hash of itself, for which every process would read hundreds of megabytes."""
    if key:
        load("triton.runtime:cache").triton_key = lambda: key


def main(cache_dir: str) -> None:
    """Until the input ends."""
    os.nice(5)  # the caller has priority
    answers = sys.stdout
    sys.stdout = sys.stderr  # stdout is for answers only
    sys.meta_path.insert(0, StandInFinder())
    load("triton:knobs").cache.dir = cache_dir
    load("triton.compiler:compile")  # loaded before the first job comes
    for line in sys.stdin:
        began = perf_counter()
        try:
            job = json.loads(line)
            use_key(job.get("triton_key", ""))
            if job.get("driver"):
                load("triton.backends.nvidia.driver:CudaUtils")()
            else:
                compile_job(job)
            answer: dict[str, Any] = {"seconds": perf_counter() - began}
        except Exception as wrong:  # noqa: BLE001  # whatever a compiler may raise: the next job may do
            answer = {"error": f"{type(wrong).__name__}: {wrong}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
