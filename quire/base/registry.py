"""Registry: name -> "module:attribute", loaded on use. Every plug-in point is one of these.

Also the only place allowed to import inside a function: `load` is how heavy or optional code is reached.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any


def load(path: str) -> Any:
    """'package.module:attribute' (or 'package.module.attribute') -> the object itself."""
    module, colon, attribute = path.partition(":")
    if not colon:
        module, _, attribute = path.rpartition(".")
    if not module or not attribute:
        raise ImportError(f"{path!r} is not an import path; write it as 'package.module:Name'")
    target: Any = importlib.import_module(module)
    for part in attribute.split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise ImportError(f"module {module!r} has no {part!r} (wanted {path!r})") from None
    return target


@cache
def entry_points(group: str) -> Iterable[Any]:
    """Those that installed packages declare under a name. Every start of an engine asks for some eight names."""
    points: Iterable[Any] = _installed().select(group=group)
    return points


@cache
def _installed() -> Any:
    """All packages are looked through: 40 ms, so once per process, and only where somebody asks."""
    return load("importlib.metadata:entry_points")()


def path_of(thing: Any) -> str:
    """The import path of a class or function, if another process could import it; else ImportError."""
    module, name = thing.__module__, thing.__qualname__
    if module == "__main__" or "<locals>" in name or "<lambda>" in name:
        raise ImportError(f"{name!r} lives in {module!r}, where another process cannot import it")
    return f"{module}:{name}"


class Registry:
    """One plug-in point. `group` names the entry-point group that outside packages may fill."""

    def __init__(self, kind: str, known: dict[str, str] | None = None, *, group: str | None = None) -> None:
        self.kind = kind
        self._paths: dict[str, Any] = dict(known or {})
        self._group = group

    def register(self, name: str, target: Any) -> None:
        """`target` is an import path or the object itself; a later registration replaces an earlier one."""
        self._paths[name] = target

    def get(self, name: str) -> Any:
        if name not in self._paths:
            self._scan()
        if name not in self._paths:
            near = difflib.get_close_matches(name, self.names(), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise LookupError(f"unknown {self.kind} {name!r}{hint or '.'} Known: {', '.join(sorted(self.names()))}")
        target = self._paths[name]
        if isinstance(target, str):
            target = self._paths[name] = load(target)
        return target

    def names(self) -> list[str]:
        self._scan()
        return list(self._paths)

    def __contains__(self, name: object) -> bool:
        return name in self._paths or (self._group is not None and name in self.names())

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _scan(self) -> None:
        if self._group is None:
            return
        for entry in entry_points(group=self._group):
            self._paths.setdefault(entry.name, entry.value)
