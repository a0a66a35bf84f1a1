"""One option, declared once: its keyword, flag, file key, EngineArgs attribute, default, limits, docs and availability.

Owns: `option(...)`, the declaration of a config group's field, and `Group`, which validates and normalizes every field
of a group when it is created. In: whatever a user typed. Out: frozen groups of plain values.
Must not know: which options exist (the group files), argparse (flags.py), or models (resolve.py).
"""

import dataclasses
import difflib
import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, Union, dataclass_transform, get_args, get_origin

import msgspec

from quire.config.unavailable import UnavailableRow, read_kind, rows_of
from quire.schema.errors import ConfigError, NotBuiltError


class OptionStatus(enum.Enum):
    """Whether an option may be set. Making one available is moving its row of unavailable.txt into a declaration."""

    READY = "available"
    LATER = "not yet"  # any value except the default (or one listed in `ready`) is refused by name
    INERT = "no effect"  # accepted, and logged with its `why`


READY, LATER, INERT = OptionStatus.READY, OptionStatus.LATER, OptionStatus.INERT
SAME: Any = object()  # an unset keyword has the field's default
_KEY = "option"
_SECRETS = ("hf_token", "api_key")
T = TypeVar("T")


class UnknownOptionError(ConfigError, TypeError):
    """An unknown keyword. A TypeError too, as for any Python call with a wrong keyword."""


class Option(NamedTuple):
    """The declaration of one field. `unset` is the default of the keyword and the flag; None: to be resolved."""

    doc: str
    status: OptionStatus
    default: Any
    unset: Any
    name: str | None = None  # the flat keyword where it is not the field's name
    flat: bool = True  # False: only a key inside its group's mapping
    flags: tuple[str, ...] = ()  # further spellings of the flag
    choices: tuple[str, ...] = ()  # known values of an open set; a closed set is a Literal type
    ready: tuple[Any, ...] = ()  # values that work although the status is LATER
    paths: bool = False  # an import path works too, although the status is LATER
    hints: tuple[Any, ...] = ()  # values that are treated as INERT although the status is LATER
    why: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None  # exclusive lower bound
    below: float | None = None  # exclusive upper bound
    human: bool = False  # accepts 25.6k and 4K
    auto: bool = False  # "auto" means -1
    accepts: Any = None  # the type a user may pass, if it is wider than the field's
    take: Callable[[Any], Any] | None = None  # user's value -> value of the field's type
    repeat: bool = False  # a list whose flag may be repeated, each time with further entries


def option(default: Any, doc: str, status: OptionStatus = READY, *, unset: Any = SAME, **more: Any) -> Any:
    """A dataclass field that carries its declaration; `more` are fields of Option."""
    declared = Option(doc, status, default, default if unset is SAME else unset, **more)
    if isinstance(default, type) and issubclass(default, Group):
        return dataclasses.field(default_factory=default, metadata={_KEY: declared})
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={_KEY: declared})
    return dataclasses.field(default=default, metadata={_KEY: declared})


class Unavailable:
    """What a row of unavailable.txt cannot express about its option."""

    def __init__(self, accepts: Any, take: Callable[[Any], Any] | None) -> None:
        self.accepts, self.take = accepts, take


def unavailable(*, accepts: Any = None, take: Callable[[Any], Any] | None = None) -> Any:
    """A field declared by a row of unavailable.txt; listed in a class because code reads or converts its value."""
    return Unavailable(accepts, take)


class OptionField(NamedTuple):
    """A field with its option; `type` is what is stored, `accepted` what a user may pass."""

    field: str
    type: Any
    option: Option

    @property
    def accepted(self) -> Any:
        return self.option.accepts or self.type


