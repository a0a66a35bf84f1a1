"""NamePattern: a regular expression that a file brings along, matched with names in bounded time.

It means what `re.match` means, and never walks back: it carries the set of all places that a match may have come to, as
the bits of one integer. Constructs that need more than such a set (back references, atomic groups) are refused. A match
that would take too many steps, as repeats within repeats may, is an error. Must not know: what names are of.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

LONGEST = 1024  # characters of an expression
MOST_STEPS = 5000  # of one match; names of layers take some dozens
_MOST_REPEAT = 1024  # in braces
_parser: Any = importlib.import_module("re._parser")  # what `re` itself reads expressions with
_FLAGS = re.IGNORECASE | re.UNICODE | re.VERBOSE
_REFUSED = {
    "GROUPREF": "a back reference", "GROUPREF_EXISTS": "a conditional group", "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}  # fmt: skip
_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal, "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}  # fmt: skip


class NamePattern:
    """ValueError: the expression cannot be used."""

    def __init__(self, source: str) -> None:
        if len(source) > LONGEST:
            raise ValueError(f"it has {len(source)} characters; the limit is {LONGEST}")
        try:
            parsed = _parser.parse(source)
        except (re.error, RecursionError, OverflowError) as wrong:
            raise ValueError(str(wrong)) from None
        _check_flags(parsed.state.flags)
        self.source = source
        self._steps = [_step(node, bool(parsed.state.flags & re.IGNORECASE)) for node in parsed]

    def matches(self, name: str) -> bool:
        """Whether it matches the beginning of the name. ValueError: that would take too many steps."""
        return bool(_Walk(name).through(self._steps, 1))

    def found_in(self, name: str) -> bool:
        """As re.search. ValueError: that would take too many steps."""
        return bool(_Walk(name).through(self._steps, (1 << len(name) + 1) - 1))


class _Walk:
    """Through one name. Bit i of a set is the place before character i; the last is the end."""

    def __init__(self, name: str) -> None:
        self.name, self.num_steps = name, 0
        self.chars = _places_of(name)

    def through(self, steps: list[Step], places: int) -> int:
        """Where a match may be after these steps."""
        for step in steps:
            if not places:
                return 0
            self.num_steps += 1
            if self.num_steps > MOST_STEPS:
                raise ValueError(f"to match it with {self.name!r:.100} takes more than {MOST_STEPS} steps")
            places = step(self, places)
        return places


Step = Callable[[_Walk, int], int]  # from the places where a match may be to those where it may be then
Mask = Callable[[_Walk], int]  # where characters are that a node takes


@lru_cache(maxsize=64)  # a name is matched with one expression after another
def _places_of(name: str) -> dict[str, int]:
    """Where each character is."""
    places: dict[str, int] = {}
    for at, char in enumerate(name):
        places[char] = places.get(char, 0) | 1 << at
    return places


def _check_flags(flags: int) -> None:
    if flags & ~_FLAGS:
        raise ValueError(f"it has flags ({re.RegexFlag(flags & ~_FLAGS)!r}); only ignoring case is supported")


def _step(node: tuple[Any, Any], any_case: bool) -> Step:
    kind, value = str(node[0]), node[1]
    if kind in _REFUSED:
        raise ValueError(f"it has {_REFUSED[kind]}, which is not supported")
    if (mask := _mask(kind, value, any_case)) is not None:
        return lambda walk, places: (places & mask(walk)) << 1
    if kind in ("MAX_REPEAT", "MIN_REPEAT"):
        low, high, inner = value
        return _repeat(low, high, inner, any_case)
    if kind == "BRANCH":
        return _branch([[_step(one, any_case) for one in inner] for inner in value[1]])
    if kind == "SUBPATTERN":
        _, added, removed, inner = value
        _check_flags(added | removed)
        cased = (any_case or bool(added & re.IGNORECASE)) and not removed & re.IGNORECASE
        steps = [_step(one, cased) for one in inner]
        return lambda walk, places: walk.through(steps, places)
    if kind in ("ASSERT", "ASSERT_NOT"):
        direction, inner = value
        return _assertion(direction, inner, any_case, kind == "ASSERT")
    edge = str(value)
    return lambda walk, places: places & _edges(walk.name, edge)


def _branch(branches: list[list[Step]]) -> Step:
    def run(walk: _Walk, places: int) -> int:
        after = 0
        for steps in branches:
            after |= walk.through(steps, places)
        return after

    return run


def _repeat(low: int, high: int, inner: Any, any_case: bool) -> Step:
    endless = high == _parser.MAXREPEAT
    if max(low, 0 if endless else high) > _MOST_REPEAT:
        raise ValueError(f"it repeats {low if endless else high} times; the limit is {_MOST_REPEAT}")
    steps = [_step(one, any_case) for one in inner]
    mask = _mask(str(inner[0][0]), inner[0][1], any_case) if endless and len(inner) == 1 else None

    def run(walk: _Walk, places: int) -> int:
        for _ in range(low):
            places = walk.through(steps, places)
        if mask is not None:
            taken = mask(walk)
            return (((places & taken) + taken) ^ taken) | places  # a sum carries a bit through a run of ones
        total = latest = places
        num = low
        while latest and (endless or num < high):
            latest = walk.through(steps, latest) & ~total
            total |= latest
            num += 1
        return total

    return run


def _assertion(direction: int, inner: Any, any_case: bool, is_there: bool) -> Step:
    steps = [_step(one, any_case) for one in inner]
    width = inner.getwidth()[0] if direction < 0 else 0

    def run(walk: _Walk, places: int) -> int:
        left = 0
        for place in (at for at in range(len(walk.name) + 1) if places >> at & 1):
            after = walk.through(steps, 1 << place - width) if place >= width else 0
            there = bool(after) if direction > 0 else bool(after >> place & 1)
            left |= (there == is_there) << place
        return left

    return run


def _mask(kind: str, value: Any, any_case: bool) -> Mask | None:
    """None: the node does not take one character."""
    if kind == "LITERAL" and not any_case:
        char = chr(value)
        return lambda walk: walk.chars.get(char, 0)
    if kind not in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return None
    takes = _test(kind, value)

    def mask(walk: _Walk) -> int:
        places = 0
        for char, there in walk.chars.items():
            if takes(char) or (any_case and (takes(char.lower()) or takes(char.upper()))):
                places |= there
        return places

    return mask


def _test(kind: str, value: Any) -> Callable[[str], bool]:
    if kind == "ANY":
        return lambda char: char != "\n"
    if kind == "NOT_LITERAL":
        return lambda char: ord(char) != value
    if kind == "IN":
        is_not = any(str(part) == "NEGATE" for part, _ in value)
        parts = [_test(str(part), inner) for part, inner in value if str(part) != "NEGATE"]
        return lambda char: any(part(char) for part in parts) != is_not
    if kind == "RANGE":
        return lambda char: value[0] <= ord(char) <= value[1]
    if kind == "LITERAL":
        return lambda char: ord(char) == value
    name = str(value)
    takes = _CATEGORIES[name.replace("CATEGORY_NOT_", "CATEGORY_")]
    return (lambda char: not takes(char)) if "_NOT_" in name else takes


def _edges(name: str, kind: str) -> int:
    """Places that an anchor names."""
    end = len(name)
    if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
        return 1
    if kind == "AT_END_STRING":
        return 1 << end
    if kind == "AT_END":
        return 1 << end | (1 << end - 1 if name.endswith("\n") else 0)
    word = [False, *map(_CATEGORIES["CATEGORY_WORD"], name), False]
    edges = sum(1 << at for at in range(end + 1) if word[at] != word[at + 1])
    return edges if kind == "AT_BOUNDARY" else ((1 << end + 1) - 1) & ~edges
