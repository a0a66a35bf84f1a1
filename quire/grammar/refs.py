"""References: the target of each `$ref` of a JSON schema, by pointer, by anchor or by `$id`, within the schema only.

In: the subschemas, as schema.py walks them. Out: the targets of references, or an InputError for one that
does not exist or only leads back to itself. Nothing is ever fetched.
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
        self._bases: dict[int, str] = {}  # by node identity: the base of its references
        self._sound: set[int] = set()  # nodes, by identity, whose reference ends at a schema that is none

    def enter(self, node: Mapping[str, Any], base: str) -> str:
        """Record the names of a schema; returns the base of its subschemas."""
        schema_id, anchor = node.get("$id"), node.get("$anchor")
        if isinstance(schema_id, str) and schema_id.startswith(
            "#"
        ):  # an anchor, as it was written before there were any
            self._anchors.setdefault((base, schema_id[1:]), node)
        elif isinstance(schema_id, str):
            base = _join(base, schema_id)
            self._roots.setdefault(base, node)
        if isinstance(anchor, str):
            self._anchors.setdefault((base, anchor), node)
        self._bases[id(node)] = base
        return base

    def entered(self, node: object) -> bool:
        return id(node) in self._bases

    def is_plain(self, node: Mapping[str, Any]) -> bool:
        """A plain pointer from the root: the form that all backends read the same way."""
        text = str(node["$ref"])
        if self._bases.get(id(node), "") != self._bases.get(id(self._root), ""):
            return False
        steps = text.split("/")[1:]
        by_name = text.startswith("#/") and not any(c in text for c in "~%") and not any(s.isdigit() for s in steps)
        return text == "#" or by_name

    def find(self, node: Mapping[str, Any]) -> object:
        """The target of its `$ref`. Call after everything was entered."""
        target = step = self._named(node)
        passed = {id(node)}
        while isinstance(step, Mapping) and "$ref" in step and id(step) not in self._sound:
            if id(step) in passed:
                raise _refuse(step["$ref"], "leads only back to itself")
            passed.add(id(step))
            step = self._named(step)
        self._sound |= passed
        return target

    def _named(self, node: Mapping[str, Any]) -> object:
        text = node["$ref"]
        if not isinstance(text, str):
            raise _refuse(text, "is not a string")
        address, _, fragment = text.partition("#")
        base = self._bases.get(id(node), "")
        if address:
            base = _join(base, address)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((base, fragment))
        else:
            target = _walk(self._roots.get(base), fragment)
        if not isinstance(target, Mapping | bool):
            raise _refuse(text, "does not exist within the schema")
        return target


def _walk(node: object, pointer: str) -> object:
    """The target of a JSON pointer; None: it does not exist."""
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
        raise _refuse(address, "is not an address") from None


def _refuse(reference: object, why: str) -> InputError:
    shown = f"{reference!r:.{_SHOWN}}"
    return InputError(f"the '$ref' {shown} {why}", param=_PARAM, value=shown)
