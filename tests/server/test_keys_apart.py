"""What is kept apart between the keys of a server: stored responses, cached prefixes, and turns in the queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.base import env
from quire.schema.messages import EngineRequest
from quire.server.callers import NOBODY, Salts, Tenants, note_key
from tests.server.hosted import hosted
from tests.server.live import Live, error_of, live_fake

A, B = {"Authorization": "Bearer alice"}, {"x-api-key": "bob"}
KEYS = ["alice", "bob", "alice"]
PATH = "/v1/responses"
TEXT = "a prompt that is longer than a few blocks of the cache, so that most of it is found again the second time " * 2
IDS = [(7 * i) % 200 + 4 for i in range(160)]
SLOW = {"vllm_xargs": {"sleep": 0.2}}


@contextlib.contextmanager
def storing(folder: Path, **options: Any) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_ENABLE_RESPONSES_API_STORE", "1")
        env.forget_all()
        with live_fake(folder, enable_prompt_tokens_details=True, **options) as found:
            yield found
    env.forget_all()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with storing(tmp_path_factory.mktemp("keys"), api_key=KEYS) as found:
        yield found


def made(server: Live, key: dict[str, str], **more: Any) -> str:
    answer = server.post(PATH, {"input": "Hi", "max_output_tokens": 4, **more}, headers=key)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


# ---- stored responses ----------------------------------------------------------------------------------------------

ASKS: list[tuple[str, str, dict[str, Any]]] = [
    ("GET", "/{id}", {}),
    ("GET", "/{id}?stream=true", {}),
    ("GET", "/{id}/input_items", {}),
    ("POST", "/{id}/cancel", {}),
    ("DELETE", "/{id}", {}),
    ("POST", "", {"input": "and?", "max_output_tokens": 4}),
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("method", "path", "body"), ASKS)
def test_a_response_is_its_makers(server: Live, method: str, path: str, body: dict[str, Any], background: bool) -> None:
    more = {"background": True, "stream": False} if background else {}
    mine = made(server, A, **more)

    def ask(response_id: str, key: dict[str, str]) -> httpx.Response:
        given = {**body, "previous_response_id": response_id} if body else None
        return httpx.request(
            method, server.url + PATH + path.format(id=response_id), json=given, headers=key, timeout=60
        )

    told = error_of(ask(mine, B), 404)
    unknown = error_of(ask("resp_0123456789abcdef", B), 404)
    assert told["message"].replace(mine, "") == unknown["message"].replace("resp_0123456789abcdef", "")
    assert {**told, "message": ""} == {**unknown, "message": ""}
    assert server.client(headers=A).get(f"{PATH}/{mine}").status_code == 200  # and nothing became of it
    assert ask(mine, A).status_code != 404


def test_names_of_one_key_are_free_for_another(server: Live) -> None:
    for key in (A, B):
        assert made(server, key, request_id="chosen") == "resp_chosen"
        again = server.post(PATH, {"input": "Hi", "request_id": "chosen"}, headers=key)
        assert error_of(again)["param"] == "request_id"
    assert server.client(headers=A).delete(f"{PATH}/resp_chosen").json()["deleted"] is True
    assert server.client(headers=B).get(f"{PATH}/resp_chosen").status_code == 200


async def test_an_id_is_taken_when_its_request_begins(server: Live) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

        async def ask(number: int) -> httpx.Response:
            body = {"input": f"number {number}", "max_output_tokens": 6, "request_id": "same", **SLOW}
            return await client.post(PATH, json=body, headers=A)

        answers = await asyncio.gather(*[ask(number) for number in range(4)])
        assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]
        whole = next(answer for answer in answers if answer.status_code == 200).json()
        assert (await client.get(f"{PATH}/resp_same", headers=A)).json() == whole
        for stream in (True, False):  # and after a failure it is free again
            wrong = {"input": "Hi", "request_id": "failed", "stream": stream, "vllm_xargs": {"fail_at": 1}}
            for _ in range(2):
                failed = await client.post(PATH, json=wrong, headers=A)
                assert "already" not in failed.text
        assert (await client.get(f"{PATH}/resp_failed", headers=A)).status_code == 404


# ---- cached prefixes -----------------------------------------------------------------------------------------------

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
    ("/v1/completions", {"prompt": [TEXT, TEXT[5:]], "n": 2, "max_tokens": 1}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 2, "use_beam_search": True, "n": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}),
    ("/invocations", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}),
    ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1, "model": "fake"}),
    ("/v1/responses", {"input": TEXT, "max_output_tokens": 1}),
    ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": {"max_tokens": 1}}),
]


def salts_seen(server: Live, patch: pytest.MonkeyPatch) -> list[str | None]:
    """Of every request that reaches the engine from now on."""
    return watch(server, patch, lambda request: request.cache_salt)


def watch(server: Live, patch: pytest.MonkeyPatch, read: Callable[[EngineRequest], Any]) -> list[Any]:
    seen: list[Any] = []
    client: Any = server.engine.front.client
    submit = client.submit

    def watched(requests: Any) -> None:
        seen.extend(map(read, requests))
        submit(requests)

    patch.setattr(client, "submit", watched)
    return seen


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_prefixes_are_shared_within_a_key_only(
    server: Live, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = salts_seen(server, monkeypatch)

    def salts(key: dict[str, str], **more: Any) -> set[str | None]:
        seen.clear()
        answer = server.post(path, {**body, **more}, headers=key)
        assert answer.status_code == 200, answer.text
        return set(seen)

    plain, own = salts(A), salts(A, cache_salt="own")
    assert len(plain) == len(own) == 1 and None not in plain | own
    assert salts(A) == plain and salts(A, cache_salt="own") == own
    different = [plain, own, salts(A, cache_salt="other"), salts(B), salts(B, cache_salt="own")]
    assert len(set.union(*different)) == 5
    for salt in set.union(*different):
        assert salt is not None and len(salt) == 64 and not any(word in salt for word in ("alice", "bob", "own"))


def cached(server: Live, key: dict[str, str], **more: Any) -> int:
    body = {"prompt": TEXT, "max_tokens": 1, **more}
    answer = server.post("/v1/completions", body, headers=key)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_what_others_asked_is_not_found(server: Live) -> None:
    secret = {"prompt": "Nobody else may know that this was asked, nor how fast it is answered again. " * 4}
    assert cached(server, A, **secret) == 0 and (own := cached(server, A, **secret)) > 100
    assert cached(server, B, **secret) == 0  # as slow as if it had never been asked
    assert cached(server, B, **secret) == own


def test_one_key_or_none_or_switched_off_is_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
        ({}, [{}, A]),
        ({"api_key": ["alice", "alice"]}, [A, A]),
        ({"api_key": KEYS, "prefix_cache_per_key": False}, [A, B]),
    ]
    for number, (options, keys) in enumerate(cases):
        with storing(tmp_path / str(number), **options) as server, monkeypatch.context() as patch:
            seen = salts_seen(server, patch)
            cached(server, keys[0])
            assert cached(server, keys[1]) > 100
            cached(server, keys[1], cache_salt="mine")
            assert seen == [None, None, "mine"]


def test_routes_that_ask_for_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever shows none finds nothing of those who do."""
    with live_fake(tmp_path / "m", api_key=KEYS, api_key_scope="v1", enable_prompt_tokens_details=True) as server:
        seen = salts_seen(server, monkeypatch)
        body = {"prompt": TEXT, "max_tokens": 1}
        server.post("/v1/completions", body, headers=A)
        server.post("/invocations", body, headers=A)
        found = server.post("/invocations", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert found == 0 and seen[0] == seen[1] is not None and seen[2] is None


def test_salts() -> None:
    one, other = Salts(KEYS, b"1" * 32), Salts(KEYS, b"2" * 32)
    asked = [(0, None), (1, None), (0, ""), (0, "a"), (1, "a"), (0, "\ud800")]
    made = [one.salt(caller, own) for caller, own in asked]
    assert len(set(made)) == len(made) and not set(made) & {other.salt(caller, own) for caller, own in asked}
    assert one.salt(NOBODY, None) is None and one.salt(NOBODY, "a") == "a"
    assert Salts.of(["alice", "alice"], b"1" * 32) is None and Salts.of(KEYS, b"1" * 32) is not None


def test_processes_of_one_server_agree(tmp_path: Path) -> None:
    """Four API processes: a prompt that one of them sent is found when another sends it again."""
    arguments = ["--api-server-count", "4", "--api-key", "alice", "bob", "--enable-prompt-tokens-details"]
    with hosted(tmp_path, *arguments, env={"QUIRE_ENABLE_RESPONSES_API_STORE": "0"}) as server:

        def ask(_: int) -> int:
            body = {"prompt": TEXT, "max_tokens": 2, **SLOW}
            answer = httpx.post(server.url + "/v1/completions", json=body, headers=A, timeout=60)
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert ask(0) == 0
        with ThreadPoolExecutor(16) as pool:  # so many connections at once that no process gets them all
            assert min(pool.map(ask, range(32))) > 100


# ---- turns in the queue --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_every_key_is_a_tenant(server: Live, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(server, monkeypatch, lambda request: request.tenant)

    def tenants(key: dict[str, str]) -> set[int]:
        seen.clear()
        answer = server.post(path, body, headers=key)
        assert answer.status_code == 200, answer.text
        return set(seen)

    alice, bob = tenants(A), tenants(B)
    assert len(alice) == len(bob) == 1 and alice != bob and tenants(A) == alice
    assert alice | bob == {1, 2}, "numbers, in the order of the keys"


def test_who_is_a_tenant_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], list[dict[str, str]], int]] = [
        ({}, [{}, A], 1),
        ({"api_key": ["alice", "alice"]}, [A, A], 1),
        ({"api_key": KEYS}, [A, B], 2),
        ({"api_key": KEYS, "fair_scheduling": "none"}, [A, B], 1),
        ({"api_key": KEYS, "fair_scheduling": "address"}, [A, B], 1),
    ]
    for number, (options, keys, num_tenants) in enumerate(cases):
        with live_fake(tmp_path / str(number), **options) as server, monkeypatch.context() as patch:
            seen = watch(server, patch, lambda request: request.tenant)
            for key in keys:
                body = {"prompt": "a", "max_tokens": 1}
                assert server.post("/v1/completions", body, headers=key).status_code == 200
            assert len(set(seen)) == num_tenants, options


