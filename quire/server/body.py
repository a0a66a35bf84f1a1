"""From the bytes of a body to a wire type, with limits before work.

Owns: JSON that is refused (too deep, too many values, NaN and Infinity, numbers that overflow, lone surrogates, bytes
that are not UTF-8), and long lists of token ids, which are read into arrays: a Python object for each would cost many
times the body. No step holds the interpreter for long, so a large body is read in a thread and the event loop goes on.
Every refusal is an InputError that names the limit, or a ValidationError that names the field. Must not know: routes,
what fields mean.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel

from quire.schema.errors import InputError

Raw = bytes | bytearray
MOST_UNKNOWN = 1024  # fields of a body that its wire type does not have
_MARKS = b"[]{},"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_ROUND = bytes.maketrans(b"{}", b"[]")
_SLICE = 1 << 16  # bytes that are looked at together: bounds memory, and the time for which a thread cannot be switched
_NUMBERS = bytes.maketrans(b"123456789E", b"000000000e")
# Any number that overflows has an exponent of three digits, or so many digits that one of two digits is enough.
_MANY_DIGITS = b"0" * 200
_OVERLAP = 200
_OF_NUMBERS = b"+-.0123456789eE"
_NUMBER = re.compile(rb"[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")  # never walks back, whatever it is given
_LONGEST_NUMBER = 4096  # digits; Python reads no longer integers either
_OPENING = 0x5B
_ASTRAL = (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")  # how a character beyond U+FFFF begins
_ASTRAL_ESCAPES = (rb"\ud", rb"\uD")
_OF_IDS = b"0123456789-,[] \t\r\n"
_ID = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Wire = TypeVar("Wire", bound=BaseModel)


class JsonLimits(NamedTuple):
    """Of one body."""

    depth: int = 128
    values: int = 1 << 16  # all but the entries of token id lists
    token_ids: int = 1 << 20


def memory_bytes(raw: Raw) -> int:
    """What a body counts for among those in flight: reading takes at most four times as much, the body included.

    That is the body, the parser's text, another where it has escapes, and Python's, in which one wide character makes
    all others as wide.
    """
    plain, escaped = raw.isascii(), b"\\" in raw
    marks = (() if plain else _ASTRAL) + (_ASTRAL_ESCAPES if escaped else ())
    width = 4 if any(_has(raw, mark) for mark in marks) else 2 if not plain or (escaped and _has(raw, rb"\u")) else 1
    copies = 2 + width + escaped
    return len(raw) * max(4, copies) // 4


def _has(raw: Raw, mark: bytes) -> bool:
    return any(raw.find(mark, at, at + _SLICE + len(mark)) >= 0 for at in range(0, len(raw), _SLICE))


class _IdLists(msgspec.Struct):
    """The fields that may be long lists of token ids, as they stand in the body."""

    prompt: msgspec.Raw = msgspec.Raw()
    tokens: msgspec.Raw = msgspec.Raw()
    token_ids: msgspec.Raw = msgspec.Raw()
    allowed_token_ids: msgspec.Raw = msgspec.Raw()


_ID_LISTS = msgspec.json.Decoder(_IdLists)  # made here: threads that meet a struct first at once may end the process


def read_body(model: type[Wire], raw: Raw, limits: JsonLimits) -> Wire:
    count = check_json(raw, limits)
    ids: dict[str, Any] = {}
    if count > limits.values:
        raw, ids = _take_ids(model, raw, count, limits)
    _check_finite(raw)
    request = model.model_validate_json(raw)
    if request.model_extra and len(request.model_extra) > MOST_UNKNOWN:
        raise InputError(
            f"the body has {len(request.model_extra)} unknown fields; at most {MOST_UNKNOWN} are read", param="body"
        )
    for name, values in ids.items():
        setattr(request, name, values)
    return request


def check_json(raw: Raw, limits: JsonLimits) -> int:
    """What the parser itself would let through or die of. Every value becomes an object of many times its bytes.

    Returns a number that the values do not exceed, the right one where it is above the limit: then some must be ids."""
    opening, commas = _rough_counts(raw)
    count, most = opening + commas, limits.values + limits.token_ids
    if count > limits.values and (count := num_values(raw, most)) > most:
        raise too_many_values(f"more than {most}", limits)
    if opening > limits.depth and is_deeper(raw, limits.depth):
        raise InputError(f"the body is nested deeper than {limits.depth} levels (--max-json-depth)", param="body")
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            msgspec.json.decode(raw, type=msgspec.Raw)  # takes them inside strings only
        except msgspec.DecodeError as wrong:
            raise InputError(
                f"the body is not JSON: {wrong} (NaN and Infinity are not numbers)", param="body"
            ) from None
    return count


def too_many_values(count: str, limits: JsonLimits) -> InputError:
    return InputError(
        f"the body has {count} values; at most {limits.token_ids} token ids (--max-request-token-ids) and "
        f"{limits.values} other values (--max-json-values) are read",
        param="body",
    )


def num_values(raw: Raw, most: int | None = None) -> int:
    """Entries of lists and objects, and these themselves: no body has more values. Counting ends above `most`."""
    count = 0
    for marks in _marks(raw):
        count += len(marks) - marks.count(b"]") - marks.count(b"}")
        if most is not None and count > most:
            break
    return count


def is_deeper(raw: Raw, limit: int) -> bool:
    depth = 0
    for marks in _marks(raw):
        brackets = marks.translate(_ROUND, b",")
        opening = brackets.count(b"[")
        if depth + opening <= limit:
            depth += 2 * opening - len(brackets)
            continue
        for bracket in brackets:
            depth += 1 if bracket == _OPENING else -1
            if depth > limit:
                return True
    return False


def _check_finite(raw: Raw) -> None:
    """1e999 is JSON and infinite; where any value may stand, the wire types cannot see it."""
    if not _may_overflow(raw) or (number := infinite_number(raw)) is None:
        return
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return  # no JSON, which the parser refuses
    name = next((name for name, part in fields.items() if infinite_number(bytes(part)) is not None), "body")[:100]
    shown = number[:40].decode()
    raise InputError(
        f"{name} holds {shown}, which is not a finite JSON number of up to {_LONGEST_NUMBER} digits", param=name
    )


def _may_overflow(raw: Raw) -> bool:
    if len(raw) <= _SLICE:  # nearly every body
        return _has_large_number(raw)
    return any(_has_large_number(raw[at : at + _SLICE + _OVERLAP]) for at in range(0, len(raw), _SLICE))


def _has_large_number(text: Raw) -> bool:
    flat = text.translate(_NUMBERS)
    return b"0e000" in flat or b"0e+000" in flat or _MANY_DIGITS in flat


def infinite_number(raw: Raw) -> bytes | None:
    """The first number outside of strings that no float can hold, or that nobody would write."""
    rest = b""  # of the slice before: a number may go on
    for piece in _outside(raw, b" "):
        text = rest + piece
        rest = text[len(text.rstrip(_OF_NUMBERS)) :]
        if len(rest) > _LONGEST_NUMBER:
            return rest
        if not _has_large_number(text):
            continue
        for match in _NUMBER.finditer(text):
            number = match[0]
            if len(number) > _LONGEST_NUMBER or (not number.isdigit() and math.isinf(float(number))):
                return number
    return None


# ---- token ids -------------------------------------------------------------------------------------------------------


def _take_ids(model: type[BaseModel], raw: Raw, count: int, limits: JsonLimits) -> tuple[bytes, dict[str, Any]]:
    """The body with short lists instead of its long lists of token ids, and these as arrays."""
    try:
        id_lists = _ID_LISTS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise too_many_values(str(count), limits) from None  # whatever else is wrong with it
    lists = {name: _bytes(id_lists, name) for name in _IdLists.__struct_fields__ if name in model.model_fields}
    lists = {name: text for name, text in lists.items() if text[:1] == b"[" and not text.translate(None, _OF_IDS)}
    num_ids = sum(text.count(b",") for text in lists.values())
    if num_ids > limits.token_ids or count - num_ids > limits.values:
        raise too_many_values(str(count), limits)
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])  # no more than the other values
    ids = {}
    for name, text in lists.items():
        ids[name] = _read_ids(name, text)
        fields[name] = msgspec.Raw(b"[[0]]" if isinstance(ids[name], list) else b"[0]")
    return msgspec.json.encode(fields), ids


def _bytes(fields: _IdLists, name: str) -> bytes:
    return bytes(msgspec.structs.asdict(fields)[name])


def _read_ids(name: str, text: bytes) -> array[int] | list[array[int]]:
    try:
        if text[1:].lstrip()[:1] != b"[":
            return _ints(text)
        return [_ints(bytes(one)) for one in msgspec.json.decode(text, type=list[msgspec.Raw])]
    except msgspec.MsgspecError:
        raise InputError(f"{name} must be token ids: a list of integers, or lists of them", param=name) from None


def _ints(text: bytes) -> array[int]:
    """A list of JSON, slice by slice."""
    inner = text.strip()
    if inner[:1] != b"[":
        raise msgspec.ValidationError
    ids, start, end = array("i"), 1, 0
    while start < len(inner):
        end = inner.find(b",", start + _SLICE)
        end = len(inner) - 1 if end < 0 else end
        ids.extend(msgspec.json.decode(b"[" + inner[start:end] + b"]", type=list[_ID]))
        start = end + 1
    return ids


# ---- slices ----------------------------------------------------------------------------------------------------------


def _rough_counts(raw: Raw) -> tuple[int, int]:
    """Opening brackets and commas, in strings too."""
    if len(raw) <= _SLICE:
        return raw.count(b"[") + raw.count(b"{"), raw.count(b",")
    opening = commas = 0
    for start in range(0, len(raw), _SLICE):
        end = start + _SLICE
        opening += raw.count(b"[", start, end) + raw.count(b"{", start, end)
        commas += raw.count(b",", start, end)
    return opening, commas


def _marks(raw: Raw) -> Iterator[bytes]:
    """The brackets and commas that are in no string, slice by slice."""
    for piece in _outside(raw, b""):
        yield piece.translate(None, _OTHERS)


def _outside(raw: Raw, joint: bytes) -> Iterator[bytes]:
    """What is in no string, slice by slice, with the joint for each string."""
    start, inside = 0, 0
    while start < len(raw):
        part = bytes(raw[start : start + _SLICE])
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # no slice ends within an escape
            part = bytes(raw[start : start + _SLICE + 1])
        plain = part.replace(rb"\\", b"").replace(rb"\"", b"")  # now every quote begins or ends a string
        pieces = plain.split(b'"')
        yield joint.join(pieces[inside::2])
        inside ^= (len(pieces) - 1) & 1
        start += len(part)
