"""Generated requests find no 5xx and leave a living engine. The long run is `python -m tests.server.fuzz`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from quire.server.app import build_app
from tests.server.live import Live

fuzz = pytest.importorskip("tests.server.fuzz", reason="needs schemathesis")


def test_generated_requests(fake: Live) -> None:
    tally = fuzz.fuzz(fake, 70)
    fuzz.is_alive(fake)
    assert tally.requests >= 60
    assert tally.of(200) >= 12 and tally.of(400) >= 12, tally.by_status  # both kinds were really met


def test_the_page(fake: Live) -> None:
    page = httpx.get(fake.url + "/openapi.json", timeout=60).json()
    for path in ("/v1/completions", "/v1/chat/completions"):
        operation = page["paths"][path]["post"]
        assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        assert {"400", "401", "404", "413", "429", "500", "503"} <= set(operation["responses"])
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        fields = page["components"]["schemas"][name]["properties"]
        assert {"temperature", "min_p", "vllm_xargs", "stream_options", "cache_salt"} <= set(fields)
    answers = page["paths"]["/invocations"]["post"]["responses"]["200"]["content"]
    told = {ref["$ref"].rpartition("/")[2] for ref in answers["application/json"]["schema"]["anyOf"]}
    assert told == {"ChatResponse", "CompletionResponse"}  # as its bodies are of two kinds
    assert "CompletionChunk" in str(answers["text/event-stream"])
    every = [operation for operations in page["paths"].values() for operation in operations.values()]
    assert all("422" not in operation["responses"] for operation in every)
    names = [operation["operationId"] for operation in every]
    assert len(names) == len(set(names))


def test_making_the_page_holds_up_nobody(fake: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second: others go on meanwhile, and it is made once."""
    app, others_went_on, made = build_app(fake.state), threading.Event(), []

    def make() -> dict[str, Any]:
        made.append(others_went_on.wait(20))
        return {"paths": {}}

    monkeypatch.setattr(app, "openapi", make)

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://server", timeout=60
        ) as client:
            asked = [asyncio.create_task(client.get("/openapi.json")) for _ in range(3)]
            assert (await client.get("/version")).status_code == 200
            others_went_on.set()
            return await asyncio.gather(*asked)

    answers = asyncio.run(ask())
    assert [answer.json() for answer in answers] == [{"paths": {}}] * 3 and made == [True]