def test_tenants_by_key_or_by_address() -> None:
    def scope(address: str | None = None, key: int = NOBODY) -> dict[str, Any]:
        made: dict[str, Any] = {"client": None if address is None else (address, 1)}
        if key != NOBODY:
            note_key(made, key)
        return made

    by_key, by_address = Tenants("key", b"1" * 32), Tenants("address", b"1" * 32)
    assert [by_key.tenant(scope("10.0.0.1", key)) for key in (NOBODY, 0, 1)] == [0, 1, 2]
    one_tenant = [("none", KEYS), ("none", []), ("key", [])]
    several = [("key", KEYS), ("key", KEYS[:1]), ("address", []), ("address", KEYS)]
    assert all(Tenants.of(by, keys, b"1" * 32) is None for by, keys in one_tenant)
    assert all(Tenants.of(by, keys, b"1" * 32) is not None for by, keys in several)
    different = ["10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8:0:1::1", "unix"]
    numbers = [by_address.tenant(scope(address)) for address in different]
    assert len(set(numbers)) == len(different) and all(0 < number <= 256 for number in numbers)
    assert by_address.tenant(scope("2001:db8::ffff:1")) == numbers[2], "a network of 64 bits is one tenant"
    assert by_address.tenant(scope("::ffff:10.0.0.1")) == numbers[0]
    assert by_address.tenant(scope(None)) == 0
    other = [Tenants("address", b"2" * 32).tenant(scope(address)) for address in different]
    assert other != numbers, "says nothing about the address"
    many = {by_address.tenant(scope(f"10.0.{high}.{low}")) for high in range(40) for low in range(250)}
    assert 200 < len(many) <= 256, "any number of addresses is a bounded number of tenants"
