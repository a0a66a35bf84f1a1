"""How many small faults the tests notice: changes one place of a module at a time, in a copy, and runs its tests.

A mutant is one comparison, `and` or `or`, `not`, sum or product, or constant that says something else. It is killed if
a test fails or runs into the time limit, and survives if all pass. Survivors are printed: each is a missing test, or a
change that makes no difference. Places are drawn at random until the time is up; --seed repeats a draw.

    python tools/mutants.py [--seconds 600] [--seed 1] [--jobs 2] [module ...]
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("quire", "compat", "tests", "tools", "docs", "pyproject.toml", "CONTRIBUTING.md", "Makefile", "README.md")
# A module of the control side, and the files of tests that are there for it. Each set takes seconds.
TESTS = {
    "quire/sched/planner.py": ("sched/test_plan", "sched/test_commit", "sched/test_prefix"),
    "quire/sched/scheduler.py": (
        "sched/test_plan",
        "sched/test_commit",
        "sched/test_prefix",
        "sched/test_queue_bounds",
    ),
    "quire/engine/loop.py": ("engine/test_loop", "grammar/test_loop"),
    "quire/engine/outputs.py": ("engine/test_outputs",),
    "quire/engine/inputs.py": ("engine/test_inputs",),
    "quire/grammar/masks.py": ("grammar/test_slow", "grammar/test_loop"),
    "quire/text/template.py": ("text/test_chat",),
}
LIMIT_S = 120.0  # and ten times what the tests take unchanged
_OTHER: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    module: str
    line: int
    before: str
    after: str
    source: str  # of the whole module

    def __str__(self) -> str:
        return f"{self.module}:{self.line}: {self.before}  ->  {self.after}"


def changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """What can be done to one node; each takes a copy of it and returns what comes in its place."""
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            if type(operator) in _OTHER:
                yield partial(_swap_comparison, place=place)
    elif isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in _OTHER:
        yield _swap_operator
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield lambda own: own.operand  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda own: ast.Constant(not own.value)  # type: ignore[attr-defined]
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda own: ast.Constant(own.value + 1)  # type: ignore[attr-defined]


def _swap_comparison(node: ast.AST, place: int) -> ast.AST:
    assert isinstance(node, ast.Compare)
    node.ops[place] = _OTHER[type(node.ops[place])]()  # type: ignore[call-overload]
    return node


def _swap_operator(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign)
    node.op = _OTHER[type(node.op)]()  # type: ignore[assignment]
    return node


def mutants(module: str, source: str) -> list[Mutant]:
    """All of a module, in the order of its lines."""
    tree = ast.parse(source)
    found = []
    for parent in _running(tree):
        for field, value in ast.iter_fields(parent):
            for place, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.expr | ast.AugAssign):
                    found += [_mutant(module, tree, (parent, field, place), node, change) for change in changes(node)]
    return sorted(found, key=lambda one: one.line)


def _running(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes of what runs: not annotations, which change nothing."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns"):
                waiting += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]


def _mutant(
    module: str,
    tree: ast.Module,
    where: tuple[ast.AST, str, int | None],
    node: ast.expr | ast.AugAssign,
    change: Callable[[ast.AST], ast.AST],
) -> Mutant:
    parent, field, place = where
    changed = change(copy.deepcopy(node))
    before, after = ast.unparse(node), ast.unparse(changed)
    _put(parent, field, place, changed)
    source = ast.unparse(ast.fix_missing_locations(tree))
    _put(parent, field, place, node)
    return Mutant(module, node.lineno, before, after, source)


def _put(parent: ast.AST, field: str, place: int | None, node: ast.AST) -> None:
    if place is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[place] = node


class Copy:
    """A copy of the repository that one mutant at a time lies in."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif (root / name).exists():
                shutil.copy(root / name, folder / name)

    def passes(self, tests: tuple[str, ...], limit: float) -> bool:
        paths = os.pathsep.join([str(self.folder), str(self.folder / "compat")])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
                       "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # fmt: skip
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin",
                   *tests]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def survives(self, one: Mutant, tests: tuple[str, ...], limit: float) -> bool:
        path = self.folder / one.module
        kept = path.read_bytes()
        path.write_text(one.source)
        try:
            return self.passes(tests, limit)
        finally:
            path.write_bytes(kept)


class Score(NamedTuple):
    killed: Counter[str]
    survived: list[Mutant]
    left: int  # for which there was no time


def run(root: Path, table: dict[str, tuple[str, ...]], seconds: float, seed: int, jobs: int) -> Score:
    """Tests of each module, mutants at random over all modules until the time is up."""
    killed, survived = Counter[str](), list[Mutant]()
    waiting = [one for module in table for one in mutants(module, (root / module).read_text())]
    random.Random(seed).shuffle(waiting)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(jobs) as pool:
        copies = [Copy(root, Path(scratch) / str(number)) for number in range(jobs)]
        limits = {module: _limit(copies[0], tests, module) for module, tests in table.items()}
        end = time.monotonic() + seconds

        def work(own: Copy) -> None:
            while waiting and time.monotonic() < end:
                one = waiting.pop()
                if own.survives(one, table[one.module], limits[one.module]):
                    survived.append(one)
                else:
                    killed[one.module] += 1

        list(pool.map(work, copies))
    return Score(killed, survived, len(waiting))


def _limit(own: Copy, tests: tuple[str, ...], module: str) -> float:
    began = time.monotonic()
    if not own.passes(tests, LIMIT_S * 5):
        raise SystemExit(f"the tests of {module} fail without any mutant: {' '.join(tests)}")
    return LIMIT_S + 10 * (time.monotonic() - began)


def show(score: Score, table: dict[str, tuple[str, ...]]) -> None:
    for one in sorted(score.survived):
        print(f"survived  {one}")
    alive = Counter(one.module for one in score.survived)
    for module in table:
        tried = score.killed[module] + alive[module]
        print(f"{module:40}{score.killed[module]:6} of {tried:5} killed")
    tried = score.killed.total() + alive.total()
    share = f", {100 * score.killed.total() / tried:.0f}%" if tried else ""
    print(f"{'all':40}{score.killed.total():6} of {tried:5} killed{share}; {score.left} not tried")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(TESTS)}")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    if unknown := [module for module in given.modules if module not in TESTS]:
        parser.error(f"no tests are named for {', '.join(unknown)}")
    table = {
        module: tuple(f"tests/plain/{name}.py" for name in names)
        for module, names in TESTS.items()
        if module in given.modules or not given.modules
    }
    show(run(ROOT, table, given.seconds, given.seed, given.jobs), table)


if __name__ == "__main__":
    main()
