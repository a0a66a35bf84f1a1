"""Tool calls and thinking in /v1/chat/completions. The model is scripted: the worker repeats its prompt, and the chat
template is the last user's message, so an answer is whatever text the test sends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.config.server import server_config
from quire.schema.errors import ConfigError
from tests.server.live import Live, error_of, events, live_fake

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{%- set ns = namespace(last='') -%}{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = "
    "m.content -%}{%- endif -%}{%- if m.role == 'tool' -%}{%- set ns.last = 'It is ' ~ m.content ~ ' in ' ~ "
    "messages[loop.index0 - 1].tool_calls[0].function.arguments.city -%}{%- endif -%}{%- endfor -%}{{ ns.last }}"
)
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    options = {"chat_template": TEMPLATE, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    engine = {"reasoning_parser": "deepseek_v3", "generation_config": "vllm"}
    with live_fake(tmp_path_factory.mktemp("tools"), engine=engine, **options) as found:
        yield found


def body(text: str, **more: Any) -> dict[str, Any]:
    length = len(text.encode())
    return {
        "model": "fake", "messages": [{"role": "user", "content": text}], "tools": TOOLS, "temperature": 0,
        "max_tokens": length + 8, "vllm_xargs": {"eos_at": length + 1}, **more,
    }  # fmt: skip


def ask(server: Live, text: str, **more: Any) -> dict[str, Any]:
    response = server.post(PATH, body(text, **more))
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def stream(server: Live, text: str, **more: Any) -> list[dict[str, Any]]:
    response = server.post(PATH, body(text, stream=True, **more))
    assert response.status_code == 200, response.text
    return [event["choices"][0] for event in events(response.text) if event["choices"]]


def joined(chunks: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    reasoning = "".join(chunk["delta"].get("reasoning") or "" for chunk in chunks)
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        for part in chunk["delta"].get("tool_calls") or ():
            if part["index"] not in calls:
                assert part["id"] and part["type"] == "function"
                calls[part["index"]] = [part["function"]["name"], ""]
            calls[part["index"]][1] += part["function"]["arguments"]
    return content, reasoning, [(name, arguments) for name, arguments in calls.values()]


def test_a_call_that_is_cut_off(server: Live) -> None:
    """Whole: text and no call. Streamed: its beginning, and an end that does not say that there were calls."""
    text = CALL[: CALL.index("rich")]
    choice = ask(server, text)
    assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (text, [])
    assert choice["finish_reason"] == "stop"
    chunks = stream(server, text)
    _, _, calls = joined(chunks)
    assert [name for name, _ in calls] == ["get_weather"] and chunks[-1]["finish_reason"] == "stop"
    with pytest.raises(ValueError):
        json.loads(calls[0][1])
    one = TWO[: TWO.rindex("arguments") + 13]
    assert [call["function"]["name"] for call in ask(server, one)["message"]["tool_calls"]] == ["get_weather"]
    assert (ask(server, one)["finish_reason"], stream(server, one)[-1]["finish_reason"]) == ("tool_calls",) * 2


def test_thinking_that_was_switched_off(tmp_path: Path) -> None:
    """A family that thinks by habit, and a prompt that does not tell: the request's word counts."""
    engine = {"reasoning_parser": "holo2", "generation_config": "vllm"}
    with live_fake(tmp_path, engine=engine, chat_template=TEMPLATE, trust_request_chat_template=True) as found:
        for name in ("thinking", "enable_thinking"):
            asked = {"tools": None, "chat_template_kwargs": {name: False}}
            assert ask(found, "So.", **asked)["message"]["content"] == "So."
            assert joined(stream(found, "So.", **asked))[:2] == ("So.", "")
        assert ask(found, "So.", tools=None)["message"]["reasoning"] == "So."


def test_calls_whole(server: Live) -> None:
    choice = ask(server, TWO)
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look.\n"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "now"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Zürich"}
    assert all(call["id"].startswith("chatcmpl-tool-") for call in message["tool_calls"])
    assert ask(server, CALL)["message"]["content"] is None


def test_calls_streamed(server: Live) -> None:
    chunks = stream(server, TWO)
    content, reasoning, calls = joined(chunks)
    assert (content, reasoning) == ("I look.\n", "")
    assert calls == [("get_weather", '{"city": "Zürich"}'), ("now", "{}")]
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]
    assert sum("tool_calls" in chunk["delta"] for chunk in chunks) > 5  # arguments come in parts


