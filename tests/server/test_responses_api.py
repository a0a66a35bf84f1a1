"""/v1/responses with the official client: whole, streamed, in the background, continued; sync and async."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from quire.base import env
from tests.server.live import Live, error_of, live, live_fake
from tests.server.test_disconnect import running, send, wait_for

ASKED = "What is the capital of France?"
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ANSWER = (
    "I must look.</think>Let me see."
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def stored() -> Iterator[pytest.MonkeyPatch]:
    """Servers started now keep responses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_RESPONSES_API_STORE", "1")
        patch.setenv("QUIRE_RESPONSES_STORE_COUNT", "8")
        env.forget_all()
        yield patch
    env.forget_all()


@pytest.fixture
def storeless(stored: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("QUIRE_ENABLE_RESPONSES_API_STORE")
        env.forget_all()
        with live_fake(tmp_path / "model") as server:
            yield server
    env.forget_all()


@pytest.fixture(scope="module")
def server(stored: pytest.MonkeyPatch) -> Iterator[Live]:
    with live(engine={"max_model_len": 512, "served_model_name": "smol", "max_num_seqs": 16}) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def scripted(stored: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Repeats its prompt, which is the last message's text. Tools and thoughts are parsed."""
    with live_fake(
        tmp_path_factory.mktemp("scripted"), chat_template="{{ messages[-1]['content'] }}",
        engine={"reasoning_parser": "deepseek_r1", "generation_config": "vllm"}, enable_auto_tool_choice=True,
        tool_call_parser="hermes",
    ) as server:  # fmt: skip
        yield server


def events(text: str) -> list[dict[str, Any]]:
    """Every event is named by its type, and they are numbered."""
    found = []
    for number, piece in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = piece.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        found.append(event)
    return found


def plain(response: Any) -> dict[str, Any]:
    """Without what differs between two answers of the same words."""
    found: dict[str, Any] = response if isinstance(response, dict) else response.to_dict()
    found = {**found, "id": "", "created_at": 0, "usage": {**found["usage"], "input_tokens_details": None}}
    output = [{**item, "id": "", **({"call_id": ""} if "call_id" in item else {})} for item in found["output"]]
    return {**found, "output": output}


# ---- the client ---------------------------------------------------------------------------------------------------


def test_whole(client: openai.OpenAI) -> None:
    found = client.responses.create(
        model="smol", input=ASKED, instructions="Be brief.", max_output_tokens=10, temperature=0, metadata={"a": "b"}
    )
    assert found.id.startswith("resp_") and found.object == "response" and found.model == "smol"
    assert found.output_text and found.output[0].type == "message"
    assert found.instructions == "Be brief." and found.metadata == {"a": "b"} and found.temperature == 0.0
    assert found.usage is not None and found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    cut = client.responses.create(model="smol", input=ASKED, max_output_tokens=2, temperature=0)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens" and cut.usage is not None
    assert cut.usage.output_tokens == 2 and cut.output[0].status == "incomplete"


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    given: Any = {"model": "smol", "input": ASKED, "max_output_tokens": 12, "temperature": 0}
    whole = client.responses.create(**given)
    parts = list(client.responses.create(**given, stream=True))
    kinds = [part.type for part in parts]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [part.sequence_number for part in parts] == list(range(len(parts)))
    text = "".join(part.delta for part in parts if part.type == "response.output_text.delta")
    assert text == whole.output_text and plain(parts[-1].response) == plain(whole)
    with client.responses.stream(model="smol", input="Say hi", max_output_tokens=200, temperature=0) as stream:
        helped = stream.get_final_response()
    assert helped.output_text == client.responses.create(model="smol", input="Say hi", temperature=0).output_text


async def test_async(server: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        given: Any = {"model": "smol", "max_output_tokens": 8, "temperature": 0}

        async def streamed(number: int) -> str:
            parts = await client.responses.create(input=f"Count from {number}.", stream=True, **given)
            return "".join([part.delta async for part in parts if part.type == "response.output_text.delta"])

        async def whole(number: int) -> str:
            return (await client.responses.create(input=f"Count from {number}.", **given)).output_text

        alone = await asyncio.gather(*map(whole, range(4)))
        assert await asyncio.gather(*map(streamed, range(4))) == alone and all(alone)


def test_logprobs(client: openai.OpenAI) -> None:
    given: Any = {"model": "smol", "input": ASKED, "max_output_tokens": 5, "temperature": 0, "top_logprobs": 2,
                  "include": ["message.output_text.logprobs"]}  # fmt: skip
    whole = client.responses.create(**given)
    logprobs = whole.output[0].content[0].logprobs
    assert len(logprobs) == 5 and all(len(entry.top_logprobs) == 2 for entry in logprobs)
    parts = [
        part for part in client.responses.create(**given, stream=True) if part.type == "response.output_text.delta"
    ]
    assert sum(len(part.logprobs) for part in parts) == 5
    assert "".join(entry.token for entry in logprobs) == whole.output_text


class City(pydantic.BaseModel):
    name: str
    river: Literal["Seine", "Tiber"]


def test_held_to_a_form(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    parsed = client.responses.parse(
        model="smol", input="Describe Paris.", text_format=City, max_output_tokens=100, temperature=0
    )
    assert isinstance(parsed.output_parsed, City)
    with client.responses.stream(
        model="smol", input="Describe Paris.", text_format=City, max_output_tokens=100, temperature=0
    ) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
    assert [event.parsed for event in done] == [parsed.output_parsed]
    choice: Any = {"type": "function", "name": "get_weather"}
    tool = {**TOOL, "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                                   "required": ["city"], "additionalProperties": False}}  # fmt: skip
    called = client.responses.create(
        model="smol", input="Rome?", tools=[tool], tool_choice=choice, max_output_tokens=40, temperature=0
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")


def test_a_conversation(client: openai.OpenAI, server: Live) -> None:
    first = client.responses.create(model="smol", input=ASKED, max_output_tokens=12, temperature=0)
    second = client.responses.create(
        model="smol", input="And of Italy?", previous_response_id=first.id, max_output_tokens=5, temperature=0
    )
    assert second.previous_response_id == first.id and second.usage is not None
    spelled: Any = [
        {"role": "user", "content": ASKED},
        *[item.to_dict() for item in first.output],
        {"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]},
    ]
    same = client.responses.create(model="smol", input=spelled, max_output_tokens=5, temperature=0)
    assert same.usage is not None and same.usage.input_tokens == second.usage.input_tokens
    assert same.output_text == second.output_text
    parts = list(client.responses.create(model="smol", input="Hi", stream=True, max_output_tokens=2))
    client.responses.create(model="smol", input="More", max_output_tokens=1,
                            previous_response_id=parts[0].response.id)  # fmt: skip


def test_retrieve_and_delete(client: openai.OpenAI) -> None:
    made = client.responses.create(model="smol", input="Hi", max_output_tokens=3)
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    with pytest.raises(openai.BadRequestError, match="stream"):
        list(client.responses.retrieve(made.id, stream=True))
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.retrieve(made.id)
    dropped = client.responses.create(model="smol", input="Hi", max_output_tokens=1, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(dropped.id)
    with pytest.raises(openai.NotFoundError, match="not found"):
        client.responses.create(model="smol", input="Hi", previous_response_id=dropped.id)


def test_input_items(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": f"Say {number}"} for number in range(4)]
    made = client.responses.create(model="smol", input=given, max_output_tokens=1)
    page = client.responses.input_items.list(made.id, limit=3, order="asc")
    assert [item.content[0].text for item in page.data] == ["Say 0", "Say 1", "Say 2"]
    assert len({item.id for item in page.data}) == 3 and page.has_more
    assert [item.content[0].text for item in page] == [f"Say {n}" for n in range(4)]
    latest = client.responses.input_items.list(made.id, limit=1)
    assert latest.data[0].content[0].text == "Say 3"
    assert client.responses.input_items.list(made.id, after=latest.data[0].id).data[0].id == page.data[2].id
    with pytest.raises(openai.BadRequestError, match="nobody"):
        client.responses.input_items.list(made.id, after="nobody")
    plain = client.responses.create(model="smol", input="Hi", max_output_tokens=1)
    assert client.responses.input_items.list(plain.id).data[0].content[0].text == "Hi"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_nobody")


def test_the_oldest_go(client: openai.OpenAI) -> None:
    ids = [client.responses.create(model="smol", input="Hi", max_output_tokens=1).id for _ in range(9)]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ids[0])
    assert all(client.responses.retrieve(one).id == one for one in ids[1:])


def test_in_the_background(client: openai.OpenAI, server: Live) -> None:
    made = client.responses.create(model="smol", input=ASKED, max_output_tokens=10, temperature=0, background=True)
    assert made.status in ("queued", "in_progress") and made.background and made.usage is None
    wait_for(lambda: client.responses.retrieve(made.id).status in ("completed", "incomplete"), True)
    same = client.responses.create(model="smol", input=ASKED, max_output_tokens=10, temperature=0)
    assert plain(client.responses.retrieve(made.id)) == plain(same) | {"background": True}
    endless: Any = {"ignore_eos": True}
    long = client.responses.create(
        model="smol", input="Tell a story", max_output_tokens=450, background=True, extra_body=endless
    )
    with pytest.raises(openai.BadRequestError, match="still being made"):
        client.responses.create(model="smol", input="Hi", previous_response_id=long.id)
    cancelled = client.responses.cancel(long.id)
    assert cancelled.status == "cancelled" and client.responses.cancel(long.id).status == "cancelled"
    wait_for(lambda: running(server)[0], 0)
    assert server.state.load.count == 0


def test_a_background_stream_outlives_its_reader(client: openai.OpenAI, server: Live) -> None:
    made = client.responses.create(
        model="smol", input=ASKED, max_output_tokens=20, temperature=0, background=True, stream=True
    )
    first = next(iter(made))
    made.close()
    assert first.type == "response.created" and first.response.status == "queued"
    again = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert again[0].type == "response.queued" and again[0].sequence_number == 1
    text = "".join(part.delta for part in again if part.type == "response.output_text.delta")
    assert text and again[-1].response.output_text == text
    assert client.responses.retrieve(first.response.id).output_text == text


# ---- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].arguments"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 511}, "max_output_tokens"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "x"}, "conversation"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ({"background": True, "store": False}, "background"),
        ({"temperature": -1}, "temperature"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(server: Live, fields: dict[str, Any], param: str) -> None:
    error = error_of(server.post("/v1/responses", {"input": "Hi", **fields}))
    assert error["param"] == param, error
    assert param in error["message"] or "maximum context length" in error["message"]


def test_without_a_store(storeless: Live) -> None:
    error = error_of(storeless.post("/v1/responses", {"input": "Hi", "background": True}))
    assert error["param"] == "background" and "ENABLE_RESPONSES_API_STORE" in error["message"]
    error = error_of(storeless.post("/v1/responses", {"input": "Hi", "previous_response_id": "resp_1"}))
    assert error["param"] == "previous_response_id" and "ENABLE_RESPONSES_API_STORE" in error["message"]
    made = storeless.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2})
    assert made.status_code == 200
    error_of(httpx.get(f"{storeless.url}/v1/responses/{made.json()['id']}", timeout=60), 404)


# ---- over the fake worker, whose answers are known -----------------------------------------------------------------


def say(server: Live, answer: str, **fields: Any) -> httpx.Response:
    """Make the model say `answer`."""
    size = len(answer.encode())
    body = {"input": answer, "max_output_tokens": size + 5, "tools": [TOOL], "vllm_xargs": {"eos_at": size + 1}}
    return server.post("/v1/responses", {**body, **fields})


def test_thoughts_and_tools(scripted: Live) -> None:
    found = say(scripted, ANSWER).json()
    thought, message, rome, oslo = found["output"]
    assert thought["type"] == "reasoning" and thought["content"] == [{"type": "reasoning_text", "text": "I must look."}]
    assert message["content"][0]["text"] == "Let me see." and thought["id"].startswith("rs_")
    assert rome["type"] == "function_call" and json.loads(rome["arguments"]) == {"city": "Rome"}
    assert oslo["call_id"] != rome["call_id"] and oslo["id"].startswith("fc_") and oslo["name"] == "get_weather"
    assert found["status"] == "completed" and found["tool_choice"] == "auto"
    assert found["usage"]["output_tokens_details"]["reasoning_tokens"] == len("I must look.")
    streamed = events(say(scripted, ANSWER, stream=True).text)
    assert plain(streamed[-1]["response"]) == plain(found)
    kinds = {event["type"] for event in streamed}
    assert {
        "response.reasoning_part.added", "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.reasoning_part.done", "response.function_call_arguments.delta",
        "response.function_call_arguments.done", "response.completed",
    } <= kinds  # fmt: skip
    for index, item in enumerate(streamed[-1]["response"]["output"]):
        mine = [event for event in streamed if event.get("output_index") == index]
        assert mine[0]["type"] == "response.output_item.added" and mine[-1]["item"] == item
        grown = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert grown == item.get("arguments", (item.get("content") or [{}])[0].get("text"))


def test_a_tool_loop(scripted: Live) -> None:
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    asked: Any = {"extra_body": {"vllm_xargs": {"eos_at": len(ANSWER) + 1}}, "max_output_tokens": len(ANSWER) + 5}
    first = client.responses.create(model="fake", input=ANSWER, tools=[TOOL], **asked)
    calls = [item for item in first.output if item.type == "function_call"]
    results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    after: Any = {"extra_body": {"vllm_xargs": {"eos_at": 6}}, "max_output_tokens": 9, "include": None}
    second = client.responses.create(model="fake", input=results, tools=[TOOL], previous_response_id=first.id, **after)
    assert second.status == "completed" and second.output[0].type == "reasoning"  # it never closes its thought
    history: Any = [{"role": "user", "content": ANSWER}, *[item.to_dict() for item in first.output], *results]
    spelled = client.responses.create(model="fake", input=history, tools=[TOOL], **after)
    assert plain(spelled) | {"previous_response_id": 0} == plain(second) | {"previous_response_id": 0}


def test_an_empty_answer_has_a_message(scripted: Live) -> None:
    found = say(scripted, "abc", vllm_xargs={"eos_at": 1}).json()
    assert found["status"] == "completed" and [item["type"] for item in found["output"]] == ["message"]
    assert found["output"][0]["content"][0]["text"] == ""


def test_an_error_in_a_stream(scripted: Live) -> None:
    found = events(say(scripted, "abcdef", stream=True, vllm_xargs={"fail_at": 3}).text)
    assert [event["type"] for event in found[-2:]] == ["error", "response.failed"]
    failed = found[-1]["response"]
    assert failed["status"] == "failed" and "cannot go on" in failed["error"]["message"]
    whole = say(scripted, "abcdef", vllm_xargs={"fail_at": 3})
    assert whole.status_code == 500
    behind = say(scripted, "abcdef", background=True, vllm_xargs={"fail_at": 3}).json()
    path = f"{scripted.url}/v1/responses/{behind['id']}"
    wait_for(lambda: httpx.get(path, timeout=60).json()["status"], "failed")
    assert "cannot go on" in httpx.get(path, timeout=60).json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes(fake: Live, stream: bool) -> None:
    body = {"input": "Hi", "max_output_tokens": 33, "stream": stream, "vllm_xargs": {"sleep": 0.3}}
    client = send(fake, "/v1/responses", body)
    wait_for(lambda: running(fake)[0], 1)
    client.close()
    wait_for(lambda: fake.state.load.count, 0)
    wait_for(lambda: running(fake), (0, 0.0))


def test_a_client_that_goes_leaves_the_background(scripted: Live) -> None:
    body = {"input": "abcdef", "background": True, "stream": True, "request_id": "mine", "max_output_tokens": 5,
            "vllm_xargs": {"sleep": 0.2}}  # fmt: skip
    client = send(scripted, "/v1/responses", body)
    wait_for(lambda: running(scripted)[0], 1)
    client.close()
    path = f"{scripted.url}/v1/responses/resp_mine"
    wait_for(lambda: httpx.get(path, timeout=60).json()["status"], "incomplete")
    assert events(httpx.get(path, params={"stream": True}, timeout=60).text)[-1]["type"] == "response.incomplete"


def test_functions_of_a_namespace(scripted: Live) -> None:
    """The model knows one name; the client gets the namespace and the name in it, and sends them back."""
    tool = {"type": "namespace", "name": "city", "description": "Cities.", "tools": [TOOL]}
    answer = ANSWER.replace('"get_weather"', '"city__get_weather"')
    body = {"input": answer, "tools": [tool], "tool_choice": "auto", "max_output_tokens": len(answer) + 2,
            "temperature": 0, "vllm_xargs": {"eos_at": len(answer) + 1}}  # fmt: skip
    response = scripted.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    calls = [item for item in response.json()["output"] if item["type"] == "function_call"]
    assert [(call["namespace"], call["name"]) for call in calls] == [("city", "get_weather")] * 2
    earlier = [{k: call[k] for k in ("type", "call_id", "name", "namespace", "arguments")} for call in calls[:1]]
    result = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "rain"}
    after = {"input": [*earlier, result], "tools": [tool], "enable_response_messages": True, "max_output_tokens": 4}
    seen = scripted.post("/v1/responses", after).json()["input_messages"]
    assert seen[0]["tool_calls"][0]["function"]["name"] == "city__get_weather"
    inner = {**tool, "tools": [{"type": "custom", "name": "a"}]}
    for wrong, place in (
        (inner, "tools[0].tools[0].type"),
        ({**tool, "tools": None}, "tools"),
        ({**tool, "name": 1}, "tools"),
    ):
        assert error_of(scripted.post("/v1/responses", {**body, "tools": [wrong]}))["param"].startswith(place)


def test_messages_that_the_client_keeps(scripted: Live) -> None:
    """What an answer shows as messages is what a later request may send instead of a stored response's id."""
    first = {"input": "hello", "instructions": "Be kind.", "max_output_tokens": 5, "enable_response_messages": True}
    one = scripted.post("/v1/responses", first).json()
    assert one["input_messages"] == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    (said,) = one["output_messages"]
    assert said["role"] == "assistant"
    before = one["input_messages"] + one["output_messages"]
    more = {"input": "and?", "previous_input_messages": before, "max_output_tokens": 5}
    two = scripted.post("/v1/responses", {**more, "enable_response_messages": True}).json()
    assert two["input_messages"] == [*before, {"role": "user", "content": "and?"}]
    silent = scripted.post("/v1/responses", more).json()
    assert silent["input_messages"] is None and silent["output_messages"] is None
    error = error_of(scripted.post("/v1/responses", {**more, "previous_input_messages": [{"content": "x"}]}))
    assert error["param"] == "previous_input_messages[0]"
    error = error_of(scripted.post("/v1/responses", {**more, "previous_response_id": "resp_x"}))
    assert error["param"] == "previous_input_messages"
