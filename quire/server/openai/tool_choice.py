"""tool_choice: whether an answer may, must or must not hold calls, and to which of the request's tools.

In: a chat request and the server's options. Out: ToolUse, which says what the parser looks for and what the answer is
held to. Must not know: formats, engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.config.server import ServerConfig
from quire.schema.errors import InputError
from quire.server.openai.chat_protocol import ChatRequest
from quire.text.parse.forced import forced_schema

_WORDS = ("none", "auto", "required")


@dataclass(frozen=True)
class ToolUse:
    """`tools`: those whose calls are looked for. `forced`: None, or "" for any of them, or one's name (forced.py).
    `schema`: what the answer must be, where it is forced."""

    tools: tuple[Mapping[str, Any], ...] = ()
    forced: str | None = None
    schema: dict[str, Any] | None = None
    parallel: bool = True


NO_TOOLS = ToolUse()


def read_tool_use(request: ChatRequest, options: ServerConfig) -> ToolUse:
    choice = request.tool_choice
    tools: tuple[Mapping[str, Any], ...] = tuple(request.tools or ())
    if choice is None and not tools:
        return NO_TOOLS
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, tools = _allowed(choice, tools)
    if isinstance(choice, Mapping):
        name = _named(choice, tools)
        return ToolUse(tools, name, forced_schema(tools, name, parallel=parallel), parallel)
    if choice is not None and choice not in _WORDS:
        raise InputError(
            f"tool_choice is {choice!r:.100}; it is one of {', '.join(_WORDS)}, or "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    if choice == "required":
        if not tools:
            raise InputError("tool_choice is 'required', and there are no tools", param="tools")
        return ToolUse(tools, "", forced_schema(tools, "", parallel=parallel), parallel)
    if choice == "auto" and not options.enable_auto_tool_choice:
        raise InputError(
            '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            param="tool_choice",
        )
    # with no tool_choice the tools are shown to the model, and its calls found where the server can
    if choice == "none" or not options.enable_auto_tool_choice or not tools:
        return NO_TOOLS
    return ToolUse(tools, parallel=parallel)


def _named(choice: Mapping[str, Any], tools: tuple[Mapping[str, Any], ...]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InputError(
            'tool_choice as an object is {"type": "function", "function": {"name": ...}}', param="tool_choice"
        )
    _check_names([name], tools)
    return name


def _allowed(
    choice: Mapping[str, Any], tools: tuple[Mapping[str, Any], ...]
) -> tuple[str, tuple[Mapping[str, Any], ...]]:
    """{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", ...}]}}"""
    inner = choice.get("allowed_tools")
    inner = inner if isinstance(inner, Mapping) else choice
    listed = inner.get("tools")
    entries = [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list) else []
    functions = [entry.get("function", entry) for entry in entries]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    _check_names(names, tools)
    return str(inner.get("mode", "auto")), tuple(tool for tool in tools if tool["function"]["name"] in names)


def _check_names(names: list[Any], tools: tuple[Mapping[str, Any], ...]) -> None:
    known = [tool["function"]["name"] for tool in tools]
    for name in names:
        if name not in known:
            names_text = ", ".join(known[:20]) or "none"
            raise InputError(f"tool_choice names {name!r:.100}; the tools are: {names_text}", param="tool_choice")
