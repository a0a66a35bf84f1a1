"""tools/covered.py: lines per package, from a report of coverage.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_lines_are_summed_per_package(tmp_path: Path) -> None:
    counts = {"quire/__init__.py": (3, 4), "quire/sched/plan.py": (10, 10), "quire/sched/kv/pool.py": (5, 20)}
    files = {
        path: {"summary": {"covered_lines": run, "num_statements": whole}} for path, (run, whole) in counts.items()
    }
    (tmp_path / "report.json").write_text(json.dumps({"files": files}))
    command = [sys.executable, str(ROOT / "tools/covered.py"), str(tmp_path / "report.json")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert [line.split() for line in printed.splitlines()] == [
        ["quire", "3", "of", "4", "lines", "75.0%"],
        ["sched", "15", "of", "30", "lines", "50.0%"],
        ["all", "18", "of", "34", "lines", "52.9%"],
    ]
