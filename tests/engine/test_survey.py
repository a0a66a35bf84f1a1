"""docs/reference/survey.md says what became of every documented flag; a sample of its rows is tried again here."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.base.unread import UNREAD
from tests.products import marked

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "reference" / "survey.md").read_text()
_ROW = r"^\| `--([a-z0-9-]+)` \| .*? \| (works|no effect|refused)[^|]*\|$"
ROWS: dict[str, str] = dict(re.findall(_ROW, TEXT, re.MULTILINE))


@pytest.fixture(scope="module")
def survey() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        spec = importlib.util.spec_from_file_location("tools_survey", ROOT / "tools" / "survey.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "tools_survey", module)
        spec.loader.exec_module(module)
        yield module


def test_every_documented_flag_has_a_row_and_the_counts_are_theirs(survey: Any) -> None:
    assert sorted(ROWS) == sorted(survey.FLAGS)
    told = re.search(r"(\d+) work, (\d+) have no effect .*?, (\d+) are refused", TEXT)
    assert told is not None
    whats = list(ROWS.values())
    assert [int(n) for n in told.groups()] == [whats.count(w) for w in ("works", "no effect", "refused")]


def test_the_counts_of_environment_variables_are_theirs(survey: Any) -> None:
    told = re.search(r"Of the (\d+) documented environment variables, (\d+) are read; (\d+) have no effect", TEXT)
    assert told is not None
    unread = [name for name in survey.VARIABLES if f"VLLM_{name}" in UNREAD]
    read = [name for name in survey.VARIABLES if f"VLLM_{name}" not in UNREAD]
    assert [int(number) for number in told.groups()] == [len(survey.VARIABLES), len(read), len(unread)]
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    assert not [name for name in survey.VARIABLES if f"VLLM_{name}" not in page and f"QUIRE_{name}" not in page]


@pytest.mark.parametrize("part", marked(range(28), (0, 10, 20)))
def test_a_sample_is_as_the_page_says(survey: Any, part: int) -> None:
    sample = tuple(sorted(ROWS)[part::28])
    for found in survey.survey(sample):
        assert found.what == ROWS[found.flag], found
        if found.what != "works":  # by name
            name = found.flag.replace("-", "_")
            assert name in found.words or name.rpartition("_config")[0] in found.words, found
