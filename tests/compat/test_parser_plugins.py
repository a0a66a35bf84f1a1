"""The documented plug-in interfaces: Quire's parsers through them, and a user's own classes in Quire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from quire.text.parse.base import fold
from quire.text.parse.choose import ParserChoice, ParseRequest
from quire.text.parse.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.plain.text.parse_corpus import RENDER, SCENES, TOOLS

PLUGIN = """
import json
from vllm.entrypoints.openai.protocol import (
    DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall, ToolCall)
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers import ToolParser, ToolParserManager

@ToolParserManager.register_module(["test_arrow"])
class Arrow(ToolParser):
    def adjust_request(self, request):
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output, request):
        before, mark, call = model_output.partition("=>")
        if not mark:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        name, _, arguments = call.partition(" ")
        made = ToolCall(function=FunctionCall(name=name, arguments=arguments))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[made], content=before or None)

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, previous_token_ids,
                                     current_token_ids, delta_token_ids, request):
        if "=>" not in current_text:
            return DeltaMessage(content=delta_text) if "=" not in delta_text else None
        call = current_text.partition("=>")[2]
        name, space, arguments = call.partition(" ")
        if not space:
            return None
        if self.current_tool_id < 0:
            self.current_tool_id = 0
            function = DeltaFunctionCall(name=name, arguments=arguments)
            return DeltaMessage(tool_calls=[DeltaToolCall(index=0, type="function", id="a", function=function)])
        return DeltaMessage(tool_calls=[DeltaToolCall(index=0, function=DeltaFunctionCall(arguments=delta_text))])

@ReasoningParserManager.register_module("test_dashes")
class Dashes(ReasoningParser):
    def is_reasoning_end(self, input_ids):
        return ord("-") in input_ids
    def extract_content_ids(self, input_ids):
        return []
    def extract_reasoning(self, model_output, request=None):
        thought, mark, content = model_output.partition("-")
        return (thought, content) if mark else (thought, None)
    def extract_reasoning_streaming(self, previous_text, current_text, delta_text, *ids):
        if "-" in delta_text:
            thought, _, content = delta_text.partition("-")
            return DeltaMessage(reasoning=thought or None, content=content or None)
        return DeltaMessage(reasoning=delta_text)
