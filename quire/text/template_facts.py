"""What a chat template expects of a message's content, derived from its syntax tree without running it.

In: template text. Out: TemplateFacts. Names are followed through assignments, loops, slices, filters and
macro arguments; if no loop over content is found that way, the template is assumed to expect plain strings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from jinja2 import nodes

from quire.text.template import Generation, parse_template


@dataclass(frozen=True)
class TemplateFacts:
    loops_content: bool  # iterates over content parts
    tests_string: bool  # tests whether content is a string, so it accepts those as well
    tests_none: bool  # distinguishes no content from empty content
    marks_answers: bool  # has {% generation %} around the model's parts


@lru_cache(maxsize=64)
def read_facts(source: str) -> TemplateFacts:
    names = _Names(parse_template(source))
    tree = names.tree
    loops = any(names.is_content(loop.iter) for loop in tree.find_all(nodes.For))
    tests = [test for test in tree.find_all(nodes.Test) if names.is_content(test.node)]
    return TemplateFacts(
        loops_content=loops,
        tests_string=any(test.name == "string" for test in tests),
        tests_none=any(test.name == "none" for test in tests),
        marks_answers=any(node.identifier == Generation.identifier for node in tree.find_all(nodes.ExtensionAttribute)),
    )


class _Names:
    """Which names refer to the list of messages, to one message, and to a message's content."""

    def __init__(self, tree: nodes.Template) -> None:
        self.tree = tree
        self.lists = {"messages"}
        self.messages: set[str] = set()
        self.contents: set[str] = set()
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        size = -1
        while size != self._size():  # names may be used above the line that binds them (loops, macros)
            size = self._size()
            self._walk()

    def is_content(self, node: nodes.Node) -> bool:
        if isinstance(node, (nodes.Getattr, nodes.Getitem)):
            if _key(node) == "content" and self._is_message(node.node):
                return True
            if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
                return self.is_content(node.node)
        if isinstance(node, nodes.Filter):
            return node.node is not None and self.is_content(node.node)
        if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
            first = node.args[0] if node.args else None
            return isinstance(first, nodes.Const) and first.value == "content" and self._is_message(node.node.node)
        return _name(node) in self.contents

    def _is_list(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        if isinstance(node, nodes.Filter) and node.name not in ("first", "last"):
            return node.node is not None and self._is_list(node.node)
        if isinstance(node, nodes.CondExpr):
            return self._is_list(node.expr1) or (node.expr2 is not None and self._is_list(node.expr2))
        return _name(node) in self.lists

    def _is_message(self, node: nodes.Node) -> bool:
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            return self._is_list(node.node)
        if isinstance(node, nodes.Filter) and node.name in ("first", "last"):
            return node.node is not None and self._is_list(node.node)
        return _name(node) in self.messages

    def _walk(self) -> None:
        for loop in self.tree.find_all(nodes.For):
            if self._is_list(loop.iter):
                self._add(self.messages, loop.target)
        for assign in self.tree.find_all(nodes.Assign):
            self._bind(assign.target, assign.node)
        for call in self.tree.find_all(nodes.Call):
            macro = self._macros.get(_name(call.node) or "")
            if macro is not None:
                for parameter, argument in zip(macro.args, call.args, strict=False):
                    self._bind(parameter, argument)
                by_name = {parameter.name: parameter for parameter in macro.args}
                for keyword in call.kwargs:
                    if keyword.key in by_name:
                        self._bind(by_name[keyword.key], keyword.value)

    def _bind(self, target: nodes.Node, value: nodes.Node) -> None:
        for holds, names in (
            (self._is_list, self.lists),
            (self._is_message, self.messages),
            (self.is_content, self.contents),
        ):
            if holds(value):
                self._add(names, target)

    def _add(self, names: set[str], target: nodes.Node) -> None:
        name = _name(target)
        if name is not None:
            names.add(name)

    def _size(self) -> int:
        return len(self.lists) + len(self.messages) + len(self.contents)


def _name(node: nodes.Node) -> str | None:
    """`x` or `namespace.x`, however it is written."""
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.NSRef):
        return f"{node.name}.{node.attr}"
    if isinstance(node, (nodes.Getattr, nodes.Getitem)) and isinstance(node.node, nodes.Name):
        key = _key(node)
        return None if key is None else f"{node.node.name}.{key}"
    return None


def _key(node: nodes.Getattr | nodes.Getitem) -> str | None:
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else None
