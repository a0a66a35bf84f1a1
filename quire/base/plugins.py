"""Plug-ins: functions of other installed packages that are called once in every process, before anything is resolved.

A package names them as entry points of a group; QUIRE_PLUGINS chooses among them by name. What they do is theirs: most
register models. In: entry points. Out: nothing but their effects. Must not know: what there is to register.
"""

from __future__ import annotations

from quire.base import env
from quire.base.log import logger
from quire.base.registry import entry_points

GROUPS = ("quire.general_plugins", "vllm.general_plugins")
_log = logger(__name__)
_called: set[str] = set()


class PluginError(RuntimeError):
    """A plug-in could not be imported or failed."""


def call_plugins() -> None:
    """Each plug-in once per process, however often this is called."""
    chosen = env.PLUGINS.get()
    if chosen == ():
        return
    for found in (entry for group in GROUPS for entry in entry_points(group=group)):
        if found.value in _called or (chosen is not None and found.name not in chosen):
            continue
        _called.add(found.value)
        try:
            found.load()()
        except Exception as wrong:
            raise PluginError(
                f"plug-in {found.name!r} ({found.value}) failed: {type(wrong).__name__}: {wrong}. QUIRE_PLUGINS lists "
                "the plug-ins to load; an empty one loads none"
            ) from wrong
        _log.info("plug-in: %s (%s)", found.name, found.value)