"""


class Tokenizer:
    skipped_ids = frozenset({1})
    response_template: Any = None

    def id_to_token(self, token_id: int) -> str:
        return "<|tool_call_begin|>"

    def get_vocab(self) -> dict[str, int]:
        return {"<think>": 10, "</think>": 11}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [{"<think>": 10, "</think>": 11}.get(text, 0)]


@pytest.fixture
def plugin(tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "arrow.py"
    file.write_text(PLUGIN)
    yield str(file)
    TOOL_PARSERS._paths.pop("test_arrow", None)
    REASONING_PARSERS._paths.pop("test_dashes", None)


def request() -> Any:
    return ChatCompletionRequest(messages=[{"role": "user", "content": "x"}], tools=TOOLS)


@pytest.mark.parametrize("name", sorted(RENDER))
def test_tool_parsers_by_name(name: str) -> None:
    parser = ToolParserManager.get_tool_parser(name)(Tokenizer())
    calls = SCENES["types"]
    text = RENDER[name](calls)
    found = parser.extract_tool_calls(text, request())
    assert found.tools_called
    assert [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls] == calls
    names, arguments, before = [], "", ""
    for letter in text + " ":  # a stream has no end here, so the last tag needs something after it
        said = parser.extract_tool_calls_streaming(before, before + letter, letter, [], [], [], request())
        before += letter
        for part in said.tool_calls if said else ():
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
    assert names == [calls[0][0]]
    assert json.loads(arguments) == calls[0][1]
    assert parser.current_tool_id == 0 and parser.streamed_args_for_tool == [arguments]
    assert parser.prev_tool_call_arr == [{"name": names[0], "arguments": arguments}]
    assert not parser.extract_tool_calls("plain", request()).tools_called


def test_the_tokenizers_own_parser() -> None:
    template = {
        "start_anchor": "<a>",
        "fields": {"tool_calls": {"open": "<call>", "close": "</call>", "content": "json",
                                  "transform": {"type": "function", "function": "{content}"}}, "content": {}},
    }  # fmt: skip
    tokenizer = Tokenizer()
    tokenizer.response_template = template
    found = ToolParserManager.get_tool_parser("hf")(tokenizer).extract_tool_calls(
        'So. <call>{"name": "now", "arguments": {}}</call>', request()
    )
    assert [call.function.name for call in found.tool_calls] == ["now"] and found.content == "So."


def test_special_tokens_are_asked_for() -> None:
    adjusted = ToolParserManager.get_tool_parser("kimi_k2")(Tokenizer()).adjust_request(request())
    assert adjusted.skip_special_tokens is False
    assert (
        ToolParserManager.get_tool_parser("hermes")(Tokenizer()).adjust_request(request()).skip_special_tokens is None
    )


def test_reasoning_parsers_by_name() -> None:
    parser = ReasoningParserManager.get_reasoning_parser("qwen3")(Tokenizer())
    assert parser.extract_reasoning("<think>a</think>b", request()) == ("a", "b")
    assert parser.extract_reasoning("a</think>b", request()) == ("a", "b")
    assert parser.extract_reasoning("b", request()) == ("b", None)  # cut off in the thought that its template began
    off = ChatCompletionRequest(messages=[], chat_template_kwargs={"enable_thinking": False})
    assert parser.extract_reasoning("b", off) == (None, "b")
    assert parser.is_reasoning_end([10, 5, 11]) and not parser.is_reasoning_end([10, 5])
    assert parser.extract_content_ids([10, 5, 11, 7]) == [7]
    found = parser.extract_reasoning_streaming("", "<think>a", "<think>a", [], [], [])
    assert found.reasoning == found.reasoning_content == "a"
    assert "deepseek_r1" in ReasoningParserManager.list_registered()
    with pytest.raises(KeyError, match="nobody"):
        ReasoningParserManager.get_reasoning_parser("nobody")


def test_a_stream_that_is_taken_up_in_the_middle() -> None:
    """What came before counts, and is not told again."""
    text = RENDER["hermes"](SCENES["parallel"])
    for at in range(0, len(text), 7):
        parser = ToolParserManager.get_tool_parser("hermes")(Tokenizer())
        before, said = text[:at], []
        for letter in text[at:] + " ":
            found = parser.extract_tool_calls_streaming(before, before + letter, letter, [], [], [], request())
            said += found.tool_calls if found else []
            before += letter
        names = [call["name"] for call in parser.prev_tool_call_arr]
        assert names == [name for name, _ in SCENES["parallel"]]
        assert [json.loads(one) for one in parser.streamed_args_for_tool] == [given for _, given in SCENES["parallel"]]
        assert sum(part.function.name is not None for part in said) <= len(names)
    thinker = ReasoningParserManager.get_reasoning_parser("deepseek_r1")(Tokenizer())
    assert thinker.extract_reasoning_streaming("<think>a</thi", "<think>a</think>b", "nk>b", [], [], []).content == "b"


def test_a_stream_that_is_told_nothing_of_what_came_before() -> None:
    text = RENDER["hermes"](SCENES["one call"])
    parser = ToolParserManager.get_tool_parser("hermes")(Tokenizer())
    for letter in text + " ":
        parser.extract_tool_calls_streaming("", letter, letter, [], [], [], request())
    assert [(c["name"], json.loads(c["arguments"])) for c in parser.prev_tool_call_arr] == SCENES["one call"]
    thinker = ReasoningParserManager.get_reasoning_parser("qwen3")(Tokenizer())
    said = [thinker.extract_reasoning_streaming("", one, one, [], [], []) for one in ("<think>", "a", "</think>", "b")]
    assert [(one.reasoning, one.content) for one in said if one] == [("a", None), (None, "b")]


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral", "pythonic", "kimi_k2"])
def test_one_entry_for_each_call(name: str) -> None:
    text = RENDER[name](SCENES["parallel"])
    parser = ToolParserManager.get_tool_parser(name)(Tokenizer())
    said = parser.extract_tool_calls_streaming("", text + " ", text + " ", [], [], [], request())
    assert [part.index for part in said.tool_calls] == [0, 1, 2]
    found = [(part.function.name, json.loads(part.function.arguments)) for part in said.tool_calls]
    assert found == SCENES["parallel"]


def test_tools_that_a_parser_was_made_with() -> None:
    """A request without tools of its own: values take their types from the parser's."""
    for name in ("minimax_m2", "deepseek_v32", "qwen3_coder"):
        parser = ToolParserManager.get_tool_parser(name)(Tokenizer(), TOOLS)
        calls = SCENES["types"]
        found = parser.extract_tool_calls(RENDER[name](calls), ChatCompletionRequest(messages=[]))
        assert [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls] == calls


