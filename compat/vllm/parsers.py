"""The documented plug-in classes for tool calls and thinking, over Quire's own parsers.

Both ways: `ToolParserManager.get_tool_parser("hermes")` is a class of the documented form that runs Quire's format, and
a user's class registered here is one of Quire's parsers by its name (quire/text/parse/plugin.py runs it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, Field

from quire.base.registry import Registry
from quire.text.parse.base import CallDelta, Delta, OutputParser, fold
from quire.text.parse.choose import ParserChoice
from quire.text.parse.compose import ParseRequest
from quire.text.parse.reasoning import ReasoningFormat, is_reasoning_end
from quire.text.parse.registry import REASONING_PARSERS, TOOL_PARSERS, load_plugin
from quire.text.parse.tools.hf import FromTokenizer
from quire.text.parse.writer import ToolFormat, random_id

Parser = TypeVar("Parser", bound="type[Any]")
_ONE_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # a tag that is a token of its own, as a rule


class _Ours:
    """A tokenizer of transformers as Quire's parsers want one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        self.skipped_ids = frozenset({*tokenizer.all_special_ids, *(i for i, token in added if token.special)})

    def id_to_token(self, token_id: int) -> str | None:
        found: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))


def ours(tokenizer: Any) -> Any:
    """Any tokenizer as Quire's parsers want one."""
    try:
        tokenizer.skipped_ids  # noqa: B018
    except AttributeError:
        return _Ours(tokenizer)
    return tokenizer


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str = Field(default_factory=lambda: random_id("", 0))
    type: str = "function"
    function: FunctionCall


class ExtractedToolCallInformation(BaseModel):
    tools_called: bool
    tool_calls: list[ToolCall]
    content: str | None = None


class DeltaFunctionCall(BaseModel):
    name: str | None = None
    arguments: str | None = None


class DeltaToolCall(BaseModel):
    id: str | None = None
    type: str | None = None
    index: int
    function: DeltaFunctionCall | None = None


class DeltaMessage(BaseModel):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[DeltaToolCall] = []


class ToolParser:
    """What a tool parser is made from; the attributes are those that documented plug-ins use."""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        self.model_tokenizer = tokenizer
        self.tools = tools
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    @property
    def vocab(self) -> dict[str, int]:
        return dict(self.model_tokenizer.get_vocab())

    def adjust_request(self, request: Any) -> Any:
        return request

    def extract_tool_calls(
        self, model_output: str, request: Any, token_ids: Sequence[int] | None = None
    ) -> ExtractedToolCallInformation:
        raise NotImplementedError("extract_tool_calls")

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        raise NotImplementedError("extract_tool_calls_streaming")


