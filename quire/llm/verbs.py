"""Control verbs as methods of LLM, LLMEngine and AsyncLLM, generated from the one table in engine/control.py.

A class writes `sleep = verb("sleep")` (or `async_verb`) and needs a `call(name, ...)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.control import VERBS
from quire.schema.errors import NotBuiltError

Read = Callable[[Any], Any]  # what an argument means in the caller's process


def verb(name: str, read: Read = lambda value: value) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.call(name, *map(read, args), **{key: read(value) for key, value in kwargs.items()})

    return _named(run, name)


def refuse_stat_loggers(stat_loggers: Any) -> None:
    """Further receivers of an engine's numbers, which documented constructors take."""
    if stat_loggers:
        raise NotBuiltError(
            "stat_loggers is not in this version of Quire: get_metrics() and /metrics have the numbers",
            param="stat_loggers",
        )


def async_verb(name: str, read: Read = lambda value: value) -> Callable[..., Any]:
    async def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await self.call(name, *map(read, args), **{key: read(value) for key, value in kwargs.items()})

    return _named(run, name)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    run.__name__ = name
    run.__doc__ = VERBS[name].doc
    return run