def hf_tokenizer(*special: str) -> Any:
    """A tokenizer of transformers, with these special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), unk_token="<unk>")
    made.add_special_tokens({"additional_special_tokens": list(special)})
    return made


def test_a_tokenizer_of_transformers() -> None:
    tags = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<think>", "</think>")
    tokenizer = hf_tokenizer(*tags)
    kimi = ToolParserManager.get_tool_parser("kimi_k2")(tokenizer)
    assert kimi.adjust_request(request()).skip_special_tokens is False
    hermes = ToolParserManager.get_tool_parser("hermes")(tokenizer)
    assert hermes.adjust_request(request()).skip_special_tokens is None
    parser = ReasoningParserManager.get_reasoning_parser("qwen3")(tokenizer)
    start, end = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
    assert (parser.start_token_id, parser.end_token_id) == (start, end)
    assert (parser.start_token, parser.end_token) == ("<think>", "</think>")
    assert parser.is_reasoning_end([start, 1, end]) and not parser.is_reasoning_end([start, 1])
    assert parser.extract_content_ids([start, 1, end, 1]) == [1]


def test_tokens_of_thought_are_counted() -> None:
    for name in ("qwen3", "deepseek_r1", "holo2"):
        parser = ReasoningParserManager.get_reasoning_parser(name)(Tokenizer())
        assert parser.count_reasoning_tokens([10, 5, 6, 11, 7]) == 2
        assert parser.count_reasoning_tokens([5, 6, 7, 11, 7]) == 3  # its template began the thought
        assert parser.count_reasoning_tokens([10, 5, 11, 7, 10, 5, 6]) == 3
    assert ReasoningParserManager.get_reasoning_parser("identity")(Tokenizer()).count_reasoning_tokens([1, 2]) == 0


def test_harmony_by_its_tokens() -> None:
    """Its marks are not in the text that a server shows, so it is read by its token ids."""

    class Marked(Tokenizer):
        def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
            assert not skip_special_tokens
            return bytes(token_ids).decode()

    text = RENDER["openai"](SCENES["one call"])
    found = ToolParserManager.get_tool_parser("openai")(Marked()).extract_tool_calls(
        "commentary", request(), token_ids=list(text.encode())
    )
    assert [(c.function.name, json.loads(c.function.arguments)) for c in found.tool_calls] == SCENES["one call"]


def test_a_tokenizer_without_the_tags_is_refused() -> None:
    class Empty(Tokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    for name in ("qwen3", "deepseek_r1", "glm45", "mistral", "seed_oss"):
        with pytest.raises(RuntimeError, match="no token"):
            ReasoningParserManager.get_reasoning_parser(name)(Empty())
        with pytest.raises(ValueError, match="tokenizer"):
            ReasoningParserManager.get_reasoning_parser(name)(None)
    for name in ("granite", "identity", "openai_gptoss"):  # their tags are words
        ReasoningParserManager.get_reasoning_parser(name)(Empty())


def test_a_prompt_that_generate_cannot_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs catch it as a ValueError, or as the engine's error of one request."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineGenerateError

    from quire import AsyncEngineArgs, SamplingParams
    from quire.base import env
    from tests.fake_engine import use_fake, write_model

    monkeypatch.setenv("QUIRE_ENABLE_V1_MULTIPROCESSING", "0")
    env.forget_all()
    use_fake(monkeypatch)

    async def ask(engine: Any, prompt: Any) -> None:
        async for _ in engine.generate(prompt, SamplingParams(max_tokens=1), "r"):
            pass

    async def all_of_them() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=write_model(tmp_path / "m"), max_model_len=64))
        try:
            for prompt in ("", {"prompt_token_ids": [99999]}, "a" * 200, 5):
                for kind in (EngineGenerateError, ValueError):
                    with pytest.raises(kind):
                        await ask(engine, prompt)
            await ask(engine, "abc")  # it goes on
        finally:
            engine.shutdown()

    asyncio.run(all_of_them())
    env.forget_all()


def test_logits_processors_of_a_request() -> None:
    from vllm import SamplingParams

    with pytest.raises(ValueError, match="AdapterLogitsProcessor"):
        SamplingParams(logits_processors=[lambda ids, logits: logits])
    assert SamplingParams(logits_processors=None).logits_processors is None


def test_an_output_takes_what_it_does_not_know() -> None:
    from vllm import RequestOutput

    made = RequestOutput("a", None, [1], None, [], True, kv_transfer_params={"b": 1}, a_field_of_tomorrow=3)
    assert (made.request_id, made.finished, made.kv_transfer_params) == ("a", True, {"b": 1})
    with pytest.raises(TypeError):
        RequestOutput("a", None)


def test_a_users_classes_in_our_parser(plugin: str) -> None:
    choice = ParserChoice.of(
        SimpleNamespace(), tool="test_arrow", tool_plugin=plugin, reasoning="test_dashes"
    )  # fmt: skip
    assert choice.adjusted(request()).skip_special_tokens is False
    text = 'so-look =>get_weather {"city": "Paris"}'
    for pieces in ([text], list(text)):
        parser = choice.parser(ParseRequest(tools=TOOLS, request=request()))
        deltas: list[Any] = []
        for number, piece in enumerate(pieces):
            ids = [ord(letter) for letter in piece]
            deltas += parser.feed(piece, ids, final=number == len(pieces) - 1)
        found = fold(deltas)
        assert (found.reasoning, found.content.strip()) == ("so", "look")
        assert [(call.name, call.arguments) for call in found.calls] == [("get_weather", '{"city": "Paris"}')]


def test_a_users_tools_beside_our_reasoning(plugin: str) -> None:
    choice = ParserChoice.of(None, tool="test_arrow", tool_plugin=plugin, reasoning="qwen3")
    parser = choice.parser(ParseRequest(tools=TOOLS, request=request()))
    found = fold(parser.feed("<think>hm</think>=>now {}", (), final=True))
    assert (found.reasoning, found.calls[0].name, found.calls[0].arguments) == ("hm", "now", "{}")


SERVED = """
import json
from vllm.entrypoints.openai.protocol import (
    ChatCompletionRequest, DeltaFunctionCall, DeltaMessage, DeltaToolCall, ExtractedToolCallInformation, FunctionCall,
    ToolCall)
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

