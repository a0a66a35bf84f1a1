"""Results: what the server asks of a flow of results, whether one request of the engine makes it or several in turn.

AsyncLLM's Flow is one; an answer during which tools run is another (openai/responses_rounds.py). Must not know: either.
"""

from __future__ import annotations

from typing import Any, Protocol

from quire.schema.outputs import RequestOutput


class Results(Protocol):
    """Close it, or it runs on. Touched only by its event loop."""

    @property
    def finished(self) -> bool:
        """All has ended well, and all was picked up."""

    async def next(self) -> list[RequestOutput]:
        """What is new. Raises once it failed. Not to be called once finished."""

    def fail(self, error: Exception) -> None:
        """Whoever listens gets this error instead of more."""

    def close(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *about: object) -> None: ...
