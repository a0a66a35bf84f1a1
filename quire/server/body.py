"""From the bytes of a body to a wire type, in one reading.

Owns: what is no JSON for us: too deep, NaN and Infinity, lone surrogates, bytes that are no UTF-8. Every refusal is an
InputError that names the limit, or a ValidationError that names the field. Must not know: routes, what fields mean.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel

from quire.schema.errors import InputError

_BRACKETS = b"[]{}"
_OTHERS = bytes(set(range(256)) - set(_BRACKETS))
_ROUND = bytes.maketrans(b"{}", b"[]")
Wire = TypeVar("Wire", bound=BaseModel)


def read_body(model: type[Wire], raw: bytes, max_depth: int) -> Wire:
    check_json(raw, max_depth)
    return model.model_validate_json(raw)


def check_json(raw: bytes, max_depth: int) -> None:
    """What the parser itself would let through or die of."""
    if is_deeper(raw, max_depth):
        raise InputError(f"the body is nested deeper than {max_depth} levels (--max-json-depth)", param="body")
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            msgspec.json.decode(raw)  # takes them inside strings only
        except msgspec.DecodeError as wrong:
            raise InputError(f"the body is no JSON: {wrong} (NaN and Infinity are no numbers)", param="body") from None


def is_deeper(raw: bytes, limit: int) -> bool:
    if raw.count(b"[") + raw.count(b"{") <= limit:
        return False
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
    brackets = b"".join(plain.split(b'"')[::2]).translate(_ROUND, _OTHERS)
    for _ in range(limit):  # take the innermost pairs away, level by level
        fewer = brackets.replace(b"[]", b"")
        if len(fewer) == len(brackets):
            break
        brackets = fewer
    return b"[]" in brackets or brackets.count(b"[") > limit  # what never closes is the parser's to refuse


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
