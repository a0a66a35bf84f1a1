"""Watching the engine: whether it lives, and whether it gets anywhere. /health and the server's end hang on this.

`trouble` says in words what is wrong now. `watch` runs beside the server: it logs a stall once, with the stacks of the
engine's threads, and returns when the engine is dead. Must not know: HTTP.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.base.log import logger

if TYPE_CHECKING:
    from quire.llm.online import AsyncLLM

log = logger(__name__)
_LOOK_SECONDS = 0.2


def trouble(engine: AsyncLLM, stall_timeout: float) -> str | None:
    """Why no request can be served now; None when all is well."""
    if not engine.is_running:
        return str(engine.dead_error)
    silent = engine.stalled_for()
    if stall_timeout and silent > stall_timeout:
        return (
            f"requests are in the engine and no step finished for {silent:.0f} s "
            f"(engine_stall_timeout={stall_timeout:g})"
        )
    return None


async def watch(engine: AsyncLLM, stall_timeout: float, *, show_stacks: bool) -> None:
    stalled = False
    while engine.is_running:
        words = trouble(engine, stall_timeout)
        if words is not None and not stalled and engine.is_running:
            log.error("The engine is stuck: %s; its stacks follow", words)
            if show_stacks:
                engine.front.client.show_stacks()
        elif words is None and stalled:
            log.warning("The engine goes on")
        stalled = words is not None
        await asyncio.sleep(_LOOK_SECONDS)
