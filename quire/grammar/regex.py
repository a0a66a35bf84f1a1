"""Checks a regular expression for constructs that a backend interprets differently than Python's `re.fullmatch`.

Not a parser: it skips escapes and character classes and looks at what is outside and inside them. What no
backend supports (look-around, back references, word boundaries) is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from quire.schema.errors import InputError

MOST_CHARS = 1 << 16
MOST_NESTING = 100
MOST_REPEAT = 100_000  # the product of nested {n,m}
_MOST_DIGITS = len(str(MOST_REPEAT))
_PARAM = "structured_outputs"
_ESCAPES = {
    "b": "a word boundary (\\b)", "B": "a word boundary (\\B)", "A": "\\A", "Z": "\\Z", "z": "\\z", "G": "\\G",
}  # fmt: skip
_TOKEN = re.compile(
    # possessive and bounded: an unterminated construct is not scanned again from every position
    r"\\(?:[pP]\{[^{}]{0,64}+\}|.)|\(\?(?:<[=!]|[=!:>]|P?<\w++>|P=\w++\)|[a-zA-Z-]++[:)]|.?)|\{\d*+,?+\d*+\}|.",
    re.S,
)
# What a class means both to Python's `re` and to guidance (which has two meanings of its own, one for JSON schemas);
# within [^...], what it means to any of them.
_COMMON = {
    (r"\w", False): r"[\p{L}\p{Nd}_]", (r"\w", True): r"\p{L}\p{N}_",
    (r"\W", False): r"[^\p{L}\p{N}_]", (r"\W", True): r"[^\p{L}\p{Nd}_]",
    (r"\d", True): r"\p{Nd}", (r"\D", False): r"[^\p{Nd}]",
    (r"\s", True): r"\s\x1c-\x1f", (r"\S", False): r"[^\s\x1c-\x1f]",
}  # fmt: skip


@dataclass
class Regex:
    """`for_xgrammar`: the same expression with `.` spelt out, because there it would match a newline too.
    `for_guidance`: with \\w and \\s as the characters that Python and Unicode agree on."""

    for_xgrammar: str
    for_guidance: str
    not_xgrammar: list[str] = field(default_factory=list)


def read_regex(source: str) -> Regex:
    if len(source) > MOST_CHARS:
        raise _refuse(f"the regex has {len(source)} characters; the limit is {MOST_CHARS}", value=len(source))
    reader = _RegexReader(source)
    for match in _TOKEN.finditer(source):
        reader.take(match.group(), match.start())
    if reader.depth or reader.in_class:
        raise _refuse(f"the regex is not closed: {'[' if reader.in_class else '('} has no end")
    return Regex("".join(reader.out), "".join(reader.common), reader.reasons)


class _RegexReader:
    def __init__(self, source: str) -> None:
        self.source, self.last, self.negated = source, len(source) - 1, False
        self.out: list[str] = []
        self.common: list[str] = []
        self.reasons: list[str] = []
        self.in_class = False
        self.class_start = 0
        self.depth = 0
        self.closed = 1  # repeats inside the group or atom that just ended
        self.inner: list[int] = [1]  # the most repeats met so far, per open group

    def take(self, token: str, at: int) -> None:
        self.common.append(_COMMON.get((token, self.in_class and self.negated), token))
        if token[0] == "\\" and len(token) > 1:
            self._escape(token)
        elif self.in_class:
            if token[0] == "]" and at > self.class_start:
                self.in_class, self.closed = False, 1
        elif token[0] == "[":
            self.in_class, self.class_start = True, at + 1
            self.negated = self.source.startswith("[^", at)
        elif token[0] == "(":
            self._open(token)
        elif token[0] == ")":
            self._close()
        elif token[0] == "{" and len(token) > 2:
            self._repeat(token)
        elif token not in "*+?":
            self.closed = 1
            if token in "^$" and at not in (0, self.last):
                self.reasons.append(f"'{token}' inside the expression")
        if token == "." and not self.in_class:
            token = "[^\\n]"
        self.out.append(token)

    def _escape(self, token: str) -> None:
        letter = token[1]
        if not self.in_class and letter in _ESCAPES:
            raise _refuse(f"the regex has {_ESCAPES[letter]}, which no grammar backend supports", value=token)
        if not self.in_class and letter.isdigit() and letter != "0":
            raise _refuse(f"the regex has a back reference ({token}), which no grammar can enforce", value=token)
        if letter in "pPNQWDS":  # its classes are ASCII, so their complement differs from Python's
            self.reasons.append(f"'{token}'")
        elif letter in "wds" and self.in_class and self.negated:
            self.reasons.append(f"'{token}' in [^...]")
        self.closed = 1

    def _open(self, token: str) -> None:
        self.depth += 1
        if self.depth > MOST_NESTING:
            raise _refuse(f"the regex nests groups deeper than {MOST_NESTING}", value=self.depth)
        self.inner.append(1)
        if token.startswith(("(?=", "(?!", "(?<=", "(?<!")):
            raise _refuse(f"the regex has look-around ('{token}'), which no grammar backend supports", value=token)
        if token.startswith("(?P="):
            raise _refuse(
                f"the regex has a back reference ('{token}'), which no grammar is able to follow", value=token
            )
        if token not in ("(", "(?:"):
            self.reasons.append(f"'{token}'")
            if token.endswith(")"):  # (?i): flags alone open no group
                self.depth -= 1
                self.inner.pop()

    def _close(self) -> None:
        self.depth -= 1
        if self.depth < 0:
            raise _refuse("the regex has ')' without '('")
        self.closed = self.inner.pop()
        self.inner[-1] = max(self.inner[-1], self.closed)

    def _repeat(self, token: str) -> None:
        counts = [n.lstrip("0") or "0" for n in token[1:-1].split(",") if n]
        if (longest := max(map(len, counts), default=0)) > _MOST_DIGITS:
            raise _refuse(f"the regex has a number of {longest} digits in braces; the limit is {MOST_REPEAT}")
        most = max(map(int, counts), default=1)
        repeats = self.closed * max(most, 1)
        if repeats > MOST_REPEAT:
            raise _refuse(f"the regex repeats something {repeats} times; the limit is {MOST_REPEAT}", value=repeats)
        self.closed = repeats
        self.inner[-1] = max(self.inner[-1], repeats)
        if repeats > 1000:
            self.reasons.append(f"{repeats} repeats")


def _refuse(message: str, *, value: object = None) -> InputError:
    return InputError(message, param=_PARAM, value=value)
