"""Whatever a request brings, the event loop goes on: measured by a task in the loop that only looks at the clocks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from quire.server.openai.completions import CompletionAnswer
from tests.products import marked
from tests.server.live import Live, error_of, live_fake

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST = 0.25  # seconds; the promise is 0.05, on a machine with nothing else to do
TICK = 0.005


class Heartbeat:
    """The longest time for which the loop did not come round: of the clock, or of the processor where that is less.
    What other programs took is no fault of the server's."""

    def __init__(self) -> None:
        self.longest, self._going = 0.0, True

    async def beat(self) -> None:
        last, used = time.monotonic(), time.process_time()
        while self._going:
            await asyncio.sleep(TICK)
            waited, worked = time.monotonic() - last - TICK, time.process_time() - used
            self.longest = max(self.longest, min(waited, worked))
            last, used = time.monotonic(), time.process_time()

    def stop(self) -> None:
        self._going = False


@contextlib.contextmanager
def heartbeat(server: Live) -> Iterator[Heartbeat]:
    heart = Heartbeat()
    future = asyncio.run_coroutine_threadsafe(heart.beat(), server.loop)
    try:
        yield heart
    finally:
        heart.stop()
        future.result(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, frozen_afterwards: None) -> Iterator[Live]:
    with live_fake(tmp_path_factory.mktemp("loop")) as server:
        gc.collect()
        gc.freeze()  # as server/host.py does; looking through all that tests have imported takes half a second
        yield server
        gc.unfreeze()


def post(server: Live, path: str, raw: bytes, key: str = "") -> httpx.Response:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return httpx.post(server.url + path, content=raw, headers=headers, timeout=120)


def _many(part: str, count: int) -> str:
    return ",".join([part] * count)


_MESSAGE = '{"role": "user", "content": "a"}'
_PART = '{"type": "text", "text": "a"}'
_BIAS = ",".join(f'"{number}": 1.5' for number in range(500_000))
# What is sent to a path. Most took the loop seconds before there were limits, and some half a second when nothing but
# the number of values was limited.
BODIES: dict[str, tuple[str, Callable[[], str]]] = {
    "ids": (TEXT, lambda: f'{{"prompt": [{_many("1000", 1_000_000)}]}}'),
    "ids and words": (TEXT, lambda: f'{{"prompt": [{_many("1000", 1_000_000)}, "a"]}}'),
    "lists of ids": (TEXT, lambda: f'{{"prompt": [{_many("[1, 2]", 330_000)}]}}'),
    "prompts": (f"{TEXT}/render", lambda: f'{{"prompt": [{_many(json.dumps("word " * 100), 1000)}]}}'),
    "ids to detokenize": ("/detokenize", lambda: f'{{"tokens": [{_many("97", 1_000_000)}]}}'),
    "ids to generate": ("/inference/v1/generate", lambda: f'{{"token_ids": [{_many("97", 1_000_000)}]}}'),
    "allowed ids": (TEXT, lambda: f'{{"prompt": "a", "allowed_token_ids": [{_many("97", 1_000_000)}]}}'),
    "unknown lists": (TEXT, lambda: f'{{"prompt": "a", "unknown": [{_many("[[]]", 260_000)}]}}'),
    "unknown fields": (TEXT, lambda: '{"prompt": "a"' + "".join(f', "u{n}": 1' for n in range(400_000)) + "}"),
    "bias": (TEXT, lambda: f'{{"prompt": "a", "logit_bias": {{{_BIAS}}}}}'),
    "bias of a response": ("/v1/responses", lambda: f'{{"input": "a", "logit_bias": {{{_BIAS}}}}}'),
    "messages": (CHAT, lambda: f'{{"messages": [{_many(_MESSAGE, 200_000)}]}}'),
    "parts": (CHAT, lambda: f'{{"messages": [{{"role": "user", "content": [{_many(_PART, 200_000)}]}}]}}'),
    "parts, few enough": (CHAT, lambda: f'{{"messages": [{{"role": "user", "content": [{_many(_PART, 21_000)}]}}]}}'),
    "messages, few enough": (CHAT, lambda: f'{{"messages": [{_many(_MESSAGE, 16_000)}]}}'),
    "blocks": ("/v1/messages", lambda: f'{{"max_tokens": 1, "messages": [{_many(_MESSAGE, 16_000)}]}}'),
    "items": ("/v1/responses", lambda: f'{{"input": [{_many(_MESSAGE, 16_000)}]}}'),
    "messages to tokenize": ("/tokenize", lambda: f'{{"messages": [{_many(_MESSAGE, 16_000)}]}}'),
    "tools": (CHAT, lambda: f'{{"messages": [{_MESSAGE}], "tools": [{{"type": "function", "function": {{"name": "f", '
              f'"parameters": {{"a": [{_many("[0.5]", 400_000)}]}}}}}}]}}'),
    "depth": (TEXT, lambda: '{"prompt": "a", "unknown": ' + "[" * 500_000 + "]" * 500_000 + "}"),
    "brackets in a text": (TEXT, lambda: json.dumps({"prompt": "[" * 8_000_000})),
    "a text to tokenize": ("/tokenize", lambda: json.dumps({"prompt": "word " * 1_500_000, "return_token_strs": True})),
    "escapes": (TEXT, lambda: '{"prompt": "' + "\\n" * 4_000_000 + '"}'),
    "a long number": (TEXT, lambda: '{"prompt": "a", "unknown": ' + "1" * 8_000_000 + ".5}"),
}  # fmt: skip


