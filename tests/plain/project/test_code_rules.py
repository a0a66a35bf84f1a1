"""The rules of docs/architecture.md that a machine can check, over the syntax trees of the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.base.collector import no_collections

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "quire"
FILES = sorted(PACKAGE.rglob("*.py"))

# `getattr(x, name, default)` hides a misspelt name, so it is counted outside the two places that read foreign objects.
# An entry here says how many a file has and why; it may shrink, not grow.
GETATTR_PLACES = ("checkpoint/facts.py", "models/zoo/")
GETATTR_KNOWN: dict[str, int] = {
    "schema/prompt.py": 1,  # arrays of any library have tolist()
}


def place(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.fixture(scope="module", autouse=True)
def _trees_for_this_file() -> Iterator[None]:
    with no_collections():  # a million nodes, none of them garbage
        yield
    tree.cache_clear()
    nodes.cache_clear()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


# What the rules look at: a tree is walked once for all of them.
LOOKED_AT = (
    ast.Attribute, ast.Call, ast.Import, ast.ImportFrom, ast.Global, ast.FunctionDef, ast.AsyncFunctionDef,
)  # fmt: skip


@cache
def nodes(module: ast.AST) -> list[ast.AST]:
    return [node for node in ast.walk(module) if isinstance(node, LOOKED_AT)]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(module: ast.AST) -> Iterator[str]:
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def environment_uses(module: ast.AST) -> list[int]:
    names = ("os.environ", "os.getenv", "os.putenv", "environ")
    attributes = [n.lineno for n in nodes(module) if isinstance(n, ast.Attribute) and dotted(n) in names]
    return attributes + [0 for name in imports(module) if name in ("os.environ", "os.getenv")]


def getattr_defaults(module: ast.AST) -> list[int]:
    calls = [n for n in nodes(module) if isinstance(n, ast.Call) and dotted(n.func) == "getattr"]
    return [call.lineno for call in calls if len(call.args) == 3]


def unpickling(module: ast.AST) -> list[str]:
    """Imports of pickling modules, and torch.load without weights_only=True."""
    roots = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    found = [name for name in imports(module) if name.split(".")[0] in roots]
    for node in nodes(module):
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and getattr(k.value, "value", None) is True]
            found += [] if safe else [f"torch.load at line {node.lineno}"]
    return found


def triton_imports(module: ast.AST) -> list[str]:
    return [name for name in imports(module) if name.split(".")[0] == "triton"]


def global_statements(module: ast.AST) -> list[int]:
    return [node.lineno for node in nodes(module) if isinstance(node, ast.Global)]


def late_imports(module: ast.AST, lines: Sequence[str]) -> list[int]:
    """Imports inside functions that do not say `# lazy`."""
    functions = [n for n in nodes(module) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {line for f in functions for line in range(f.lineno, (f.end_lineno or f.lineno) + 1)}
    found = [n for n in nodes(module) if isinstance(n, (ast.Import, ast.ImportFrom)) and n.lineno in inside]
    return [n.lineno for n in found if n.end_lineno and "# lazy" not in lines[n.lineno - 1]]


def endless_commands(module: ast.AST) -> list[int]:
    """Lines that wait for a command without a limit: a hang should be a failure that names the command."""
    names = {f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")}
    calls = [n for n in nodes(module) if isinstance(n, ast.Call) and dotted(n.func) in names]
    return [call.lineno for call in calls if not any(k.arg in ("timeout", None) for k in call.keywords)]


def silent(module: ast.Module) -> list[str]:
    return ["no docstring"] if module.body and not ast.get_docstring(module) else []


def offenders(rule: Callable[[ast.Module], list[Any]], *allowed: str) -> dict[str, list[Any]]:
    """File -> what the rule found there, outside the places where it is allowed."""
    files = [path for path in FILES if not place(path).startswith(allowed)] if allowed else FILES
    return {place(path): found for path in files if (found := rule(tree(path)))}


def test_the_rules_catch_what_they_should() -> None:
    bad = ast.parse(
        "import os, pickle, triton.language\nfrom os import environ\nos.environ['A']\nos.getenv('B')\n"
        "getattr(x, 'y', None)\ntorch.load(f)\ntorch.load(f, weights_only=True)\ndef f():\n  global a\n"
        "def g():\n  import numpy\n"
    )
    assert len(environment_uses(bad)) == 3
    assert getattr_defaults(bad) == [5]
    assert unpickling(bad) == ["pickle", "torch.load at line 6"]
    assert triton_imports(bad) == ["triton.language"]
    assert global_statements(bad) == [9]
    assert late_imports(
        ast.parse("def g():\n  import a  # lazy\n  import b"), ["", "  import a  # lazy", "  import b"]
    ) == [3]
    run = "import subprocess\nsubprocess.run(a)\nsubprocess.run(a, timeout=1)\nsubprocess.check_output(a, **more)"
    assert endless_commands(ast.parse(run)) == [2]
    assert silent(bad) and not silent(ast.parse("'Says so.'")) and not silent(ast.parse(""))


def test_environment_is_read_in_one_file() -> None:
    assert not offenders(environment_uses, "base/env.py"), "declare the variable in base/env.py"


def test_no_global_statement() -> None:
    assert not offenders(global_statements)


def test_triton_stays_in_its_folder() -> None:
    assert not offenders(triton_imports, "ops/triton/")


def test_nothing_unpickles() -> None:
    assert not offenders(unpickling)


def test_getattr_with_a_default_is_counted() -> None:
    found = {name: len(lines) for name, lines in offenders(getattr_defaults, *GETATTR_PLACES).items()}
    assert found == GETATTR_KNOWN


def test_every_module_says_what_it_owns() -> None:
    assert not offenders(silent)


def test_imports_inside_functions_say_that_they_are_lazy() -> None:
    """So that the import contract and type checkers follow them: strings are for plug-ins."""
    found = {place(path): late_imports(tree(path), path.read_text().splitlines()) for path in FILES}
    assert not {name: lines for name, lines in found.items() if lines}


def test_no_string_names_a_module_of_ours() -> None:
    """Outside of the tables of plug-ins and the first functions of child processes."""
    pattern = re.compile(r'load\(f?"quire\.')
    assert not [place(path) for path in FILES if pattern.search(path.read_text())]


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Late imports count; those for types alone do not."""
    grimp = pytest.importorskip("grimp", reason="comes with import-linter")
    graph = grimp.build_graph("quire", exclude_type_checking_imports=True, cache_dir=None)
    below = {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}
    while leaves := [module for module, imported in below.items() if not imported]:  # what is left is in a circle
        for module in leaves:
            del below[module]
        for imported in below.values():
            imported.difference_update(leaves)
    above = {module for imported in below.values() for module in imported}
    assert not above, f"circles among, or above, {sorted(above)}"


def test_a_test_waits_for_a_command_with_a_limit() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    found = {name: endless_commands(ast.parse(text)) for name, text in texts.items() if "subprocess" in text}
    assert {name: lines for name, lines in found.items() if lines} == {}
