"""The flat view of the tree: every keyword and flag, the path of its field, and how values are assembled into a tree.

In: a mapping keyword -> value. Out: an EngineConfig with every value set and validated, nothing resolved yet.
"""

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from quire.base.log import logger, once
from quire.config.engine import EngineConfig
from quire.config.option import (
    Group,
    Option,
    OptionField,
    declarations,
    has_no_effect,
    make,
    parts,
    refuse,
    same,
    shown_value,
)
from quire.schema.errors import ConfigError

log = logger(__name__)


class Flat(NamedTuple):
    """One keyword. `path` leads from EngineConfig to the field."""

    name: str
    path: tuple[str, ...]
    group: str  # name of the class that declares it
    declared: OptionField


def group_of(kind: Any) -> type[Group] | None:
    """The group class in a field's type, if it is one."""
    for part in parts(kind):
        if isinstance(part, type) and issubclass(part, Group):
            return part
    return None


@cache
def table() -> dict[str, Flat]:
    """Keyword -> its field, in the order of declaration. A name declared twice is a bug."""
    rows: dict[str, Flat] = {}
    for flat in _walk(EngineConfig, ()):
        if flat.name in rows:
            raise AssertionError(f"two options are called {flat.name!r}: {rows[flat.name].path} and {flat.path}")
        rows[flat.name] = flat
    return rows


def _walk(group: type[Any], path: tuple[str, ...]) -> Iterator[Flat]:
    declared = declarations(group)
    for field in dataclasses.fields(group):
        here = (*path, field.name)
        mine = declared.get(field.name)
        if mine is not None and mine.option.flat:
            yield Flat(mine.option.name or field.name, here, group.__name__, mine)
        inner = group_of(field.type)
        if inner is not None:
            yield from _walk(inner, here)


def assemble(requested: Mapping[str, Any]) -> EngineConfig:
    """Set every requested value in the tree. Unset fields keep their group's default."""
    tree: dict[str, Any] = {}
    set_by: dict[tuple[str, ...], str] = {}
    for flat in sorted(table().values(), key=lambda f: len(f.path)):
        value = requested.get(flat.name, flat.declared.option.unset)
        if same(value, flat.declared.option.unset):
            continue
        if group_of(flat.declared.type) is not None and value is not None:
            _insert_mapping(tree, set_by, flat, value)
        else:
            _insert(tree, set_by, flat.path, value, flat.name)
    config: EngineConfig = _build(EngineConfig, tree)
    return config


def _insert_mapping(tree: dict[str, Any], set_by: dict[tuple[str, ...], str], flat: Flat, value: Any) -> None:
    """A complete group as a mapping, an instance, or the shorthand that its option accepts."""
    take = flat.declared.option.take
    value = take(value) if take is not None else value
    if isinstance(value, Group):
        value = _set_fields(value)
    if not isinstance(value, Mapping):
        kind = group_of(flat.declared.type)
        raise ConfigError(
            f"{flat.name} must be a mapping{f' or a {kind.__name__}' if kind else ''}, got {value!r}",
            param=flat.name,
            value=value,
        )
    _insert(tree, set_by, flat.path, {}, flat.name)
    for key, inner in value.items():
        _insert(tree, set_by, (*flat.path, str(key)), inner, f"{flat.name}.{key}")


def _set_fields(group: Group) -> dict[str, Any]:
    """The fields of an instance that differ from its class's defaults."""
    plain = type(group)()
    values = {name: getattr(group, name) for name in declarations(type(group))}
    return {name: value for name, value in values.items() if not same(value, getattr(plain, name))}


def _insert(
    tree: dict[str, Any], set_by: dict[tuple[str, ...], str], path: tuple[str, ...], value: Any, name: str
) -> None:
    if path in set_by and value != {}:
        raise ConfigError(f"{name} and {set_by[path]} set the same field; use only one", param=name, value=value)
    set_by[path] = name
    *above, last = path
    for key in above:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _build(group: type[Any], tree: Mapping[str, Any], where: str = "") -> Any:
    values = dict(tree)
    for field in dataclasses.fields(group):
        inner = group_of(field.type)
        if inner is not None and isinstance(values.get(field.name), dict):
            inner_path = f"{where}.{field.name}" if where else field.name
            values[field.name] = _build(inner, values[field.name], inner_path)
    return make(group, values, where)


def refuse_unbuilt(config: Any) -> None:
    """Refuse every set option whose feature is missing, by name, wherever in the tree it was set. Options that are
    accepted without effect are listed in one line of the log."""
    notes = []
    for name, value, declared in _set_options(config):
        if value is declared.default or value is declared.unset:  # most of 300: nothing to compare
            continue
        refuse(name, value, declared)
        if has_no_effect(value, declared):
            notes.append(f"{name}={shown_value(name, value)} ({declared.why})")
    if notes:
        once(log, logging.WARNING, "Options that have no effect: %s", "; ".join(notes))


def _set_options(config: Any, where: str = "") -> Iterator[tuple[str, Any, Option]]:
    """Name, value and declaration of every option, except those in groups that were left at their defaults."""
    declared = declarations(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        mine = declared.get(field.name)
        flat = mine is not None and mine.option.flat
        name = (mine.option.name or field.name) if mine is not None and flat else f"{where}.{field.name}".lstrip(".")
        inner = isinstance(value, Group)
        untouched = inner and mine is not None and mine.option.default is not None and value == type(value)()
        if mine is not None and not untouched:
            yield name, value, mine.option
        if inner:
            yield from _set_options(value, name)


def without_hints(config: Any) -> Any:
    """The same, with hints for another engine reset to their defaults, so no other code has to know them."""
    declared = declarations(type(config))
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        mine = declared.get(field.name)
        if isinstance(value, Group):
            inner = without_hints(value)
            if inner is not value:
                changes[field.name] = inner
        elif mine is not None and any(same(value, hint) for hint in mine.option.hints):
            changes[field.name] = mine.option.default
    return dataclasses.replace(config, **changes) if changes else config
