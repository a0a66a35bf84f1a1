"""server/pooling/encoding.py: numbers are written piece by piece, and the pieces are one JSON value."""

from __future__ import annotations

import base64
import json
from array import array
from typing import Any

import pytest

from quire.schema.step import Pooled
from quire.server.pooling import encoding

PIECE = 8


@pytest.mark.parametrize("shape", [(1,), (8,), (21,), (0,), (7, 3), (5, 1), (2, 20), (0, 3), (3, 0)])
def test_pieces_are_the_whole(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = encoding._encode

    def encode(value: Any) -> bytes:
        sizes.append(sum(len(row) if isinstance(row, list) else 1 for row in value))
        return real(value)

    monkeypatch.setattr(encoding, "_PIECE", PIECE)
    monkeypatch.setattr(encoding, "_encode", encode)
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    values = array("f", [index / 7 - 1 for index in range(count)])
    rows: list[Any] = list(values)
    if len(shape) > 1:
        rows = [list(values[at * shape[1] : (at + 1) * shape[1]]) for at in range(shape[0])]
    pooled = Pooled(shape, "float32", values.tobytes())
    assert json.loads(encoding.json_numbers(pooled)) == rows
    assert max(sizes) <= max(PIECE, shape[-1])


@pytest.mark.parametrize("size", [0, 1, 95, 96, 97, 1000])
def test_base64_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_PIECE", PIECE)
    data = bytes(index % 251 for index in range(size))
    assert base64.b64decode(json.loads(encoding.json_base64(data)), validate=True) == data


def test_an_answer_around_its_entries() -> None:
    answer = encoding.json_answer({"id": "a", "usage": {"n": 1}}, "data", [b"1", b'{"x":[2]}'])
    assert json.loads(answer) == {"id": "a", "usage": {"n": 1}, "data": [1, {"x": [2]}]}