@ToolParserManager.register_module("test_first_tool")
class FirstTool(ToolParser):
    '''@{"city": ...} calls the request's first tool.'''

    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)
        assert tokenizer.get_vocab() and self.vocab

    def extract_tool_calls(self, model_output, request: ChatCompletionRequest):
        before, mark, arguments = model_output.partition("@")
        if not mark:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        function = request.tools[0].function
        assert function.parameters["type"] == "object" and function.description is None
        made = ToolCall(function=FunctionCall(name=function.name, arguments=arguments))
        return ExtractedToolCallInformation(tools_called=True, tool_calls=[made], content=before)

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, previous_token_ids,
                                     current_token_ids, delta_token_ids, request):
        before, mark, after = delta_text.partition("@")
        if "@" in previous_text:
            before, after = "", delta_text
        elif not mark:
            return DeltaMessage(content=delta_text)
        call = DeltaFunctionCall(arguments=after)
        if self.current_tool_id < 0:
            self.current_tool_id, call.name = 0, request.tools[0].function.name
        return DeltaMessage(content=before or None, tool_calls=[DeltaToolCall(index=0, function=call)])

@ToolParserManager.register_module("test_own_hermes")
class OwnHermes(Hermes2ProToolParser):
    def extract_tool_calls(self, model_output, request):
        return super().extract_tool_calls(model_output.replace("CALL", "tool_call"), request)

