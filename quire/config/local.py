"""Names for Python objects in a config: an import path, or a marker for an object of this process only.

A config is plain data and may be sent to another process. A class that another process can import is represented by its
import path; any other (defined in a script or inside a function) is stored here under a marker that only this process
can resolve.
"""

from typing import Any

from quire.base.registry import load, path_of
from quire.schema.errors import ConfigError

_MARK = "in-process:"
_local_objects: dict[str, Any] = {}


def name_of(obj: Any) -> str:
    """A string for a class or function; strings are returned unchanged."""
    if isinstance(obj, str):
        return obj
    if not callable(obj):
        raise ConfigError(f"expected a class or an import path like 'package.module:Name', got {obj!r}", value=obj)
    try:
        path = path_of(obj)
        if load(path) is obj:
            return path
    except (ImportError, AttributeError):
        pass
    mark = f"{_MARK}{obj.__module__}.{obj.__qualname__}#{id(obj):x}"
    _local_objects[mark] = obj
    return mark


def names_of(objects: Any) -> tuple[str, ...]:
    """`name_of` over a list; None gives an empty list, a single object a list of one."""
    if objects is None:
        return ()
    if isinstance(objects, str) or callable(objects):
        objects = (objects,)
    if not isinstance(objects, list | tuple):
        raise ConfigError(f"expected a list of classes or import paths, got {objects!r}", value=objects)
    return tuple(name_of(obj) for obj in objects)


def object_of(name: str) -> Any:
    """The object behind a name made by `name_of`."""
    if not name.startswith(_MARK):
        return load(name)
    if name not in _local_objects:
        raise ConfigError(
            f"{describe(name)} belongs to another process; move it into a module that both can import", value=name
        )
    return _local_objects[name]


def is_local(name: str) -> bool:
    """True if only this process can resolve the object."""
    return name.startswith(_MARK)


def describe(name: str) -> str:
    """The dotted name without the marker, for messages."""
    return name.removeprefix(_MARK).partition("#")[0]
