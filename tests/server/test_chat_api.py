"""/v1/chat/completions over the worker that repeats its prompt: role:content; per message, then assistant:."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fake_engine import ids_of
from tests.server.live import Live, error_of, events, live_fake

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PROMPT = "user:Hi;assistant:"


def ask(server: Live, **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"model": "fake", "temperature": 0, "messages": HI, "max_tokens": 30, **body})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def content(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_an_answer(fake: Live) -> None:
    answer = ask(fake, max_tokens=len(PROMPT))
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    assert answer["choices"][0]["message"]["role"] == "assistant" and content(answer) == PROMPT
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


def test_all_roles_and_forms_of_content(fake: Live) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "user", "name": "me",
         "content": ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "t"},
        {"role": "function", "name": "f", "content": "r"},
    ]  # fmt: skip
    wanted = "system:s;developer:d;user:a\nb\nc;assistant:no;assistant:;tool:t;function:r;assistant:"
    answer = ask(fake, messages=messages, max_tokens=33, return_prompt_text=True, return_token_ids=True)
    assert answer["prompt_text"] == wanted and answer["prompt_token_ids"] == ids_of(wanted)
    assert content(answer) == wanted[:33]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_media_are_refused_by_name(fake: Live, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": kind, kind: {"url": "http://x/y.png"}}]}]
    assert kind in error_of(fake.post(PATH, {"messages": messages}))["message"]


def test_continuing_the_last_message(fake: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    answer = ask(fake, messages=messages, continue_final_message=True, add_generation_prompt=False,
                 return_prompt_text=True)  # fmt: skip
    assert answer["prompt_text"] == "user:Hi;assistant:Well, "
    echoed = ask(fake, messages=messages, continue_final_message=True, add_generation_prompt=False, echo=True,
                 max_tokens=4)  # fmt: skip
    assert content(echoed) == "Well, user" and echoed["choices"][0]["message"]["role"] == "assistant"
    both = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert error_of(fake.post(PATH, both))["param"] == "continue_final_message"


def test_echo_needs_the_same_role(fake: Live) -> None:
    assert content(ask(fake, echo=True, max_tokens=4)) == "user"


def test_logprobs(fake: Live) -> None:
    found = ask(fake, max_tokens=2, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in found] == ["u", "s"] and found[0]["bytes"] == [117] and found[0]["logprob"] == -2.0
    assert found[0]["top_logprobs"] == [{"token": chr(6), "logprob": -1.0, "bytes": [6]}]
    bare = ask(fake, max_tokens=1, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert bare[0]["top_logprobs"] == []
    as_ids = ask(fake, max_tokens=1, logprobs=True, return_tokens_as_token_ids=True)
    assert as_ids["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ids_of('u')[0]}"
    assert error_of(fake.post(PATH, {"messages": HI, "top_logprobs": 2}))["param"] == "top_logprobs"
    told = ask(fake, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    assert len(told) == len(PROMPT) and told[0] is None


def test_max_completion_tokens_goes_first(fake: Live) -> None:
    assert ask(fake, max_tokens=9, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    error = error_of(fake.post(PATH, {"messages": HI, "max_completion_tokens": 0}))
    assert error["param"] == "max_completion_tokens"


def test_a_stream(fake: Live) -> None:
    body = {"messages": HI, "max_tokens": 4, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    chunks = events(fake.post(PATH, body).text)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"]["content"] for one in mine) == "user"
        assert all("role" not in one["delta"] for one in mine[1:])
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]
    assert chunks[-1]["usage"] == {"prompt_tokens": 18, "total_tokens": 26, "completion_tokens": 8}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_a_streamed_echo_and_ids(fake: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True,
            "stream": True, "max_tokens": 3, "return_token_ids": True, "logprobs": True}  # fmt: skip
    first, second, *rest = events(fake.post(PATH, body).text)
    assert first["prompt_token_ids"] == ids_of("user:Hi;assistant:Well, ")
    assert second["choices"][0]["delta"]["content"] == "Well, "
    assert [i for one in rest for i in one["choices"][0]["token_ids"]] == ids_of("use")
    tokens = [t["token"] for one in rest for t in one["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == "use"


def test_tools_are_shown_and_not_called(tmp_path: Any) -> None:
    template = "{% if tools %}{{ tools[0].function.name }}|{% endif %}{{ messages[-1].content }}{{ effort }}"
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    options = {"chat_template": template, "exclude_tools_when_tool_choice_none": True,
               "default_chat_template_kwargs": {"effort": "!"}, "response_role": "poet"}  # fmt: skip
    with live_fake(tmp_path / "model", **options) as server:
        answer = ask(server, tools=tools, return_prompt_text=True)
        assert answer["prompt_text"] == "look|Hi!" and answer["choices"][0]["message"]["role"] == "poet"
        assert ask(server, tools=tools, tool_choice="none", return_prompt_text=True)["prompt_text"] == "Hi!"
        error = error_of(server.post(PATH, {"messages": HI, "tools": tools, "tool_choice": "auto"}))
        assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]


def test_templates_of_requests_need_trust(fake: Live, tmp_path: Any) -> None:
    given = {"messages": HI, "chat_template": "{{ messages[0].content }}"}
    error = error_of(fake.post(PATH, given))
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    assert error_of(fake.post("/tokenize", given))["param"] == "chat_template"
    secret = tmp_path / "secret"
    secret.write_text("{{ 'never' }}")
    with live_fake(tmp_path / "model", trust_request_chat_template=True) as server:
        answer = ask(server, chat_template="<{{ messages[0].content }}{{ a }}>", chat_template_kwargs={"a": [1, 2]},
                     return_prompt_text=True)  # fmt: skip
        assert answer["prompt_text"] == "<Hi[1, 2]>"
        assert error_of(server.post(PATH, {"messages": HI, "chat_template": str(secret)}))["param"] == "chat_template"
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}"
        assert "chat template" in error_of(server.post(PATH, {"messages": HI, "chat_template": endless}))["message"]
        tokenize = {"messages": HI, "chat_template_kwargs": {"tokenize": False}}
        assert "tokenize" in error_of(server.post(PATH, tokenize))["message"]
