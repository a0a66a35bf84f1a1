"""Tools that the server runs for its clients: those of MCP servers (--tool-server), and two of its own to try it with.

In: the option's words. Out: the tools by server, and ToolSessions, which runs the calls of one answer one after the
other. Connections are made when the first request asks for tools, so a tool server may start later or start again.
Must not know: dialects, engines.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import datetime
import importlib.util
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from quire.base.log import logger
from quire.base.registry import load
from quire.schema.errors import ConfigError, MissingExtraError, QuireError

log = logger(__name__)
CALL_SECONDS = 60.0  # that one call may take
CONNECT_SECONDS = 10.0
MOST_CHARACTERS = 1 << 18  # of a result; what is longer is cut off


class ToolServerError(QuireError):
    """A tool server that cannot be reached."""

    status = 503


@dataclass(frozen=True)
class ServerTool:
    """One tool of one server."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What a call gave. `failed`: the words say why it gave nothing."""

    text: str
    failed: bool = False


class ToolSession(Protocol):
    """One connection to one server. Entered, used and left by the same task."""

    async def __aenter__(self) -> ToolSession: ...
    async def __aexit__(self, *about: Any) -> bool | None: ...
    async def tools(self) -> tuple[str, Sequence[ServerTool]]:
        """(the server's name, its tools)"""

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult: ...


class ToolServer:
    """All tool servers of this one."""

    def __init__(self, sessions: Sequence[Callable[[], ToolSession]]) -> None:
        self._sessions = sessions
        self._homes: dict[str, Callable[[], ToolSession]] = {}
        self._known: dict[str, Sequence[ServerTool]] = {}

    @classmethod
    def of(cls, option: str | None) -> ToolServer | None:
        """`demo`, or addresses with commas between: host:port, or a URL whose path ends with /sse or is the place of
        streamable HTTP."""
        if not option:
            return None
        words = [word.strip() for word in option.split(",") if word.strip()]
        sessions: list[Callable[[], ToolSession]] = []
        for word in words:
            if word == "demo":
                sessions.append(DemoSession)
            else:
                sessions.append(_mcp_session(_places(word)))
        if not sessions:
            raise ConfigError(f"tool_server={option!r} names no server", param="tool_server", value=option)
        if words != ["demo"] and importlib.util.find_spec("mcp") is None:
            raise MissingExtraError("tool_server", "mcp", "mcp")
        return cls(sessions)

    async def tools(self) -> dict[str, Sequence[ServerTool]]:
        """By server. Asked anew each time: tools come and go with their servers."""
        listed = await asyncio.gather(*map(self._list, self._sessions))
        self._known = {name: tools for name, tools, _ in listed}
        self._homes = {name: session for name, _, session in listed}
        return self._known

    async def _list(
        self, session: Callable[[], ToolSession]
    ) -> tuple[str, Sequence[ServerTool], Callable[[], ToolSession]]:
        opened = session()
        try:
            async with asyncio.timeout(CONNECT_SECONDS), opened:
                name, tools = await opened.tools()
        except Exception as wrong:  # of another program's: refused connections, wrong protocols, groups of both
            raise ToolServerError(f"the tool server {opened} cannot be reached: {_reason(wrong)}") from wrong
        return name, tools, session

    def session(self, server: str) -> ToolSession:
        return self._homes[server]()


