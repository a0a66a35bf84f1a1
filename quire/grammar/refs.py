"""References: what each `$ref` of a JSON schema names, by pointer, by anchor or by `$id`, within the schema alone.

In: the schemas within a schema, as schema.py walks them. Out: those that references name, or an InputError for one that
names nothing, or leads only back to itself. Nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urljoin

from quire.schema.errors import InputError

_PARAM = "structured_outputs"
_SHOWN = 80  # characters of a reference in a message


class References:
    def __init__(self, root: object) -> None:
        self._root = root
        self._roots: dict[str, object] = {"": root}
        self._anchors: dict[tuple[str, str], object] = {}
        self._bases: dict[int, str] = {}  # by the identity of a node: what its references are relative to
        self._sound: set[int] = set()  # nodes, by identity, whose reference ends at a schema that is none

    def enter(self, node: Mapping[str, Any], base: str) -> str:
        """Take in the names that a schema has; the base of its parts."""
        own, anchor = node.get("$id"), node.get("$anchor")
        if isinstance(own, str) and own.startswith("#"):  # an anchor, as it was written before there were any
            self._anchors.setdefault((base, own[1:]), node)
        elif isinstance(own, str):
            base = _join(base, own)
            self._roots.setdefault(base, node)
        if isinstance(anchor, str):
            self._anchors.setdefault((base, anchor), node)
        self._bases[id(node)] = base
        return base

    def entered(self, node: object) -> bool:
        return id(node) in self._bases

    def is_plain(self, node: Mapping[str, Any]) -> bool:
        """A pointer by names alone, from the root of the whole: the form that every backend reads alike."""
        text = str(node["$ref"])
        if self._bases.get(id(node), "") != self._bases.get(id(self._root), ""):
            return False
        steps = text.split("/")[1:]
        by_name = text.startswith("#/") and not any(c in text for c in "~%") and not any(s.isdigit() for s in steps)
        return text == "#" or by_name

    def find(self, node: Mapping[str, Any]) -> object:
        """The schema that its `$ref` names. Only once everything was entered."""
        found = step = self._named(node)
        passed = {id(node)}
        while isinstance(step, Mapping) and "$ref" in step and id(step) not in self._sound:
            if id(step) in passed:
                raise _refuse(step["$ref"], "leads only back to itself")
            passed.add(id(step))
            step = self._named(step)
        self._sound |= passed
        return found

    def _named(self, node: Mapping[str, Any]) -> object:
        text = node["$ref"]
        if not isinstance(text, str):
            raise _refuse(text, "is no string")
        address, _, fragment = text.partition("#")
        base = self._bases.get(id(node), "")
        if address:
            base = _join(base, address)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((base, fragment))
        else:
            found = _walk(self._roots.get(base), fragment)
        if not isinstance(found, Mapping | bool):
            raise _refuse(text, "names nothing within the schema")
        return found


def _walk(node: object, pointer: str) -> object:
    """What a JSON pointer leads to; None: nothing."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping):
            node = node.get(name)
        elif isinstance(node, list) and name.isascii() and name.isdigit() and len(name) < 9 and int(name) < len(node):
            node = node[int(name)]
        else:
            return None
    return node


def _join(base: str, address: str) -> str:
    try:
        return urljoin(base, address).partition("#")[0]
    except ValueError:
        raise _refuse(address, "is no address") from None


def _refuse(reference: object, why: str) -> InputError:
    shown = f"{reference!r:.{_SHOWN}}"
    return InputError(f"the '$ref' {shown} {why}", param=_PARAM, value=shown)