class Group:
    """Parent of every config group: keyword-only, frozen, compared by value, each declared field validated on creation.

    The methods are defined here once because `dataclass` would compile them for every group, which costs
    a tenth of a second at start-up.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init__(self, **values: Any) -> None:
        for field in fields(self):
            value = values.pop(field.name) if field.name in values else _default(field)
            object.__setattr__(self, field.name, value)
        if values:
            known = [field.name for field in fields(self)]
            raise UnknownOptionError(unknown(f"{type(self).__name__} has no key", next(iter(values)), known))
        self.__post_init__()

    def __post_init__(self) -> None:
        for field, kind, declared in declarations(type(self)).values():
            value = getattr(self, field)
            if value is not declared.default:
                object.__setattr__(self, field, settle(declared.name or field, value, kind, declared))

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self))

    def __repr__(self) -> str:
        """Only what differs from the defaults: there are 400 fields."""
        values = ((f, getattr(self, f.name)) for f in fields(self))
        shown = ((f.name, value) for f, value in values if value != _default(f))
        return f"{type(self).__name__}({', '.join(f'{name}={shown_value(name, value)}' for name, value in shown)})"

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"{type(self).__name__} is frozen; use quire.config.replace")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"{type(self).__name__} is frozen")

    def compute_hash(self) -> str:
        """The same for equal options, whatever was resolved or measured since; secrets do not count."""
        return hashlib.sha256(msgspec.json.encode(_options_of(self), order="sorted")).hexdigest()[:10]

    def __hash__(self) -> int:
        raise TypeError(f"{type(self).__name__} holds mappings, so it has no hash")


def _options_of(group: Group) -> dict[str, Any]:
    """The values of a group's options, and those of the groups in it."""
    declared = declarations(type(group))
    values = ((field.name, getattr(group, field.name)) for field in fields(group))
    return {
        name: _options_of(value) if isinstance(value, Group) else value
        for name, value in values
        if (name in declared or isinstance(value, Group)) and name not in _SECRETS
    }


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


_PLAIN = Unavailable(None, None)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def group(cls: type[T]) -> type[T]:
    """Make a Group subclass a dataclass, with its rows of unavailable.txt as additional fields."""
    kinds = dict(cls.__annotations__)
    for row in rows_of(cls.__name__):
        written = vars(cls).get(row.field, _PLAIN)
        if not isinstance(written, Unavailable):
            raise AssertionError(f"{cls.__name__}.{row.field} is declared, and is in unavailable.txt too")
        kind = kinds.setdefault(row.field, read_kind(row.kind, _groups))
        setattr(cls, row.field, _from_row(row, kind, written))
    cls.__annotations__ = kinds
    made = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    _groups[cls.__name__] = made
    return made


_groups: dict[str, type[Any]] = {}


def _from_row(row: UnavailableRow, kind: Any, written: Unavailable) -> Any:
    """If the type excludes None, None means unset: the second default (or the group's own) applies."""
    unset, *equal = row.defaults
    default = unset
    if unset is None and NoneType not in parts(kind):
        default, equal = (equal[0] if equal else kind), []
    return option(
        default, row.doc, LATER if row.is_refused else INERT, unset=unset, ready=tuple(equal), why=row.why,
        name=row.name, flat=row.flat, flags=row.flags, choices=row.choices, accepts=written.accepts,
        take=written.take, **row.bounds,
    )  # fmt: skip


def declarations(group: type[Any]) -> dict[str, OptionField]:
    """Field name -> declaration, in source order. Fields without one are results, not options."""
    if group not in _declarations:
        declared_fields = ((f, f.metadata[_KEY]) for f in fields(group) if _KEY in f.metadata)
        _declarations[group] = {f.name: OptionField(f.name, f.type, declared) for f, declared in declared_fields}
    return _declarations[group]


_declarations: dict[type[Any], dict[str, OptionField]] = {}


def make(group: type[Any], values: Mapping[str, Any], where: str = "") -> Any:
    """A group from a mapping; an unknown key is an error that suggests the closest known one."""
    known = [f.name for f in fields(group)]
    for key in values:
        if key not in known:
            raise UnknownOptionError(unknown(f"{where or group.__name__} has no key", str(key), known), param=where)
    return group(**values)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"{what} {name!r}; did you mean {near[0]!r}?" if near else f"{what} {name!r}"


def settle(name: str, value: Any, kind: Any, declared: Option) -> Any:
    """The value converted to the field's type, or a ConfigError that names option, value and limit."""
    if declared.take is not None:
        value = declared.take(value)
    if value is None:
        if declared.default is None or NoneType in parts(kind):
            return None
        if declared.unset is None:  # unset
            return _fresh(declared.default)
        raise _wrong(name, value, kind, declared)
    group = next((k for k in parts(kind) if isinstance(k, type) and issubclass(k, Group)), None)
    if group is not None:
        return _settle_group(name, value, group)
    try:
        value = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise _wrong(name, value, kind, declared) from None
    _check_bounds(name, value, declared)
    return value


def _fresh(default: Any) -> Any:
    return default() if isinstance(default, type) else default


