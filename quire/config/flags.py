"""A declaration -> an argparse flag. Owns: how a type is written on a command line, and how its text is parsed.

In: Flat rows of table.py. Out: arguments of an argparse parser, grouped by the config class that declares them.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from quire.config.option import INERT, LATER, Option, limits, parts
from quire.config.parser import FOLDED
from quire.config.table import Flat, group_of

_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d+)?|\.\d+))([kKmMgGtT]?)")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def human_readable_int(text: str) -> int:
    """'1k' is 1000, '1K' is 1024, '25.6k' is 25600; also m, g, t and M, G, T."""
    number = _NUMBER.fullmatch(text.strip())
    if number is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number (write 4096, 4k or 4K)")
    digits, suffix = number.groups()
    if suffix and suffix.isupper():
        if "." in digits:
            raise argparse.ArgumentTypeError(
                f"{text!r}: a fraction needs the decimal suffix; write {digits}{suffix.lower()} for powers of 1000"
            )
        return int(digits) << 10 * _POWERS[suffix.lower()]
    if not suffix:
        if "." in digits:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
        return int(digits)
    whole, _, fraction = digits.partition(".")
    shift = 3 * _POWERS[suffix]
    if len(fraction) > shift:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    sign = -1 if whole.startswith("-") else 1
    return sign * int(whole.lstrip("+-") + fraction.ljust(shift, "0") or "0")


def human_readable_int_or_auto(text: str) -> int:
    """The same, and 'auto' (or -1)."""
    return -1 if text.strip().lower() == "auto" else human_readable_int(text)


def json_value(text: str) -> Any:
    """JSON text; an error says where it is invalid."""
    try:
        return json.loads(text)
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {wrong}") from None


def union_dict_and_str(text: str) -> Any:
    """JSON if it looks like a mapping, otherwise the text itself."""
    stripped = text.strip()
    return json_value(text) if stripped.startswith("{") and stripped.endswith("}") else text


def optional_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """'' and 'None' give None; anything else goes through `read`."""

    def read_optional(text: str) -> Any:
        return None if text in ("", "None") else read(text)

    read_optional.__name__ = read.__name__  # argparse puts it into its messages
    return read_optional


class Gather(argparse.Action):
    """A flag that may be repeated: all its values, instead of the default."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, list(values) if before is self.default else [*before, *values])


def add_flags(parser: argparse.ArgumentParser, flats: Iterable[Flat]) -> None:
    """Add every flag; those of one config class share a group of that name, in order of first appearance."""
    groups: dict[str, Any] = {}
    for flat in flats:
        if flat.group not in groups:
            groups[flat.group] = parser.add_argument_group(flat.group, FOLDED)
        names = [f"--{flat.name.replace('_', '-')}", *flat.declared.option.flags]
        groups[flat.group].add_argument(*names, dest=flat.name, **arguments_for(flat))


def arguments_for(flat: Flat) -> dict[str, Any]:
    """The keyword arguments of add_argument for one option."""
    declared, o = flat.declared, flat.declared.option
    default = list(o.unset) if isinstance(o.unset, tuple) else o.unset
    works = [value for value in o.ready if value not in (None, False, o.unset, o.default)]
    absent = o.status is LATER and not works  # every value with an effect is refused, so help does not list it
    arguments: dict[str, Any] = {"default": default, "help": argparse.SUPPRESS if absent else help_text(o)}
    kinds = [kind for kind in parts(declared.accepted) if kind is not NoneType]
    optional = o.unset is None or NoneType in parts(declared.accepted)
    if kinds == [bool]:
        return arguments | {"action": argparse.BooleanOptionalAction}
    if bool in kinds:
        return arguments | {"nargs": "?", "const": True, "type": str}
    if group_of(declared.accepted) is not None:
        return arguments | {"type": optional_type(json_value)}
    return arguments | _typed(kinds, optional, o)


def _typed(kinds: list[Any], optional: bool, o: Option) -> dict[str, Any]:
    lists = [kind for kind in kinds if get_origin(kind) in (tuple, list)]
    read: Callable[[str], Any]
    extra: dict[str, Any] = {}
    if o.human:
        read = human_readable_int_or_auto if o.auto else human_readable_int
    elif lists:
        inner = get_args(lists[0])[0]
        repeat = {"action": Gather} if o.repeat else {}
        return {"nargs": "+", "type": inner if inner in (int, float) else str, **repeat}
    elif any(get_origin(kind) is dict for kind in kinds):
        read = union_dict_and_str if str in kinds else json_value
    elif literals := [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]:
        read = type(literals[0])
        values = literals if read is not str else sorted(literals)
        extra["choices"] = [*values, None] if optional else values
        if optional:
            extra["metavar"] = "{" + ",".join(str(value) for value in extra["choices"]) + "}"
    else:
        read = next((kind for kind in (int, float) if kinds == [kind]), str)
    if o.choices:
        extra["metavar"] = "{" + ",".join(o.choices) + "}"
    return {"type": optional_type(read) if optional else read, **extra}


def help_text(o: Option) -> str:
    """What the option does, its limits and whether it can be used."""
    text = o.doc
    if bounds := limits(o):
        text += f" Must be {bounds}."
    if o.status is LATER:
        works = f" (works: {', '.join(map(str, o.ready))})" if o.ready else ""
        text += f" Not available yet{works}."
    elif o.status is INERT:
        text += f" No effect: {o.why}."
    return f"{text} Default: {_written(o.unset)}.".replace("%", "%%")


def _written(default: Any) -> str:
    """As one would write it after the flag."""
    if isinstance(default, tuple):
        return " ".join(map(str, default)) or "[]"
    return "''" if default == "" else str(default)
