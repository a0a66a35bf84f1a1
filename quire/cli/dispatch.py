"""A table of commands by name: its --help, its error for an unknown name, and the call of the command that was named.

In: the arguments after the program's name. Out: an exit status. Commands are import paths, loaded only when they are
called, so --help costs almost nothing. Must not know: any command, or how its errors are reported (main.py).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.base.registry import load


class Command(NamedTuple):
    path: str  # function (arguments, program name) -> exit status
    summary: str


class CommandTable(dict[str, Command]):
    """`kind` is what one entry is called, `title` the heading of the list, `later` names that are not built yet."""

    def __init__(
        self, kind: str, commands: Mapping[str, Command], *, title: str = "", flags: Mapping[str, str] | None = None,
        later: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(commands)
        self.kind, self.title, self.flags, self.later = kind, title or f"{kind}s", flags or {}, later

    def call(self, arguments: Sequence[str], program: str) -> int:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(self.usage(program))
            return 0
        name, *rest = arguments
        if name not in self:
            print(f"{program}: {self.unknown(name)}", file=sys.stderr)
            return 2
        status: int = load(self[name].path)(rest, f"{program} {name}")
        return status

    def usage(self, program: str) -> str:
        kind = self.kind.upper()
        short = "".join(f"[{flag.partition(',')[0]}] " for flag in self.flags)
        lines = [f"usage: {program} {short}{kind} ...", "", f"{self.title}:", *_columns(self._summaries())]
        if self.flags:
            lines += ["", "options:", *_columns(self.flags)]
        return "\n".join([*lines, "", f"'{program} {kind} --help' lists its options."])

    def unknown(self, name: str) -> str:
        known = f"{self.kind.capitalize()}s: {', '.join(self)}"
        if name in self.later:
            return f"'{name}' is not built yet. {known}"
        near = difflib.get_close_matches(name, self, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        return f"unknown {self.kind} '{name}'{hint or '.'} {known}"

    def _summaries(self) -> dict[str, str]:
        return {name: command.summary for name, command in self.items()}


def _columns(rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows)) + 2
    return [f"  {name:<{width}}{text}" for name, text in rows.items()]
