"""Tools that the server runs during an answer of /v1/responses: of a live MCP server, and the two of `demo`.

The model is scripted: it repeats its prompt, and the template writes what a model would answer at each turn.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import uvicorn

from quire.base import env
from quire.schema.errors import ConfigError
from quire.server.tool_server import ToolServer, ToolSessions, calculate
from tests.server.live import Live, error_of, live_fake
from tests.server.test_disconnect import wait_for
from tests.server.test_responses_api import events

pytest.importorskip("mcp")

# A user's message is what the model says first; then it tells the last result. With "again" in it, it says the same
# again as long as it is shown tools.
TEMPLATE = (
    "{%- set last = messages[-1] -%}"
    "{%- set asked = (messages | selectattr('role', 'equalto', 'user') | list | last).content -%}"
    "{%- if last.role == 'tool' and not ('again' in asked and tools) -%}"
    "It is {{ last.content }}.<end>{%- else -%}{{ asked }}<end>{%- endif -%}"
)
PATH = "/v1/responses"
MCP: Any = {"type": "mcp", "server_label": "weather", "require_approval": "never"}
DEMO: Any = {"type": "mcp", "server_label": "demo"}
OWN: Any = {"type": "function", "name": "own", "parameters": {"type": "object", "properties": {}}}


def say(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def weather_server() -> Any:
    server = pytest.importorskip("mcp.server.mcpserver").MCPServer("weather")
    counts: dict[str, int] = {}

    @server.tool()
    def get_weather(city: str) -> str:
        """How the weather is."""
        if city == "Nowhere":
            raise ValueError("no such city")
        return f"4 degrees in {city}"

    @server.tool()
    async def wait_long() -> str:
        """Takes a while."""
        counts["waits"] = counts.get("waits", 0) + 1
        await asyncio.sleep(100)
        return "late"

    return server


@pytest.fixture(scope="module")
def mcp_port() -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(weather_server().sse_app(), log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    wait_for(lambda: server.started, True)
    yield listening.getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(60)


@pytest.fixture(scope="module")
def server(mcp_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_RESPONSES_API_STORE", "1")
        env.forget_all()
        with live_fake(
            tmp_path_factory.mktemp("tools"), chat_template=TEMPLATE, enable_auto_tool_choice=True,
            tool_call_parser="hermes", engine={"generation_config": "vllm"}, tool_server=f"127.0.0.1:{mcp_port},demo",
            exclude_tools_when_tool_choice_none=True,
        ) as found:  # fmt: skip
            yield found
    env.forget_all()


def ask(server: Live, text: str, *tools: Any, **more: Any) -> dict[str, Any]:
    response = server.post(PATH, {"input": text, "tools": list(tools), "max_output_tokens": 300, **more})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


def test_a_tool_is_run(server: Live) -> None:
    found = ask(server, "Let me see." + say("get_weather", city="Oslo"), MCP)
    assert found["status"] == "completed"
    first, call, last = found["output"]
    assert (first["type"], last["type"]) == ("message", "message")
    assert call["type"] == "mcp_call" and call["status"] == "completed" and call["server_label"] == "weather"
    assert (call["name"], json.loads(call["arguments"]), call["output"]) == (
        "get_weather", {"city": "Oslo"}, "4 degrees in Oslo",
    )  # fmt: skip
    assert last["content"][0]["text"] == "It is 4 degrees in Oslo."
    assert found["usage"]["output_tokens"] > len("It is 4 degrees in Oslo.")


def test_streamed_with_the_client(server: Live) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    given: Any = {"model": "fake", "input": say("get_weather", city="Oslo"), "tools": [MCP], "max_output_tokens": 300}
    with client.responses.stream(**given) as flow:
        kinds = [event.type for event in flow]
        final = flow.get_final_response()
    assert final.output_text == "It is 4 degrees in Oslo."
    assert [item.type for item in final.output] == ["mcp_call", "message"]
    wanted = ["response.mcp_call.in_progress", "response.mcp_call_arguments.done", "response.mcp_call.completed"]
    assert [kind for kind in kinds if kind in wanted] == wanted
    assert kinds.count("response.completed") == 1 and kinds.count("response.created") == 1
    raw = events(server.post(PATH, {**given, "stream": True}).text)
    grown = [event["delta"] for event in raw if event["type"] == "response.mcp_call_arguments.delta"]
    assert "".join(grown) == raw[-1]["response"]["output"][0]["arguments"] == '{"city": "Oslo"}'
    done = [event["item"] for event in raw if event["type"] == "response.output_item.done"]
    assert done == raw[-1]["response"]["output"]


def test_several_rounds_end(server: Live) -> None:
    """The model calls at every turn it may."""
    found = ask(server, "again" + say("calculate", expression="6 * 7"), DEMO, max_tool_calls=3)
    calls = [item for item in found["output"] if item["type"] == "mcp_call"]
    assert [call["output"] for call in calls] == ["42"] * 3
    assert found["status"] == "completed"
    endless = ask(server, "again" + say("calculate", expression="1"), DEMO, max_output_tokens=None)
    assert sum(item["type"] == "mcp_call" for item in endless["output"]) == 16


def test_tokens_are_counted_over_all_rounds(server: Live) -> None:
    text = "again" + say("calculate", expression="1 + 1")
    found = ask(server, text, DEMO, max_output_tokens=2 * len(text))
    assert found["status"] == "incomplete" and found["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found["usage"]["output_tokens"] <= 2 * len(text)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (say("get_weather", city="Nowhere"), "get_weather"),
        (say("get_weather"), "city"),
        ('<tool_call>\n{"name": "get_weather", "arguments": "oops"}\n</tool_call>', "JSON"),
    ],
)
def test_a_tool_that_fails(server: Live, call: str, words: str) -> None:
    found = ask(server, call, MCP, max_output_tokens=None)
    item = found["output"][0]
    assert item["status"] == "failed" and item["output"] is None
    assert words in item["error"]
    assert text_of(found).startswith("It is ") and found["status"] == "completed"


def test_a_clients_function_ends_the_answer(server: Live) -> None:
    found = ask(server, say("get_weather", city="Oslo") + say("own"), MCP, OWN)
    kinds = [item["type"] for item in found["output"]]
    assert kinds == ["mcp_call", "function_call"] and found["output"][0]["output"] == "4 degrees in Oslo"


def test_a_conversation_goes_on(server: Live) -> None:
    first = ask(server, say("get_weather", city="Oslo"), MCP)
    later = ask(server, "Thanks", previous_response_id=first["id"])
    assert text_of(later) == "Thanks"
    assert later["usage"]["input_tokens"] > 0
    echoed = ask(server, [*first["output"], {"role": "user", "content": "And now?"}])
    assert text_of(echoed) == "And now?"


def test_in_the_background(server: Live) -> None:
    made = ask(server, say("get_weather", city="Oslo"), MCP, background=True)
    done = lambda: server.client().get(f"{PATH}/{made['id']}").json()  # noqa: E731
    wait_for(lambda: done()["status"], "completed")
    assert text_of(done()) == "It is 4 degrees in Oslo."


def test_cancelled_while_a_tool_runs(server: Live) -> None:
    made = ask(server, say("wait_long"), MCP, background=True)
    client = server.client()
    wait_for(lambda: [item["status"] for item in client.get(f"{PATH}/{made['id']}").json()["output"]], ["calling"])
    began = time.monotonic()
    assert client.post(f"{PATH}/{made['id']}/cancel").json()["status"] == "cancelled"
    assert time.monotonic() - began < 60


def test_what_is_refused(server: Live, tmp_path: Any) -> None:
    for tool, word in (
        ({**MCP, "server_label": "nobody"}, "nobody"),
        ({**MCP, "server_url": "http://example.com/mcp"}, "server_url"),
        ({**MCP, "require_approval": "always"}, "require_approval"),
        ({**MCP, "allowed_tools": ["none_such"]}, "none_such"),
        ({**MCP, "allowed_tools": 5}, "allowed_tools"),
        ({**MCP, "allowed_tools": {"tool_names": "get_weather"}}, "allowed_tools"),
        ({"type": "code_interpreter"}, "python"),
    ):
        error = error_of(server.post(PATH, {"input": "x", "tools": [tool]}))
        assert word in error["message"]
    twice = server.post(PATH, {"input": "x", "tools": [MCP, {**OWN, "name": "get_weather"}]})
    assert "get_weather" in error_of(twice)["message"]
    some = {**MCP, "allowed_tools": {"tool_names": ["get_weather"]}}
    assert ask(server, say("get_weather", city="Oslo"), some)["output"][0]["type"] == "mcp_call"
    with live_fake(tmp_path / "plain") as plain:
        assert "--tool-server" in error_of(plain.post(PATH, {"input": "x", "tools": [MCP]}))["message"]


def test_the_option() -> None:
    for wrong in ("nowhere", "host:notaport", "ftp://host:1/sse", ","):
        with pytest.raises(ConfigError, match="tool_server"):
            ToolServer.of(wrong)
    assert ToolServer.of(None) is None and ToolServer.of("demo") is not None


async def test_streamable_http_and_a_server_that_is_gone() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    served = uvicorn.Server(uvicorn.Config(weather_server().streamable_http_app(), log_level="error"))
    task = asyncio.create_task(served.serve([listening]))
    try:
        while not served.started:
            await asyncio.sleep(0.01)
        found = ToolServer.of(f"127.0.0.1:{listening.getsockname()[1]}")
        assert found is not None
        tools = {tool.name: tool for tool in (await found.tools())["weather"]}
        sessions = ToolSessions(found)
        result = await sessions.start(tools["get_weather"], {"city": "Rome"})
        assert (result.text, result.failed) == ("4 degrees in Rome", False)
        sessions.close()
    finally:
        served.should_exit = True
        await task
    with pytest.raises(Exception, match="cannot be reached"):
        await found.tools()


def test_calculate() -> None:
    assert calculate("(1 + 2) * -3 // 2") == "-5"
    for wrong in ("__import__('os')", "2 ** 9", "'a' * 9", "1 +" * 300):
        with pytest.raises((ValueError, SyntaxError)):
            calculate(wrong)
