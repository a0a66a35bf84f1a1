"""Which parser reads an answer: a reasoning format around a tool format around content, chosen once per server.

In: the names of the options, then for each answer its prompt and tools. Out: an OutputParser. Any reasoning parser goes
with any tool parser (compose.py); plug-ins in the form of vLLM's classes are adapted (plugin.py). Must not know:
dialects, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.schema.errors import InputError
from quire.text.parse.base import Delta, OutputParser, PlainParser
from quire.text.parse.compose import ParseRequest, compose, tool_is_strict
from quire.text.parse.forced import forced_format
from quire.text.parse.reasoning import ReasoningFormat, ReasoningTokens
from quire.text.parse.registry import TOOL_PARSERS, find_reasoning_parser, find_tool_parser, load_plugin
from quire.text.parse.writer import ToolFormat

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ParserChoice:
    """A server's parsers. Either may be a format of ours or a plug-in class."""

    tool: Any = None
    reasoning: Any = None
    tokenizer: Any = None

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer | None,
        *,
        tool: str | None = None,
        reasoning: str | None = None,
        tool_plugin: str = "",
        reasoning_plugin: str = "",
    ) -> ParserChoice:
        """By name; a wrong name is a ConfigError that lists the right ones."""
        if tool_plugin:
            load_plugin(tool_plugin, "tool_parser_plugin")
        if reasoning_plugin:
            load_plugin(reasoning_plugin, "reasoning_parser_plugin")
        parser_class = find_tool_parser(tool) if tool else None
        from quire.text.parse.tools.hf import FromTokenizer  # lazy

        if isinstance(parser_class, FromTokenizer) and tokenizer is not None:
            parser_class = parser_class(tokenizer)
        return cls(parser_class, find_reasoning_parser(reasoning) if reasoning else None, tokenizer)

    def parser(self, ask: ParseRequest) -> OutputParser:
        """For one answer."""
        if ask.tools and ask.forced is not None and self._is_harmony():  # a forced call is in the last channel
            plain = ParserChoice(reasoning=self.reasoning).parser(replace(ask, tools=(), forced=None))
            from quire.text.parse.plugin import Chained  # lazy

            return Chained(plain, ParserChoice().parser(ask))
        tool = (self.tool if ask.forced is None else forced_format(ask.forced)) if ask.tools else None
        if tool is None and self.reasoning is None:
            return PlainParser()
        if _is_ours(tool, ToolFormat) and _is_ours(self.reasoning, ReasoningFormat):
            parser = compose(tool, self.reasoning, ask)
        else:
            from quire.text.parse.plugin import adapt  # lazy

            parser = adapt(tool, self.reasoning, self.tokenizer, ask)
        return parser if ask.include_reasoning or self.reasoning is None else ThoughtlessParser(parser)

    def _is_harmony(self) -> bool:
        return isinstance(self.reasoning, ReasoningFormat) and self.reasoning.harmony

    def keeps_special_tokens(self, *, with_tools: bool) -> bool:
        """Whether special tokens must stay in the text, because a tag is one of them."""
        if self.tokenizer is None:
            return False
        tags = [*self.tool.tags] if with_tools and isinstance(self.tool, ToolFormat) else []
        if isinstance(self.reasoning, ReasoningFormat):
            from quire.text.parse.tools.harmony import TAGS  # lazy

            tags += TAGS if self.reasoning.harmony else self.reasoning.tags
        return any(mark in tag or tag in mark for tag in tags for mark in self._special.values() if mark)

    def adjusted(self, request: Any) -> Any:
        """The request as a plug-in's adjust_request wants it; ours want nothing."""
        if self.tool is None or isinstance(self.tool, ToolFormat):
            return request
        return self.tool(self.tokenizer).adjust_request(request)

    def strict_tag(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> dict[str, Any] | None:
        """What holds calls to the schemas of the tools that are strict; None: none is."""
        if not any(map(tool_is_strict, tools)):
            return None
        forms = self.tool.forms if isinstance(self.tool, ToolFormat) else ()
        if not forms:
            able = (name for name in TOOL_PARSERS.names() if isinstance(TOOL_PARSERS.get(name), ToolFormat))
            raise InputError(
                "a strict tool needs a parser whose calls can be held to a schema, with tool_choice 'auto': "
                f"{', '.join(sorted(name for name in able if TOOL_PARSERS.get(name).forms))}; the server's is none of "
                "them. Leave 'strict' out, or set tool_choice to 'required'",
                param="tools",
            )
        special = {text: token_id for token_id, text in self._special.items() if text}
        from quire.text.parse.strict import strict_tag  # lazy

        made: dict[str, Any] = strict_tag(tools, forms, special, parallel=parallel)
        return made

    @cached_property
    def _special(self) -> dict[int, str]:
        tokenizer = self.tokenizer
        return {} if tokenizer is None else {i: tokenizer.id_to_token(i) or "" for i in tokenizer.skipped_ids}

    def reasoning_format(self) -> ReasoningFormat | None:
        """The tags of thought, a plug-in's too if it names them."""
        if self.reasoning is None or isinstance(self.reasoning, ReasoningFormat):
            return self.reasoning
        from quire.text.parse.plugin import tags_of  # lazy

        tags: ReasoningFormat = tags_of(self.reasoning, self.tokenizer)
        return tags

    def reasoning_tokens(self) -> ReasoningTokens | None:
        """The same as token ids, for a grammar that waits for a thought's end and for thinking budgets. None: a thought
        of this family has no end that could be told."""
        reasoning, tokenizer = self.reasoning_format(), self.tokenizer
        if tokenizer is None or reasoning is None:
            return None
        if reasoning.harmony:
            from quire.text.parse.tools.harmony import FINAL, TO_FINAL  # lazy

            end, forced = _ids(tokenizer, FINAL), _ids(tokenizer, TO_FINAL)
            return ReasoningTokens((), end, ends=(FINAL,), forced=forced, first=end, may_stop=True)
        if not reasoning.end:
            return None
        start, end = _ids(tokenizer, reasoning.start[0]), _ids(tokenizer, reasoning.end[0])
        starts, ends = (tuple(tag.strip() for tag in tags) for tags in (reasoning.start, reasoning.end))
        return ReasoningTokens(start, end, starts, ends, forced=end)


class ThoughtlessParser:
    """Leaves the thought out."""

    def __init__(self, inner: OutputParser) -> None:
        self._inner = inner

    def feed(self, text: str, token_ids: Sequence[int], *, final: bool) -> Sequence[Delta]:
        return [delta for delta in self._inner.feed(text, token_ids, final=final) if not delta.reasoning]


def _is_ours(part: Any, kind: type) -> bool:
    return part is None or isinstance(part, kind)


def _ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))
