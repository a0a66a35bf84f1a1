"""Anthropic's Messages API with its official client, sync and async, streamed and whole, against the embedded model."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pydantic
import pytest

from tests.server.live import Live, live_fake
from tests.server.test_disconnect import running, send, wait_for

if TYPE_CHECKING:  # tests import it themselves: it takes seconds, and every process collects this file
    import anthropic

ASKED: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0}  # the client no longer has a name for it
TOOL: Any = {
    "name": "get_weather",
    "description": "Current weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(smol: Live) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=smol.url, api_key="none", max_retries=0)


def refused(server: Live, status: int = 400, path: str = "/v1/messages", **fields: Any) -> dict[str, Any]:
    body = {"messages": ASKED, "max_tokens": 5, **fields}
    answer = server.post(path, body)
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found["type"] == "error" and set(found["error"]) == {"type", "message"}
    assert found["request_id"] == answer.headers["request-id"]
    error: dict[str, Any] = found["error"]
    return error


def events(text: str) -> list[dict[str, Any]]:
    """Every event is named by its type."""
    found = []
    for piece in text.removesuffix("\n\n").split("\n\n"):
        name, data = piece.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


# ---- the client ---------------------------------------------------------------------------------------------------


def test_whole(client: anthropic.Anthropic) -> None:
    found = client.messages.create(model="smol", messages=ASKED, max_tokens=12, system="Be brief.", extra_body=GREEDY)
    assert found.type == "message" and found.role == "assistant" and found.model == "smol"
    assert found.id.startswith("msg_") and found._request_id
    (block,) = found.content
    assert block.type == "text" and block.text
    assert found.stop_reason in ("end_turn", "max_tokens") and found.stop_sequence is None
    assert found.usage.output_tokens <= 12 and found.usage.input_tokens > 20


def test_streamed_is_whole(client: anthropic.Anthropic) -> None:
    given: Any = {"model": "smol", "messages": ASKED, "max_tokens": 12, "extra_body": GREEDY}
    whole = client.messages.create(**given)
    with client.messages.stream(**given) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    told = final.to_dict()
    assert told.pop("stop_details") is None  # the client's own
    assert told | {"id": ""} == whole.to_dict() | {"id": ""}
    kinds = [event.type for event in client.messages.create(**given, stream=True)]
    assert kinds[0] == "message_start" and kinds[1] == "content_block_start"
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


async def test_async(smol: Live) -> None:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=smol.url, api_key="none", max_retries=0) as client:
        given: Any = {"model": "smol", "max_tokens": 8, "extra_body": GREEDY}

        def asked(number: int) -> Any:
            return [{"role": "user", "content": f"Count from {number}."}]

        async def streamed(number: int) -> str:
            async with client.messages.stream(messages=asked(number), **given) as stream:
                return "".join([text async for text in stream.text_stream])

        async def whole(number: int) -> str:
            found = await client.messages.create(messages=asked(number), **given)
            return "".join(block.text for block in found.content if block.type == "text")

        alone = await asyncio.gather(*map(whole, range(4)))
        assert await asyncio.gather(*map(streamed, range(4))) == alone and all(alone)


def test_stop_sequences_and_prefill(client: anthropic.Anthropic) -> None:
    told: Any = [{"role": "user", "content": "Count to ten."}, {"role": "assistant", "content": "1, 2, 3, 4,"}]
    found = client.messages.create(model="smol", messages=told, max_tokens=30, stop_sequences=["7"], extra_body=GREEDY)
    assert found.stop_reason == "stop_sequence" and found.stop_sequence == "7"
    assert found.content[0].text.strip() == "5, 6,"


def test_count_tokens_is_what_a_message_uses(client: anthropic.Anthropic) -> None:
    told: Any = [
        {"role": "user", "content": [
            {"type": "text", "text": "How is it in Rome?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Rome"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    given: Any = {"model": "smol", "messages": told, "system": [{"type": "text", "text": "Be brief."}]}
    count = client.messages.count_tokens(**given, tools=[TOOL]).input_tokens
    used = client.messages.create(**given, tools=[TOOL], max_tokens=1).usage.input_tokens
    assert count == used > client.messages.count_tokens(model="smol", messages=told[:1]).input_tokens


class City(pydantic.BaseModel):
    name: str
    river: Literal["Seine", "Tiber"]


def test_held_to_a_form(client: anthropic.Anthropic) -> None:
    pytest.importorskip("xgrammar")
    given: Any = {"model": "smol", "messages": ASKED, "max_tokens": 60, "extra_body": GREEDY}
    assert isinstance(client.messages.parse(**given, output_format=City).parsed_output, City)
    schema = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
              "additionalProperties": False}  # fmt: skip
    choice = {"type": "tool", "name": "get_weather"}
    found = client.messages.create(**given, tools=[{**TOOL, "input_schema": schema}], tool_choice=choice)
    (call,) = [block for block in found.content if block.type == "tool_use"]
    assert call.name == "get_weather" and call.input["city"] in ("Rome", "Oslo")


def test_errors_in_the_client(client: anthropic.Anthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="nope", messages=ASKED, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="smol", messages=ASKED, max_tokens=0)
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(model="smol", messages=ASKED, max_tokens=5, stream=True, extra_body={"temperature": -1})


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers"),
        ({"container": "a"}, "container"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "--reasoning-parser"),
        ({"n": 2}, "n is not a field"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences has 65"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"top_p": 2}, "top_p"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(smol: Live, fields: dict[str, Any], named: str) -> None:
    error = refused(smol, **fields)
    assert error["type"] == "invalid_request_error" and named in error["message"], error


def test_whoever_refuses_the_form_is_anthropics(smol: Live) -> None:
    assert refused(smol, 404, model="nope")["type"] == "not_found_error"
    assert refused(smol, 404, "/v1/messages/batches")["type"] == "not_found_error"
    counting = smol.post("/v1/messages/count_tokens", {"messages": ASKED, "system": [{"type": "image"}]})
    assert counting.status_code == 400 and counting.json()["error"]["message"].startswith("system[0].type")
    wrong = httpx.post(
        f"{smol.url}/v1/messages", content=b"{", headers={"content-type": "application/json"}, timeout=60
    )
    assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"
    plain = httpx.post(f"{smol.url}/v1/messages", content=b"{}", headers={"content-type": "text/plain"}, timeout=60)
    assert plain.status_code == 415 and plain.json()["type"] == "error"
    other = httpx.get(f"{smol.url}/v1/messages", timeout=60)
    assert other.status_code == 405 and other.json()["type"] == "error"
    assert "type" not in smol.post("/v1/chat/completions", {}).json()  # the others keep theirs


# ---- over the fake worker, whose answers are known -----------------------------------------------------------------


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Repeats its prompt, which is the last message's text. Tools and thoughts are parsed."""
    template = "{{ messages[-1]['content'] }}"
    with live_fake(
        tmp_path_factory.mktemp("scripted"), chat_template=template,
        engine={"reasoning_parser": "deepseek_r1", "generation_config": "vllm"},
        enable_auto_tool_choice=True, tool_call_parser="hermes", api_key=["right"], max_request_bytes=4096,
    ) as server:  # fmt: skip
        yield server


