"""What benchmarks/hostile.py sends beside honest streams: every attack is one small function, run again and again.

    python benchmarks/hostile_attacks.py --url http://127.0.0.1:8000 --key MINE --victim-key THEIRS --seconds 60

In: a server on this machine, two of its keys. Out (stdout, JSON): per attack how often, which statuses, the slowest
refusal, and which promises were broken. Payloads are made before the clock starts and sent over plain sockets at a
bounded rate, so that the sender takes little of the processor that the server needs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import random
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
from hostile_wire import NO_ANSWER, BrokenError, Door, Rate, Tally, Target, parse, read_all

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
FORGED = "FORGED-LINE"  # never at the beginning of a line of the log


# ---- the list ---------------------------------------------------------------------------------------------------

Attack = Callable[[Door], Awaitable[None]]
ATTACKS: dict[str, tuple[str, float, Attack]] = {}  # name -> subject, seconds between two rounds


def attack(subject: str, pause: float = 3.0) -> Callable[[Attack], Attack]:
    def keep(function: Attack) -> Attack:
        ATTACKS[function.__name__] = subject, pause, function
        return function

    return keep


_serial = itertools.count()


def fresh() -> str:
    """Makes a payload one that no cache has."""
    return f"{os.getpid():x}x{next(_serial):x}"


# ---- connections, without a key ---------------------------------------------------------------------------------


async def _endless(door: Door, begin: bytes, piece: bytes, what: str, most: int = 4 << 20) -> None:
    """It must be cut off long before `most` bytes."""
    head = door.head(TEXT, ["Transfer-Encoding: chunked"], key=None)
    sent = 0

    def pieces() -> Iterable[bytes]:
        nonlocal sent
        yield head + begin
        while sent < most:
            sent += len(piece)
            yield piece

    answer = await door.say(pieces(), what=what, patience=30)
    await door.must(answer, (NO_ANSWER, 400, 401, 408, 413, 431, 503), what)
    if sent >= most:
        raise BrokenError(f"{what}: {most} bytes were taken")


@attack("trailers: one without end")
async def endless_trailer(door: Door) -> None:
    await _endless(door, b"2\r\n{}\r\n0\r\nx: ", b"a" * 16384, "a trailer without end")


@attack("trailers: very many")
async def many_trailers(door: Door) -> None:
    await _endless(door, b"2\r\n{}\r\n0\r\n", b"x: a\r\n" * 2048, "trailers without end")


@attack("trailers: chunk extensions without end")
async def endless_extension(door: Door) -> None:
    await _endless(door, b"2;x=", b"a" * 16384, "a chunk extension without end")


@attack("slow clients: a trailer byte by byte", pause=10)
async def slow_trailer(door: Door) -> None:
    head = door.head(TEXT, ["Transfer-Encoding: chunked"]) + b"2\r\n{}\r\n0\r\nx: "
    async with door.connect() as (_, writer):
        await _drip(writer, [head, *([b"a"] * 20)], 1.0)


@attack("slow clients: heads that never end", pause=10)
async def slow_heads(door: Door) -> None:
    async def one() -> None:
        async with door.connect() as (_, writer):
            await _drip(writer, [b"GET /health HTTP/1.1\r\n", *([b"x: y\r\n"] * 10)], 2.0)

    await asyncio.gather(*(one() for _ in range(16)), return_exceptions=True)


@attack("slow clients: bodies of 4 MB at 1 KB a second", pause=10)
async def slow_bodies(door: Door) -> None:
    async def one() -> None:
        head = door.head(TEXT, [f"Content-Length: {4 << 20}"])
        async with door.connect() as (_, writer):
            await _drip(writer, [head, *([b" " * 1024] * 60)], 1.0)

    await asyncio.gather(*(one() for _ in range(16)), return_exceptions=True)


async def _drip(writer: asyncio.StreamWriter, pieces: Sequence[bytes], pause: float) -> None:
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
            if writer.is_closing():
                return


@attack("connections: 200 that say nothing", pause=15)
async def idle_connections(door: Door) -> None:
    async with contextlib.AsyncExitStack() as opened:
        for _ in range(200):
            with contextlib.suppress(OSError):
                await opened.enter_async_context(door.connect())
        await asyncio.sleep(5)


@attack("heads: a header without end, and very many")
async def endless_head(door: Door) -> None:
    for piece in (b"a" * 16384, b"\r\nx: a" * 2048):
        answer = await door.say([b"GET /health HTTP/1.1\r\nx: ", *([piece] * 64)], what="an endless head", patience=30)
        await door.must(answer, (NO_ANSWER, 400, 431), "an endless head")


@attack("bodies: declared as a terabyte, and chunks over the limit", pause=10)
async def oversized_bodies(door: Door) -> None:
    head = door.head(TEXT, [f"Content-Length: {1 << 40}"])
    answer = await door.say([head, b" " * 65536], what="a body of a terabyte")
    await door.must(answer, (NO_ANSWER, 413), "a body of a terabyte")
    head = door.head(TEXT, ["Transfer-Encoding: chunked"])
    chunk = b"40000\r\n" + b" " * 0x40000 + b"\r\n"
    answer = await door.say([head, *([chunk] * 64)], what="chunks over the limit")
    await door.must(answer, (NO_ANSWER, 413), "chunks over the limit")


@attack("framing: lengths that contradict, broken chunks")
async def wrong_framing(door: Door) -> None:
    for extra, body in (
        (["Content-Length: 2", "Transfer-Encoding: chunked"], b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"),
        (["Content-Length: 2", "Content-Length: 40"], b"{}GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"),
        (["Content-Length: -1"], b"{}"),
        (["Transfer-Encoding: chunked"], b"zz\r\n{}\r\n0\r\n\r\n"),
        (["Transfer-Encoding: chunked"], b"ffffffffffffffffff\r\n{}\r\n0\r\n\r\n"),
        (["Transfer-Encoding: xchunked"], b"{}"),
    ):
        answer = await door.say([door.head(TEXT, extra) + body], what=f"framing {extra}", patience=90)
        await door.must(answer, (NO_ANSWER, 400, 411, 413, 501), f"framing {extra}")


@attack("connections: pipelined requests, read late")
async def pipelined(door: Door) -> None:
    async with door.connect() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        await asyncio.sleep(2)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        found = (await asyncio.wait_for(read_all(reader), 60)).count(b"HTTP/1.1 200")
    if found < 100:
        raise BrokenError(f"{found} of 100 pipelined requests were answered 200")


# ---- streams that are left --------------------------------------------------------------------------------------


def _stream(door: Door, **more: Any) -> bytes:
    body = json.dumps({"prompt": f"Count: {fresh()}", "stream": True, "temperature": 0, "ignore_eos": True, **more})
    return door.head(TEXT, [f"Content-Length: {len(body)}"]) + body.encode()


@attack("streams: clients that hang up")
async def hang_ups(door: Door) -> None:
    for read in (0, 0, 1, 200):
        async with door.connect() as (reader, writer):
            writer.write(_stream(door, max_tokens=256))
            await writer.drain()
            if read:
                await reader.read(read)


@attack("streams: a client that never reads", pause=10)
async def deaf_reader(door: Door) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (door.target.host, door.target.port))
        await loop.sock_sendall(sock, _stream(door, max_tokens=64, logprobs=5))
        await asyncio.sleep(20)


# ---- one small request ------------------------------------------------------------------------------------------


def _small(name: str, subject: str, path: str, body: bytes, statuses: Sequence[int], pause: float = 10.0) -> None:
    """An attack that is one request, sent as it is each time."""

    async def send(door: Door) -> None:
        await door.must(await door.send(path, body), (*statuses, 503), name)

    send.__name__ = name
    attack(subject, pause)(send)


def _asks(**fields: Any) -> bytes:
    return json.dumps({"prompt": "a", "max_tokens": 1, "temperature": 0, **fields}).encode()


def define_small() -> None:
    keywords = {"type": "object", **{f"unknown-{i}": 1 for i in range(60_000)}}
    _small("unknown_keywords", "one request: a schema with 60,000 unknown keywords", TEXT,
           _asks(structured_outputs={"json": keywords}), (200, 400))  # fmt: skip
    _small("long_bad_words", "one request: 1,024 long bad_words", TEXT, _asks(bad_words=["x" * 1000] * 1024), (400,))
    for count, wanted in ((900_000, (400,)), (3_000_000, (400, 413))):
        _small(f"detokenize_{count}", f"one request: /detokenize with {count} ids", "/detokenize",
               b'{"tokens": [' + b"1," * count + b"1]}", wanted)  # fmt: skip
    for path in (TEXT, CHAT, "/v1/messages", RESPONSES):
        _small(f"nested_lists{path}", f"one request: an unknown field of 2,000,000 lists to {path}", path,
               b'{"unknown": [' + b"[]," * 2_000_000 + b"[]]}", (400,))  # fmt: skip
    _small("unknown_values", "one request: an unknown field of 900,000 numbers", TEXT,
           b'{"prompt": "a", "max_tokens": 1, "unknown": [' + b"1," * 900_000 + b"1]}", (200, 400))  # fmt: skip
    for count in (900_000, 3_500_000):
        _small(f"prompt_of_ids_{count}", f"one request: a prompt of {count} ids", TEXT,
               b'{"prompt": [' + b"1," * count + b"1]}", (400,))  # fmt: skip
    _small("property_regex", "one request: \\p{ 5,250 times in a regex", TEXT,
           _asks(structured_outputs={"regex": "\\p{" * 5250}), (400,))  # fmt: skip
    _small("deep_body", "one request: 1,000,000 levels", CHAT, b'{"messages":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
           (400,))  # fmt: skip
    _small(
        "wrong_messages", "one request: 300,000 faults", CHAT, json.dumps({"messages": [1] * 300_000}).encode(), (400,)
    )
    text = "x" * 7_900_000
    for path, body in (
        (TEXT, {"prompt": text, "max_tokens": 1}),
        (CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
        (RESPONSES, {"input": text, "store": False}),
        ("/tokenize", {"prompt": text}),
    ):
        _small(
            f"long_text{path}", f"long prompts: 7.9 MB of text to {path}", path, json.dumps(body).encode(), (200, 400)
        )
    salt = "s" * 1_000_000
    prompts = [f"p{i}" for i in range(64)]
    large: dict[str, dict[str, Any]] = {
        "cache_salt": {"cache_salt": salt},
        "vllm_xargs": {"vllm_xargs": {"a": salt}},
        "structured_outputs": {"structured_outputs": {"choice": ["a" * 1000 + str(i) for i in range(900)]}},
        "allowed_token_ids": {"allowed_token_ids": list(range(48_000))},
    }
    for name, fields in large.items():
        _small(f"fan_out_{name}", f"bytes times answers: {name} of 64 prompts with n 32", TEXT,
               _asks(**{"prompt": prompts, "n": 32, **fields}), (400,), 20.0)  # fmt: skip
    _small("fan_out_logprobs", "bytes times answers: 20 logprobs at 1,000 tokens of 64 prompts with n 32", TEXT,
           _asks(prompt=prompts, n=32, logprobs=20, max_tokens=1000), (400,), 20.0)  # fmt: skip
    _small("beams", "beams times prompts: 64 of 64", TEXT,
           _asks(prompt=prompts, n=64, use_beam_search=True, max_tokens=256), (400,), 20.0)  # fmt: skip


# ---- answers that would be 500 ----------------------------------------------------------------------------------

_DEEP = "[" * 100_000 + "]" * 100_000


def _calls(arguments: str) -> list[Any]:
    return [*HI, {"role": "assistant", "tool_calls": [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}]}]  # fmt: skip


FAULTS: list[tuple[str, bytes]] = [
    ("/invocations", b"{bad"),
    ("/invocations", b'{"prompt": "\xff"}'),
    *((TEXT, _asks(structured_outputs={"json": schema})) for schema in (
        {"type": "object", "required": [{}], "properties": {"a": {}}},
        {"type": "object", "required": 5, "properties": {"a": {}}},
        {"type": "string", "pattern": "a{" + "9" * 5000 + "}"},
        {"$ref": "#/nowhere"}, {"$ref": "https://example.com/schema.json"}, {"$ref": 5},
    )),
    (TEXT, _asks(structured_outputs={"regex": "a{" + "9" * 5000})),
    *((TEXT, _asks(response_format={"type": "structural_tag", "format": form})) for form in (
        {"type": "regex", "pattern": 5}, {"type": {}}, 5,
    )),
    *((TEXT, _asks(n=2, use_beam_search=True, length_penalty=penalty)) for penalty in (1e6, -1e6)),
    (CHAT, json.dumps({"messages": _calls(_DEEP), "max_tokens": 2}).encode()),
    (TEXT, _asks(allowed_token_ids=[2], min_tokens=2, max_tokens=4)),
]  # fmt: skip


@attack("faults of a client: each is answered 4xx", pause=5)
async def faults(door: Door) -> None:
    for path, body in FAULTS:
        answer = await door.send(path, body)
        await door.must(answer, (200, 400, 503), f"{path} {body[:80]!r}")


# ---- constraints, templates, answers ----------------------------------------------------------------------------


@attack("constraints: compiled for nobody, beside an honest one", pause=15)
async def abandoned_grammars(door: Door) -> None:
    for _ in range(7):
        regex = f"(x+x+)+{fresh()}" + "(a|b|ab){1,400}(c|d|cd){1,400}"
        body = _asks(structured_outputs={"regex": regex}, max_tokens=8)
        async with door.connect() as (_, writer):
            writer.write(door.head(TEXT, [f"Content-Length: {len(body)}"]) + body)
            await writer.drain()
            await asyncio.sleep(0.1)
    honest = {"choice": [f"yes {fresh()}", "no"]}
    answer = await door.ask(TEXT, {"prompt": "A:", "max_tokens": 4, "structured_outputs": honest})
    await door.must(answer, (200,), "an honest constraint")
    if answer.seconds > 20:
        raise BrokenError(f"an honest constraint took {answer.seconds:.1f} s behind abandoned ones")


TEMPLATES = [
    "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "{% if a %}" * 20_000,
    "{{ a" + ".b" * 100_000 + " }}",
    "{% for i in range(999999999) %}x{% endfor %}",
    "{{ 'x' * 999999999999 }}",
    "{% set a = namespace(x='x') %}{% for i in range(64) %}{% set a.x = a.x ~ a.x %}{% endfor %}",
    "{{ ''.__class__.__mro__ }}",
    "{{ 1" + " + 1" * 50_000 + " }}",
    "{# " + "x" * 500_000 + " #}{{ messages[0].content }}",
]


@attack("templates of requests: costly to parse, to read and to render", pause=15)
async def request_templates(door: Door) -> None:
    for template in TEMPLATES:
        body = {"messages": HI, "max_tokens": 1, "chat_template": template + "{# " + fresh() + " #}"}
        answer = await door.ask(CHAT, body)
        await door.must(answer, (200, 400, 503), f"template {template[:30]!r}")


@attack("answers: repetition detection of any size over a long output", pause=20)
async def repetition(door: Door) -> None:
    """Every size that fits is looked at. The answer comes as slowly as those of everyone else: its tokens are few."""
    rule = {"max_pattern_size": 1_000_000, "min_pattern_size": 1, "min_count": 16}
    body = {"prompt": "a a a a", "max_tokens": 64, "ignore_eos": True, "repetition_detection": rule}
    await door.must(await door.ask(TEXT, body), (200, 400), "repetition detection")


# ---- other people's things --------------------------------------------------------------------------------------


@attack("isolation: stored responses of another key", pause=10)
async def stored_responses(door: Door) -> None:
    victim = door.target.victim_key
    asked = {"input": f"My secret is {fresh()}", "max_output_tokens": 4, "temperature": 0}
    made = await door.ask(RESPONSES, asked, key=victim)
    await door.must(made, (200,), "a response to store")
    kept = f"{RESPONSES}/{made.json()['id']}"
    for method, path in (("GET", kept), ("GET", f"{kept}/input_items"), ("POST", f"{kept}/cancel"), ("DELETE", kept)):
        await door.must(await door.send(path, method=method), (404,), f"{method} of another key's response")
    follow = {"input": "Repeat it.", "previous_response_id": made.json()["id"], "max_output_tokens": 4}
    await door.must(await door.ask(RESPONSES, follow), (400, 404), "previous_response_id of another key")
    await door.must(await door.send(kept, method="GET", key=victim), (200,), "one's own response")


@attack("isolation: the prefix cache tells nothing of another key's prompts", pause=10)
async def cached_prompts(door: Door) -> None:
    prompt = f"{fresh()} is what nobody else may know. " * 12
    for key, whose in ((door.target.victim_key, "first"), ("", "another"), (door.target.victim_key, "own")):
        answer = await door.ask(TEXT, {"prompt": prompt, "max_tokens": 1}, key=key)
        await door.must(answer, (200,), "a prompt")
        num_cached = (answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if whose == "another" and num_cached:
            raise BrokenError(f"{num_cached} tokens of another key's prompt were found in the cache")
        if whose == "own" and not num_cached:
            raise BrokenError("one's own prompt is not cached: this attack shows nothing")


@attack("keys: everything without one")
async def without_a_key(door: Door) -> None:
    for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("GET", "/load"), ("GET", "//v1/models"),
                         ("GET", "/v1/../v1/models"), ("GET", "/%76%31/models"), ("POST", "/tokenize")):  # fmt: skip
        await door.must(await door.send(path, b"{}", key=None, method=method), (401,), f"{method} {path}")


@attack("log: lines made up by a client")
async def forged_lines(door: Door) -> None:
    line = f"a\r\n{FORGED} INFO all is well\x1b[2J\n{FORGED}"
    answer = await door.ask(TEXT, {"prompt": line, "max_tokens": 1, "model": line})
    await door.must(answer, (400, 404), "a forged model name")
    body = {"prompt": line, "max_tokens": 1, f"field-{fresh()}{line}": 1, "request_id": line}
    await door.must(await door.ask(TEXT, body), (200, 400), "a forged field")
    await door.ask(CHAT, {"messages": [{"role": line, "content": line}], "max_tokens": 1})
    await door.say([door.head(f"/v1/models/{FORGED}%0a{FORGED}%1b[2J", method="GET")], what="a forged path")


@attack("sockets of the server: frames that are no message", pause=10)
async def stray_frames(door: Door) -> None:
    """As somebody who already is the server's own user; others cannot enter the folder."""
    if door.target.sockets is None:
        return
    context = zmq.Context.instance()
    for path in Path(door.target.sockets).rglob("*"):
        if not path.is_socket():
            continue
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(f"ipc://{path}")
            for frames in ([b""], [b"", b"\xff" * 100], [b"x"] * 50, [b"\x00", b"\x93", b"\xc1"]):
                with contextlib.suppress(zmq.ZMQError):
                    dealer.send_multipart(frames, zmq.NOBLOCK)
            await asyncio.sleep(0.2)


