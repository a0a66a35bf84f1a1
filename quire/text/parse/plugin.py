"""Plug-ins in the form of vLLM's ToolParser and ReasoningParser classes, as OutputParsers.

Such a class is made with the tokenizer; streamed answers go through extract_tool_calls_streaming and
extract_reasoning_streaming (text before, text now, what is new; the same for token ids; the request), whole ones
through extract_tool_calls and extract_reasoning. What they return is read by its attributes. A class may stand beside a
format of ours: then the thought is taken off first, by whichever it is. Must not know: dialects.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from quire.schema.errors import ConfigError
from quire.text.parse.base import CallDelta, Delta, OutputParser, PlainParser
from quire.text.parse.compose import ParseRequest, compose
from quire.text.parse.reasoning import ReasoningFormat
from quire.text.parse.writer import ToolFormat, random_id


def adapt(tool: Any, reasoning: Any, tokenizer: Any, ask: ParseRequest) -> OutputParser:
    """One parser of both, where at least one is a plug-in class."""
    ask = dataclasses.replace(ask, request=_shown(ask.request))
    inner: OutputParser = PlainParser()
    if isinstance(tool, ToolFormat):
        inner = compose(tool, None, ask)
    elif tool is not None:
        inner = PluginTools(tool(tokenizer), ask)
    if reasoning is None:
        return inner
    if isinstance(reasoning, ReasoningFormat):
        bare = ParseRequest(prompt=ask.prompt, continues=ask.continues)
        return Chained(compose(None, reasoning, bare), inner)
    return Chained(PluginReasoning(reasoning(tokenizer), ask), inner)


def tags_of(reasoning: Any, tokenizer: Any) -> ReasoningFormat:
    """What a class says of its tags, as most do by `start_token` and `end_token`. Until the end comes, all is thought,
    as in vLLM."""
    try:
        parser = reasoning(tokenizer)
        start, end = parser.start_token, parser.end_token
    except (AttributeError, NotImplementedError):
        return ReasoningFormat()
    except RuntimeError as wrong:  # the tokenizer does not know its tags
        raise ConfigError(f"reasoning_parser: {wrong}", param="reasoning_parser") from None
    return ReasoningFormat((start,), (end,), inside=True) if start and end else ReasoningFormat()


class AttributeDict(dict[str, Any]):
    """A tool of a request, or its function, whose entries are attributes too: so plug-ins read them."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name in ("description", "parameters", "strict"):
            return None
        raise AttributeError(name)

    def model_dump(self, **how: Any) -> dict[str, Any]:
        return dict(self)


def _shown(request: Any) -> Any:
    """The request with its tools as plug-ins want them; the request itself stays as it is."""
    try:
        tools = request.tools
    except AttributeError:
        return request
    if not tools or not all(isinstance(tool, dict) for tool in tools):
        return request
    shown = copy.copy(request)
    shown.tools = [
        AttributeDict(
            {key: AttributeDict(value) if isinstance(value, Mapping) else value for key, value in tool.items()}
        )
        for tool in tools
    ]
    return shown


class Chained:
    """The content that one parser leaves goes through another."""

    def __init__(self, outer: OutputParser, inner: OutputParser) -> None:
        self._outer, self._inner = outer, inner

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Sequence[Delta]:
        deltas: list[Delta] = []
        content = ""
        for delta in self._outer.feed(text, token_ids, final=final):
            if delta.content:
                content += delta.content
            else:
                deltas.append(delta)
        if content or final:
            deltas += self._inner.feed(content, token_ids, final=final)
        return deltas


class _History:
    """What a plug-in is told of an answer."""

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []

    def add(self, text: str, token_ids: Sequence[int]) -> tuple[str, str, str, list[int], list[int], list[int]]:
        before, earlier, new = self.text, self.ids, list(token_ids)
        self.text, self.ids = before + text, earlier + new
        return before, self.text, text, earlier, self.ids, new


class PluginTools:
    def __init__(self, parser: Any, ask: ParseRequest) -> None:
        self._parser, self._request, self._first_only = parser, ask.request, not ask.parallel
        self._history, self._named = _History(), set[int]()

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Sequence[Delta]:
        if final and not self._history.text:
            return self._whole(text)
        if not text and not token_ids:
            return ()
        result = self._parser.extract_tool_calls_streaming(*self._history.add(text, token_ids), self._request)
        if result is None:
            return ()
        deltas = [Delta(result.content)] if result.content else []
        for part in result.tool_calls or ():
            index, function = part.index, part.function
            if self._first_only and index:
                continue
            fresh = index not in self._named and function is not None and bool(function.name)
            self._named.add(index)
            name, call_id = (function.name, part.id or random_id(function.name, index)) if fresh else (None, None)
            more = (function.arguments or "") if function is not None else ""
            deltas.append(Delta(call=CallDelta(index, more, call_id, name)))
        return deltas

    def _whole(self, text: str) -> list[Delta]:
        result = self._parser.extract_tool_calls(text, self._request)
        if not result.tools_called:
            return [Delta(result.content if result.content is not None else text)]
        deltas = [Delta(result.content)] if result.content else []
        for index, call in enumerate(result.tool_calls[: 1 if self._first_only else None]):
            name = call.function.name
            deltas.append(
                Delta(call=CallDelta(index, call.function.arguments, call.id or random_id(name, index), name))
            )
        return deltas


class PluginReasoning:
    """Once the plug-in says that the thought is over, all further text is content, as in vLLM."""

    def __init__(self, parser: Any, ask: ParseRequest) -> None:
        self._parser, self._request = parser, ask.request
        self._history, self._over = _History(), False

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Sequence[Delta]:
        if self._over:
            return [Delta(text)] if text else ()
        if final and not self._history.text:
            thought, content = self._parser.extract_reasoning(text, self._request)
            return [*([Delta(reasoning=thought)] if thought else ()), *([Delta(content)] if content else ())]
        if not text and not token_ids:
            return ()
        result = self._parser.extract_reasoning_streaming(*self._history.add(text, token_ids))
        self._over = bool(self._parser.is_reasoning_end(self._history.ids))
        if result is None:
            return ()
        thought = result.reasoning or result.reasoning_content
        return [*([Delta(reasoning=thought)] if thought else ()), *([Delta(result.content)] if result.content else ())]
