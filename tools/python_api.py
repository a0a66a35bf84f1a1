"""The page docs/reference/python.md: what `quire` exports, from signatures and docstrings. Written by reference.py."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import quire

WIDTH = 100


class Source:
    """The text of a class as it is written: annotations and defaults, not what they evaluate to."""

    def __init__(self, path: str) -> None:
        module, _, name = path.partition(":")
        self.object = getattr(importlib.import_module(module), name)
        self.module = self.object.__module__ if inspect.isclass(self.object) else module
        tree = ast.parse(Path(importlib.import_module(self.module).__file__ or "").read_text())
        wanted = self.object.__name__ if inspect.isclass(self.object) else name
        found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == wanted]
        self.node = found[0] if found else None

    def fields(self) -> Iterator[tuple[str, str, str]]:
        """(name, type, default) of a class of data."""
        for node in self.node.body if self.node else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
                kind = ast.unparse(node.annotation)
                if not kind.startswith("ClassVar"):
                    yield node.target.id, kind, ast.unparse(node.value) if node.value else ""

    def members(self) -> Iterator[tuple[str, str]]:
        """(name, value) of an enum."""
        for node in self.node.body if self.node else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node.targets[0].id, ast.unparse(node.value)

    def methods(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.node.body if self.node else ():
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
                node.name[0] != "_" or node.name == "__init__"
            ):
                yield node


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    """One line, or one argument a line where that would be long."""
    bare = ast.unparse(node.args).removeprefix("self, ").removeprefix("cls, ")
    bare = "" if bare in ("self", "cls") else bare
    result = f" -> {ast.unparse(node.returns)}" if node.returns and name[0].islower() else ""
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    line = f"{start}{name}({bare}){result}"
    if len(line) <= WIDTH:
        return line
    inside = textwrap.fill(bare, WIDTH - 4, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return f"{start}{name}(\n{inside}\n){result}"


def words(node: ast.AST | None) -> str:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return ""
    return inspect.cleandoc(ast.get_docstring(node) or "")


def section(name: str, path: str) -> list[str]:
    source = Source(path)
    lines = [f"## {name}", "", f"`{source.module}`", ""]
    if source.node is None:
        return [*lines, "A type alias; see its module.", ""]
    lines += [words(source.node), ""] if words(source.node) else []
    if inspect.isclass(source.object) and issubclass(source.object, enum.Enum):
        return [*lines, *(f"- `{member} = {value}`" for member, value in source.members()), ""]
    fields = list(source.fields())
    if fields:
        lines += ["| field | type | default |", "|---|---|---|"]
        lines += [
            f"| `{field}` | `{cell(kind)}` | {f'`{cell(value)}`' if value else ''} |" for field, kind, value in fields
        ]
        lines.append("")
    for node in source.methods():
        shown = name if node.name == "__init__" else node.name
        if node.name == "__init__" and fields:
            continue
        title = "Made with" if node.name == "__init__" else f"{name}.{node.name}"
        lines += [f"### {title}", "", "```text", signature(node, shown), "```", ""]
        lines += [words(node), ""] if words(node) else []
    return lines


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def python_page() -> str:
    lines = [
        "# Python API",
        "",
        "What `from quire import ...` has, in the order in which people need it. Engine options are keywords of `LLM`",
        "and of `EngineArgs` alike: [options](options.md). How it goes together is in the [guide](../guide.md); errors",
        "are those of `quire.schema.errors`.",
        "",
    ]
    seen: dict[str, str] = {}
    for name, path in quire._NAMES.items():
        if path in seen:
            lines += [f"## {name}", "", f"Another name of `{seen[path]}`.", ""]
            continue
        seen[path] = name
        lines += section(name, path)
    return "\n".join(lines).rstrip() + "\n"
