"""/v1/responses streamed: every kind of answer walked event by event; docs/server names every official event."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.base import env
from tests.server.live import Live, live_fake
from tests.server.response_events import OFFICIAL, OURS, walk
from tests.server.test_disconnect import running, wait_for
from tests.server.test_responses_api import ANSWER, TOOL, events
from tests.server.test_tool_server import DEMO, OWN, TEMPLATE
from tests.server.test_tool_server import say as a_call

PAGE = Path(__file__).parents[2] / "docs" / "server" / "responses.md"


@pytest.fixture(scope="module")
def stored() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_RESPONSES_API_STORE", "1")
        env.forget_all()
        yield
    env.forget_all()


@pytest.fixture(scope="module")
def scripted(stored: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Says what its user said, then tells the last result of a tool. Thoughts and calls are parsed."""
    with live_fake(
        tmp_path_factory.mktemp("scripted"), chat_template=TEMPLATE, enable_auto_tool_choice=True,
        tool_call_parser="hermes", tool_server="demo",
        engine={"reasoning_parser": "deepseek_r1", "generation_config": "vllm"},
    ) as server:  # fmt: skip
        yield server


def streamed(server: Live, said: str, **fields: Any) -> list[dict[str, Any]]:
    body = {"input": said, "max_output_tokens": 300, "stream": True, **fields}
    response = server.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    return events(response.text)


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [item["type"] for item in found[-1]["response"]["output"]]


def test_every_official_event_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert [name for name in [*OFFICIAL, *OURS] if f"`{name}`" not in page] == []
    assert len(OFFICIAL) > 50


@pytest.mark.parametrize(
    "text, fields, wanted",
    [
        ("Hm.</think>Hello", {}, ["reasoning", "message"]),
        ("</think>Hello", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}, ["message"]),
        (ANSWER, {"tools": [TOOL]}, ["reasoning", "message", "function_call", "function_call"]),
        ("</think>" + a_call("get_weather", city="Rome"), {"tools": [TOOL]}, ["function_call"]),
        ("Hm.</think>" + a_call("calculate", expression="6*7"), {"tools": [DEMO]},
         ["reasoning", "mcp_call", "reasoning"]),
        ("</think>" + a_call("calculate", expression="1/0"), {"tools": [DEMO]}, ["mcp_call", "reasoning"]),
        ("</think>" + a_call("calculate", expression="2") + a_call("own"), {"tools": [DEMO, OWN]},
         ["mcp_call", "function_call"]),
        ("</think>" + a_call("calculate", expression="2") + a_call("calculate", expression="3"), {"tools": [DEMO]},
         ["mcp_call", "mcp_call", "reasoning"]),
    ],
)  # fmt: skip
def test_an_answer_adds_up(scripted: Live, text: str, fields: dict[str, Any], wanted: list[str]) -> None:
    found = streamed(scripted, text, **fields)
    response = walk(found)
    assert kinds(found) == wanted and response["status"] == "completed", response["output"]


@pytest.mark.parametrize("cut", [4, 20, 40, 90])
def test_an_answer_that_is_cut_off(scripted: Live, cut: int) -> None:
    """Within a thought, a text, a call of the client's and one of the server's."""
    found = streamed(scripted, ANSWER, tools=[TOOL], max_output_tokens=cut)
    response = walk(found)
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][-1]["status"] == "incomplete"
    text = "</think>" + a_call("calculate", expression="1+1+1+1+1+1+1+1+1+1")
    walk(streamed(scripted, text, tools=[DEMO], max_output_tokens=cut))


def test_one_that_fails(scripted: Live) -> None:
    found = streamed(scripted, "Hm.</think>Hello", vllm_xargs={"fail_at": 13})
    response = walk(found)
    assert found[-2]["type"] == "error" and response["status"] == "failed"
    assert response["error"]["code"] == "server_error" and found[-2]["message"] == response["error"]["message"]
    behind = streamed(scripted, "Hm.</think>Hello", vllm_xargs={"fail_at": 13}, background=True)
    assert walk(behind)["status"] == "failed"


def test_background_with_the_official_helper(scripted: Live) -> None:
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "fake", "input": "Hm.</think>Hello", "max_output_tokens": 60}
    with client.responses.stream(**asked, background=True) as stream:
        final = stream.get_final_response()
    made = [event.to_dict() for event in client.responses.retrieve(final.id, stream=True)]
    response = walk(made)
    assert [event["type"] for event in made[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert final.output_text == "Hello" and len(final.output) == len(response["output"]) == 2
    for after in (0, 2, len(made) - 2, len(made) - 1, len(made) + 5):
        later = client.responses.retrieve(response["id"], stream=True, starting_after=after)
        assert [event.to_dict() for event in later] == made[after + 1 :]
    with client.responses.stream(response_id=response["id"], starting_after=4) as stream:
        assert [event.sequence_number for event in stream] == list(range(5, len(made)))
    assert client.responses.retrieve(response["id"]).to_dict() == response


def test_one_that_is_cancelled(scripted: Live) -> None:
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"model": "fake", "input": "</think>A long story", "max_output_tokens": 400, "background": True}
    stream = client.responses.create(**asked, stream=True, extra_body={"vllm_xargs": {"sleep": 0.05}})
    found = []
    for event in stream:
        found.append(event.to_dict())
        if len(found) == 6:
            cancelled = client.responses.cancel(found[0]["response"]["id"])
    response = walk(found)
    assert response == cancelled.to_dict() and response["status"] == "cancelled"
    assert response["output"][0]["status"] == "incomplete"
    wait_for(lambda: running(scripted), (0, 0.0))


def test_the_client_knows_each_event(scripted: Live) -> None:
    """As the official client reads them: by their type, into the class of that type."""
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    read = client.responses.create(model="fake", input=ANSWER, tools=[TOOL], stream=True, max_output_tokens=300)
    for event in read:
        assert event.type in OURS or type(event) is OFFICIAL[event.type], event
    refused = httpx.get(f"{scripted.url}/v1/responses/resp_none", params={"stream": True}, timeout=60)
    assert refused.status_code == 404
