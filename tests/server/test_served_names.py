"""One table of served names: an entry that is added later is reached by every dialect, with its engine and adapter."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire.server
from quire import LoRARequest
from quire.schema.errors import InputError, ModelNotFoundError
from quire.schema.messages import EngineRequest
from quire.server.app import build_app
from quire.server.openai.batch import BatchRunner
from quire.server.pooling.routes import PATHS
from quire.server.served import ServedModel, ServedModels
from tests.server.live import Live, error_of, live_fake

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
# A body for every route that takes `model`; those of GENERATES submit requests to an engine.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 3},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]] * 2, "max_tokens": 3},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": CHAT,
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [101]},
    "/inference/v1/generate": {"token_ids": [10, 11], "sampling_params": {"max_tokens": 3}},
    "/invocations": CHAT,
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/v1/chat/completions/render": CHAT,
    "/v1/completions/render": {"prompt": "ab"},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [10, 11]},
}
GENERATES = list(BODIES)[:8]
STREAMS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
# Modules that speak of the process's own engine and of the table itself; all others have their call's ServedModel.
PROCESS = (
    "adapters.py", "admin.py", "app.py", "host.py", "metrics_route.py", "route.py", "state.py", "stream.py",
    "console/stats.py", "openai/models.py", "tokens.py",
)  # fmt: skip


class Seen:
    """What an engine was asked to do."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: Any) -> None:
        self.requests: list[EngineRequest] = []
        self.num_reads = 0
        real_open, real_read = engine.open, engine.read

        def open_(requests: Any, **kwargs: Any) -> Any:
            self.requests += [one for prepared in requests for one in prepared.requests]
            return real_open(requests, **kwargs)

        async def read(*args: Any, **kwargs: Any) -> Any:
            self.num_reads += 1
            return await real_read(*args, **kwargs)

        patch.setattr(engine, "open", open_)
        patch.setattr(engine, "read", read)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Live]]:
    """A server whose table also has the model of a second engine, and an adapter of its own."""
    with (
        live_fake(tmp_path_factory.mktemp("first"), engine={"enable_lora": True}) as first,
        live_fake(
            tmp_path_factory.mktemp("second"), served_model_name="second", engine={"max_model_len": 256}
        ) as second,
    ):
        served = first.state.served
        served.add(second.state.served.base)
        loading = first.engine.add_lora(LoRARequest("tuned-7", 7, "adapters/7"))
        assert asyncio.run_coroutine_threadsafe(loading, first.loop).result(60)
        served.add(dataclasses.replace(served.base, name="tuned", adapter="tuned-7", parent="fake", root="adapters/7"))
        yield first, second


@pytest.fixture
def seen(pair: tuple[Live, Live], monkeypatch: pytest.MonkeyPatch) -> tuple[Seen, Seen]:
    return Seen(monkeypatch, pair[0].engine), Seen(monkeypatch, pair[1].engine)


def test_every_route_with_a_model_is_here(pair: tuple[Live, Live]) -> None:
    page = httpx.get(pair[0].url + "/openapi.json", timeout=60).json()

    def has_model(schema: dict[str, Any]) -> bool:
        if "$ref" in schema:
            schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return "model" in schema.get("properties", {}) or any(map(has_model, schema.get("anyOf", ())))

    found = {
        path
        for path, operations in page["paths"].items()
        for operation in operations.values()
        if has_model(operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {}))
    }
    assert found - set(PATHS) == set(BODIES)  # those of pooling models answer 400 here: test_pooling_api.py
    assert set(PATHS) <= found


@pytest.mark.parametrize("path", BODIES)
def test_every_route_reaches_the_second_engine(pair: tuple[Live, Live], seen: tuple[Seen, Seen], path: str) -> None:
    response = pair[0].post(path, {**BODIES[path], "model": "second"})
    assert response.status_code == 200, response.text
    first, second = seen
    assert not first.requests and not first.num_reads
    assert second.num_reads and bool(second.requests) == (path in GENERATES)
    body = response.json()
    assert (body[0] if isinstance(body, list) else body).get("model", "second") == "second"
    assert body.get("max_model_len", 256) == 256 if isinstance(body, dict) else True


@pytest.mark.parametrize("path", STREAMS)
def test_so_do_streams(pair: tuple[Live, Live], seen: tuple[Seen, Seen], path: str) -> None:
    response = pair[0].post(path, {**BODIES[path], "model": "second", "stream": True})
    assert response.status_code == 200 and "data: " in response.text
    assert not seen[0].requests and seen[1].requests


@pytest.mark.parametrize("path", GENERATES)
def test_every_route_names_the_adapter_to_the_engine(
    pair: tuple[Live, Live], seen: tuple[Seen, Seen], path: str
) -> None:
    for model, adapter in (("tuned", "tuned-7"), ("fake", None)):
        seen[0].requests.clear()
        response = pair[0].post(path, {**BODIES[path], "model": model})
        assert response.status_code == 200 and response.json().get("model", model) == model
        assert {one.lora_name for one in seen[0].requests} == {adapter}
    assert not seen[1].requests


