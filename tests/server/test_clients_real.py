"""The client libraries people use, against the embedded model over a real socket."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import openai
import pytest

from tests.server.live import Live

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no network for prices
ASKED: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(smol: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0)


def test_openai_chat(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smol", messages=ASKED, temperature=0, max_tokens=12)
    assert "Paris" in (whole.choices[0].message.content or "") and whole.usage is not None
    assert whole.usage.completion_tokens == 12 or whole.choices[0].finish_reason == "stop"
    parts = list(
        client.chat.completions.create(
            model="smol", messages=ASKED, temperature=0, max_tokens=12, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_chat_extras(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=ASKED, temperature=0.8, seed=7, n=2, max_completion_tokens=5, logprobs=True,
        top_logprobs=3, stop=["\n"], extra_body={"top_k": 20, "min_p": 0.05, "chat_template_kwargs": {"x": True}},
    )  # fmt: skip
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3 and entry.bytes is not None
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True) and entry.logprob <= values[0]


def test_openai_completions_and_models(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="smol", prompt="The capital of France is", temperature=0, max_tokens=5,
                                      logprobs=2)  # fmt: skip
    assert "Paris" in whole.choices[0].text and whole.choices[0].logprobs is not None
    streamed = client.completions.create(model="smol", prompt="The capital of France is", temperature=0, max_tokens=5,
                                         stream=True)  # fmt: skip
    assert "".join(part.choices[0].text for part in streamed) == whole.choices[0].text
    assert [model.id for model in client.models.list()] == ["smol"] and client.models.retrieve("smol").id == "smol"


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nope", messages=ASKED)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="smol", messages=ASKED, temperature=-1)
    assert caught.value.param == "temperature"


async def test_openai_async(smol: Live) -> None:
    async with openai.AsyncOpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0) as client:

        async def whole(prompt: str) -> str:
            found = await client.completions.create(model="smol", prompt=prompt, temperature=0, max_tokens=6)
            return found.choices[0].text

        async def streamed(prompt: str) -> str:
            parts = await client.completions.create(
                model="smol", prompt=prompt, temperature=0, max_tokens=6, stream=True
            )
            return "".join([part.choices[0].text async for part in parts])

        prompts = [f"Count: {i}, {i + 1}," for i in range(6)]
        alone = await asyncio.gather(*map(whole, prompts))
        assert await asyncio.gather(*map(streamed, prompts)) == alone
        chat = await client.chat.completions.create(model="smol", messages=ASKED, temperature=0, max_tokens=12)
        assert "Paris" in (chat.choices[0].message.content or "")


def test_leaving_an_openai_stream_ends_the_request(client: openai.OpenAI, smol: Live) -> None:
    stream = client.completions.create(model="smol", prompt="Once", max_tokens=400, stream=True,
                                       extra_body={"ignore_eos": True})  # fmt: skip
    next(iter(stream))
    stream.close()
    for _ in range(600):
        if not len(smol.engine.front.outputs):
            return
        asyncio.run(asyncio.sleep(0.05))
    pytest.fail("the request still runs")


@pytest.fixture
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """litellm puts folders into sys.path when it is imported."""
    monkeypatch.setattr(sys, "path", sys.path[:])


@pytest.mark.usefixtures("same_path")
def test_litellm(smol: Live) -> None:
    litellm = pytest.importorskip("litellm")
    given = {"model": "hosted_vllm/smol", "api_base": f"{smol.url}/v1", "api_key": "none", "messages": ASKED,
             "temperature": 0, "max_tokens": 12}  # fmt: skip
    whole = litellm.completion(**given)
    assert "Paris" in whole.choices[0].message.content and whole.usage.completion_tokens > 0
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(**given, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    as_openai = litellm.completion(**{**given, "model": "openai/smol"})
    assert as_openai.choices[0].message.content == whole.choices[0].message.content


@pytest.mark.usefixtures("same_path")
async def test_litellm_async(smol: Live) -> None:
    litellm = pytest.importorskip("litellm")
    found = await litellm.acompletion(
        model="openai/smol", api_base=f"{smol.url}/v1", api_key="none", messages=ASKED, temperature=0, max_tokens=12,
        stream=True,
    )  # fmt: skip
    assert "Paris" in "".join([part.choices[0].delta.content or "" async for part in found])


async def test_langchain(smol: Live) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(model="smol", base_url=f"{smol.url}/v1", api_key="none", temperature=0, max_tokens=12)
    whole = model.invoke("What is the capital of France?")
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
    assert "".join(part.content for part in model.stream("What is the capital of France?")) == whole.content
    assert (await model.ainvoke("What is the capital of France?")).content == whole.content
    assert "".join([p.content async for p in model.astream("What is the capital of France?")]) == whole.content
    plain = langchain.OpenAI(model="smol", base_url=f"{smol.url}/v1", api_key="none", temperature=0, max_tokens=5)
    assert "Paris" in plain.invoke("The capital of France is")
