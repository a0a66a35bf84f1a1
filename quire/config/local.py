"""Names for Python objects that a config must mention: an import path, or a mark for an object of this process only.

A config is plain data and may cross to another process. A class that another process can import is written as its
import path; any other (defined in a script or inside a function) is kept here under a mark that only this process
can read back.
"""

from typing import Any

from quire.base.registry import load, path_of
from quire.schema.errors import ConfigError

_MARK = "in-process:"
_kept: dict[str, Any] = {}


def name_of(thing: Any) -> str:
    """A string for a class or function; a string stays what it is."""
    if isinstance(thing, str):
        return thing
    if not callable(thing):
        raise ConfigError(f"expected a class or an import path like 'package.module:Name', got {thing!r}", value=thing)
    try:
        path = path_of(thing)
        if load(path) is thing:
            return path
    except (ImportError, AttributeError):
        pass
    mark = f"{_MARK}{thing.__module__}.{thing.__qualname__}#{id(thing):x}"
    _kept[mark] = thing
    return mark


def names_of(things: Any) -> tuple[str, ...]:
    """`name_of` over a list; None gives an empty list, a single object a list of one."""
    if things is None:
        return ()
    if isinstance(things, str) or callable(things):
        things = (things,)
    if not isinstance(things, list | tuple):
        raise ConfigError(f"expected a list of classes or import paths, got {things!r}", value=things)
    return tuple(name_of(thing) for thing in things)


def thing_of(name: str) -> Any:
    """The object behind a name made by `name_of`."""
    if not name.startswith(_MARK):
        return load(name)
    if name not in _kept:
        raise ConfigError(
            f"{describe(name)} belongs to another process; move it into a module that both can import", value=name
        )
    return _kept[name]


def is_local(name: str) -> bool:
    """True if only this process can find the object."""
    return name.startswith(_MARK)


def describe(name: str) -> str:
    """The dotted name without the mark, for messages."""
    return name.removeprefix(_MARK).partition("#")[0]
