"""Python literals, read while they arrive and written as JSON.

Strings, numbers, True, False and None (also true, false, null), lists, tuples, sets, dicts. A bare word that is none of
these becomes a string: nothing is evaluated, and no parser of Python runs. Models forget to escape a quote within a
string: one after which the string cannot be over is part of it. What was written stays whole JSON even where the
text breaks: every bracket that was opened is closed. In: a TextSource. Must not know: calls.
"""

from __future__ import annotations

import json
import re

from quire.text.parse.json_text import inside_quotes, quoted, skip_space
from quire.text.parse.tags import Emit, Steps, TextSource

DEEPEST = 64
_FAR = 256  # characters looked ahead to see whether a string is over
_CLOSER = {"[": "]", "(": ")", "{": "}"}
_SCALAR = re.compile(r"""[^,()\[\]{}:'"\n]*""")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][+-]?\d+)?")
_INTEGER = re.compile(r"[+-]?0[xXoObB][0-9a-fA-F_]+")
_LITERALS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_INSIDE = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "v": "\v",
    "\n": "",
}  # fmt: skip
_DIGITS = {"x": 2, "u": 4, "U": 8}


def value(source: TextSource, emit: Emit, depth: int = 0, *, argument: bool = False) -> Steps[bool]:
    """One value. False: it broke off, or is nested too deep; what was written is whole all the same. `argument`: of a
    call, so that a keyword or a closing bracket follows."""
    mark = yield from skip_space(source)
    if mark in ("'", '"'):
        return (yield from _string(source, emit, argument=argument))
    if mark in ("[", "("):
        closer = _CLOSER[(yield from source.take(1))]
        emit("[")
        return (yield from _items(source, emit, depth, closer))
    if mark == "{":
        return (yield from _braces(source, emit, depth))
    text = (yield from source.word(_SCALAR)).strip()
    emit(scalar(text))
    return bool(text)


def scalar(text: str) -> str:
    """A word or a number as JSON; what is neither is a string."""
    if text in _LITERALS:
        return _LITERALS[text]
    try:
        if _INTEGER.fullmatch(text):
            return str(int(text, 0))
        if _NUMBER.fullmatch(text):
            plain = text.replace("_", "").removeprefix("+")
            number = float(plain) if any(c in plain for c in ".eE") else int(plain)
            return json.dumps(number, allow_nan=False)
    except ValueError:  # too many digits, or a number that no float holds
        pass
    return quoted(text)


def literal_as_json(text: str) -> str | None:
    """A whole literal; None if the text is none."""
    source, parts = TextSource(text, final=True), list[str]()

    def read() -> Steps[bool]:
        whole = yield from value(source, parts.append)
        return whole and (yield from skip_space(source)) == ""

    steps = read()
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return "".join(parts) if end.value else None


def _items(source: TextSource, emit: Emit, depth: int, closer: str, first: bool = True) -> Steps[bool]:
    """What a list holds. Not `first`: its first item is written."""
    whole = depth < DEEPEST
    while whole:
        mark = yield from skip_space(source)
        if mark == closer:
            yield from source.take(1)
            break
        if not first:
            if mark != ",":
                whole = False
                break
            yield from source.take(1)
            if (yield from skip_space(source)) == closer:
                continue
            emit(", ")
        elif mark == "":
            whole = False
            break
        first = False
        whole = yield from value(source, emit, depth + 1)
    emit("]")
    return whole


def _braces(source: TextSource, emit: Emit, depth: int) -> Steps[bool]:
    """A dict, or a set, which becomes a list: what stands after the first item tells."""
    yield from source.take(1)
    mark = yield from skip_space(source)
    if mark in ("(", "["):
        emit("[")
        return (yield from _items(source, emit, depth, "}"))
    if mark in ("}", "{", "") or depth >= DEEPEST:
        emit("{")
        return (yield from _pairs(source, emit, depth))
    source.record()
    item = yield from _key_text(source)
    mark = yield from skip_space(source)
    if item is not None and mark in (",", "}"):
        source.recorded()
        emit("[" + item[1])
        return (yield from _items(source, emit, depth, "}", first=False))
    emit("{")
    if item is None or mark != ":":
        emit("}")
        return False
    source.recorded()
    yield from source.take(1)
    emit(f"{item[0]}: ")
    if not (yield from value(source, emit, depth + 1)):
        emit("}")
        return False
    return (yield from _pairs(source, emit, depth, first=False))