class ToolSessions:
    """The calls of one answer. One connection to each server that is called, until `close`: what a tool remembers, it
    remembers for the answer."""

    def __init__(self, server: ToolServer) -> None:
        self._server = server
        self._calls: asyncio.Queue[tuple[ServerTool, dict[str, Any], asyncio.Future[ToolResult]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    def start(self, tool: ServerTool, arguments: dict[str, Any]) -> asyncio.Future[ToolResult]:
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._serve())
        result: asyncio.Future[ToolResult] = loop.create_future()
        self._calls.put_nowait((tool, arguments, result))
        return result

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _serve(self) -> None:
        """Enters and leaves every connection, as their library wants it: in one task."""
        with contextlib.suppress(asyncio.CancelledError):
            async with AsyncExitStack() as stack:
                opened: dict[str, ToolSession] = {}
                while True:
                    tool, arguments, result = await self._calls.get()
                    answer = await self._run(stack, opened, tool, arguments)
                    if not result.done():
                        result.set_result(answer)

    async def _run(
        self, stack: AsyncExitStack, opened: dict[str, ToolSession], tool: ServerTool, arguments: dict[str, Any]
    ) -> ToolResult:
        try:
            if tool.server not in opened:
                async with asyncio.timeout(CONNECT_SECONDS):
                    opened[tool.server] = await stack.enter_async_context(self._server.session(tool.server))
            async with asyncio.timeout(CALL_SECONDS):
                result = await opened[tool.server].call(tool.name, arguments)
        except TimeoutError:
            opened.pop(tool.server, None)
            return ToolResult(f"the tool {tool.name} did not answer within {CALL_SECONDS:g} s", failed=True)
        except Exception as wrong:  # noqa: BLE001  # whatever a tool server does, the model is told and the answer goes on
            opened.pop(tool.server, None)
            log.warning("The tool %s of %s failed: %s", tool.name, tool.server, _reason(wrong))
            return ToolResult(f"the tool {tool.name} failed: {_reason(wrong)}", failed=True)
        if len(result.text) > MOST_CHARACTERS:
            return ToolResult(result.text[:MOST_CHARACTERS] + " (cut off)", result.failed)
        return result


def _reason(wrong: BaseException) -> str:
    while isinstance(wrong, BaseExceptionGroup):
        wrong = wrong.exceptions[0]
    return f"{type(wrong).__name__}: {wrong}"[:500]


# ---- MCP ---------------------------------------------------------------------------------------------------------


def _places(word: str) -> tuple[str, ...]:
    """The URLs at which a server may be: of host:port the documented one first, then the newer transport's."""
    if "://" in word:
        parts = urlsplit(word)
        if parts.scheme in ("http", "https") and parts.hostname:
            return (word,)
    else:
        parts = urlsplit(f"//{word}")
        try:
            if parts.hostname and parts.port and not parts.path:
                return (f"http://{word}/sse", f"http://{word}/mcp")
        except ValueError:  # a port that is none
            pass
    raise ConfigError(
        f"tool_server holds {word!r:.200}; it must be 'demo', host:port, or an http URL",
        param="tool_server",
        value=word,
    )


def _mcp_session(places: tuple[str, ...]) -> Callable[[], ToolSession]:
    return lambda: McpSession(places)


class McpSession:
    """Through the official client."""

    def __init__(self, places: tuple[str, ...]) -> None:
        self._places = places
        self._client: Any = None
        self._stack = AsyncExitStack()

    def __str__(self) -> str:
        return self._places[0]

    async def __aenter__(self) -> McpSession:
        client = load("mcp:Client")
        last: BaseException | None = None
        for place in self._places:
            transport = load("mcp.client.sse:sse_client")(place) if urlsplit(place).path.endswith("/sse") else place
            try:
                self._client = await self._stack.enter_async_context(client(transport))
            except Exception as wrong:  # noqa: BLE001  # there may be another place
                last = wrong
            else:
                return self
        assert last is not None
        raise last

    async def __aexit__(self, *about: Any) -> bool | None:
        return await self._stack.__aexit__(*about)

    async def tools(self) -> tuple[str, Sequence[ServerTool]]:
        name, tools, cursor = str(self._client.server_info.name), list[ServerTool](), None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            tools += [ServerTool(name, one.name, one.description or "", one.input_schema) for one in page.tools]
            if (cursor := page.next_cursor) is None:
                return name, tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        result = await self._client.call_tool(tool, arguments)
        texts = [part.text for part in result.content if part.type == "text"]
        left = [part.type for part in result.content if part.type != "text"]
        if left:
            texts.append(f"({', '.join(left)} left out: this version of Quire takes text only)")
        return ToolResult("\n".join(texts), failed=bool(result.is_error))


# ---- demo --------------------------------------------------------------------------------------------------------

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
_LONGEST = 500  # characters of an expression; nothing in it can take long


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % and brackets. Nothing is evaluated but these."""
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has {len(expression)} characters; it may have {_LONGEST}")
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and (binary := _OPERATORS.get(type(node.op))):
        return binary(_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and (unary := _OPERATORS.get(type(node.op))):
        return unary(_value(node.operand))
    raise ValueError(f"{ast.unparse(node)[:100]!r} is not arithmetic")


class DemoSession:
    """Two harmless tools in this process."""

    def __str__(self) -> str:
        return "demo"

    async def __aenter__(self) -> DemoSession:
        return self

    async def __aexit__(self, *about: Any) -> bool | None:
        return None

    async def tools(self) -> tuple[str, Sequence[ServerTool]]:
        one = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"],
               "additionalProperties": False}  # fmt: skip
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        return "demo", (
            ServerTool("demo", "calculate", "The value of an arithmetic expression.", one),
            ServerTool("demo", "now", "The date and time, in UTC.", none),
        )

    async def call(self, tool: str, arguments: dict[str, Any]) -> ToolResult:
        if tool == "calculate":
            return ToolResult(calculate(str(arguments.get("expression", ""))))
        return ToolResult(datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
