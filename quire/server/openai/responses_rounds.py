"""Rounds: an answer of /v1/responses during which the server runs tools and lets the model go on with their results.

In: a request with tools of the server's (mcp, and the built-in ones that a tool server stands for). Out: a flow of
results like any other, behind which one request of the engine follows the other until the model calls nothing more, or
calls a function of its client's. Bounded: rounds, calls, seconds, characters. Must not know: events, sockets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from quire.schema.errors import InputError, NotBuiltError
from quire.schema.outputs import RequestOutput
from quire.server.openai.chat_open import OpenedChat
from quire.server.openai.responses_protocol import ResponsesRequest
from quire.server.parts import Part
from quire.server.tool_server import ServerTool, ToolResult, ToolServer, ToolSessions

MOST_ROUNDS = 16
# what the built-in tools of the documented API are called as tool servers
BUILT_IN = {
    "web_search_preview": "browser", "web_search": "browser", "code_interpreter": "python", "container": "container",
}  # fmt: skip
_UNBUILT = ("server_url", "connector_id", "authorization", "headers", "tunnel_id")
ServerTools = dict[str, ServerTool]  # by the name that the model sees


class ToolRoundAnswer(Protocol):
    """What the rounds ask of the answer that they fill."""

    def waiting(self) -> Sequence[Part]:
        """Calls of the server's tools that have no result yet."""

    def goes_on(self) -> bool:
        """All calls of this round were the server's, and their results are wanted."""

    def settle(self, part: Part, result: ToolResult) -> None: ...
    def next_round(self, chat: OpenedChat) -> None: ...


class Rounds:
    """As a Flow. `open_next`: the next request, after `rounds` of them, with the results so far."""

    def __init__(
        self,
        chat: OpenedChat,
        answer: ToolRoundAnswer,
        tools: ServerTools,
        server: ToolServer,
        open_next: Callable[[int], Awaitable[OpenedChat]],
    ) -> None:
        self._flow = chat.opened.flow
        self.loop = self._flow.loop
        self._answer, self._tools, self._open_next = answer, tools, open_next
        self._sessions = ToolSessions(server)
        self._running: tuple[Part, asyncio.Future[ToolResult]] | None = None
        self._opening: asyncio.Task[OpenedChat] | None = None
        self._error: Exception | None = None
        self._rounds = 1

    @property
    def finished(self) -> bool:
        """The last request has ended, and nothing waits for a result."""
        return self._flow.finished and not self._answer.waiting() and not self._answer.goes_on()

    async def next(self) -> list[RequestOutput]:
        """What is new; nothing where only a tool has given its result. May be left and called again at any time."""
        if self._error is not None:
            raise self._error
        if not self._flow.finished:
            return await self._flow.next()
        if waiting := self._answer.waiting():
            await self._settle(waiting[0])
            return []
        if self._opening is None:
            self._opening = self.loop.create_task(self._open())
        chat = await asyncio.shield(self._opening)
        self._opening = None
        self._rounds += 1
        self._flow.close()
        self._flow = chat.opened.flow
        if self._error is not None:
            raise self._error
        self._answer.next_round(chat)
        return []

    async def _open(self) -> OpenedChat:
        return await self._open_next(self._rounds)

    async def _settle(self, part: Part) -> None:
        if self._running is None:
            try:
                arguments = json.loads(part.text or "{}")
            except (ValueError, RecursionError) as wrong:
                arguments = None
                reason = f"the arguments are not JSON: {wrong}"
            else:
                reason = "the arguments are not a JSON object"
            if not isinstance(arguments, dict):
                self._answer.settle(part, ToolResult(reason, failed=True))
                return
            self._running = part, self._sessions.start(self._tools[part.name], arguments)
        result = await asyncio.shield(self._running[1])
        self._running = None
        if self._error is not None:
            raise self._error
        self._answer.settle(part, result)

    def fail(self, error: Exception) -> None:
        """End it, also where it waits for a tool."""
        self._error = self._error or error
        self._flow.fail(error)
        if self._running is not None and not self._running[1].done():
            self._running[1].set_result(ToolResult(str(error), failed=True))

    def close(self) -> None:
        self._sessions.close()
        if self._opening is not None:
            self._opening.add_done_callback(_close_opened)
            self._opening.cancel()
        self._flow.close()

    def __enter__(self) -> Rounds:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()


def _close_opened(task: asyncio.Task[OpenedChat]) -> None:
    """What was opened for nobody."""
    if not task.cancelled() and task.exception() is None:
        task.result().opened.flow.close()


async def server_tools(request: ResponsesRequest, server: ToolServer | None) -> ServerTools:
    """The tools of the request that this server runs, by name."""
    server_side = [(n, tool) for n, tool in enumerate(request.tools or ()) if tool.get("type") in ("mcp", *BUILT_IN)]
    if not server_side:
        return {}
    if server is None:
        number, tool = server_side[0]
        raise InputError(
            f"tools[{number}].type is {tool.get('type')!r}: this server runs no tools; start it with --tool-server",
            param=f"tools[{number}].type",
        )
    known = await server.tools()
    taken = {str(tool.get("name")) for tool in request.tools or () if tool.get("type") == "function"}
    chosen: ServerTools = {}
    for number, tool in server_side:
        for one in _chosen(tool, known, f"tools[{number}]"):
            if one.name in taken:
                raise InputError(f"tools[{number}]: two tools are called {one.name!r:.100}", param=f"tools[{number}]")
            taken.add(one.name)
            chosen[one.name] = one
    return chosen


def _chosen(tool: Mapping[str, Any], known: Mapping[str, Sequence[ServerTool]], place: str) -> Sequence[ServerTool]:
    kind = str(tool.get("type"))
    label = str(tool.get("server_label")) if kind == "mcp" else BUILT_IN[kind]
    if kind == "mcp":
        _check_mcp(tool, place)
    if label not in known:
        raise InputError(
            f"{place}: there is no tool server {label!r:.100}; this server has: {', '.join(known) or 'none'}",
            param=f"{place}.server_label" if kind == "mcp" else place,
        )
    tools = known[label]
    allowed = tool.get("allowed_tools")
    names = allowed.get("tool_names") if isinstance(allowed, Mapping) else allowed
    if names is None:
        return tools
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f'{place}.allowed_tools must be a list of names, or {{"tool_names": [...]}}', param=f"{place}.allowed_tools"
        )
    wrong = [name for name in names if name not in {one.name for one in tools}]
    if wrong:
        raise InputError(
            f"{place}.allowed_tools: {label} has no tool {wrong[0]!r:.100}", param=f"{place}.allowed_tools"
        )
    return [one for one in tools if one.name in names]


def _check_mcp(tool: Mapping[str, Any], place: str) -> None:
    for name in _UNBUILT:
        if tool.get(name):
            raise InputError(
                f"{place}.{name}: tool servers are the operator's, who names them with --tool-server",
                param=f"{place}.{name}",
            )
    if tool.get("require_approval") not in (None, "never"):
        raise NotBuiltError(
            f"{place}.require_approval: tools run without asking in this version of Quire; say 'never'",
            param=f"{place}.require_approval",
        )
    allowed = tool.get("allowed_tools")
    if isinstance(allowed, Mapping) and allowed.get("read_only") is not None:
        raise NotBuiltError(f"{place}.allowed_tools.read_only is not in this version of Quire",
                            param=f"{place}.allowed_tools.read_only")  # fmt: skip


def shown(tool: ServerTool) -> dict[str, Any]:
    """In the form of a chat's tools."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.schema)}
    return {"type": "function", "function": function}
