"""chat_template_kwargs: every dialect takes them from anybody, and they replace nothing that the server passes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.live import Live, error_of, live_fake

HI = [{"role": "user", "content": "Hi"}]
TEMPLATE = (
    "{{ bos_token }}{{ messages[0].content }}{% if enable_thinking is false %} no thoughts{% endif %}"
    "{% if extra %}{{ extra.a }}{% endif %}"
)
OFF = {"enable_thinking": False}
# path, body, where the answer says how many tokens the prompt had
DIALECTS = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}, ("usage", "prompt_tokens")),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, ("usage", "input_tokens")),
    ("/v1/messages", {"model": "fake", "messages": HI, "max_tokens": 1}, ("usage", "input_tokens")),
    ("/v1/messages/count_tokens", {"model": "fake", "messages": HI}, ("input_tokens",)),
    ("/invocations", {"messages": HI, "max_tokens": 1}, ("usage", "prompt_tokens")),
    ("/tokenize", {"messages": HI}, ("count",)),
]
IDS = [path for path, _, _ in DIALECTS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("fake"), chat_template=TEMPLATE) as found:
        yield found


def num_tokens(server: Live, path: str, body: dict[str, Any], place: tuple[str, ...]) -> int:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for key in place:
        found = found[key]
    return int(found)


@pytest.mark.parametrize(("path", "body", "place"), DIALECTS, ids=IDS)
def test_arguments_reach_the_template(server: Live, path: str, body: dict[str, Any], place: tuple[str, ...]) -> None:
    without = num_tokens(server, path, body, place)
    told = num_tokens(server, path, {**body, "chat_template_kwargs": OFF}, place)
    assert told == without + len(" no thoughts")


def test_values_with_a_structure_are_rendered_apart(server: Live) -> None:
    body = {"messages": HI, "max_tokens": 1, "return_prompt_text": True, "chat_template_kwargs": {"extra": {"a": "!"}}}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200 and answer.json()["prompt_text"].endswith("Hi!"), answer.text


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "add_generation_prompt", "tokenize", "bos_token", "eos_token",
             "raise_exception", "strftime_now", "range", "namespace", "self", "not a name", ""],
)  # fmt: skip
@pytest.mark.parametrize(("path", "body", "place"), DIALECTS, ids=IDS)
def test_arguments_replace_nothing(
    server: Live, path: str, body: dict[str, Any], place: tuple[str, ...], name: str
) -> None:
    answer = server.post(path, {**body, "chat_template_kwargs": {name: "x"}})
    assert answer.status_code == 400, answer.text
    assert "chat_template_kwargs" in answer.json()["error"]["message"] and repr(name) in answer.text.replace('\\"', '"')


@pytest.mark.parametrize(
    ("given", "limit"),
    [({f"a{i}": 1 for i in range(65)}, "65 entries; the limit is 64"), ({"a": "x" * 70_000}, "the limit is 65536"),
     ({"a": [["x" * 1000] * 10] * 10}, "100001 characters"), ({"a": list(range(10_000_000, 10_020_000))}, "160001")],
    ids=["many", "long", "nested", "numbers"],
)  # fmt: skip
def test_arguments_are_bounded(server: Live, given: dict[str, Any], limit: str) -> None:
    error = error_of(server.post("/v1/chat/completions", {"messages": HI, "chat_template_kwargs": given}))
    assert error["param"] == "chat_template_kwargs" and limit in error["message"]


def test_a_template_of_a_request_needs_trust(server: Live) -> None:
    for path in ("/v1/chat/completions", "/tokenize"):
        error = error_of(server.post(path, {"messages": HI, "chat_template": "{{ 1 }}"}))
        assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
