"""compose: a reasoning format around a tool format around content, as one OutputParser of an answer.

The parts are one generator after the other over the same text, so any of ours goes with any other.
Must not know: which formats a server has chosen, plug-ins, dialects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.text.parse.base import OutputParser
from quire.text.parse.reasoning import ReasoningFormat
from quire.text.parse.tags import Steps, TextSource
from quire.text.parse.typed import tool_schemas
from quire.text.parse.writer import DeltaWriter, FormatParser, ToolFormat, read_text, read_thought


@dataclass(frozen=True)
class ParseRequest:
    """What a parser has to know of one request. `tools`: those whose calls are looked for; none, no calls are.
    `forced`: calls are a must (forced.py). `prompt`: its end says whether a thought is open. `thinking`: False where
    the request switched it off. `request`: for plug-ins, whatever the dialect's is."""

    prompt: str | None = None
    thinking: bool | None = None
    continues: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    forced: str | None = None
    parallel: bool = True
    include_reasoning: bool = True
    request: Any = None


def tool_is_strict(tool: Mapping[str, Any]) -> bool:
    """Whether the calls of this tool are held to its schema."""
    function = tool.get("function")
    return isinstance(function, Mapping) and function.get("strict") is True


def compose(tool: ToolFormat | None, reasoning: ReasoningFormat | None, ask: ParseRequest) -> OutputParser:
    """A parser of one answer: first the thought, then calls or text. None: no such part is looked for."""
    if reasoning is not None and reasoning.harmony and ask.forced is None:
        from quire.text.parse.tools.harmony import FORMAT, TEXT_ONLY  # lazy

        tool = TEXT_ONLY if tool is None else FORMAT
        reasoning = None
    inside = reasoning is not None and reasoning.begins_inside(
        ask.prompt, continues=ask.continues, thinking=ask.thinking
    )
    is_strict = any(tool_is_strict(one) for one in ask.tools)

    def read(source: TextSource, out: DeltaWriter) -> Steps[None]:
        hidden: tuple[str, ...] = ()
        if reasoning is not None:
            calls_end_it = tool is not None and not is_strict and ask.forced is None
            hidden = yield from reasoning.read(source, out, inside, calls_end_it)
        if tool is None:
            yield from read_text(source, out)
            return
        source.hide((*tool.hidden, *hidden))
        begun = ask.prompt if reasoning is None else None  # a thought that it opened is read by now
        if tool.thought is not None and (reasoning is None or not reasoning.end):
            opened = (ask.prompt or "").rstrip().endswith(tool.thought[0])
            yield from read_thought(source, out, tool.thought, opened)
        if is_strict and tool.strict_read is not None:
            yield from tool.strict_read(source, out)
        else:
            yield from (tool.read if tool.after is None or not begun else tool.after(begun))(source, out)

    writer = (
        DeltaWriter(keep_space=True)
        if tool is None or not ask.tools
        else DeltaWriter(tool_schemas(ask.tools), new_id=tool.new_id, first_only=not ask.parallel)
    )
    return FormatParser(read, writer, shows_broken=tool is not None and tool.tells_broken and not tool.is_answer)