# tests/server/test_loop_time.py measures every callback of a loop in Python for each of these; here it is the real one.
@pytest.mark.parametrize("name", marked(BODIES, list(BODIES)[::3]))
def test_the_loop_goes_on(server: Live, name: str) -> None:
    path, make = BODIES[name]
    raw = make().encode()

    def ask() -> None:
        answer = post(server, path, raw)
        assert answer.status_code in (200, 400), answer.text[:300]

    check_that_the_loop_goes_on(server, ask)


def check_that_the_loop_goes_on(server: Live, ask: Callable[[], None]) -> None:
    """What holds up the loop does so every time; what others on the machine took does not."""
    held_up = []
    for _ in range(3):
        with heartbeat(server) as heart:
            ask()
        if heart.longest < LONGEST:
            return
        held_up.append(round(heart.longest, 3))
    raise AssertionError(f"the loop did not come round for {held_up} seconds")


def test_several_at_once(server: Live) -> None:
    """The lanes are few, so many large bodies take turns and the loop still has its own."""
    raw = BODIES["messages, few enough"][1]().encode()

    async def ask() -> list[int]:
        async with httpx.AsyncClient(timeout=120, headers={"Content-Type": "application/json"}) as client:
            answers = await asyncio.gather(*(client.post(server.url + CHAT, content=raw) for _ in range(4)))
            return [answer.status_code for answer in answers]

    def ask_and_look() -> None:
        assert asyncio.run(ask()) == [400] * 4  # too long for the model

    check_that_the_loop_goes_on(server, ask_and_look)


def test_ids_in_an_array_are_the_same_prompt(tmp_path: Path) -> None:
    """Read into arrays or into lists, ids give the same answers."""
    ids = [97 + number % 26 for number in range(300)]
    asked = [
        ({"prompt": ids, "max_tokens": 3}, TEXT),
        ({"prompt": [ids, ids[:7]], "max_tokens": 3}, TEXT),
        ({"prompt": ids * 2000, "max_tokens": 3, "truncate_prompt_tokens": 20}, TEXT),
        ({"prompt": ids * 2000, "max_tokens": 3, "truncate_prompt_tokens": 20, "truncation_side": "right"}, TEXT),
        ({"prompt": "a", "allowed_token_ids": ids[:26], "max_tokens": 3}, TEXT),
        ({"token_ids": ids, "sampling_params": {"max_tokens": 3}}, "/inference/v1/generate"),
        ({"tokens": ids}, "/detokenize"),
    ]
    found = []
    for values in (1 << 20, 1024):
        with live_fake(tmp_path / str(values), max_json_values=values) as one:
            for body, path in asked:
                pad = {"unknown": [1] * 900}  # so that the smaller limit needs the ids to be taken out
                answer = one.post(path, body if path != TEXT else body | pad).json()
                found.append({name: answer[name] for name in ("usage", "choices", "prompt") if name in answer})
    assert len(found) == 2 * len(asked) and found[: len(asked)] == found[len(asked) :]
    assert found[0]["usage"]["prompt_tokens"] == 300 and found[2]["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize("given", ["[1, 2.5]", "[1, 99999999999]", "[[1], [2], 3]", "[1, [2]]", "[1, -]", "[1, 2,]"])
def test_ids_that_are_none(server: Live, given: str) -> None:
    raw = f'{{"prompt": [{_many("7", 70_000)}, {given[1:]}}}'
    error = error_of(post(server, TEXT, raw.encode()))
    assert error["param"] in ("prompt", "body"), error


def test_many_log_probabilities_are_written_in_a_lane(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a few hundred tokens are not worth it. What comes in one step is bounded in the same way."""
    seen: list[str] = []
    whole = CompletionAnswer.whole

    def spy(self: CompletionAnswer) -> bytes:
        seen.append(threading.current_thread().name)
        return whole(self)

    monkeypatch.setattr(CompletionAnswer, "whole", spy)
    body = {"echo": True, "logprobs": 2, "max_tokens": 2}
    assert server.post(TEXT, body | {"prompt": ["a" * 500] * 4}).status_code == 200
    assert server.post(TEXT, body | {"prompt": "a" * 500}).status_code == 200
    many, few = seen
    assert "lane" in many and "lane" not in few


def test_a_light_prompt_does_not_wait_for_heavy_ones(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six heavy texts are in the tokenizer when a light one comes; it is answered while they are still there."""
    tokenizer = server.engine.tokenizer
    assert tokenizer is not None
    encode, release = tokenizer.encode_batch, []

    def slow(texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        while any(len(text) > 300_000 for text in texts) and not release:
            time.sleep(0.01)
        return encode([text[:100_000] for text in texts], add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode_batch", slow)
    heavy = {"prompt": "x" * 310_000, "truncate_prompt_tokens": 5, "max_tokens": 1}
    light = {"prompt": "x" * 5_000, "truncate_prompt_tokens": 5, "max_tokens": 1}

    async def ask() -> tuple[bool, int]:
        async with httpx.AsyncClient(timeout=60) as client:
            monkeypatch.setattr(type(server.engine.front.inputs), "check_length", lambda *args, **kwargs: None)
            waiting = [asyncio.ensure_future(client.post(server.url + TEXT, json=heavy)) for _ in range(6)]
            await asyncio.sleep(1.0)
            first = await asyncio.wait_for(client.post(server.url + TEXT, json=light), 60)
            ended = any(one.done() for one in waiting)
            release.append(True)
            assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200] * 6
            return ended, first.status_code

    try:
        assert asyncio.run(ask()) == (False, 200)
    finally:
        release.append(True)
