"""Plug-ins: functions of other installed packages that are called once in every process, before anything is resolved.

A package names them as entry points of a group; QUIRE_PLUGINS chooses among them by name. What they do is theirs: most
register models. Those that vLLM itself brings, where it is installed beside Quire, are not called. In: entry points.
Out: nothing but their effects. Must not know: what there is to register.
"""

from __future__ import annotations

import re
from typing import Any

from quire.base import env
from quire.base.log import logger
from quire.base.registry import entry_points

GROUPS = ("quire.general_plugins", "vllm.general_plugins")
_log = logger(__name__)
_called: set[str] = set()


class PluginError(RuntimeError):
    """A plug-in could not be imported or failed."""


def call_plugins() -> None:
    """Each plug-in once per process, however often this is called. One line of the log says which."""
    chosen = env.PLUGINS.get()
    if chosen == ():
        return
    loaded, left = [], []
    for entry in (entry for group in GROUPS for entry in entry_points(group=group)):
        if entry.value in _called or (chosen is not None and entry.name not in chosen):
            continue
        _called.add(entry.value)
        if _is_vllms(entry):
            left.append(entry.name)
            continue
        _call(entry)
        loaded.append(f"{entry.name} ({entry.value})")
    if loaded or left:
        beside = f"; not vLLM's own: {', '.join(left)}" if left else ""
        _log.info("plug-ins: %s%s", ", ".join(loaded) or "none", beside)


def _is_vllms(entry: Any) -> bool:
    """Whether vLLM brings it itself, in whichever of its distributions: it would import all of vLLM, to change vLLM."""
    owner = "" if entry.dist is None else re.sub(r"[-_.]+", "-", entry.dist.name).lower()
    return owner == "vllm" or entry.value.partition(":")[0].partition(".")[0].strip() == "vllm"


def _call(entry: Any) -> None:
    try:
        entry.load()()
    except Exception as wrong:
        raise PluginError(
            f"plug-in {entry.name!r} ({entry.value}) failed: {type(wrong).__name__}: {wrong}. QUIRE_PLUGINS lists "
            "the plug-ins to load; an empty one loads none"
        ) from wrong