def test_so_does_a_search(pair: tuple[Live, Live], seen: tuple[Seen, Seen]) -> None:
    body = {"model": "tuned", "prompt": "ab", "max_tokens": 2, "n": 2, "use_beam_search": True, "temperature": 0}
    assert pair[0].post("/v1/completions", body).status_code == 200
    assert seen[0].requests and {one.lora_name for one in seen[0].requests} == {"tuned-7"}


@pytest.mark.parametrize("path", BODIES)
def test_every_route_refuses_an_unknown_name(pair: tuple[Live, Live], path: str) -> None:
    response = pair[0].post(path, {**BODIES[path], "model": "nope"})
    assert response.status_code == 404
    assert "Valid aliases: fake, alias, second, tuned." in response.json()["error"]["message"]


def test_limits_are_those_of_the_model(pair: tuple[Live, Live]) -> None:
    body = {"prompt": "ab", "max_tokens": 300}
    assert "max_model_len=256" in error_of(pair[0].post("/v1/completions", {**body, "model": "second"}))["message"]
    assert pair[0].post("/v1/completions", {**body, "model": "fake"}).status_code == 200


async def test_a_batch_file_reaches_the_second_engine(pair: tuple[Live, Live], seen: tuple[Seen, Seen]) -> None:
    body = {"model": "second", "prompt": "ab", "max_tokens": 3}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}).encode()
    target = io.BytesIO()
    runner = BatchRunner(build_app(pair[0].state), window=1, longest_line=1000)
    async with asyncio.timeout(60):
        await runner.run(io.BytesIO(line + b"\n"), target)
    assert json.loads(target.getvalue())["response"]["body"]["model"] == "second"
    assert not seen[0].requests and seen[1].requests


def test_cards(pair: tuple[Live, Live]) -> None:
    cards = httpx.get(pair[0].url + "/v1/models", timeout=60).json()["data"]
    shown = [(card["id"], card["parent"], card["max_model_len"]) for card in cards]
    assert shown == [("fake", None, 512), ("alias", None, 512), ("second", None, 256), ("tuned", "fake", 512)]
    assert cards[3]["root"] == "adapters/7" and cards[0]["root"] == cards[1]["root"] != cards[2]["root"]
    assert all(card["permission"][0]["object"] == "model_permission" for card in cards)
    assert httpx.get(pair[0].url + "/v1/models/tuned", timeout=60).json() == cards[3]


def entry(name: str, **changes: Any) -> ServedModel:
    nothing: Any = None
    return ServedModel(name=name, engine=nothing, config=nothing, root="", max_model_len=8, **changes)


def test_entries_come_and_go() -> None:
    table = ServedModels(entry("base"), ["base", "other"])
    table.add(entry("tuned", adapter="t", parent="other"))
    assert table.find("tuned").adapter == "t" and table.find(None) is table.find("other") is table.base
    assert table.remove("tuned").name == "tuned"
    with pytest.raises(ModelNotFoundError):
        table.find("tuned")
    table.add(entry("tuned"))
    assert [name for name, _ in table.entries()] == ["base", "other", "tuned"]


@pytest.mark.parametrize(
    ("name", "parent", "words"),
    [
        ("base", None, "is served already"), ("", None, "1 to 256"), ("x" * 257, None, "got 257"),
        ("a\nb", None, "printable"),
        ("new", "gone", "does not exist"),
    ],
)  # fmt: skip
def test_wrong_entries(name: str, parent: str | None, words: str) -> None:
    table = ServedModels(entry("base"))
    with pytest.raises(InputError, match=words):
        table.add(entry(name, parent=parent))
    assert [name for name, _ in table.entries()] == ["base"]


def test_the_base_model_stays() -> None:
    table = ServedModels(entry("base"), ["base", "other"])
    for name in ("base", "other"):
        with pytest.raises(InputError, match="base model"):
            table.remove(name)


def test_a_refusal_is_bounded() -> None:
    table = ServedModels(entry("base"))
    for number in range(200):
        table.add(entry(f"{number:03}" + "x" * 200))
    with pytest.raises(ModelNotFoundError) as refused:
        table.find("nope" * 1000)
    assert len(str(refused.value)) < 2000 and str(refused.value).endswith("and 181 more.")


def test_dialects_ask_only_their_calls_model() -> None:
    """No other module reads `state.engine`, `state.config` or `state.served`."""
    folder = Path(quire.server.__file__).parent
    wrong = []
    for path in sorted(folder.rglob("*.py")):
        if (name := path.relative_to(folder).as_posix()) in PROCESS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("engine", "config", "served"):
                owner = node.value
                last = (
                    owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                )
                wrong += [f"{name}:{node.lineno}"] if last in ("state", "_state") else []
    assert not wrong


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_adapters_come_and_go_over_http_only_where_that_is_allowed(pair: tuple[Live, Live], path: str) -> None:
    response = pair[0].post(path, {"lora_name": "a", "lora_path": "/x"})
    assert response.status_code == 404 and "ALLOW_RUNTIME_LORA_UPDATING" in response.json()["error"]["message"]
