"""How deep a body may be nested: the quick test and the exact one agree with a JSON parser."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.schema.errors import InputError
from quire.server import body
from quire.server.body import check_finite, check_json, is_deeper, num_values


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
    check_json(b'{"a": "NaN", "b": "Infinity"}', 9)
    for raw in (b'{"a": NaN}', b"[Infinity]", b"[-Infinity]"):
        with pytest.raises(InputError, match="NaN"):
            check_json(raw, 9)
    check_finite("x", {"a": [1.0, "b", None]})
    with pytest.raises(InputError, match="inf"):
        check_finite("x", {"a": [float("inf")]})


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


def test_a_body_of_too_many_values_is_refused_before_it_is_read():
    check_json(b"[" + b"1," * 998 + b"1]", 9, 1000)
    check_json(json.dumps("," * 5000 + "[" * 5000).encode(), 9, 1000)
    for raw in (b"[" + b"1," * 1000 + b"1]", b"[" + b"[]," * 600 + b"[]]", b"[" * 2000):
        with pytest.raises(InputError, match="max-json-values"):
            check_json(raw, 9, 1000)
