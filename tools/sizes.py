"""Prints where the lines are: files, lines and function sizes per room, and the longest functions and files.

Nothing fails on these numbers: a long file is a question, not an error.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Function(NamedTuple):
    lines: int
    where: str


class Room(NamedTuple):
    name: str
    files: list[tuple[int, str]]
    functions: list[Function]


def read(name: str, folder: Path) -> Room:
    files, functions = [], []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        where = path.relative_to(ROOT).as_posix()
        files.append((text.count("\n"), where))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
                functions.append(Function(node.end_lineno - node.lineno + 1, f"{where}:{node.lineno} {node.name}"))
    return Room(name, files, functions)


def p90(sizes: list[int]) -> int:
    return sorted(sizes)[int(0.9 * (len(sizes) - 1))] if sizes else 0


def print_row(room: Room) -> None:
    sizes = [f.lines for f in room.functions] or [0]
    lines = sum(n for n, _ in room.files)
    middle = statistics.median(sizes)
    print(
        f"{room.name:<12}{len(room.files):>6}{lines:>8}{len(room.functions):>7}{middle:>8g}{p90(sizes):>6}{max(sizes):>6}"
    )


def main() -> None:
    rooms = [read(path.parent.name, path.parent) for path in sorted((ROOT / "quire").glob("*/__init__.py"))]
    top = Room("(top)", [(p.read_text().count("\n"), p.name) for p in (ROOT / "quire").glob("*.py")], [])
    package = Room("quire", [*top.files], [])
    print(f"{'room':<12}{'files':>6}{'lines':>8}{'funcs':>7}{'median':>8}{'p90':>6}{'max':>6}")
    for room in (top, *rooms):
        print_row(room)
    for room in rooms:
        package.files.extend(room.files)
        package.functions.extend(room.functions)
    print_row(package)
    for name in ("compat", "tests"):
        print_row(read(name, ROOT / name))
    print("\nlongest functions")
    for function in sorted(package.functions, reverse=True)[:8]:
        print(f"{function.lines:>6}  {function.where}")
    print("\nlongest files")
    for lines, where in sorted(package.files, reverse=True)[:8]:
        print(f"{lines:>6}  {where}")


if __name__ == "__main__":
    main()
