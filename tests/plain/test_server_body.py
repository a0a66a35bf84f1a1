"""How deep a body may be nested: the quick test and the exact one agree with a JSON parser."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.schema.errors import InputError
from quire.server.body import check_finite, check_json, is_deeper


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
