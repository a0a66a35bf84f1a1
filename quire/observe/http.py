"""HttpMetrics: requests, sizes and times of the HTTP side, by route, method and class of status.

In: one `answered` per answer. Label sets are closed: a path that is no route counts as handler "none", a method
outside the table as "other". Must not know: ASGI (server/metrics_route.py measures), or what an answer means.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.observe.declared import METHODS, OTHER_HANDLER, STATUSES, http_table
from quire.observe.reader import Metric
from quire.observe.sheet import Sheet

_METHODS = frozenset(METHODS)


class HttpMetrics:
    def __init__(self, handlers: Iterable[str], *, folder: str | None = None) -> None:
        """`handlers` are the routes as they are written, such as /v1/models/{name}."""
        self._handlers = tuple(sorted(set(handlers) - {OTHER_HANDLER}))
        self.sheet = Sheet(http_table(self._handlers), kind="http", folder=folder)
        self._known = frozenset(self._handlers)

    def answered(
        self, handler: str | None, method: str, status: int, seconds: float, *, received: int, sent: int
    ) -> None:
        """`received` and `sent` are bytes of the bodies."""
        name = handler if handler in self._known and handler is not None else OTHER_HANDLER
        verb = method if method in _METHODS else "other"
        sheet = self.sheet
        sheet.add("http_requests", 1, name, verb, STATUSES[min(max(status // 100, 1), 5) - 1])
        sheet.observe("http_request_size_bytes", received, name)
        sheet.observe("http_response_size_bytes", sent, name)
        sheet.observe("http_request_duration_highr_seconds", seconds)
        sheet.observe("http_request_duration_seconds", seconds, name, verb)

    def snapshot(self) -> list[Metric]:
        """Only combinations that happened: there are hundreds."""
        return self.sheet.read({}, seen_only=True)
