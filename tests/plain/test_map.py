"""docs/house.md tells the truth: it names every room and every file it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/house.md").read_text()
ROOMS = {path.parent.name for path in (ROOT / "quire").glob("*/__init__.py")}
TABLE = PAGE.split("## The rooms", 1)[1].split("\n## ", 1)[0]


def test_the_table_names_every_room_and_no_other() -> None:
    named = re.findall(r"^\| `(\w+)` \|", TABLE, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == ROOMS


def test_the_picture_names_every_room() -> None:
    picture = PAGE.split("```", 2)[1]
    assert set(re.findall(r"[a-z_]+", picture)) >= ROOMS


def test_every_room_holds_code() -> None:
    """A room on the map has something in it."""
    empty = [room for room in sorted(ROOMS) if not any(p.stat().st_size for p in (ROOT / "quire" / room).rglob("*.py"))]
    assert not empty, f"rooms without a line of code: {empty}"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\b[a-z_]+/[a-z_]+\.py\b", PAGE))))
def test_named_files_exist(name: str) -> None:
    places = [ROOT / "quire" / name, ROOT / name]
    assert any(place.exists() for place in places), f"docs/house.md names {name}"


def test_the_import_contract_knows_every_room() -> None:
    contract = (ROOT / "pyproject.toml").read_text()
    missing = [room for room in sorted(ROOMS) if f"quire.{room}" not in contract]
    assert not missing, f"pyproject.toml's import contract leaves out {missing}"
