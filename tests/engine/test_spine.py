"""The path of a request in docs/architecture.md is the one that it takes: traced on the embedded model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = (ROOT / "docs/architecture.md").read_text().split("## The path of a request", 1)[1].split("\n## ", 1)[0]
NAMED = set(re.findall(r"(?:[a-z_]+/)+[a-z_]+\.py", PATH))
MUCH = 50  # lines of a file that one request runs
MOST_FILES = {"offline": 35, "chat": 50}  # may shrink, not grow


def trace(subject: str) -> dict[str, tuple[int, int]]:
    """Functions and lines that one request runs, per file."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools/spine.py"), "--only", subject, "--json"],
        capture_output=True, text=True, check=True, cwd=ROOT, timeout=600,
        env=os.environ | {"QUIRE_AUDIT": "0"},  # tests audit every step; requests do not
    )  # fmt: skip
    counts: dict[str, tuple[int, int]] = json.loads(done.stdout)[subject]
    return counts


@pytest.mark.parametrize("subject", MOST_FILES)
def test_the_page_names_the_files_that_do_the_work(subject: str) -> None:
    counts = trace(subject)
    if len(counts) > MOST_FILES[subject]:  # a server has timers: one that fires by chance is not on a request's path
        again = trace(subject)
        counts = {name: count for name, count in counts.items() if name in again}
    missing = {name: lines for name, (_, lines) in counts.items() if lines > MUCH and name not in NAMED}
    assert not missing, f"docs/architecture.md does not name {missing}"
    assert 20 < len(counts) <= MOST_FILES[subject], sorted(counts)
