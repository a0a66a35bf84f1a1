"""docs/glossary.md holds: no forbidden part in any name, no refused spelling of a word, no class name twice."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from quire.base.collector import no_collections

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/glossary.md").read_text()
FILES = sorted((ROOT / "quire").rglob("*.py"))
# Architectures are called what their makers call them.
FOREIGN = ("quire/models/zoo/",)


def table(title: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    section = PAGE.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return rows[2:]


REFUSED = {word for row in table("Terms") for word in re.findall(r"`(\w+)`", row[2])}
FORBIDDEN = {row[0].lower() for row in table("Never in a name")}
PARTICIPLES = {row[0] for row in table("Never a variable")}
# Packages that still have variables of such names. A package that has none any more is taken off, and stays off.
UNFINISHED = {"ops"}


def parts(name: str) -> set[str]:
    """KVCacheManager -> kv, cache, manager; utils_v2 -> utils, v2."""
    return {p.lower() for p in re.findall(r"V\d+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+\d*|\d+", name)}


def singular(words: set[str]) -> set[str]:
    return {word.removesuffix("s") for word in words} | words


def bad_parts(name: str, *, is_class: bool) -> set[str]:
    forbidden = FORBIDDEN if is_class else FORBIDDEN - {"base"}
    return singular(parts(name)) & singular(forbidden)


@pytest.fixture(scope="module", autouse=True)
def _trees_for_this_file() -> Iterator[None]:
    with no_collections():  # a million nodes, none of them garbage
        yield
    tree.cache_clear()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def definitions(tree: ast.AST) -> Iterator[tuple[str, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, True
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, False


def variables(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_the_page_is_read() -> None:
    assert {"manager", "helper", "utils", "mixin", "v2"} <= FORBIDDEN
    assert {"req", "seq"} <= REFUSED
    assert {"asked", "found", "given"} <= PARTICIPLES
    assert {row[0] for row in table("Terms")} >= {"request", "step", "plan", "grant", "row", "block", "scheme", "arch"}


@pytest.mark.parametrize(
    "name, bad",
    [
        ("KVCacheManager", "manager"),
        ("tensor_utils", "utils"),
        ("LoraMixin", "mixin"),
        ("RunnerV2", "v2"),
        ("Util", "util"),
    ],
)
def test_the_rule_catches(name: str, bad: str) -> None:
    assert bad_parts(name, is_class=True)
    assert not bad_parts("baseline_of_v", is_class=False)


def test_no_name_has_a_forbidden_part() -> None:
    bad: dict[str, list[str]] = {}
    for path in FILES:
        where = path.relative_to(ROOT).as_posix()
        names = [(path.stem, False)]
        if not where.startswith(FOREIGN):
            names += definitions(tree(path))
        if found := sorted({name for name, is_class in names if bad_parts(name, is_class=is_class)}):
            bad[where] = found
    assert not bad


def test_no_variable_has_a_refused_name() -> None:
    bad: dict[str, list[str]] = {}
    for path in FILES:
        if found := sorted({name for name in variables(tree(path)) if name in REFUSED}):
            bad[path.relative_to(ROOT).as_posix()] = found
    assert not bad


def bare_participles(module: ast.AST) -> set[str]:
    """Variables and arguments whose name is a participle of the glossary, alone."""
    return {name for name in variables(module) if name.lstrip("_") in PARTICIPLES}


def test_the_rule_catches_a_participle() -> None:
    bad = ast.parse("def f(given):\n    _kept = [found for found in given]\n")
    assert bare_participles(bad) == {"given", "_kept", "found"}
    assert not bare_participles(ast.parse("def f(num_kept, values):\n    found_at = values.given\n"))


def test_no_variable_is_a_participle() -> None:
    bad: dict[str, set[str]] = {}
    for path in FILES:
        where = path.relative_to(ROOT / "quire")
        if where.parts[0] not in UNFINISHED and (names := bare_participles(tree(path))):
            bad[where.as_posix()] = names
    assert not bad


def repeated_classes(sources: Iterable[tuple[str, ast.AST]]) -> dict[str, list[str]]:
    """Class names that several definitions share, with where these are; a leading underscore makes no other name."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for where, source in sources:
        for name, is_class in definitions(source):
            if is_class:
                places[name.lstrip("_")].append(where)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_the_rule_finds_a_class_name_given_twice() -> None:
    one, two = ast.parse("class Call: ...\nclass Row: ..."), ast.parse("def make():\n    class _Call: ...")
    twice = ast.Module([*two.body, *two.body], [])
    assert repeated_classes([("a/x.py", one), ("b/y.py", two)]) == {"Call": ["a/x.py", "b/y.py"]}
    assert repeated_classes([("a/x.py", twice)]) == {"Call": ["a/x.py", "a/x.py"]}
    assert not repeated_classes([("a/x.py", one)])


def test_no_class_name_is_given_twice() -> None:
    assert not repeated_classes([(path.relative_to(ROOT).as_posix(), tree(path)) for path in FILES])


def denied_nouns(module: ast.AST) -> list[str]:
    """Texts that say "is no file" for "is not a file"; docstrings are prose and may."""
    docstrings = {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}
    texts = (node for node in ast.walk(module) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [node.value for node in texts if id(node) not in docstrings and _DENIED.search(node.value)]


_DENIED = re.compile(r"(?<!there )(?<!here )\b(is|are) no\b(?! longer| more)")


def test_the_rule_finds_a_denied_noun() -> None:
    module = ast.parse('"""It is no file."""\nf"{1} is no file"\n"there are no files"\n"is no longer"\nx = "are no "')
    assert sorted(denied_nouns(module)) == [" is no file", "are no "]


def test_no_message_denies_a_noun() -> None:
    bad = {path.relative_to(ROOT).as_posix(): found for path in FILES if (found := denied_nouns(tree(path)))}
    assert not bad