# ---- fuzzers ----------------------------------------------------------------------------------------------------

_rng = random.Random(0)
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 1e308, -0.0, "", "a", "\u0000", "\ud7ff", "x" * 5000, [], {},
    [[]], [None], {"": None}, [{}], ["a", 1], {"type": "json_object"}, {"a": {"b": [1]}}, "auto", "none", [0.5], [-1],
    [2**40],
]  # fmt: skip
SEEDS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "a", "max_tokens": 2, "n": 1, "stop": ["x"], "logprobs": 1, "echo": False, "stream": False,
            "temperature": 0.5, "top_k": 3, "logit_bias": {"5": 1}, "allowed_token_ids": [5], "bad_words": ["b"],
            "structured_outputs": {"choice": ["a"]}, "seed": 1, "stop_token_ids": [5], "prompt_logprobs": 1}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2, "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}], "tool_choice": "none",
        "response_format": {"type": "text"}, "logprobs": True, "top_logprobs": 2, "stream": True}),
    ("/v1/messages", {"max_tokens": 2, "messages": [{"role": "user", "content": "a"}], "system": "b", "tools": [],
                      "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "temperature": 0, "top_k": 1}),
    (RESPONSES, {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 2, "instructions": "b",
                 "store": False, "text": {"format": {"type": "text"}}, "reasoning": {}, "tools": [], "include": []}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": {"max_tokens": 2}}),
]  # fmt: skip


@attack("fuzzer: bodies with odd values in odd places", pause=2)
async def fuzz_bodies(door: Door) -> None:
    for _ in range(4):
        path, seed = _rng.choice(SEEDS)
        body = _mutated(seed)
        answer = await door.ask(path, body)
        if answer.status == NO_ANSWER:
            raise BrokenError(f"{path} {json.dumps(body)[:300]}: no answer")


def _mutated(value: Any, odds: float = 0.15) -> Any:
    """The same with something else here and there. What decides how much is generated stays small."""
    if _rng.random() < odds / 3:
        return _rng.choice(ODD_VALUES)
    if isinstance(value, dict):
        kept = {name: one if name.startswith("max_") else _mutated(one, odds * 1.5) for name, one in value.items()
                if name.startswith("max_") or _rng.random() > odds / 2}  # fmt: skip
        return kept
    if isinstance(value, list):
        return [_mutated(one, odds * 1.5) for one in value for _ in range(_rng.choice((1, 1, 1, 2)))]
    return _rng.choice(ODD_VALUES) if _rng.random() < odds else value


@attack("fuzzer: requests with bytes changed", pause=2)
async def fuzz_bytes(door: Door) -> None:
    for _ in range(4):
        path, seed = _rng.choice(SEEDS)
        body = json.dumps(seed).encode()
        raw = bytearray(door.head(path, [f"Content-Length: {len(body)}"]) + body)
        for _ in range(_rng.randint(1, 4)):
            at = _rng.randrange(len(raw))
            match _rng.randrange(3):
                case 0:
                    raw[at] = _rng.randrange(256)
                case 1:
                    del raw[at : at + _rng.randint(1, 9)]
                case _:
                    raw[at:at] = _rng.randbytes(_rng.randint(1, 9))
        await _say_and_leave(door, bytes(raw))


async def _say_and_leave(door: Door, raw: bytes) -> None:
    """What may be half a request is not answered before it ends: wait a little, then go."""
    began = time.monotonic()
    async with door.connect() as (reader, writer):
        writer.write(raw)
        with contextlib.suppress(ConnectionError, TimeoutError):
            body = await asyncio.wait_for(read_all(reader), 5)
            door.tally.note(parse(body, time.monotonic() - began), repr(raw[:200]))


# ---- the run ----------------------------------------------------------------------------------------------------


async def repeat(function: Attack, pause: float, door: Door, until: float) -> None:
    await asyncio.sleep(_rng.random() * min(pause, max(0.0, until - time.monotonic())))
    while time.monotonic() < until:
        try:
            await function(door)
        except BrokenError as broken:
            door.tally.trouble(str(broken))
        except (OSError, EOFError, ValueError) as failed:  # refused or cut off: that is the server's right
            door.tally.statuses[NO_ANSWER] += 1
            if isinstance(failed, ValueError):
                door.tally.trouble(f"an answer that cannot be read: {failed}")
        door.tally.rounds += 1
        await asyncio.sleep(pause * (0.5 + _rng.random()))


async def run(target: Target, seconds: float, rate: Rate, only: Sequence[str]) -> dict[str, Tally]:
    until = time.monotonic() + seconds
    chosen = {name: row for name, row in ATTACKS.items() if not only or any(part in name for part in only)}
    tallies = {name: Tally() for name in chosen}
    await asyncio.gather(*(
        repeat(function, pause, Door(target, tallies[name], rate), until)
        for name, (_, pause, function) in chosen.items()
    ))  # fmt: skip
    return tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", required=True, help="the attacker's own")
    parser.add_argument("--victim-key", required=True, help="somebody else's")
    parser.add_argument("--sockets", help="folder of the server's own sockets")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--bytes-per-second", type=float, default=4e6, help="of all attacks together")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of attacks")
    args = parser.parse_args()
    address = urlsplit(args.url)
    if address.hostname not in ("127.0.0.1", "::1", "localhost"):
        sys.exit(f"{args.url} is not on this machine: attacks go nowhere else")
    os.nice(10)
    define_small()
    target = Target(address.hostname, address.port or 80, args.key, args.victim_key, args.sockets)
    tallies = asyncio.run(run(target, args.seconds, Rate(args.bytes_per_second), args.only))
    told = {
        name: {"subject": ATTACKS[name][0], **dataclasses.asdict(tally), "statuses": dict(tally.statuses)}
        for name, tally in tallies.items()
    }
    json.dump(told, sys.stdout)
    return int(any(tally.broken for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
