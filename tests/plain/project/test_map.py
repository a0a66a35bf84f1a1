"""docs/architecture.md tells the truth: it names every package, and every file it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/architecture.md").read_text()
PACKAGES = {path.parent.name for path in (ROOT / "quire").glob("*/__init__.py")}
TABLE = PAGE.split("## Packages", 1)[1].split("\n## ", 1)[0]


def test_the_table_names_every_package_and_no_other() -> None:
    named = re.findall(r"^\| `(\w+)` \|", TABLE, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == PACKAGES


def test_the_picture_names_every_package() -> None:
    picture = (ROOT / "docs/architecture.svg").read_text()
    assert set(re.findall(r"[a-z_]+", picture)) >= PACKAGES


def test_every_package_holds_code() -> None:
    empty = [
        name for name in sorted(PACKAGES) if not any(p.stat().st_size for p in (ROOT / "quire" / name).rglob("*.py"))
    ]
    assert not empty, f"packages without a line of code: {empty}"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\.py\b", PAGE))))
def test_named_files_exist(name: str) -> None:
    places = [ROOT / "quire" / name, ROOT / name]
    assert any(place.exists() for place in places), f"docs/architecture.md names {name}"


def test_the_import_contract_knows_every_package() -> None:
    contract = (ROOT / "pyproject.toml").read_text()
    missing = [name for name in sorted(PACKAGES) if f"quire.{name}" not in contract]
    assert not missing, f"pyproject.toml's import contract leaves out {missing}"