def test_parallel_tool_calls_false(server: Live) -> None:
    assert len(ask(server, TWO, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert len(joined(stream(server, TWO, parallel_tool_calls=False))[2]) == 1


def test_no_call_is_text(server: Live) -> None:
    for more in ({}, {"tool_choice": "none"}, {"tools": None}):
        choice = ask(server, "Just <b>text</b>.", **more)
        assert choice["message"]["content"] == "Just <b>text</b>."
        assert (choice["message"]["tool_calls"], choice["finish_reason"]) == ([], "stop")
    assert ask(server, CALL, tool_choice="none")["message"]["content"] == CALL


def test_a_call_cut_off_says_length(server: Live) -> None:
    choice = ask(server, CALL, max_tokens=70, vllm_xargs={})
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city"')


def test_thought_has_both_names(server: Live) -> None:
    text = "<think>Hm, is it?</think>Yes."
    message = ask(server, text)["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("Hm, is it?",) * 2
    assert message["content"] == "Yes."
    chunks = stream(server, text)
    assert joined(chunks)[:2] == ("Yes.", "Hm, is it?")
    assert all(c["delta"]["reasoning"] == c["delta"]["reasoning_content"] for c in chunks if "reasoning" in c["delta"])
    assert ask(server, text, include_reasoning=False)["message"]["reasoning"] is None
    assert joined(stream(server, text, include_reasoning=False))[:2] == ("Yes.", "")


def test_thought_then_calls(server: Live) -> None:
    text = f"<think>maybe {CALL}</think>\n\n{CALL}"
    message = ask(server, text)["message"]
    assert message["reasoning"] == f"maybe {CALL}"
    assert len(message["tool_calls"]) == 1
    assert message["content"] is None
    content, reasoning, calls = joined(stream(server, text))
    assert (content, reasoning, len(calls)) == ("", f"maybe {CALL}", 1)


def test_logprobs_and_usage_with_calls(server: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(server, CALL, logprobs=True, return_token_ids=True, stream_options=options)
    assert joined(chunks)[2] == [("get_weather", '{"city": "Zürich"}')]
    named = [entry for chunk in chunks for entry in ((chunk["logprobs"] or {}).get("content") or ())]
    assert len(named) == len(CALL.encode()) + 1  # the end of text too


def test_several_answers(server: Live) -> None:
    response = server.post(PATH, body(CALL, n=3)).json()
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in response["choices"]]
    assert len(set(ids)) == 3


def test_openai_client_runs_a_tool_loop(server: Live) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: list[Any] = [{"role": "user", "content": CALL}]
    xargs = {"vllm_xargs": {"eos_at": len(CALL.encode()) + 1}}
    first = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, extra_body=xargs)
    call = first.choices[0].message.tool_calls[0]
    assert first.choices[0].finish_reason == "tool_calls"
    city = json.loads(call.function.arguments)["city"]
    messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "raining"}]
    said = f"It is raining in {city}"
    xargs = {"vllm_xargs": {"eos_at": len(said.encode()) + 1}}
    second = client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, extra_body=xargs)
    assert second.choices[0].message.content == said
    with client.chat.completions.stream(
        model="fake", messages=[{"role": "user", "content": CALL}], tools=TOOLS,
        extra_body={"vllm_xargs": {"eos_at": len(CALL.encode()) + 1}},
    ) as flow:  # fmt: skip
        final = flow.get_final_completion()
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Zürich"}


def test_wrong_choices_are_refused(server: Live) -> None:
    named = {"type": "function", "function": {"name": "nobody"}}
    for choice, word in (("sometimes", "sometimes"), (named, "nobody"), ({"type": "function"}, "function")):
        error = error_of(server.post(PATH, body("x", tool_choice=choice)))
        assert error["param"] == "tool_choice"
        assert word in error["message"]
    assert error_of(server.post(PATH, body("x", tool_choice="required", tools=[])))["param"] == "tools"


def strict(**parameters: Any) -> list[dict[str, Any]]:
    schema = {"type": "object", "properties": parameters, "required": list(parameters), "additionalProperties": False}
    return [{"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": schema}}, TOOLS[1]]


def test_strict_tools_are_held_to_their_schemas(server: Live) -> None:
    """The scripted model says what it was told, unless a mask forbids it."""
    pytest.importorskip("xgrammar")
    call = '<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
    now = '<tool_call>\n{"name": "now", "arguments": {"any": [1]}}\n</tool_call>'
    city = {"city": {"enum": ["Rome", "Bern"]}}
    right = "I look.\n" + call % '{"city": "Rome"}' + "\n" + now
    found = ask(server, right, tools=strict(**city))
    names = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in found["message"]["tool_calls"]]
    assert names == [("get_weather", {"city": "Rome"}), ("now", {"any": [1]})]
    assert ask(server, "No call <at all>.", tools=strict(**city))["message"]["content"] == "No call <at all>."
    for wrong in (call % '{"city": "Oslo"}', call % "{}", now.replace("now", "never")):
        held = ask(server, wrong, tools=strict(**city), max_tokens=400)
        for made in held["message"].get("tool_calls") or ():
            given = json.loads(made["function"]["arguments"])
            assert made["function"]["name"] in ("get_weather", "now")
            assert made["function"]["name"] == "now" or given["city"] in ("Rome", "Bern"), (wrong, given)
        assert wrong not in json.dumps(held)
        loose = [{**tool, "function": {**tool["function"], "strict": False}} for tool in strict(**city)]
        assert ask(server, wrong, tools=loose)["finish_reason"] == "tool_calls"


def test_a_strict_call_alone_ends_the_answer(server: Live) -> None:
    pytest.importorskip("xgrammar")
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tools = strict(city={"enum": ["Rome"]})
    found = ask(server, one, tools=tools, parallel_tool_calls=False)
    assert [c["function"]["name"] for c in found["message"]["tool_calls"]] == ["now"]
    assert len(ask(server, one + one, tools=tools, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    assert len(ask(server, one + one, tools=tools)["message"]["tool_calls"]) == 2


def test_a_strict_schema_that_nobody_can_hold_is_refused(server: Live) -> None:
    tools = strict(tags={"type": "array", "uniqueItems": True})
    assert "uniqueItems" in error_of(server.post(PATH, body("x", tools=tools)))["message"]


def test_auto_needs_its_options(fake: Live) -> None:
    error = error_of(fake.post(PATH, body("x", tool_choice="auto")))
    assert "--enable-auto-tool-choice" in error["message"]
    assert error["param"] == "tool_choice"


def test_options_are_checked_before_a_model_is_loaded(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="tool_call_parser"):
        server_config(enable_auto_tool_choice=True)
    with (
        pytest.raises(ConfigError, match="did you mean 'hermes'"),
        live_fake(tmp_path, enable_auto_tool_choice=True, tool_call_parser="hermess"),
    ):
        pass
