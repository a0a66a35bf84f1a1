"""The README's chart: drawn by its script, from numbers that stand in RESULTS.md where it is said they stand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[3]
GROUPS = json.loads((ROOT / "benchmarks/figures.json").read_text())["groups"]
ROWS = [(group["heading"], row) for group in GROUPS for row in group["rows"]]


def cells(heading: str) -> list[list[str]]:
    """The table rows of one chapter of RESULTS.md; an empty first cell means the one above it."""
    text = (ROOT / "benchmarks/RESULTS.md").read_text()
    chapter = re.search(rf"^## {re.escape(heading)}.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL).group()
    found: list[list[str]] = []
    for line in re.findall(r"^\| ?(.*)\|$", chapter, re.MULTILINE):
        row = [cell.strip() for cell in line.split("|")]
        found.append([row[0] or (found[-1][0] if found else ""), *row[1:]])
    return found


@pytest.mark.parametrize("heading, row", ROWS, ids=[row["label"] for _, row in ROWS])
def test_the_numbers_are_results(heading: str, row: dict) -> None:
    """Of the rows that are named, one holds Quire's number and one (or the same) the other's."""
    figures = row["figures"].items()
    wanted = {engine: re.compile(rf"(?<![\d.,]){re.escape(figure)}(?![\d,]|\.\d)") for engine, figure in figures}
    other = next(engine for engine in row["figures"] if engine != "Quire")
    for engine, name in (("Quire", row["row"]), (other, row.get("peer", row["row"]))):
        lines = [line for line in cells(heading) if re.sub(r"^before.*?: ", "", line[0]) == name]
        lines = [line for line in lines if "model" not in row or line[1] == row["model"]]
        assert lines and any(wanted[engine].match(cell) for line in lines for cell in line[1:]), (engine, lines)


def test_a_line_where_quire_is_behind_is_shown() -> None:
    def number(figure: str) -> float:
        return float(figure.replace(",", ""))

    assert any(number(row["figures"]["Quire"]) < max(map(number, row["figures"].values())) for _, row in ROWS)


def test_the_chart_is_current_and_readable() -> None:
    done = subprocess.run([sys.executable, "benchmarks/chart.py", "--check"], cwd=ROOT, timeout=300)
    assert done.returncode == 0, "run benchmarks/chart.py"
    tree = ElementTree.parse(ROOT / "docs/figures.svg")
    texts = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}text")]
    for _, row in ROWS:
        assert row["label"] in texts
        assert all(f"{figure} {engine}" in texts for engine, figure in row["figures"].items())
    assert "figures.svg" in (ROOT / "README.md").read_text()
