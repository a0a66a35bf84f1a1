"""From the bytes of a body to a wire type, in one reading.

Owns: what is no JSON for us: too deep, too many values, NaN and Infinity, lone surrogates, bytes that are no UTF-8.
Every refusal is an InputError that names the limit, or a ValidationError that names the field. Must not know: routes,
what fields mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from quire.schema.errors import InputError

MOST_VALUES = 1 << 20
_MARKS = b"[]{},"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_ROUND = bytes.maketrans(b"{}", b"[]")
_SLICE = 1 << 20  # bytes that are looked at together, so that a large body costs no more memory than a small one
Wire = TypeVar("Wire", bound=BaseModel)


def read_body(model: type[Wire], raw: bytes, max_depth: int, max_values: int = MOST_VALUES) -> Wire:
    check_json(raw, max_depth, max_values)
    return model.model_validate_json(raw)


def check_json(raw: bytes, max_depth: int, max_values: int = MOST_VALUES) -> None:
    """What the parser itself would let through or die of. Every value becomes an object of many times its bytes."""
    brackets = raw.count(b"[") + raw.count(b"{")
    if brackets + raw.count(b",") > max_values and (count := num_values(raw)) > max_values:
        raise InputError(
            f"the body has {count} values; at most {max_values} are read (--max-json-values)", param="body", value=count
        )
    if brackets > max_depth and is_deeper(raw, max_depth):
        raise InputError(f"the body is nested deeper than {max_depth} levels (--max-json-depth)", param="body")
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            msgspec.json.decode(raw)  # takes them inside strings only
        except msgspec.DecodeError as wrong:
            raise InputError(f"the body is no JSON: {wrong} (NaN and Infinity are no numbers)", param="body") from None


def num_values(raw: bytes) -> int:
    """Entries of lists and objects, and these themselves: no body has more values than that."""
    return sum(len(marks) - marks.count(b"]") - marks.count(b"}") for marks in _marks(raw))


def is_deeper(raw: bytes, limit: int) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    brackets = b"".join(marks.translate(_ROUND, b",") for marks in _marks(raw))
    for _ in range(limit):  # take the innermost pairs away, level by level
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    return b"[]" in brackets or brackets.count(b"[") > limit  # what never closes is the parser's to refuse


def _marks(raw: bytes) -> Iterator[bytes]:
    """The brackets and commas that are in no string, slice by slice."""
    start, inside = 0, 0
    while start < len(raw):
        end = min(start + _SLICE, len(raw))
        while end < len(raw) and raw[end - 1] == 0x5C:  # no slice ends within an escape
            end += 1
        plain = raw[start:end].replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
        pieces = plain.split(b'"')
        yield b"".join(pieces[inside::2]).translate(None, _OTHERS)
        inside ^= (len(pieces) - 1) & 1
        start = end


def check_finite(name: str, value: Any) -> None:
    """1e999 is JSON and infinite; where any value may stand, the wire types cannot see it."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} holds {value}, which is no finite number", param=name)
    if isinstance(value, dict):
        for one in value.values():
            check_finite(name, one)
    elif isinstance(value, list):
        for one in value:
            check_finite(name, one)