class ReasoningParser:
    """What a reasoning parser is made from."""

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        self.model_tokenizer = tokenizer

    @property
    def vocab(self) -> dict[str, int]:
        return dict(self.model_tokenizer.get_vocab())

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        raise NotImplementedError("is_reasoning_end")

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        raise NotImplementedError("extract_content_ids")

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self.is_reasoning_end(input_ids)

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        return self.extract_reasoning_content(model_output, request)

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        texts = (previous_text, current_text, delta_text)
        return self.extract_reasoning_content_streaming(*texts, previous_token_ids, current_token_ids, delta_token_ids)

    # the names these two had before; classes that still have them work

    def extract_reasoning_content(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        if type(self).extract_reasoning is ReasoningParser.extract_reasoning:
            raise NotImplementedError("extract_reasoning")
        return self.extract_reasoning(model_output, request)

    def extract_reasoning_content_streaming(self, *args: Any) -> DeltaMessage | None:
        if type(self).extract_reasoning_streaming is ReasoningParser.extract_reasoning_streaming:
            raise NotImplementedError("extract_reasoning_streaming")
        return self.extract_reasoning_streaming(*args)


class QuireTools(ToolParser):
    """One of Quire's formats as a documented class."""

    FORMAT: ToolFormat | FromTokenizer
    _parser: OutputParser | None = None

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        if isinstance(self.FORMAT, FromTokenizer):
            self.FORMAT = self.FORMAT(tokenizer)

    def adjust_request(self, request: Any) -> Any:
        if ParserChoice(self.FORMAT, None, ours(self.model_tokenizer)).keeps_special_tokens(with_tools=True):
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(
        self, model_output: str, request: Any, token_ids: Sequence[int] | None = None
    ) -> ExtractedToolCallInformation:
        """`token_ids`: the same answer, for formats whose marks are left out of its text."""
        if token_ids is not None:
            model_output = self.model_tokenizer.decode(list(token_ids), skip_special_tokens=False)
        found = fold(self._new(request).feed(model_output, (), final=True))
        calls = [ToolCall(id=c.id, function=FunctionCall(name=c.name, arguments=c.arguments)) for c in found.calls]
        content = found.content if found.content or not calls else None
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        if self._parser is None:  # one object for one answer, which may be some way on
            self._parser = self._new(request)
            self._fed(self._parser, previous_text, previous_token_ids)
        return self._fed(self._parser, delta_text, delta_token_ids)

    def _new(self, request: Any) -> OutputParser:
        return _parser(self.FORMAT, request, self.tools)

    def _fed(self, parser: OutputParser, text: str, token_ids: Sequence[int]) -> DeltaMessage | None:
        message = _message(parser.feed(text, token_ids, final=False))
        for part in message.tool_calls if message is not None else ():
            self._note(part)
        return message

    def _note(self, part: DeltaToolCall) -> None:
        """What documented classes remember of the calls so far."""
        function = part.function or DeltaFunctionCall()
        if function.name is not None:
            self.current_tool_id, self.current_tool_name_sent = part.index, True
            self.prev_tool_call_arr.append({"name": function.name, "arguments": ""})
            self.streamed_args_for_tool.append("")
        self.prev_tool_call_arr[-1]["arguments"] += function.arguments or ""
        self.streamed_args_for_tool[-1] += function.arguments or ""


class QuireReasoning(ReasoningParser):
    """One of Quire's reasoning formats as a documented class. No prompt is known here: an answer that has an end of
    thought and no beginning began within one."""

    FORMAT: ClassVar[ReasoningFormat]
    _parser: OutputParser | None = None

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(tokenizer, *args, **kwargs)
        self._thinking = _thinking(kwargs.get("chat_template_kwargs"))
        if tokenizer is None:
            raise ValueError("a reasoning parser needs the tokenizer of its model")
        tags = [tag for tag in (*self.FORMAT.start[:1], *self.FORMAT.end[:1]) if _ONE_TOKEN.fullmatch(tag)]
        lacking = [tag for tag in tags if tag not in self.vocab]
        if lacking:
            raise RuntimeError(f"{type(self).__name__}: the tokenizer has no token {lacking[0]!r}")

    @property
    def start_token(self) -> str:
        return self.FORMAT.start[0] if self.FORMAT.start else ""

    @property
    def end_token(self) -> str:
        return self.FORMAT.end[0] if self.FORMAT.end else ""

    @property
    def start_token_id(self) -> int | None:
        return self.vocab.get(self.start_token)

    @property
    def end_token_id(self) -> int | None:
        return self.vocab.get(self.end_token)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens within thoughts, without their tags. An answer that has an end of thought first began within one."""
        tokens = ParserChoice(None, self.FORMAT, ours(self.model_tokenizer)).reasoning_tokens()
        if tokens is None:
            return 0
        count, since, at = 0, 0, 0
        starts, ends = _places(token_ids, tokens.start), _places(token_ids, tokens.end)
        habit = self.FORMAT.inside or self.FORMAT.opened
        inside = bool(ends) and (not starts or min(ends) < min(starts)) if starts or ends else habit
        while at < len(token_ids):
            if inside and at in ends:
                count, inside, at = count + at - since, False, at + len(tokens.end)
            elif not inside and at in starts:
                inside, at = True, at + len(tokens.start)
                since = at
            else:
                at += 1
        return count + (len(token_ids) - since if inside else 0)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        tokens = ParserChoice(None, self.FORMAT, ours(self.model_tokenizer)).reasoning_tokens()
        return tokens is None or is_reasoning_end(tokens, input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        tokens = ParserChoice(None, self.FORMAT, ours(self.model_tokenizer)).reasoning_tokens()
        if tokens is None:
            return list(input_ids)
        size = len(tokens.end)
        for at in range(len(input_ids) - size, -1, -1):
            if tuple(input_ids[at : at + size]) == tokens.end:
                return list(input_ids[at + size :])
        return []

    def extract_reasoning(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
        begins = any(tag in model_output for tag in self.FORMAT.start)
        inside = not begins and any(tag in model_output for tag in self.FORMAT.end)
        found = fold(self._new(inside, request).feed(model_output, (), final=True))
        return found.reasoning or None, found.content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        if self._parser is None:
            self._parser = self._new(False)
            self._parser.feed(previous_text, previous_token_ids, final=False)
        return _message(self._parser.feed(delta_text, delta_token_ids, final=False))

    def _new(self, inside: bool, request: Any = None) -> OutputParser:
        thinking = self._thinking
        try:
            said = _thinking(request.chat_template_kwargs)
        except AttributeError:
            said = None
        ask = ParseRequest(prompt=self.FORMAT.start[0] if inside else None, thinking=thinking if said is None else said)
        return ParserChoice(None, self.FORMAT).parser(ask)


class BaseThinkingReasoningParser(QuireReasoning):
    """For a user's family that differs in its two tags only: `start_token` and `end_token`. Until the end comes, all is
    thought."""

    @property
    def start_token(self) -> str:
        raise NotImplementedError("start_token")

    @property
    def end_token(self) -> str:
        raise NotImplementedError("end_token")

    @property
    def FORMAT(self) -> ReasoningFormat:  # type: ignore[override]  # noqa: N802
        return ReasoningFormat((self.start_token,), (self.end_token,), inside=True)


def _thinking(variables: Any) -> bool | None:
    """What a template's variables say of thinking."""
    said = [variables[name] for name in ("enable_thinking", "thinking") if name in variables] if variables else []
    return bool(said[0]) if said else None


def _places(token_ids: Sequence[int], wanted: Sequence[int]) -> set[int]:
    size, given = len(wanted), tuple(wanted)
    return {at for at in range(len(token_ids) - size + 1) if size and tuple(token_ids[at : at + size]) == given}


def _parser(form: Any, request: Any, own: Any) -> OutputParser:
    """`own`: the tools that the parser was made with, for requests that have none."""
    try:
        given = request.tools or own
    except AttributeError:
        given = own
    tools = [tool if isinstance(tool, dict) else tool.model_dump() for tool in given or ()]
    return ParserChoice(form).parser(ParseRequest(tools=tools or [{}]))


def _message(deltas: Sequence[Delta]) -> DeltaMessage | None:
    if not deltas:
        return None
    message = DeltaMessage()
    for delta in deltas:
        if delta.content:
            message.content = (message.content or "") + delta.content
        if delta.reasoning:
            message.reasoning = message.reasoning_content = (message.reasoning or "") + delta.reasoning
        if (part := delta.call) is not None:
            _join(message.tool_calls, part)
    return message


def _join(parts: list[DeltaToolCall], new: CallDelta) -> None:
    """One entry for each call, however many pieces of it are new."""
    if new.broken is not None:
        return
    for part in parts:
        if part.index == new.index and part.function is not None:
            part.function.arguments = (part.function.arguments or "") + new.arguments
            return
    function = DeltaFunctionCall(name=new.name, arguments=new.arguments)
    kind = None if new.name is None else "function"
    parts.append(DeltaToolCall(index=new.index, id=new.id, type=kind, function=function))


class _Registered(Generic[Parser]):
    """Names of parsers, as the documented managers have them."""

    registry: ClassVar[Registry]
    option: ClassVar[str]
    made: ClassVar[dict[str, Any]]
    parent: ClassVar[Any]

    @classmethod
    def list_registered(cls) -> list[str]:
        return sorted(cls.registry.names())

    @classmethod
    def register_module(
        cls, name: str | list[str] | None = None, force: bool = True, module: Any = None
    ) -> Callable[[Any], Any] | Any:
        """A decorator, or with `module` a call."""

        def register(parser: Any) -> Any:
            names = [name] if isinstance(name, str) else name or [parser.__name__]
            for one in names:
                if not force and one in cls.registry:
                    raise KeyError(f"{one} is already registered")
                cls.registry.register(one, parser)
            return parser

        return register if module is None else register(module)

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        cls.registry.register(name, f"{module_path}:{class_name}")

    @classmethod
    def _class(cls, name: str) -> Any:
        try:
            found = cls.registry.get(name)
        except LookupError as wrong:
            raise KeyError(str(wrong)) from None
        if isinstance(found, type):
            return found
        if name not in cls.made:
            cls.made[name] = type(f"{name}_parser", (cls.parent,), {"FORMAT": found})
        return cls.made[name]


class ToolParserManager(_Registered[Any]):
    registry, option, made, parent = TOOL_PARSERS, "tool_parser_plugin", {}, QuireTools

    @classmethod
    def get_tool_parser(cls, name: str) -> Any:
        return cls._class(name)

    @classmethod
    def import_tool_parser(cls, plugin_path: str) -> None:
        load_plugin(plugin_path, cls.option)


class ReasoningParserManager(_Registered[Any]):
    registry, option, made, parent = REASONING_PARSERS, "reasoning_parser_plugin", {}, QuireReasoning

    @classmethod
    def get_reasoning_parser(cls, name: str) -> Any:
        return cls._class(name)

    @classmethod
    def import_reasoning_parser(cls, plugin_path: str) -> None:
        load_plugin(plugin_path, cls.option)
