"""What a body may hold: depth, numbers and values as a JSON parser sees them; ids as arrays; memory of a reading."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from array import array
from typing import Any

import pytest
from pydantic import BaseModel

from quire.schema.errors import InputError
from quire.server import body
from quire.server.body import JsonLimits, check_json, infinite_number, is_deeper, memory_bytes, num_values, read_body
from quire.server.openai.chat_protocol import ChatRequest
from quire.server.openai.protocol import CompletionRequest

LIMITS = JsonLimits(depth=9)
FEW = JsonLimits(depth=9, values=1000, token_ids=0)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


def drawn(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(4 if depth else 2)
    if kind == 0:
        return rng.choice([1, 0.5, None, True])
    if kind == 1:
        return "".join(rng.choice('ab[]{}"\\\n') for _ in range(rng.randrange(6)))
    many = range(rng.randrange(4))
    if kind == 2:
        return [drawn(rng, depth - 1) for _ in many]
    return {f"{i}{rng.choice('[]{}')}": drawn(rng, depth - 1) for i in many}


@pytest.mark.parametrize("seed", range(200))
def test_the_depth_is_exact(seed: int) -> None:
    value = [drawn(random.Random(seed), 6)]
    raw = json.dumps(value).encode()
    depth = depth_of(value)
    assert not is_deeper(raw, depth)
    assert is_deeper(raw, depth - 1)


@pytest.mark.parametrize(
    "raw", [b"[" * 1_000_000, b'"[' * 500_000, b"[{" * 400_000, b"]" * 1_000_000, b'"\\' * 300_000]
)
def test_no_json_is_no_trouble(raw: bytes) -> None:
    is_deeper(raw, 128)


def test_numbers() -> None:
    check_json(b'{"a": "NaN", "b": "Infinity"}', LIMITS)
    for raw in (b'{"a": NaN}', b"[Infinity]", b"[-Infinity]"):
        with pytest.raises(InputError, match="NaN"):
            check_json(raw, LIMITS)


def _infinite(value: object) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_infinite, parts)) or (isinstance(value, float) and math.isinf(value))


def test_numbers_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    made = random.Random(7)
    digits, numbers = "9" * 250, ["1e999", "-1E+0999", "1e99", "1e-999", "0.5e308", "9.9e308", "7", "1e100", "0e999"]
    numbers += [f"{digits}e99", f"{digits}.5e5", digits, f"0.{digits}e99", "12.5"]
    for size in (1, 3, 64, 1 << 16):  # wherever a slice ends
        monkeypatch.setattr(body, "_SLICE", size)
        for _ in range(60):
            words = [made.choice([*numbers[2:], '"1e999"', '"\\\\\\"1e999"', "[]"]) for _ in range(made.randrange(6))]
            words += [made.choice(numbers)]
            raw = f'{{"a": [{", ".join(words)}], "b": "1e999"}}'
            assert (infinite_number(raw.encode()) is not None) == _infinite(json.loads(raw)), raw


def test_a_number_that_overflows_is_refused_with_its_field() -> None:
    wrong = b'{"messages": [{"role": "user", "content": "1e999", "more": {"x": [1e999]}}]}'
    with pytest.raises(InputError, match="1e999") as refused:
        read_body(ChatRequest, wrong, LIMITS)
    assert refused.value.param == "messages"
    read_body(ChatRequest, wrong.replace(b"[1e999]", b"[1e99, 1e-999]"), LIMITS)


def _count(value: object) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if parts is None else 1 + max(0, len(parts) - 1) + sum(map(_count, parts))


def test_values_are_counted_outside_of_strings(monkeypatch):
    made = random.Random(5)

    def value(depth):
        kind = made.choice("sssldn" if depth else "sn")
        if kind == "l":
            return [value(depth - 1) for _ in range(made.randrange(4))]
        if kind == "d":
            return {word(): value(depth - 1) for _ in range(made.randrange(4))}
        return word() if kind == "s" else made.randrange(99)

    def word():
        return "".join(made.choice('\\"[]{},a') for _ in range(made.randrange(9)))

    for size in (1, 2, 3, 7, 1 << 20):  # wherever a slice ends
        monkeypatch.setattr(body, "_SLICE", size)
        for _ in range(200):
            found = [value(4)]
            raw = json.dumps(found).encode()
            assert num_values(raw) == _count(found)
            deep = next(depth for depth in range(9) if not is_deeper(raw, depth))
            assert is_deeper(raw, deep - 1) and not is_deeper(raw, deep)


def test_how_wide_a_body_is() -> None:
    raw = b"x" * 400
    for text, quarters in (
        (b"", 4), (b"\\n", 4), ("\u00e9".encode(), 4), ("\u4e2d".encode(), 4), (rb"\u4e2d", 5),
        (rb"\n" + "\u4e2d".encode(), 5), ("\U0001f600".encode(), 6), ("\U0010ffff".encode(), 6), (rb"\ud83d\ude00", 7),
        (rb"\uD83D\uDE00", 7), (rb"\n" + "\U00010000".encode(), 7),
    ):  # fmt: skip
        assert memory_bytes(raw + text) == (400 + len(text)) * quarters // 4, text


def test_a_body_of_too_many_values_is_refused_before_it_is_read():
    check_json(b"[" + b"1," * 998 + b"1]", FEW)
    check_json(json.dumps("," * 5000 + "[" * 5000).encode(), FEW)
    for raw in (b"[" + b"1," * 1000 + b"1]", b"[" + b"[]," * 600 + b"[]]", b"[" * 2000):
        with pytest.raises(InputError, match="max-json-values"):
            check_json(raw, FEW)


def test_long_lists_of_ids_are_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = JsonLimits(values=50, token_ids=2000)
    ids = list(range(-3, 1500, 2))
    for size in (7, 64, 1 << 16):
        monkeypatch.setattr(body, "_SLICE", size)
        for indent in (None, 1):
            raw = json.dumps({"user": "1e9 [", "prompt": ids, "n": 2}, indent=indent).encode()
            found = read_body(CompletionRequest, raw, limits)
            assert (
                isinstance(found.prompt, array) and list(found.prompt) == ids and (found.user, found.n) == ("1e9 [", 2)
            )
            assert found.model_fields_set == {"user", "prompt", "n"}
            raw = json.dumps({"prompt": [ids, [], [5]]}, indent=indent).encode()
            assert list(map(list, read_body(CompletionRequest, raw, limits).prompt or ())) == [ids, [], [5]]
    for wrong in ({"prompt": [*ids, "a"]}, {"prompt": ids * 3}, {"unknown": ids}, {"prompt": [[1]] * 900}):
        with pytest.raises(InputError, match="max-json-values"):
            read_body(CompletionRequest, json.dumps(wrong).encode(), limits)
    for wrong in ({"prompt": [*ids, 1 << 31]}, {"prompt": [*ids, [1]]}, {"prompt": [[1], *ids]}):
        with pytest.raises(InputError, match="token ids") as refused:
            read_body(CompletionRequest, json.dumps(wrong).encode(), limits)
        assert refused.value.param == "prompt"


def test_unknown_fields_are_few() -> None:
    many = {"prompt": "a"} | {f"u{number}": 1 for number in range(1025)}
    with pytest.raises(InputError, match="1025 unknown fields"):
        read_body(CompletionRequest, json.dumps(many).encode(), LIMITS)


_LARGE = 8 << 20
_WIDE = "a" * (_LARGE - 100)
MEMORY: dict[str, tuple[type[BaseModel], str]] = {
    "ids": (CompletionRequest, f'{{"prompt": [{",".join(["999"] * (1 << 20))}]}}'),
    "short ids": (CompletionRequest, f'{{"prompt": [{",".join(["9"] * (1 << 20))}]}}'),
    "a text": (CompletionRequest, json.dumps({"prompt": _WIDE})),
    "texts": (CompletionRequest, json.dumps({"prompt": ["word " * 1000] * 1600})),
    "too many values": (CompletionRequest, '{"unknown": [' + "{}," * 2_000_000 + "{}]}"),
    "quotes": (CompletionRequest, '{"unknown": [' + '"",' * 2_000_000 + '""]}'),
    "escapes": (CompletionRequest, '{"prompt": "' + r"\n" * (_LARGE // 2 - 50) + '"}'),
    "escaped quotes": (CompletionRequest, '{"prompt": "' + r"\"" * (_LARGE // 2 - 50) + '"}'),
}


@pytest.mark.parametrize("name", MEMORY)
def test_reading_a_body_takes_four_times_its_memory_at_the_most(name: str) -> None:
    """The body itself is one of them. What Python and its libraries keep for themselves is some megabytes more."""
    size, grown = _memory_of(*MEMORY[name])
    assert grown + size < 4 * size + 5_000_000, f"{(grown + size) / size:.1f} times"


def test_wide_characters_take_six_times() -> None:
    """Python keeps four bytes for each character of a text that has one beyond U+FFFF."""
    size, grown = _memory_of(CompletionRequest, f'{{"prompt": "{_WIDE}\U0001f600"}}')
    assert 4 * size < grown + size < 7 * size, f"{(grown + size) / size:.1f} times"


@pytest.mark.parametrize("part", ["{}", '{"a": 1}', "[[]]", "0.5", '"aaaaaaaa"'])
def test_other_values_are_few_enough(part: str) -> None:
    many = ",".join([part] * ((1 << 16) // (1 + sum(part.count(mark) for mark in "[{,"))))
    _, grown = _memory_of(CompletionRequest, f'{{"prompt": "a", "unknown": [{many[: -len(part) - 1]}]}}')
    assert grown < 30_000_000  # none at all where the interpreter has enough free memory


def test_parts_are_few_enough() -> None:
    parts = ",".join(['{"text": "b"}'] * 32_000)
    _, grown = _memory_of(ChatRequest, f'{{"messages": [{{"role": "a", "content": [{parts}]}}]}}')
    assert grown < 40_000_000


def _memory_of(model: type[BaseModel], text: str) -> tuple[int, int]:
    """Bytes of a body, and of the memory that the system counts while it is read, in a process of its own: parsers
    have memory that Python does not see."""
    code = (
        "import re, sys; from quire.schema.errors import InputError; "
        "from quire.server.body import JsonLimits, read_body; "
        f"from {model.__module__} import {model.__name__} as Model; "
        "raw = sys.stdin.buffer.read()\n"
        "told = lambda name: int(re.search(name + r':\\s+(\\d+)', open('/proc/self/status').read())[1]) * 1024\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"  # the peak counts from here
        "before = told('VmRSS')\n"
        "try: kept = read_body(Model, raw, JsonLimits())\n"
        "except InputError: pass\n"
        "print(len(raw), told('VmHWM') - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=text.encode(), capture_output=True, check=True, timeout=300
    )
    size, grown = map(int, done.stdout.split())
    return size, grown


@pytest.mark.parametrize("first", ["x", "\n"])
@pytest.mark.parametrize("last", ["x", "\u4e2d", "\U0001f600"])
def test_a_body_counts_for_the_memory_that_reading_it_takes(first: str, last: str) -> None:
    """One wide character, and every character of its text is wide: at most four times what is counted."""
    text = json.dumps({"prompt": first + "x" * 6_000_000 + last}, ensure_ascii=False)
    size, grown = _memory_of(CompletionRequest, text)
    counted = memory_bytes(text.encode())
    assert size + grown <= 4.2 * counted, (size, grown, counted)
    assert counted == size or size + grown > 3.8 * counted  # what is counted for more takes more
