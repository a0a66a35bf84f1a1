"""A terminal: its capabilities, messages typed or pasted into it, and answers streamed to it.

In: chunks of Markdown. Out: the same with colours if the terminal supports them, else unchanged. Model output
cannot control a terminal: control characters are escaped. A pipe gets every byte unchanged.
Must not know: models, conversations.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from quire.base import env
from quire.base.registry import load

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BOLD, _DIM, _CODE, _HEAD, _OFF = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[1;35m", "\x1b[0m"
_MORE = "...> "
# a paste is one message, and Alt-Enter inserts a line break
_BINDINGS = ("set enable-bracketed-paste on", r'"\e\C-m": "\C-v\C-j"', r'"\e\C-j": "\C-v\C-j"')


class AnswerWriter(Protocol):
    """Takes the chunks of an answer."""

    def write(self, text: str) -> None: ...
    def close(self) -> None: ...


def writer() -> AnswerWriter:
    """For the current stdout."""
    if not sys.stdout.isatty():
        return PlainWriter()
    return Coloured() if has_colours() else Visible()


def has_colours() -> bool:
    return sys.stdout.isatty() and not env.NO_COLOR.get() and env.TERM.get() != "dumb"


def dim(text: str) -> str:
    """For notices on stderr."""
    return f"{_DIM}{text}{_OFF}" if has_colours() and sys.stderr.isatty() else text


class PlainWriter:
    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def close(self) -> None:
        print(flush=True)


class Visible(PlainWriter):
    """For a terminal without colours."""

    def write(self, text: str) -> None:
        super().write(visible(text))


def visible(text: str) -> str:
    return _CONTROL.sub(lambda match: ascii(match.group())[1:-1], text)


class Coloured(Visible):
    """Markdown markup becomes colours: headings, bold, code and its fences, bullets.

    A possible start of markup is held back until the next chunk.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._line_begins = True
        self._in_fence = self._in_code = self._in_bold = self._in_heading = False

    def write(self, text: str) -> None:
        shown = self._take(self._pending + visible(text), final=False)
        if shown:
            print(shown, end="", flush=True)

    def close(self) -> None:
        print(self._take(self._pending, final=True) + _OFF, flush=True)

    def _take(self, text: str, *, final: bool) -> str:
        shown: list[str] = []
        self._pending = ""
        while text:
            if self._line_begins and (rest := self._begin_line(text, shown, final)) is not text:
                if rest is None:
                    self._pending = text
                    break
                text = rest
                continue
            self._line_begins = False
            if text in ("*", "`") and not final and not self._in_fence:
                self._pending = text
                break
            text = self._next(text, shown)
        return "".join(shown)

    def _begin_line(self, text: str, shown: list[str], final: bool) -> str | None:
        """The text after markup at the start of a line; None: more input is needed; the text itself: no markup."""
        line, newline, rest = text.partition("\n")
        if line.lstrip(" ").startswith("```"):
            if not newline and not final:
                return None
            self._in_fence = not self._in_fence
            shown.append(f"{_DIM}{line}{_OFF}{newline}" + (_CODE if self._in_fence else ""))
            return rest
        if not newline and not final and len(line) < 8 and re.fullmatch(r" *(`{1,2}|#{1,6} ?|[-*])?", line):
            return None
        if self._in_fence:
            return text
        if heading := re.match(r"#{1,6} +", line):
            self._in_heading, self._line_begins = True, False
            shown.append(_HEAD)
            return text[heading.end() :]
        if bullet := re.match(r"( *)[-*] +", line):
            self._line_begins = False
            shown.append(f"{bullet[1]}• ")
            return text[bullet.end() :]
        return text

    def _next(self, text: str, shown: list[str]) -> str:
        """One span of markup, or the text up to the next."""
        if text[0] == "\n":
            self._line_begins = True
            off = self._in_heading or self._in_bold or self._in_code
            self._in_heading = self._in_bold = self._in_code = False
            shown.append((_OFF if off else "") + "\n")
            return text[1:]
        if not self._in_fence and text.startswith("**") and not self._in_code:
            self._in_bold = not self._in_bold
            shown.append(_BOLD if self._in_bold else _OFF)
            return text[2:]
        if not self._in_fence and text[0] == "`":
            self._in_code = not self._in_code
            shown.append(_CODE if self._in_code else _OFF)
            return text[1:]
        end = re.search("\n" if self._in_fence else r"\n|`|\*", text[1:])
        length = len(text) if end is None else end.start() + 1
        shown.append(text[:length])
        return text[length:]


# ---- input ---------------------------------------------------------------------------------------------------------


def messages(prompt: str, greeting: str) -> Iterator[str]:
    """Messages from a terminal, or lines of a pipe; empty ones are skipped, Ctrl-C clears the input, Ctrl-D quits.

    On a terminal a paste is one message, and a message continues after a backslash at the end of a line or Alt-Enter.
    """
    terminal = sys.stdin.isatty()
    if terminal:
        set_up_editing()
        print(greeting, file=sys.stderr)
    while True:
        try:
            message = _typed(prompt) if terminal else input()
        except EOFError:
            if terminal:
                print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if message.strip():
            yield message


def _typed(prompt: str) -> str:
    lines = [input(prompt)]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(_MORE))
    return "\n".join(lines)


def set_up_editing() -> None:
    """Importing readline gives input() history and editing, if the platform has it."""
    try:
        bind: Any = load("readline:parse_and_bind")
    except ImportError:
        return
    for binding in _BINDINGS:
        bind(binding)