ANSWER = (
    "I must look.</think>Let me see."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


def say(server: Live, answer: str, **fields: Any) -> httpx.Response:
    """Make the model say `answer`."""
    body = {
        "messages": [{"role": "user", "content": answer}],
        "max_tokens": len(answer.encode()),
        "tools": [TOOL],
        **fields,
    }
    return server.post("/v1/messages", body, headers={"x-api-key": "right"})


def test_thoughts_and_tools(scripted: Live) -> None:
    found = say(scripted, ANSWER, max_tokens=len(ANSWER) + 10, vllm_xargs={"eos_at": len(ANSWER) + 1}).json()
    thought, text, rome, oslo = found["content"]
    signature = hashlib.sha256(b"I must look.").hexdigest()
    assert thought == {"type": "thinking", "thinking": "I must look.", "signature": signature}
    assert text == {"type": "text", "text": "Let me see."}
    assert rome["type"] == "tool_use" and rome["name"] == "get_weather" and rome["input"] == {"city": "Rome"}
    assert oslo["input"] == {"city": "Oslo"} and oslo["id"] != rome["id"]
    assert found["stop_reason"] == "tool_use"


def test_thoughts_and_tools_streamed(scripted: Live) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=scripted.url, api_key="right", max_retries=0)
    with client.messages.stream(
        model="fake", messages=[{"role": "user", "content": ANSWER}], max_tokens=len(ANSWER) + 10, tools=[TOOL],
        thinking={"type": "adaptive"}, extra_body={"vllm_xargs": {"eos_at": len(ANSWER) + 1}},
    ) as stream:  # fmt: skip
        inputs = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert final.stop_reason == "tool_use" and len(inputs) > 4  # the arguments came bit by bit
    text = say(scripted, ANSWER, stream=True).text
    starts = [event["index"] for event in events(text) if event["type"] == "content_block_start"]
    assert starts == [0, 1, 2, 3] and "[DONE]" not in text


