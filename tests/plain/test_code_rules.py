"""The rules of docs/architecture.md that a machine can check, over the syntax trees of the package."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
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


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imports(module: ast.AST) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def environment_uses(module: ast.AST) -> list[int]:
    names = ("os.environ", "os.getenv", "os.putenv", "environ")
    attributes = [n.lineno for n in ast.walk(module) if isinstance(n, ast.Attribute) and dotted(n) in names]
    return attributes + [0 for name in imports(module) if name in ("os.environ", "os.getenv")]


def getattr_defaults(module: ast.AST) -> list[int]:
    calls = [n for n in ast.walk(module) if isinstance(n, ast.Call) and dotted(n.func) == "getattr"]
    return [call.lineno for call in calls if len(call.args) == 3]


def unpickling(module: ast.AST) -> list[str]:
    """Imports of pickling modules, and torch.load without weights_only=True."""
    roots = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
    found = [name for name in imports(module) if name.split(".")[0] in roots]
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and dotted(node.func) == "torch.load":
            safe = [k for k in node.keywords if k.arg == "weights_only" and getattr(k.value, "value", None) is True]
            found += [] if safe else [f"torch.load at line {node.lineno}"]
    return found


def triton_imports(module: ast.AST) -> list[str]:
    return [name for name in imports(module) if name.split(".")[0] == "triton"]


def global_statements(module: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(module) if isinstance(node, ast.Global)]


def late_imports(module: ast.AST) -> list[int]:
    """Imports inside functions, except in those whose decorator says that this is what they do."""
    functions = [n for n in ast.walk(module) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    plain = [f for f in functions if "lazy" not in map(dotted, f.decorator_list)]
    return [n.lineno for f in plain for n in ast.walk(f) if isinstance(n, (ast.Import, ast.ImportFrom))]


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
        "def g():\n  import numpy\n@lazy\ndef h():\n  import numpy\n"
    )
    assert len(environment_uses(bad)) == 3
    assert getattr_defaults(bad) == [5]
    assert unpickling(bad) == ["pickle", "torch.load at line 6"]
    assert triton_imports(bad) == ["triton.language"]
    assert global_statements(bad) == [9]
    assert late_imports(bad) == [11]
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


def test_only_lazy_functions_import() -> None:
    assert not offenders(late_imports), "decorate the function that imports with base/lazy.py's `lazy`"