def _settle_group(name: str, value: Any, group: type[Any]) -> Any:
    if isinstance(value, group):
        return value
    if isinstance(value, Mapping):
        return make(group, value, name)
    raise ConfigError(
        f"{name} must be a mapping or a {group.__name__}, got {type(value).__name__} {value!r}", param=name, value=value
    )


def _check_bounds(name: str, value: Any, o: Option) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    too_low = (o.low is not None and value < o.low) or (o.above is not None and value <= o.above)
    too_high = (o.high is not None and value > o.high) or (o.below is not None and value >= o.below)
    if too_low or too_high or value != value:
        raise ConfigError(f"{name} must be {limits(o)}, got {value}", param=name, value=value)


def shown_value(name: str, value: Any) -> str:
    """For logs and messages; secrets are masked."""
    return "'***'" if name in _SECRETS and value not in (None, True, False) else repr(value)


def limits(o: Option) -> str:
    """'at least 1', 'above 0 and at most 1', or ''."""
    texts = (("at least", o.low), ("above", o.above), ("at most", o.high), ("below", o.below))
    return " and ".join(f"{word} {bound:g}" for word, bound in texts if bound is not None)


def _wrong(name: str, value: Any, kind: Any, declared: Option) -> ConfigError:
    expected = describe(declared.accepts or kind)
    if isinstance(value, str) and (known := choices_of(kind)):
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return ConfigError(f"{name} is {value!r}; it must be one of {', '.join(known)}{hint}", param=name, value=value)
    return ConfigError(f"{name} must be {expected}, got {value!r}", param=name, value=value)


def parts(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def choices_of(kind: Any) -> list[str]:
    """Every string a Literal in this type allows."""
    return [str(v) for part in parts(kind) if get_origin(part) is Literal for v in get_args(part)]


def describe(kind: Any) -> str:
    """A type as shown to users: 'a whole number or None'."""
    return " or ".join(_TYPE_NAMES.get(part) or _describe_one(part) for part in parts(kind))


_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number", float: "a number", str: "a string", bool: "True or False", NoneType: "None",
    Any: "any value",
}  # fmt: skip


def _describe_one(part: Any) -> str:
    origin = get_origin(part)
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in get_args(part))
    if origin in (tuple, list):
        inner = [a for a in get_args(part) if a is not Ellipsis]
        return f"a list of {_TYPE_NAMES.get(inner[0], 'values').removeprefix('a ')}s" if inner else "a list"
    if origin is dict:
        return "a mapping"
    return f"a {part.__name__}" if isinstance(part, type) else str(part)


def has_no_effect(value: Any, o: Option) -> bool:
    """Whether it was set and is accepted, but changes nothing."""
    if any(same(value, usual) for usual in (o.unset, o.default, *o.ready)):
        return False
    return o.status is INERT or any(same(value, hint) for hint in o.hints)


def refuse(name: str, value: Any, o: Option) -> None:
    """NotBuiltError if this value requires a feature that this version does not have."""
    if same(value, o.unset) or same(value, o.default) or (o.status is not LATER and not o.paths):
        return
    if any(same(value, allowed) for allowed in (*o.ready, *o.hints)):
        return
    if o.paths and isinstance(value, str) and not {".", ":"}.isdisjoint(value):
        return
    if o.choices and isinstance(value, str) and value not in o.choices:
        raise ConfigError(unknown(f"{name} can be {', '.join(o.choices)}; not", value, o.choices), param=name)
    if o.status is not LATER:
        return
    known = (o.unset, *o.ready) if isinstance(o.default, type) else (o.unset, o.default, *o.ready)
    allowed = f"leave {name} at {' or '.join(dict.fromkeys(map(repr, known)))}"
    advice = allowed if not o.why else o.why if o.ready else f"{o.why}; {allowed}"
    raise NotBuiltError(
        f"{name}={value!r} is not available in this version of Quire ({o.doc.rstrip('.')}): {advice}",
        param=name,
        value=value,
    )


def same(value: Any, other: Any) -> bool:
    """Equal as a setting: a list equals its tuple, and True is not 1."""
    if value is other:
        return True
    if isinstance(value, set | frozenset) and isinstance(other, tuple):
        return sorted(value) == sorted(other)
    if isinstance(value, list | tuple) and isinstance(other, list | tuple):
        return list(value) == list(other)
    if isinstance(value, bool) is not isinstance(other, bool):
        return False
    return bool(value == other)
