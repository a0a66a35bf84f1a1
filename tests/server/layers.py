"""Middleware of a user's own, by import path, for tests of --middleware."""

from __future__ import annotations

from typing import Any


class Stamp:
    """A plain ASGI class."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-stamp", b"class")]
            await send(message)

        await self.app(scope, receive, stamped if scope["type"] == "http" else send)


async def mark(request: Any, call_next: Any) -> Any:
    response = await call_next(request)
    response.headers["x-mark"] = "function"
    return response


NEITHER = 3
