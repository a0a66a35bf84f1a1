"""The store of responses keeps to its limits, and AnswerParts gives the same answer however its Deltas are cut."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from quire.base import env
from quire.config.server import server_config
from quire.schema.errors import ConfigError, InputError, OverloadedError
from quire.server.openai.responses_store import NoSuchResponseError, Record, ResponseStore
from quire.server.parts import AnswerParts, Change, Kind
from quire.text.parse.base import CallDelta, Delta


class Answer:
    def __init__(self, response_id: str, size: int = 10) -> None:
        self.id, self.size = response_id, size

    def whole(self) -> bytes:
        return json.dumps({"id": self.id, "text": "a" * self.size}).encode()

    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "assistant", "content": "yes"}]


ME, YOU = 0, 1  # keys


def kept(
    store: ResponseStore, name: str, size: int = 10, *, ended: bool = True, caller: int = ME, items: Any = None
) -> Record:
    answer: Any = Answer(name, size)
    flow: Any = None if ended else object()
    record = Record(answer, [{"role": "user", "content": "hm?"}], caller, items=items, flow=flow, with_events=not ended)
    store.put(record)
    if ended:
        store.grow(record, record.end())
    return record


def test_the_one_not_used_for_longest_goes() -> None:
    store = ResponseStore(3, 1 << 20)
    for name in "abc":
        kept(store, name)
    assert store.get(ME, "a").messages()[-1] == {"role": "assistant", "content": "yes"}
    kept(store, "d")
    assert (ME, "b") not in store and all((ME, name) in store for name in "acd")
    with pytest.raises(NoSuchResponseError, match="'b' not found"):
        store.get(ME, "b")


def test_callers_do_not_see_each_others() -> None:
    store = ResponseStore(5, 1 << 20)
    mine, yours = kept(store, "a", 10), kept(store, "a", 20, caller=YOU)
    assert store.get(ME, "a") is mine and store.get(YOU, "a") is yours
    kept(store, "b", caller=YOU)
    told = []
    for name in ("b", "c"):
        with pytest.raises(NoSuchResponseError) as refused:
            store.get(ME, name)
        told.append(str(refused.value).replace(repr(name), "it"))
    assert told[0] == told[1]


def test_an_id_is_taken_while_its_request_runs() -> None:
    store = ResponseStore(5, 1 << 20)
    with store.take(ME, "a"), store.take(YOU, "a"):
        with pytest.raises(InputError, match="already a response with the id a"), store.take(ME, "a"):
            pass
        kept(store, "a")
    with pytest.raises(InputError, match="already"), store.take(ME, "a"):
        pass
    with store.take(YOU, "a"):  # nothing came of the first
        pass


def test_what_is_replaced_gives_its_bytes_back() -> None:
    store = ResponseStore(5, 1 << 20)
    old = kept(store, "a", 5000)
    kept(store, "a", 10)
    assert store.num_bytes == store.get(ME, "a").num_bytes < 5000 and len(store) == 1
    store.grow(old, 7000)  # late news of what is no longer there
    store.remove(old)
    assert store.num_bytes == store.get(ME, "a").num_bytes < 5000 and len(store) == 1
    full = ResponseStore(1, 1 << 20)
    kept(full, "a")
    kept(full, "a")  # needs no further room
    assert len(full) == 1


def test_input_counts_from_the_beginning() -> None:
    store, long = ResponseStore(100, 5000), [{"text": "a" * 2000}]
    kept(store, "old", 1000)
    for name in "ab":
        kept(store, name, ended=False, items=long)
    assert (ME, "old") not in store and 4000 < store.num_bytes <= 5000
    with pytest.raises(OverloadedError, match=r"the limit is 5000 \(QUIRE_RESPONSES_STORE_BYTES"):
        kept(store, "c", ended=False, items=long)
    assert len(store) == 2 and store.num_bytes <= 5000
    whole = ResponseStore(100, 5000)
    kept(whole, "a", 1000)
    with pytest.raises(OverloadedError):
        kept(whole, "b", items=[{"text": "a" * 6000}])
    assert (ME, "a") in whole  # what can never fit drops nobody


def test_bytes_are_counted() -> None:
    store = ResponseStore(100, 5000)
    for number in range(20):
        kept(store, str(number), 1000)
        assert store.num_bytes <= 5000
    assert 1 <= len(store) <= 4 and (ME, "19") in store
    kept(store, "large", 6000)
    assert (ME, "large") not in store
    for name in map(str, range(20)):
        if (ME, name) in store:
            store.remove(store.get(ME, name))
    assert store.num_bytes == 0 and len(store) == 0


def test_what_is_being_made_stays() -> None:
    store = ResponseStore(2, 1000)
    first, second = kept(store, "a", ended=False), kept(store, "b", ended=False)
    with pytest.raises(OverloadedError, match="limit is 2"):
        kept(store, "c")
    store.grow(first, first.add([b"x" * 2000]))
    assert (ME, "a") in store and (ME, "b") in store  # over the limit until one has ended
    store.grow(second, second.end())
    assert (ME, "b") in store
    store.grow(first, first.end())
    assert (ME, "a") not in store and store.num_bytes <= 1000


async def test_followers_get_every_event_in_order() -> None:
    record = kept(ResponseStore(5, 1 << 20), "a", ended=False)
    record.add([b"0", b"1"])

    async def follow(first: int) -> list[bytes]:
        return [event async for event in record.follow(first)]

    readers = [asyncio.create_task(follow(first)) for first in (0, 1, 3)]
    for number in range(2, 6):
        await asyncio.sleep(0)
        record.add([b"%d" % number])
    record.end()
    assert [b"".join(found) for found in await asyncio.gather(*readers)] == [b"012345", b"12345", b"345"]


def test_several_processes_cannot_share_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    env.forget_all()
    try:
        with pytest.raises(ConfigError, match="api_server_count is 2"):
            server_config(api_server_count=2)
        server_config(api_server_count=1)
    finally:
        monkeypatch.undo()
        env.forget_all()


def test_parts() -> None:
    rng = random.Random(0)
    pieces = [
        (Kind.THOUGHT, "hm, hm"),
        (Kind.TEXT, "I look."),
        (Kind.CALL, '{"a": 1}'),
        (Kind.CALL, "{}"),
        (Kind.TEXT, "ok"),
    ]
    for _ in range(50):
        deltas: list[Delta] = []
        call = -1
        for kind, text in pieces:
            if kind is Kind.CALL:
                call += 1
                deltas.append(Delta(call=CallDelta(call, "", f"id{call}", "f")))
            while text:
                size = rng.randint(1, len(text))
                part, text = text[:size], text[size:]
                if kind is Kind.CALL:
                    deltas.append(Delta(call=CallDelta(call, part)))
                else:
                    deltas.append(Delta(part) if kind is Kind.TEXT else Delta(reasoning=part))
        parts = AnswerParts()
        steps = [*parts.feed(deltas), *parts.end(), *parts.end()]
        assert [(part.kind, part.text) for part in parts.all] == pieces
        assert [part.call_id for part in parts.all if part.kind is Kind.CALL] == ["id0", "id1"]
        for part in parts.all:
            mine = [step for step in steps if step.part is part]
            assert mine[0].change is Change.OPENED and mine[-1].change is Change.CLOSED
            assert "".join(step.text for step in mine) == part.text
