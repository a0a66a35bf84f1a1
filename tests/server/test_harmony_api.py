"""gpt-oss: its answers are read as channels without being asked, and its thoughts go back under the template's name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.text.chat import normalize_messages
from tests.server.live import Live, live_fake

# The worker repeats its prompt: what a gpt-oss model says at each turn.
TEMPLATE = (
    "{%- set last = messages[-1] -%}{%- if last.role == 'tool' -%}<|channel|>analysis<|message|>After"
    " {{ messages[-2].thinking }}<|end|><|start|>assistant<|channel|>final<|message|>It is {{ last.content }}.<end>"
    "{%- elif tools -%}<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.now <|constrain|>json<|message|>{"zone": "CET"}<end>'
    "{%- else -%}<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi.<end>"
    "{%- endif -%}"
)
TOOL: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = {"hf_overrides": {"model_type": "gpt_oss"}, "generation_config": "vllm"}
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "openai", "chat_template": TEMPLATE}
    with live_fake(tmp_path_factory.mktemp("harmony"), engine=engine, **options) as found:
        yield found


def test_chat(server: Live) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    said: Any = client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "Hi"}])
    message = said.choices[0].message
    assert (message.reasoning, message.content) == ("Hm.", "Hi.")


def test_a_loop_of_responses(server: Live) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    history: list[Any] = [{"role": "user", "content": "What time is it?"}]
    with client.responses.stream(model="fake", input=history, tools=[TOOL]) as flow:
        first = flow.get_final_response()
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    call = first.output[1]
    assert call.type == "function_call" and (call.name, call.arguments) == ("now", '{"zone": "CET"}')
    history += [item.to_dict() for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "noon"})
    second = client.responses.create(model="fake", input=history, tools=[TOOL])
    assert second.output_text == "It is noon."
    assert second.output[0].to_dict()["content"] == [{"type": "reasoning_text", "text": "After I look."}]


def test_identity_leaves_the_text(tmp_path: Any) -> None:
    engine = {"hf_overrides": {"model_type": "gpt_oss"}, "generation_config": "vllm", "reasoning_parser": "identity"}
    with live_fake(tmp_path, engine=engine, chat_template=TEMPLATE) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        content = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert content.startswith("<|channel|>analysis<|message|>Hm.")


def test_thoughts_have_the_templates_name() -> None:
    how = {"as_parts": False, "wrap_strings": False, "keep_none": True}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    (alone,) = normalize_messages(
        [{"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]}], **how
    )
    assert alone["thinking"] == "hm"
    (both,) = normalize_messages(
        [{"role": "assistant", "content": "So.", "reasoning": "hm", "tool_calls": [call]}], **how
    )
    assert "thinking" not in both  # its template refuses both before calls