@ReasoningParserManager.register_module("test_braces")
class Braces(BaseThinkingReasoningParser):
    start_token, end_token = "{{", "}}"
"""


def test_a_users_classes_in_our_server(tmp_path: Path) -> None:
    from tests.server.live import events as chunks
    from tests.server.live import live_fake

    file = tmp_path / "served.py"
    file.write_text(SERVED)
    try:
        with live_fake(
            tmp_path / "model", chat_template="{{ messages[-1].content }}<end>", enable_auto_tool_choice=True,
            tool_call_parser="test_first_tool", tool_parser_plugin=str(file),
            engine={"reasoning_parser": "test_braces", "reasoning_parser_plugin": str(file),
                    "generation_config": "vllm"},
        ) as server:  # fmt: skip
            body = {"messages": [{"role": "user", "content": 'hm}}Look.@{"city": "Paris"}'}], "tools": TOOLS,
                    "max_tokens": 60}  # fmt: skip
            message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
            assert (message["reasoning"], message["content"]) == ("hm", "Look.")
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Paris"}'}
            parts = chunks(server.post("/v1/chat/completions", {**body, "stream": True}).text)
            deltas = [part["choices"][0]["delta"] for part in parts]
            assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm"
            assert "".join(delta.get("content") or "" for delta in deltas) == "Look."
            calls = [part["function"] for delta in deltas for part in delta.get("tool_calls") or ()]
            assert calls[0]["name"] == "get_weather"
            assert "".join(part["arguments"] for part in calls) == '{"city": "Paris"}'
        own = ToolParserManager.get_tool_parser("test_own_hermes")(Tokenizer())
        found = own.extract_tool_calls('<CALL>{"name": "now", "arguments": {}}</CALL>', request())
        assert [call.function.name for call in found.tool_calls] == ["now"]
    finally:
        for name in ("test_first_tool", "test_own_hermes"):
            TOOL_PARSERS._paths.pop(name, None)
        REASONING_PARSERS._paths.pop("test_braces", None)


def test_older_names_of_a_reasoning_class() -> None:
    from vllm.entrypoints.openai.protocol import DeltaMessage
    from vllm.reasoning import ReasoningParser

    class Old(ReasoningParser):
        def extract_reasoning_content(self, model_output: str, request: Any = None) -> tuple[str | None, str | None]:
            return model_output[:1], model_output[1:]

        def extract_reasoning_content_streaming(self, *args: Any) -> DeltaMessage:
            return DeltaMessage(reasoning=args[2])

    parser = Old(Tokenizer())
    assert parser.extract_reasoning("ab") == ("a", "b")
    assert parser.extract_reasoning_streaming("", "a", "a", [], [], []).reasoning == "a"
    with pytest.raises(NotImplementedError):
        ReasoningParser(Tokenizer()).extract_reasoning("ab")
