"""Chat templates that come with requests are read and rendered apart: the server goes on, and hostile ones are 400s."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from quire.text.template import compile_template
from tests.server.live import Live, error_of, live_fake

HI = [{"role": "user", "content": "Hi"}]
CALL = [*HI, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}]
LONG = "{{ [" + "x," * 300_000 + "] }}"  # Python takes many seconds to compile it, and lets nobody else run meanwhile
DEEP = "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"
ROUTES = [
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 1}),
    ("/v1/chat/completions/render", {"messages": HI, "max_tokens": 1}),
    ("/invocations", {"messages": HI, "max_tokens": 1}),
    ("/tokenize", {"messages": HI}),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("fake"), trust_request_chat_template=True) as found:
        yield found


def answered(server: Live, until: threading.Event) -> int:
    """How many questions about its health were answered meanwhile, one after the other."""
    count = 0
    with server.client() as client:
        while not until.is_set():
            assert client.get("/health").status_code == 200
            count += 1
            until.wait(0.05)
    return count


def test_reading_a_template_holds_nobody_up(server: Live) -> None:
    done = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        watching = pool.submit(answered, server, done)
        try:
            body = {"messages": HI, "max_tokens": 1, "chat_template": LONG}
            answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=300)
        finally:
            done.set()
        assert watching.result() >= 10, "the server does nothing else for the five seconds that a template may take"
    error = error_of(answer)
    assert error["param"] == "chat_template" and "5 seconds" in error["message"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_an_unreadable_template_is_refused(server: Live, path: str, body: dict[str, Any]) -> None:
    before = compile_template.cache_info().currsize
    error = error_of(server.post(path, {**body, "chat_template": DEEP}))
    assert error["param"] == "chat_template" and "cannot be compiled" in error["message"]
    fine = server.post(path, {**body, "chat_template": "<{{ messages[0].content }}>"})
    assert fine.status_code == 200, fine.text
    assert compile_template.cache_info().currsize == before  # of either, nothing is kept


def test_what_a_template_wants_is_still_found_out(server: Live) -> None:
    """The form of contents, calls as text where the template wants them so, the place where a message goes on."""

    def prompt(template: str, messages: Any = HI, **more: Any) -> str:
        body = {"messages": messages, "max_tokens": 1, "chat_template": template, "return_prompt_text": True, **more}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["prompt_text"])

    parts = (
        "{% for m in messages %}{% for part in m.content %}[{{ part.type }}={{ part.text }}]{% endfor %}{% endfor %}"
    )
    assert prompt(parts) == "[text=Hi]"
    assert prompt("{{ messages[1].tool_calls[0].function.arguments + '!' }}", CALL) == '{"a": 1}!'
    assert prompt("{{ messages[1].tool_calls[0].function.arguments.a }}", CALL) == "1"
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt("{{ messages[0].content }}<end>", **goes_on) == "Hi"
    missing = {"messages": HI, "chat_template": "{{ 1 }}", **goes_on}
    assert error_of(server.post("/v1/chat/completions", missing))["param"] == "continue_final_message"


def test_so_many_may_wait(server: Live) -> None:
    load = server.state.templates_load
    load.count += 64
    try:
        body = {"messages": HI, "chat_template": "{{ 1 }}"}
        answer = server.post("/v1/chat/completions", body)
        assert error_of(answer, 503)["message"].endswith("the limit is 64") and "Retry-After" in answer.headers
        assert server.post("/v1/chat/completions", {"messages": HI, "max_tokens": 1}).status_code == 200
    finally:
        load.count -= 64
    assert server.post("/v1/chat/completions", {**body, "max_tokens": 1}).status_code == 200