def _pairs(source: TextSource, emit: Emit, depth: int, first: bool = True) -> Steps[bool]:
    """What a dict holds. Not `first`: its first pair is written."""
    whole = depth < DEEPEST
    while whole:
        mark = yield from skip_space(source)
        if mark == "}":
            yield from source.take(1)
            break
        if not first:
            if mark != ",":
                whole = False
                break
            yield from source.take(1)
            if (yield from skip_space(source)) == "}":
                continue
        key = yield from _key(source)
        if key is None:
            whole = False
            break
        emit(f"{'' if first else ', '}{key}: ")
        first = False
        whole = yield from value(source, emit, depth + 1)
    emit("}")
    return whole


def _key(source: TextSource) -> Steps[str | None]:
    """A key as a JSON string; the colon is read too. If it is none, what was read stays recorded."""
    source.record()
    item = yield from _key_text(source)
    if item is None or (yield from skip_space(source)) != ":":
        return None
    yield from source.take(1)
    source.recorded()
    return item[0]


def _key_text(source: TextSource) -> Steps[tuple[str, str] | None]:
    """A string or a word: (as a key, as a value)."""
    parts: list[str] = []
    if (yield from source.peek()) in ("'", '"'):
        if not (yield from _string(source, parts.append)):
            return None
        text = "".join(parts)
        return text, text
    text = (yield from source.word(_SCALAR)).strip()
    return (quoted(text), scalar(text)) if text else None


def _string(source: TextSource, emit: Emit, *, argument: bool = False) -> Steps[bool]:
    quote = yield from source.take(1)
    emit('"')
    whole = yield from _string_text(source, quote, lambda text: emit(inside_quotes(text)), argument)
    emit('"')
    return whole


def _is_closed(source: TextSource, argument: bool) -> Steps[bool]:
    """Whether a string may be over, after a quote of its kind: by what comes next."""
    at, mark = yield from _next_mark(source, 0)
    if not argument or mark in ("", "+", "*", "%", "."):
        return mark in ("", ",", ")", "]", "}", ":", "+", "*", "%", ".")
    if mark == ",":
        at, mark = yield from _next_mark(source, at + 1)
        if mark.isidentifier():
            size = 0
            while (mark.isidentifier() or mark.isdigit()) and size < _FAR:
                at, size = at + 1, size + 1
                mark = yield from source.glance(at)
            _, mark = yield from _next_mark(source, at)
            return mark in ("=", "")
    if mark == ")":
        mark = yield from source.glance(at + 1)
        return mark.isspace() or mark in ("", ",", ";", "]", "<")
    return mark == ""


def _next_mark(source: TextSource, at: int) -> Steps[tuple[int, str]]:
    """(where, which) is the next character from `at` on that is no white space; nothing is read."""
    for index in range(at, at + _FAR):
        mark = yield from source.glance(index)
        if not mark.isspace():
            return index, mark
    return at + _FAR, ""


def _string_text(source: TextSource, quote: str, emit: Emit, argument: bool) -> Steps[bool]:
    triple = False
    if (yield from source.accept(quote)):  # an empty string, or the second of three
        if not (yield from source.accept(quote)):
            return True
        triple = True
    while True:
        yield from source.span(_INSIDE[quote], emit)
        mark = yield from source.take(1)
        if mark == "":
            return False
        if mark == quote:
            over = (yield from source.accept(quote * 2)) if triple else (yield from _is_closed(source, argument))
            if over:
                return True
            emit(quote)
            continue
        emit((yield from _escape(source)))


def _escape(source: TextSource) -> Steps[str]:
    letter = yield from source.take(1)
    if letter in _DIGITS:
        digits = yield from source.take(_DIGITS[letter])
        if re.fullmatch(r"[0-9a-fA-F]+", digits) and len(digits) == _DIGITS[letter]:
            code = int(digits, 16)
            if code < 0xD800 or 0xE000 <= code < 0x110000:
                return chr(code)
        return "\\" + letter + digits
    if letter and letter in "01234567":
        digits = letter
        while len(digits) < 3 and (yield from source.peek()) in tuple("01234567"):
            digits += yield from source.take(1)
        return chr(int(digits, 8))
    return _ESCAPES.get(letter, "\\" + letter)
