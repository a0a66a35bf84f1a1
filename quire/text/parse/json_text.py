"""JSON as a model writes it, read while it arrives.

`raw_value` hands a value's text on as it stands, with the slips that models make put right: control characters inside
strings, escapes that JSON does not have, Python's True, False and None. `string` decodes a string. Both stop where the
text can be no JSON any more and say so; neither builds anything, so depth and size cost nothing but time. In: a
TextSource. Must not know: calls.
"""

from __future__ import annotations

import json
import re

from quire.text.parse.tags import SPACE, Emit, Steps, TextSource

_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r"[-+.,:\s\d]*")
_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_CONTROL = re.compile(r"[\x00-\x1f]")
_CLOSER = {"{": "}", "[": "]"}
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def quoted(text: str) -> str:
    """As a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def inside_quotes(text: str) -> str:
    """As part of a JSON string."""
    return quoted(text)[1:-1]


def raw_value(source: TextSource, emit: Emit) -> Steps[bool]:
    """One value. False: it broke off, or what comes next cannot belong to it."""
    first = yield from source.peek()
    if first == '"':
        return (yield from raw_string(source, emit))
    if first not in ("{", "["):
        word = yield from source.word(_WORD)
        emit(_LITERALS.get(word, word))
        return bool(word)
    closers: list[str] = []
    while True:
        yield from source.span(_BETWEEN, emit)
        mark = yield from source.peek()
        if mark == '"':
            if not (yield from raw_string(source, emit)):
                return False
        elif mark in ("{", "["):
            emit((yield from source.take(1)))
            closers.append(_CLOSER[mark])
        elif mark in ("}", "]"):
            if closers[-1] != mark:
                return False
            emit((yield from source.take(1)))
            closers.pop()
            if not closers:
                return True
        else:
            word = yield from source.word(_WORD)
            if not word:
                return False
            emit(_LITERALS.get(word, word))


def raw_string(source: TextSource, emit: Emit) -> Steps[bool]:
    """A string with its quotes, as it stands. False: it broke off."""

    def clean(text: str) -> None:
        emit(_CONTROL.sub(_escaped, text))

    emit((yield from source.take(1)))
    while True:
        yield from source.span(_IN_STRING, clean)
        mark = yield from source.peek()
        if mark == '"':
            emit((yield from source.take(1)))
            return True
        if mark == "":
            return False
        pair = yield from source.take(2)
        if len(pair) < 2:
            emit(pair)
            return False
        emit(pair if pair[1] in _ESCAPES or pair[1] == "u" else "\\\\" + inside_quotes(pair[1]))


def depth_of(text: str) -> int:
    """How many brackets the beginning of some JSON has open; 0 if it breaks off within a string."""
    depth, inside, escaped = 0, False, False
    for letter in text:
        if escaped:
            escaped = False
        elif inside:
            inside, escaped = letter != '"', letter == "\\"
        elif letter == '"':
            inside = True
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
    return 0 if inside else max(0, depth)


def skim(source: TextSource, emit: Emit, depth: int) -> Steps[None]:
    """The rest of some JSON with so many brackets open, word for word."""
    while depth > 0:
        yield from source.span(_OUTSIDE, emit)
        mark = yield from source.take(1)
        if mark == "":
            return
        emit(mark)
        if mark != '"':
            depth += 1 if mark in "{[" else -1
            continue
        while True:
            yield from source.span(_IN_STRING, emit)
            mark = yield from source.take(1)
            emit(mark)
            if mark in ('"', ""):
                break
            emit((yield from source.take(1)))


def string(source: TextSource, emit: Emit) -> Steps[bool]:
    """A string's meaning. False: it broke off."""
    yield from source.take(1)
    while True:
        yield from source.span(_IN_STRING, emit)
        mark = yield from source.take(1)
        if mark == '"':
            return True
        if mark == "":
            return False
        escape = yield from source.take(1)
        if escape == "u":
            emit((yield from _code_point(source)))
        else:
            emit(_ESCAPES.get(escape, "\\" + escape))


def string_value(source: TextSource, longest: int) -> Steps[str | None]:
    """A short string, whole; None if it broke off or is too long."""
    parts: list[str] = []
    if not (yield from string(source, parts.append)):
        return None
    text = "".join(parts)
    return text if len(text) <= longest else None


def skip_space(source: TextSource) -> Steps[str]:
    """The next character that is no white space, unread."""
    yield from source.span(SPACE)
    return (yield from source.peek())


def _escaped(match: re.Match[str]) -> str:
    return inside_quotes(match.group())


def _code_point(source: TextSource) -> Steps[str]:
    """What \\uXXXX means, with the second half of a pair."""
    digits = yield from source.take(4)
    code = _hex(digits)
    if code is None:
        return "\\u" + digits
    if not 0xD800 <= code < 0xDC00:
        return "\ufffd" if 0xDC00 <= code < 0xE000 else chr(code)
    if not (yield from source.accept("\\u")):
        return "\ufffd"
    digits = yield from source.take(4)
    low = _hex(digits)
    if low is None or not 0xDC00 <= low < 0xE000:
        return "\ufffd" + ("\\u" + digits if low is None or 0xD800 <= low < 0xDC00 else chr(low))
    return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))


def _hex(digits: str) -> int | None:
    return int(digits, 16) if re.fullmatch(r"[0-9a-fA-F]{4}", digits) else None
