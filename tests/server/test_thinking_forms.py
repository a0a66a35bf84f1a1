"""Thinking, forms of answers, calls and budgets together: the embedded model, and a template that opens thoughts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, error_of, events, live

PATH = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{{ '<think>\n' if thinking else '<think>\n\n</think>\n\n' }}"
)
SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"],
          "additionalProperties": False}  # fmt: skip
FORM = {"type": "json_schema", "json_schema": {"name": "color", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    engine = {"max_model_len": 512, "served_model_name": "smol", "max_num_seqs": 8, "reasoning_parser": "deepseek_v3"}
    options = {"chat_template": TEMPLATE, "enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with live(engine=engine, trust_request_chat_template=True, **options) as found:
        yield found


def body(*, thinking: bool, **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Say a color."}], "chat_template_kwargs": {"thinking": thinking},
        "temperature": 0, "max_tokens": 60, **more,
    }  # fmt: skip


def choice(server: Live, **given: Any) -> dict[str, Any]:
    answer = server.post(PATH, body(**given))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def test_the_form_binds_the_answer_and_not_the_thought(server: Live) -> None:
    given: dict[str, Any] = {"thinking": True, "response_format": FORM, "thinking_token_budget": 6}
    message = choice(server, **given)["message"]
    assert json.loads(message["content"])["color"] in ("red", "green") and "{" not in message["reasoning"]
    chunks = [e["choices"][0]["delta"] for e in events(server.post(PATH, body(**given, stream=True)).text)]
    assert "".join(c.get("reasoning") or "" for c in chunks) == message["reasoning"]
    assert "".join(c.get("content") or "" for c in chunks) == message["content"]
    guided = {"thinking": True, "guided_choice": ["red", "green"], "thinking_token_budget": 2}
    assert choice(server, **guided)["message"]["content"] in ("red", "green")


def test_without_a_thought_it_binds_from_the_first_token(server: Live) -> None:
    message = choice(server, thinking=False, response_format=FORM)["message"]
    assert json.loads(message["content"])["color"] in ("red", "green") and message["reasoning"] is None


def test_a_call_that_must_be_follows_a_thought(server: Live) -> None:
    for wanted in ("required", {"type": "function", "function": {"name": "paint"}}):
        found = choice(server, thinking=True, tools=TOOLS, tool_choice=wanted, thinking_token_budget=4,
                       parallel_tool_calls=False)  # fmt: skip
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] == "paint" and found["message"]["reasoning"]
        assert json.loads(call["function"]["arguments"])["color"] in ("red", "green")


def test_budgets_that_are_none(server: Live) -> None:
    assert (
        error_of(server.post(PATH, body(thinking=True, thinking_token_budget=-1)))["param"] == "thinking_token_budget"
    )
    alone = {"prompt": "<think>", "max_tokens": 12, "temperature": 0, "thinking_token_budget": 0}
    assert server.post("/v1/completions", alone).json()["choices"][0]["text"].startswith("</think>")
