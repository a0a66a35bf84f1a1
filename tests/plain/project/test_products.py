"""Combinations that `make test` leaves out: each of their values is in a test that it runs; whose time is counted."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processor_time import processor_seconds
from tests.products import marked, spread

ROOT = Path(__file__).parents[3]
PROGRAM = """
import pytest
from tests.products import marked
@pytest.mark.parametrize("number", marked([1, 2, 3], [2]))
def test_it(number): pass
"""


def is_long(one: Any) -> bool:
    return bool(getattr(one, "marks", ()))


@pytest.mark.parametrize("sizes", [(8, 6), (3, 5, 2), (6, 3, 3), (2, 2), (1, 4), (2, 2, 3)], ids=str)
def test_every_value_is_tried_without_the_mark(sizes: tuple[int, ...]) -> None:
    factors = [[f"{name}{i}" for i in range(size)] for name, size in zip("abc", sizes, strict=False)]
    made = spread(*factors)
    values = [tuple(one.values) if is_long(one) else one for one in made]
    assert sorted(values) == sorted(itertools.product(*factors))
    kept = [one for one in made if not is_long(one)]
    assert len(kept) == max(sizes)
    for at, factor in enumerate(factors):
        assert {one[at] for one in kept} == set(factor)


def test_what_is_kept_is_not_marked() -> None:
    assert [is_long(one) for one in marked(["a", "b", "c"], ["b"])] == [True, False, True]
    pairs = marked([("a", 1), ("b", 2)], [("a", 1)])
    assert pairs[0] == ("a", 1) and pairs[1].values == ("b", 2)


def test_long_tests_run_when_they_are_asked_for(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_one.py").write_text(PROGRAM)
    own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}

    def names(*options: str) -> list[str]:
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, text=True, check=True, timeout=300)
        return [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]

    assert names() == ["test_it[2]"]
    assert names("--long", "-m", "long") == ["test_it[1]", "test_it[3]"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_processes_that_run_and_that_ended_are_counted() -> None:
    code = "import sys, time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\nsys.stdin.read()"
    before = processor_seconds()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None
        busy.stdout.readline()
        running = processor_seconds()
    assert running - before > 0.4
    assert processor_seconds() - before > 0.4
