"""Names of compiled kernels that are the same in every process.

Triton 3.6 makes the key of a kernel from its source, the keys of the functions it calls, and the constants that
those read, but learns a function's constants only if its key was computed before. So the key depends on which kernels
a process has met by then: one that another process has compiled is not found, and compiled again. `settle` computes the
keys of callees first, as Triton 3.9 does itself. Imports no torch: processes that only compile use it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime import jit

_CALLABLE: type = vars(jit).get("JITCallable", jit.JITFunction)
_OWN = __name__.partition(".")[0]


def settle(kernel: Any) -> None:
    """Before anybody asks for this kernel's key."""
    _settle(kernel, set())


def _settle(function: Any, met: set[int]) -> None:
    if id(function) in met:  # it calls itself, or was met on another way
        return
    met.add(id(function))
    for called in _called(function):
        _settle(called, met)
    _ = function.cache_key  # computed now, and kept


def _called(function: Any) -> Iterator[Any]:
    names, scope = function.fn.__code__.co_names, function.fn.__globals__
    for name in names:
        found = scope.get(name)
        if isinstance(found, ModuleType) and found.__name__.startswith(_OWN):
            yield from (each for other in names if isinstance(each := vars(found).get(other), _CALLABLE))
        elif isinstance(found, _CALLABLE):
            yield found
