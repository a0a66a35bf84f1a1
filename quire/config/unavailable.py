"""Options that vLLM documents and Quire does not have: the rows of unavailable.txt, which explains its columns.

In: the file. Out: for each config class, its additional options (option.py adds them), and
the reasons by name. To make an option available, move it from the file to a declaration in its class.
Must not know: how an option's value is validated or refused (option.py).
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

_FILE = os.path.join(os.path.dirname(__file__), "unavailable.txt")
_OUTCOMES = {"refused": True, "inert": False}
_BOUNDS = {">=": "low", ">": "above", "<=": "high", "<": "below"}
_LITERALS: dict[str, Any] = {"None": None, "True": True, "False": False, "()": (), "{}": {}}
_KINDS: dict[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "dict": dict[str, Any],
    "list[str]": tuple[str, ...], "list[int]": tuple[int, ...], "list[float]": tuple[float, ...],
    "list[int|str]": tuple[int | str, ...], "list[triple]": tuple[tuple[int, int, int], ...],
    "dict[str]": dict[str, str], "dict[list[str]]": dict[str, tuple[str, ...]], "dict[dict]": dict[str, dict[str, Any]],
    "dict[int|dict]": dict[str, int | dict[str, int]], "str|list[int]": str | tuple[int, ...],
}  # fmt: skip


class UnavailableRow(NamedTuple):
    """One option. `kind` is unparsed: it may name a config class, which only option.py knows."""

    field: str
    name: str | None  # the keyword if it differs from the field's name
    flat: bool  # False: only a key inside its group's mapping
    flags: tuple[str, ...]
    kind: str
    choices: tuple[str, ...]
    bounds: dict[str, float]
    defaults: tuple[Any, ...]
    since: str
    doc: str
    is_refused: bool  # else it has no effect
    why: str


def rows_of(group: str) -> list[UnavailableRow]:
    """The file's options of the config class of this name."""
    return all_rows().get(group, [])


def all_rows() -> dict[str, list[UnavailableRow]]:
    """By config class."""
    return _read()[0]


def reason(name: str) -> str:
    return _read()[1][name]


def read_kind(text: str, groups: Mapping[str, type[Any]]) -> Any:
    """'int?' -> int | None; 'a/b' -> Literal['a', 'b']; a config class by its name."""
    plain = text.removesuffix("?")
    if plain not in _KINDS:
        _KINDS[plain] = groups[plain] if plain.endswith("Config") else _one_of(plain.split("/"))
    if text not in _KINDS:
        _KINDS[text] = _KINDS[plain] | None
    return _KINDS[text]


def _one_of(values: list[str]) -> Any:
    return Literal[tuple(int(value) if value.isdigit() else value for value in values)]


@cache
def _read() -> tuple[dict[str, list[UnavailableRow]], dict[str, str]]:
    with open(_FILE, encoding="utf-8") as file:
        lines = [line for line in file.read().splitlines() if line and line[0] != "#"]
    reasons: dict[str, str] = {}
    groups: dict[str, list[UnavailableRow]] = {}
    section = ""
    for line in lines:
        if line[0] == "[":
            section = line.strip("[]")
            continue
        cells = [cell.strip() for cell in line.split(" | ")]
        if section == "reasons":
            reasons[cells[0]] = cells[1]
        else:
            groups.setdefault(section, []).append(_row(cells, reasons))
    return groups, reasons


def _row(cells: list[str], reasons: dict[str, str]) -> UnavailableRow:
    option, value, default, since, doc, why = cells
    field, *rest = option.split()
    name = None
    if rest and rest[0] == ">":
        _, name, *rest = rest
    what, _, reason_text = why.partition(" ")
    return UnavailableRow(
        field.removeprefix("."), name, field[0] != ".", tuple(rest), *_value(value), _defaults(default), since, doc,
        _OUTCOMES[what.rstrip(":")], reason_text if what.endswith(":") else reasons[reason_text],
    )  # fmt: skip


@cache
def _value(text: str) -> tuple[str, tuple[str, ...], dict[str, float]]:
    """'int? >=1' or 'str (a/b)'."""
    text, _, known = text.partition(" (")
    kind, *limits = text.split()
    bounds = {_BOUNDS[limit.rstrip("0123456789.")]: float(limit.lstrip("<>=")) for limit in limits}
    return kind, tuple(known.removesuffix(")").split("/")) if known else (), bounds


@cache
def _defaults(text: str) -> tuple[Any, ...]:
    """'None or 0' -> (None, 0)."""
    return tuple(_literal(part) for part in text.split(" or "))


def _literal(text: str) -> Any:
    if text in _LITERALS:
        return _LITERALS[text]
    if text.startswith("'"):
        return text.strip("'")
    return float(text) if "." in text else int(text)