def test_thought_left_out_and_calls_cut_off(scripted: Live) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    kinds = [block["type"] for block in say(scripted, ANSWER, thinking=thinking).json()["content"]]
    assert kinds == ["text", "tool_use", "tool_use"]
    cut = ANSWER[: ANSWER.index('"Rome"') + 3]
    found = say(scripted, cut).json()
    assert found["stop_reason"] == "max_tokens"
    assert found["content"][-1]["type"] == "tool_use" and "raw_arguments" in found["content"][-1]["input"]


def test_asked_to_think(scripted: Live) -> None:
    enabled = {"type": "enabled", "budget_tokens": 1024}
    small = say(scripted, ANSWER, thinking={**enabled, "budget_tokens": 10})
    assert small.status_code == 400 and "thinking.budget_tokens" in small.json()["error"]["message"]
    found = say(scripted, ANSWER, thinking=enabled)  # kept to the budget, or refused; never taken and forgotten
    if found.status_code == 200:
        assert found.json()["content"][0]["type"] == "thinking"
    else:
        assert found.status_code == 400 and "thinking.budget_tokens" in found.json()["error"]["message"]


def test_keys_and_sizes(scripted: Live) -> None:
    body = {"messages": ASKED, "max_tokens": 2}
    assert scripted.post("/v1/messages", body, headers={"Authorization": "Bearer right"}).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"Authorization": "Basic right"}):
        answer = scripted.post("/v1/messages", body, headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
    large = scripted.post("/v1/messages", {**body, "system": "a" * 5000}, headers={"x-api-key": "right"})
    assert large.status_code == 413 and large.json()["error"]["type"] == "request_too_large"


def test_an_error_in_a_stream(scripted: Live) -> None:
    text = say(scripted, "abcdef", stream=True, vllm_xargs={"fail_at": 3}).text
    found = events(text)
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error" and "cannot go on" in found[-1]["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes(fake: Live, stream: bool) -> None:
    body = {"messages": ASKED, "max_tokens": 33, "stream": stream, "vllm_xargs": {"sleep": 0.3}}
    client = send(fake, "/v1/messages", body)
    wait_for(lambda: running(fake)[0], 1)
    client.close()
    wait_for(lambda: fake.state.load.count, 0)
    wait_for(lambda: running(fake), (0, 0.0))


def test_overload_is_529(tmp_path: Path) -> None:
    engine = {"max_num_seqs": 1, "max_num_queued_reqs": 1}
    with live_fake(tmp_path / "model", engine=engine) as server:
        body = {"messages": ASKED, "max_tokens": 33, "vllm_xargs": {"sleep": 0.5}}
        clients = [send(server, "/v1/messages", body)]
        wait_for(lambda: running(server)[0], 1)
        clients.append(send(server, "/v1/messages", body))
        wait_for(lambda: running(server)[0], 2)
        answer = server.post("/v1/messages", body)
        for client in clients:
            client.close()
    assert answer.status_code in (429, 529), answer.text
    assert answer.json()["error"]["type"] in ("rate_limit_error", "overloaded_error") and answer.headers["retry-after"]


def test_the_page(smol: Live) -> None:
    page = httpx.get(f"{smol.url}/openapi.json", timeout=60).json()
    operation = page["paths"]["/v1/messages"]["post"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    wrong = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
    assert wrong.endswith("/AnthropicErrorResponse") and "529" in operation["responses"]
