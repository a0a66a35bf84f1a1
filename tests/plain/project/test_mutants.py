"""tools/mutants.py: which places it changes, and that a weak test lets a mutant live."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SOURCE = """
LIMIT = 3

def within(value: int, most: int = LIMIT) -> bool:
    return 0 <= value and not value > most
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    about = importlib.util.spec_from_file_location("mutants_tool", ROOT / "tools/mutants.py")
    assert about is not None and about.loader is not None
    made = sys.modules["mutants_tool"] = importlib.util.module_from_spec(about)
    about.loader.exec_module(made)
    return made


def test_each_mutant_is_one_change(tool: ModuleType) -> None:
    found = tool.mutants("m.py", SOURCE)
    assert [(one.line, one.before, one.after) for one in found if one.line < 5] == [(2, "3", "4")]
    assert sorted((one.before, one.after) for one in found if one.line == 5) == [
        ("0", "1"),
        ("0 <= value", "0 < value"),
        ("0 <= value and (not value > most)", "0 <= value or not value > most"),
        ("not value > most", "value > most"),
        ("value > most", "value >= most"),
    ]
    plain = ast.unparse(ast.parse(SOURCE))
    assert len({one.source for one in found} - {plain}) == len(found)
    assert all("value: int, most: int" in one.source for one in found)


def test_what_tests_notice_is_counted(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The test below asks nothing about the limit itself: only that boundary's mutants live."""
    (tmp_path / "quire").mkdir()
    (tmp_path / "quire/__init__.py").write_text("")
    (tmp_path / "quire/within.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_within.py").write_text(
        "from quire.within import within\n"
        "def test_it(): assert within(1) and within(0) and not within(-1) and not within(9)\n"
    )
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\npythonpath = ['.']\n")
    table = {"quire/within.py": ("tests/test_within.py",)}
    score = tool.run(tmp_path, table, seconds=300, seed=1, jobs=1)
    assert sorted(str(one) for one in score.survived) == [
        "quire/within.py:2: 3  ->  4",
        "quire/within.py:5: value > most  ->  value >= most",
    ]
    assert score.killed == {"quire/within.py": 4} and score.left == 0
    tool.show(score, table)
    assert "4 of     6 killed, 67%" in capsys.readouterr().out
    assert (tmp_path / "quire/within.py").read_text() == SOURCE
    assert tool.run(tmp_path, table, seconds=0, seed=1, jobs=1).left == 6
    (tmp_path / "tests/test_within.py").write_text("def test_it(): assert False\n")
    with pytest.raises(SystemExit, match="fail without any mutant"):
        tool.run(tmp_path, table, seconds=300, seed=1, jobs=1)


def test_named_modules_and_tests_are_there(tool: ModuleType) -> None:
    for module, names in tool.TESTS.items():
        nodes = tool._running(ast.parse((ROOT / module).read_text()))
        assert any(True for node in nodes for _ in tool.changes(node)), f"nothing of {module} can be changed"
        assert names and all((ROOT / f"tests/plain/{name}.py").is_file() for name in names)
